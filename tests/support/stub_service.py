"""A process that behaves as its arguments say: `python -m tests.support.stub_service MODE`.

It prints its process id first.
"""

import os
import signal
import sys
import time
from pathlib import Path


def main() -> None:
    mode, *arguments = sys.argv[1:]
    if mode == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if mode == "graceful":
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    print("pid", os.getpid())
    if mode == "fail":
        print("error: there is no such model", file=sys.stderr)
        sys.exit(3)
    if mode == "die-once" and not Path(arguments[0]).exists():
        Path(arguments[0]).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if mode == "environment":
        print("import", __import__(arguments[0]).__name__)
    while True:
        time.sleep(60)


if __name__ == "__main__":
    main()
