"""What is said before octets flow, and the keys that come of it. Pure.

A connection begins with a nonce from each side. Every transfer on it begins with a ticket's token and a MAC
over nonces, number and token. So the client proves, for this connection and this transfer, that it knows the
ticket's key, which travelled on the authenticated control channel alone. The server proves the same before
anything is given to it; of what it gives, the tags and seals are proof enough, as both come from the key.

    client  Hello:   "KVU3" nonce(16)
    server  Hello:   "KVU3" nonce(16)
    client  Request: token(16) mac(32)
            frames, as tagged messages, or for a write:
    server  Accept:  mac(32)
    client  frames
    server  Done:    mac(32)
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from typing import Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from kvsp.bulk.source import Ticket
from ucx_transport.errors import lost

MAGIC: Final = b"KVU3"
NONCE_OCTETS: Final = 16
HELLO_OCTETS: Final = len(MAGIC) + NONCE_OCTETS
TOKEN_OCTETS: Final = 16
MAC_OCTETS: Final = 32
REQUEST_OCTETS: Final = TOKEN_OCTETS + MAC_OCTETS
KEY_OCTETS: Final = 32
SEAL_OCTETS: Final = 16
"""What sealing adds to a frame: the tag of AES-GCM."""


def hello() -> bytes:
    """The first words of either side."""
    return MAGIC + secrets.token_bytes(NONCE_OCTETS)


def check_hello(octets: bytes) -> None:
    """Raises KvspError (503) when the peer speaks something else."""
    if not octets.startswith(MAGIC):
        raise lost("the peer speaks another protocol")


def control_tags(hellos: bytes) -> tuple[int, int]:
    """The tags of what client and server say after their hellos (the client's first)."""
    words = (hashlib.sha256(hellos + side).digest()[:8] for side in (b"client", b"server"))
    client, server = (int.from_bytes(word) >> 1 for word in words)
    return client, server


REQUEST: Final = b"request"
ACCEPT: Final = b"accept"
DONE: Final = b"done"


class Keys:
    """Keys of one transfer: `number` counts those of a connection, `hellos` are the client's and the server's.

    Every transfer has keys of its own, by direction, so a frame's number is nonce enough: one side sends frames.
    They come from the ticket's key, 32 random octets, by keyed BLAKE2b with the purpose as its personalization, as
    libsodium's crypto_kdf does: a fifth of what HKDF costs, on the way of every small block.
    """

    def __init__(self, ticket: Ticket, hellos: bytes, number: int, *, write: bool) -> None:
        self._key = ticket.key
        self._context = hellos + number.to_bytes(8) + ticket.token
        self._direction = b"write " if write else b"read "
        # Nobody who lacks the key can guess a tag and slip a message in.
        self.first_tag = int.from_bytes(self._derived(b"tags", 8)) >> 1
        self._cipher = AESGCM(self._derived(b"data", KEY_OCTETS)) if ticket.sealed else None
        self.overhead = SEAL_OCTETS if ticket.sealed else 0

    def proof(self, word: bytes) -> bytes:
        """The MAC that goes with a word: REQUEST, ACCEPT or DONE."""
        return self._derived(word, MAC_OCTETS)

    def _derived(self, purpose: bytes, octets: int) -> bytes:
        person = self._direction + purpose
        return hashlib.blake2b(self._context, digest_size=octets, key=self._key, person=person).digest()

    @property
    def sealed(self) -> bool:
        """Whether frames are encrypted."""
        return self._cipher is not None

    def seal(self, frame: int, offset: int, plain: memoryview, into: memoryview) -> None:
        """Encrypt a frame into `into`, `overhead` octets longer."""
        assert self._cipher is not None  # noqa: S101 - a caller asks `sealed` first
        self._cipher.encrypt_into(_nonce(frame), plain, _bound(frame, offset, len(plain)), into)

    def open(self, frame: int, offset: int, sealed: memoryview, into: memoryview) -> None:
        """Decrypt a frame into `into`. Raises KvspError (503) unless it is what the peer sealed for this place."""
        assert self._cipher is not None  # noqa: S101
        try:
            self._cipher.decrypt_into(_nonce(frame), sealed, _bound(frame, offset, len(into)), into)
        except InvalidTag:
            raise lost("a frame was changed on its way") from None


def check_mac(expected: bytes, got: bytes) -> None:
    """Raises KvspError (503) unless they are equal."""
    if not hmac.compare_digest(expected, got):
        raise lost("the peer does not know the ticket")


def _nonce(frame: int) -> bytes:
    return frame.to_bytes(12)


def _bound(frame: int, offset: int, length: int) -> bytes:
    return b"".join(each.to_bytes(8) for each in (frame, offset, length))
