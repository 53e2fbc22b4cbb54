"""A process that compiles constraints on trial.

    python -m scheduler_service.frontend.structured_output.sandbox NUM_CHILDREN

It reads questions from its standard input and forks for each; the child answers what is wrong with
the constraint. A child that takes too much time or memory, or dies, shows that the constraint is
wrong, too, and affects nothing else. At most NUM_CHILDREN run at a time. Answers carry the
questions' ids and come in any order. The process ends with its standard input.
"""

import json
import os
import resource
import selectors
import signal
import sys
from dataclasses import dataclass, field
from typing import Any

from scheduler_service.frontend.structured_output import framing
from scheduler_service.frontend.structured_output.problems import find_problem

MAX_CPU_S = 1.0
"""Workers compile a constraint on a thread of their own, but its sequence waits for that."""

MAX_MEMORY_BYTES = 256 * 2**20
MAX_STACK_BYTES = 8 * 2**20
"""Workers have four times as much."""

TOO_SLOW = f"too complex: compiling it takes more than {MAX_CPU_S:g} s"
TOO_LARGE = f"too complex: compiling it takes more than {MAX_MEMORY_BYTES >> 20} MiB"


@dataclass(slots=True)
class _Child:
    """One trial in progress."""

    question_id: int
    pid: int
    answer: bytearray = field(default_factory=bytearray)


class Sandbox:
    """The loop around the children."""

    def __init__(self, num_children: int) -> None:
        self._num_children = num_children
        self._num_running = 0
        self._selector = selectors.DefaultSelector()
        self._stdin = open(0, "rb", buffering=0, closefd=False)  # noqa: SIM115 - for life
        self._stdin_is_watched = False

    def run(self) -> None:
        """Answer questions until the standard input ends."""
        while True:
            self._watch_stdin(self._num_running < self._num_children)
            for key, _ in self._selector.select():
                if key.data is None:
                    question = framing.read(self._stdin)
                    if question is None:
                        return
                    self._start(**question)
                else:
                    self._read(key.fd, key.data)

    def _watch_stdin(self, wanted: bool) -> None:
        if wanted and not self._stdin_is_watched:
            self._selector.register(self._stdin, selectors.EVENT_READ)
        elif not wanted and self._stdin_is_watched:
            self._selector.unregister(self._stdin)
        self._stdin_is_watched = wanted

    def _start(self, id: int, kind: str, texts: list[str]) -> None:
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            _run_child(writer, kind, texts)
        os.close(writer)
        self._num_running += 1
        self._selector.register(reader, selectors.EVENT_READ, _Child(id, pid))

    def _read(self, reader: int, child: _Child) -> None:
        """Read some of a child's answer; at its end, pass it on."""
        if data := os.read(reader, 1 << 16):
            child.answer += data
            return
        self._selector.unregister(reader)
        os.close(reader)
        self._num_running -= 1
        _, status = os.waitpid(child.pid, 0)
        _send({"id": child.question_id, "problem": _outcome(bytes(child.answer), status)})


def _outcome(answer: bytes, status: int) -> str | None:
    """The problem that a child process has found in its constraint."""
    exit_code = os.waitstatus_to_exitcode(status)
    if answer and exit_code == 0:
        problem: str | None = json.loads(answer)["problem"]
        return problem
    return TOO_SLOW if exit_code == -signal.SIGPROF else TOO_LARGE


def _run_child(writer: int, kind: str, texts: list[str]) -> None:
    """Answer into the pipe, within limits; does not return."""
    try:
        _limit_memory()
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # hides the output of a compiler that crashes
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


def _send(answer: dict[str, Any]) -> None:
    sys.stdout.buffer.write(framing.encode(answer))
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    Sandbox(int(sys.argv[1])).run()
