"""Descriptors of a holder's arena, passed over its control socket: no name to guess, and none to be swapped."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvsp.bulk.source import SourceUnavailableError
from kvsp.rpc.framed import LENGTH_OCTETS

WANTED: Final = b"arena"
"""First message of a connection that asks for the descriptors and nothing else. It is no TransferHello."""
ANSWER_S: Final = 5.0
_NAME_OCTETS_MAX: Final = 255
_DESCRIPTORS: Final = 2
_INT: Final = struct.Struct("i")


@dataclass(slots=True)
class ArenaFiles:
    """An arena's name, and descriptors that can only read (and so only be mapped for reading) and only write."""

    name: str
    read: int
    write: int

    def close(self) -> None:
        """Mappings stay. Idempotent."""
        for fd in (self.read, self.write):
            if fd >= 0:
                os.close(fd)
        self.read = self.write = -1


def give(peer: socket.socket, files: ArenaFiles) -> None:
    """Answer WANTED on a connection on which nothing else is queued. Raises OSError."""
    name = files.name.encode()
    socket.send_fds(peer, [len(name).to_bytes(LENGTH_OCTETS) + name], [files.read, files.write])


async def ask(control: Path) -> ArenaFiles:
    """The descriptors of the holder that serves this control socket. Raises SourceUnavailableError."""
    loop = asyncio.get_running_loop()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as own:
        own.setblocking(False)
        try:
            async with asyncio.timeout(ANSWER_S):
                await loop.sock_connect(own, str(control))
                await loop.sock_sendall(own, len(WANTED).to_bytes(LENGTH_OCTETS) + WANTED)
                await _readable(own)
            # Sent by one sendmsg: descriptors never come apart from the octets they were sent with.
            answer, ancillary, _, _ = own.recvmsg(
                LENGTH_OCTETS + _NAME_OCTETS_MAX,
                socket.CMSG_LEN(_DESCRIPTORS * _INT.size),
                socket.MSG_CMSG_CLOEXEC,
            )
        except (OSError, TimeoutError) as error:
            raise SourceUnavailableError(f"arena: {str(error) or 'no answer'}") from error
    descriptors = [
        fd
        for level, kind, data in ancillary
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS)
        for (fd,) in _INT.iter_unpack(data)
    ]
    if len(descriptors) != _DESCRIPTORS:
        for fd in descriptors:
            os.close(fd)
        raise SourceUnavailableError("arena: the holder gave no descriptors")
    return ArenaFiles(answer[LENGTH_OCTETS:].decode(errors="replace"), *descriptors)


async def _readable(own: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    ready = loop.create_future()
    loop.add_reader(own, ready.cancel)
    try:
        await asyncio.wait([ready])
    finally:
        loop.remove_reader(own)
