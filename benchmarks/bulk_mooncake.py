"""One end of Mooncake's store, run by the Python of an environment that has it: what to do comes line by line.

owner: `SIZE` puts a block of that size, once. client: `SIZE AT_ONCE COUNT` gets it COUNT times, tells the seconds.
"""

import ctypes
import os
import sys
import threading
import time
from typing import Any

from mooncake.store import MooncakeDistributedStore

SEGMENT = 1 << 30
LOCAL = 256 << 20
AT_ONCE_MAX = 16


def owner(store: Any) -> None:
    known: set[int] = set()
    for line in sys.stdin:
        if not line.strip():
            return
        size = int(line)
        if size not in known:
            assert store.put(str(size), os.urandom(size)) == 0
            known.add(size)
        print("1", flush=True)


def client(store: Any) -> None:
    buffers: dict[int, tuple[list[bytearray], list[int]]] = {}
    for line in sys.stdin:
        if not line.strip():
            return
        size, at_once, count = map(int, line.split())
        if size not in buffers:
            kept = [bytearray(size) for _ in range(AT_ONCE_MAX)]
            places = [ctypes.addressof(ctypes.c_char.from_buffer(each)) for each in kept]
            assert all(store.register_buffer(place, size) == 0 for place in places)
            buffers[size] = kept, places
        print(timed(store, size, buffers[size][1][:at_once], count), flush=True)


def timed(store: Any, size: int, places: list[int], count: int) -> float:
    def work(place: int, times: int) -> None:
        for _ in range(times):
            assert store.get_into(str(size), place, size) == size

    work(places[0], 1)
    shares = [count // len(places) + (i < count % len(places)) for i in range(len(places))]
    threads = [threading.Thread(target=work, args=pair) for pair in zip(places, shares, strict=True)]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - began


if __name__ == "__main__":
    role, master, own = sys.argv[1:]
    made = MooncakeDistributedStore()
    # Standard output is for answers; the library logs there, too, while it starts.
    assert made.setup(own, "P2PHANDSHAKE", SEGMENT if role == "owner" else 0, LOCAL, "tcp", "", master) == 0
    (owner if role == "owner" else client)(made)
    made.close()
