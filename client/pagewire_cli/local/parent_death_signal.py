"""Runs `python -m MODULE ARGUMENTS...` so that it is killed when its parent ends.

Usage: parent_death_signal.py PARENT_PID MODULE [ARGUMENTS...]

The kernel's parent-death signal (PR_SET_PDEATHSIG) reaches the child even if the parent was killed,
when no handler of the parent could run, and it survives `exec`. It is bound to the parent's
*thread* that started the child, which must therefore live as long as the child.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Become the module, or exit; never returns."""
    parent, module, *arguments = sys.argv[1:]
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != int(parent):
        sys.exit("error: the parent ended before its service began")
    os.execv(sys.executable, [sys.executable, "-m", module, *arguments])


if __name__ == "__main__":
    main()
