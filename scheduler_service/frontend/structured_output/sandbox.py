"""A process that compiles constraints, as a trial.

    python -m scheduler_service.frontend.structured_output.sandbox


It reads a constraint from its standard input, forks, and lets the child find what is wrong. What a
child takes too long or too much memory for, or dies of, is wrong too, and nobody else notices. Ends
with its standard input.
"""

import json
import os
import resource
import signal
import sys

from scheduler_service.frontend.structured_output import framing
from scheduler_service.frontend.structured_output.problems import find_problem

MAX_CPU_S = 1.0
"""Workers compile a constraint on a thread of their own, but its sequence waits for that."""

MAX_MEMORY_BYTES = 256 * 2**20
MAX_STACK_BYTES = 8 * 2**20
"""Workers have four times as much."""

TOO_SLOW = f"too complex: compiling it takes more than {MAX_CPU_S:g} s"
TOO_LARGE = f"too complex: compiling it takes more than {MAX_MEMORY_BYTES >> 20} MiB"


def try_out(kind: str, texts: list[str]) -> str | None:
    """What is wrong with a constraint, found by a child."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        _be_the_child(writer, kind, texts)
    os.close(writer)
    with open(reader, "rb") as pipe:
        answer = pipe.read()
    _, status = os.waitpid(child, 0)
    if answer and os.waitstatus_to_exitcode(status) == 0:
        return json.loads(answer)["problem"]
    return TOO_SLOW if os.waitstatus_to_exitcode(status) == -signal.SIGPROF else TOO_LARGE


def _be_the_child(writer: int, kind: str, texts: list[str]) -> None:
    """Answer into the pipe, within limits; does not return."""
    try:
        _limit_memory()
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # a compiler's last words
        signal.setitimer(signal.ITIMER_PROF, MAX_CPU_S)
        problem = find_problem(kind, texts)
        os.write(writer, json.dumps({"problem": problem}).encode())
        os._exit(0)
    finally:
        os._exit(1)


def _limit_memory() -> None:
    with open("/proc/self/statm", encoding="ascii") as statm:
        used = int(statm.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    for what, limit in (
        (resource.RLIMIT_AS, used + MAX_MEMORY_BYTES),
        (resource.RLIMIT_STACK, MAX_STACK_BYTES),
        (resource.RLIMIT_CORE, 0),
    ):
        _, hard = resource.getrlimit(what)
        resource.setrlimit(what, (limit if hard < 0 else min(limit, hard), hard))


def main() -> None:
    """Answer until the standard input ends."""
    while (question := framing.read(sys.stdin.buffer)) is not None:
        sys.stdout.buffer.write(framing.encode({"problem": try_out(**question)}))
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
