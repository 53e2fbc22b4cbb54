"""Compiles constraints on trial, each in a process of its own with little time and memory.

The processes are forks of `multiprocessing`'s fork server, which has loaded the compilers, and has
neither threads nor the frontend's memory. One that takes too much time or memory, or dies, shows
that its constraint is wrong, and affects nothing else.
"""

import json
import os
import resource
import signal
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection
from threading import Lock

from scheduler_service.frontend.structured_output.problems import find_problem

MAX_CPU_S = 1.0
"""Workers compile a constraint on a thread of their own, but its sequence waits for that."""

MAX_MEMORY_BYTES = 256 * 2**20
MAX_STACK_BYTES = 8 * 2**20
"""Workers have four times as much."""

TOO_SLOW = f"too complex: compiling it takes more than {MAX_CPU_S:g} s"
TOO_LARGE = f"too complex: compiling it takes more than {MAX_MEMORY_BYTES >> 20} MiB"

_CONTEXT = get_context("forkserver")
_CONTEXT.set_forkserver_preload([__name__])
_LOCK = Lock()
"""Held by a thread that begins or ends a process, which looks at all others."""


def find_problem_apart(kind: str, texts: Sequence[str], timeout_s: float) -> str | None:
    """What is wrong with a constraint; None if nothing is. Blocks this thread.

    Raises TimeoutError if there is no answer in time, and OSError or EOFError without a server.
    """
    reader, writer = _CONTEXT.Pipe(duplex=False)
    process = _CONTEXT.Process(target=_run, args=(writer, kind, texts), daemon=True)
    with reader:
        with writer, _LOCK:
            process.start()
        answer = b""
        if not (is_answered := reader.poll(timeout_s)):
            process.kill()
        with suppress(EOFError):
            answer = reader.recv_bytes()
    with _LOCK:
        process.join()
    if not is_answered:
        raise TimeoutError
    if answer:  # not unpickled: whoever has taken over the process could run anything here
        problem: str | None = json.loads(answer)
        return problem
    return TOO_SLOW if process.exitcode == -signal.SIGPROF else TOO_LARGE


def _run(writer: Connection, kind: str, texts: Sequence[str]) -> None:
    """Answer into the pipe, within limits; does not return."""
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all processes
        _limit_memory()
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # hides the output of a compiler that crashes
        signal.setitimer(signal.ITIMER_PROF, MAX_CPU_S)
        writer.send_bytes(json.dumps(find_problem(kind, list(texts))).encode())
    finally:
        os._exit(0)


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
