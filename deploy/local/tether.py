"""Run as a script, `tether.py PARENT PROGRAM ARGUMENT...`: becomes the program, tied to the life of its parent.

The kernel sends the program SIGTERM when the supervisor is gone, however it went, even by SIGKILL. A script of
its own, as the same in `preexec_fn` would run between fork and exec of a process with threads.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
CANNOT_START = 127  # as a shell has it


def main() -> None:
    """Replace this process; exits with CANNOT_START when that is not possible."""
    parent, *argv = sys.argv[1:]
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != int(parent):  # it went before the kernel was told
        sys.exit(CANNOT_START)
    try:
        os.execvp(argv[0], argv)  # noqa: S606 - no shell is wanted
    except OSError as error:
        print(f"cannot start {argv[0]}: {error.strerror}", file=sys.stderr)
        sys.exit(CANNOT_START)


if __name__ == "__main__":
    main()
