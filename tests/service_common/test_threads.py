"""A process that the system gives few threads."""

import subprocess
import sys

PROGRAM = """
import resource, threading
from service_common.errors import TooFewThreads
from service_common.threads import require_threads

require_threads(16)
STACK = 64 << 20
threading.stack_size(STACK)
pages = int(open("/proc/self/statm").read().split()[0])
limit = pages * resource.getpagesize() + 4 * STACK
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
try:
    require_threads(16)
except TooFewThreads as error:
    print(error)
print(threading.active_count())
"""


def test_too_few_threads_are_an_error_and_leave_none_behind() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True
    )
    message, num_threads = ended.stdout.splitlines()
    assert message.startswith("cannot start 16 threads, only ")
    assert "ulimit -u" in message
    assert num_threads == "1"
