"""Both ends of a child process that exchanges requests and responses as lines of JSON.

An engine can thus run under its own Python, with its own threads and memory. The child writes a
line when it is ready, then one for each line that it reads. This module is also imported in
environments without Pagewire, so it uses only the standard library.
"""

import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol, Self


class LineProcess:
    """A context manager around such a process; starting it waits until it is ready."""

    def __init__(
        self,
        command: Sequence[str | Path],
        environment: Mapping[str, str] | None = None,
        *,
        log: Path | None = None,
    ) -> None:
        """`environment`: additional variables. `log`: file for all other output, of which errors
        quote the end; a temporary one otherwise."""
        self._files = ExitStack()
        open_log = log.open if log else tempfile.TemporaryFile
        self._log = self._files.enter_context(open_log("w+"))
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=os.environ | (environment or {}),
            text=True,
        )
        try:
            self.ready: dict[str, Any] = self._answer()
            """Its first line, which it writes when it is ready."""
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def ask(self, request: object) -> Any:
        """Send a request. Returns its response; raises RuntimeError if the process ends instead."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process ended with {self._process.wait()}{self._last_words()}")
        return json.loads(line)

    def _last_words(self) -> str:
        self._log.seek(0)
        return ":\n" + "\n".join(self._log.read().splitlines()[-20:])

    def close(self, timeout_s: float = 30.0) -> None:
        """End the process: close its input, and kill it if it does not end in time."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._files.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Described(Protocol):
    """An engine in its own process."""

    def about(self) -> dict[str, Any]:
        """Its version, and the settings it was given."""
        ...


class Runs(Described, Protocol):
    """One that generates tokens."""

    def generate(self, prompts: list[list[int]], num_tokens: list[int]) -> list[list[int]]:
        """Generate `num_tokens` greedy tokens for each prompt, past end-of-sequence tokens."""
        ...


def take_stdout() -> Any:
    """Return the file whose lines the parent reads, and redirect all other output to stderr, that
    of Python and of C."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    if sys.platform == "linux":  # a stopped child would not notice that its parent has ended
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    return answers


def serve(make_engine: Callable[[dict[str, Any]], Runs]) -> None:
    """Make an engine with the settings on the command line, and run jobs until the input ends."""

    def run(engine: Runs, asked: dict[str, Any]) -> dict[str, Any]:
        began = time.perf_counter()
        outputs = engine.generate(asked["prompts"], asked["num_tokens"])
        seconds = time.perf_counter() - began
        return {"token_ids": [list(map(int, tokens)) for tokens in outputs], "seconds": seconds}

    answer_lines(make_engine, run)


def answer_lines(
    make_engine: Callable[[dict[str, Any]], Described],
    answer: Callable[[Any, dict[str, Any]], dict[str, Any]],
) -> None:
    """Make an engine with the settings on the command line, write what it is, and answer each line
    that is read until the input ends."""
    answers = take_stdout()
    engine = make_engine(json.loads(sys.argv[1]))
    print(json.dumps(engine.about()), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(engine, json.loads(line))), file=answers, flush=True)
