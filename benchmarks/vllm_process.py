"""The process in which vLLM's scheduler is timed."""

import json
import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from benchmarks.steady_core import GROWTH_TOKENS, PREFILL_TOKENS, Queue

SCRIPT = Path(__file__).with_name("vllm_scheduler.py")


@dataclass(frozen=True, slots=True)
class VllmTimes:
    """CPU time of one of vLLM's steps, in microseconds."""

    deciding: float
    """`schedule` and `update_from_output`."""
    carrying: float
    """Its messages to and from bytes."""


class VllmProcess:
    """A context manager around a process that speaks as `vllm_scheduler` does."""

    def __init__(self, command: Sequence[str | Path]) -> None:
        environment = os.environ | {"VLLM_LOGGING_LEVEL": "ERROR"}
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            text=True,
        )
        self.version: str = self._answer()["version"]

    def prepare(self, queue: Queue) -> None:
        """Have all of a queue's requests running."""
        self._ask(
            num_seqs=queue.num_seqs,
            prompt_tokens=queue.prompt_tokens,
            block_size=queue.block_size,
            num_blocks=queue.num_blocks + 1,  # it keeps one to itself
            max_tokens=GROWTH_TOKENS,
            max_num_batched_tokens=queue.num_seqs + PREFILL_TOKENS,
        )

    def steps(self, count: int) -> list[VllmTimes]:
        """Times of its next steps."""
        return [VllmTimes(*times) for times in self._ask(steps=count)]

    def _ask(self, **request: int) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process ended with {self._process.wait()}")
        return json.loads(line)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=30)
        if self._process.stdout is not None:
            self._process.stdout.close()
