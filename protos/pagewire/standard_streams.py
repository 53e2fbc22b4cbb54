"""Standard streams of a process that was started with some of them closed (`2>&-`)."""

import os
import sys


def open_standard_streams() -> None:
    """Connect closed standard streams to /dev/null: otherwise `sys.stderr` is None, and the next
    file or socket gets its descriptor, to which libraries in C++ write their errors."""
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
        if getattr(sys, name) is None:
            stream = os.fdopen(descriptor, "w" if descriptor else "r", closefd=False)
            setattr(sys, name, stream)
