"""`python tether.py LAUNCHER_PID COMMAND…`: replaces itself by COMMAND, which is killed when the launcher exits.

A separate program that imports nothing of the project: code between fork and exec would run in a copy of the launcher,
where another thread may have held any lock.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    parent, *command = sys.argv[1:]
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(parent):  # it died before the line above
        sys.exit(1)
    os.execv(command[0], command)  # the setting of prctl survives an exec


if __name__ == "__main__":
    main()
