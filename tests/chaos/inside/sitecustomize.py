"""Runs first in every process of a cluster under test; Python imports it by its name.

On SIGUSR1 a process prints the stacks of its threads and tasks. It does not outlive its starter.
"""

import asyncio
import ctypes
import faulthandler
import signal
import sys
from types import FrameType

PR_SET_PDEATHSIG = 1


def tell(number: int, frame: FrameType | None) -> None:
    """Print all stacks to stderr."""
    del number, frame
    print("--- threads", file=sys.stderr)
    faulthandler.dump_traceback(all_threads=True)
    try:
        tasks = asyncio.all_tasks()
    except RuntimeError:  # no loop runs here yet
        return
    print(f"--- {len(tasks)} tasks", file=sys.stderr)
    for task in tasks:
        # Not `print_stack`, which fails for a frame that is just between two lines.
        places = [
            f"{f.f_code.co_filename}:{f.f_lineno} {f.f_code.co_name}" for f in task.get_stack()
        ]
        print(task.get_name(), *places, sep="\n    ", file=sys.stderr)
    sys.stderr.flush()


if sys.platform == "linux":
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
signal.signal(signal.SIGUSR1, tell)
