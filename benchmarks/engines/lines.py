"""The child's end of `benchmarks.json_lines_process`, for engines that run jobs.

Known to Pythons that have nothing of Pagewire's installed: the standard library alone.
"""

import ctypes
import json
import os
import signal
import sys
import time
from typing import Any, Protocol


class Runs(Protocol):
    """An engine in its own process."""

    def generate(self, prompts: list[list[int]], num_tokens: list[int]) -> list[list[int]]:
        """Generate `num_tokens` greedy tokens for each prompt, past end-of-sequence tokens."""
        ...

    def about(self) -> dict[str, Any]:
        """Its version, and the settings it was given."""
        ...


def settings() -> dict[str, Any]:
    """What the parent wrote on our command line."""
    read: dict[str, Any] = json.loads(sys.argv[1])
    return read


def take_stdout() -> Any:
    """The way to the parent. What anybody else prints, in Python or in C, goes with the errors."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    if sys.platform == "linux":  # a stopped child would not notice that its parent has gone
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    return answers


def serve(engine: Runs, answers: Any) -> None:
    """Run what the parent asks for until it asks no more."""

    def answer(value: object) -> None:
        print(json.dumps(value), file=answers, flush=True)

    answer(engine.about())
    for line in sys.stdin:
        asked = json.loads(line)
        began = time.perf_counter()
        outputs = engine.generate(asked["prompts"], asked["num_tokens"])
        seconds = time.perf_counter() - began
        answer({"token_ids": [list(map(int, tokens)) for tokens in outputs], "seconds": seconds})
