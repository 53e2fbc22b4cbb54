"""The process in which vLLM's scheduler is timed."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.json_lines_process import LineProcess
from benchmarks.steady_core import GROWTH_TOKENS, PREFILL_TOKENS, Queue

SCRIPT = Path(__file__).with_name("vllm_scheduler.py")


@dataclass(frozen=True, slots=True)
class VllmTimes:
    """CPU time of one of vLLM's steps, in microseconds."""

    deciding: float
    """`schedule` and `update_from_output`."""
    carrying: float
    """Its messages to and from bytes."""


class VllmProcess(LineProcess):
    """A process that speaks as `vllm_scheduler` does."""

    def __init__(self, command: Sequence[str | Path]) -> None:
        super().__init__(command, {"VLLM_LOGGING_LEVEL": "ERROR"})
        self.version: str = self.ready["version"]

    def prepare(self, queue: Queue) -> None:
        """Start all requests of a queue."""
        asked = {
            "num_seqs": queue.num_seqs,
            "prompt_tokens": queue.prompt_tokens,
            "block_size": queue.block_size,
            "num_blocks": queue.num_blocks + 1,  # it keeps one to itself
            "max_tokens": GROWTH_TOKENS,
            "max_num_batched_tokens": queue.num_seqs + PREFILL_TOKENS,
        }
        self.ask(asked)

    def steps(self, count: int) -> list[VllmTimes]:
        """Times of its next steps."""
        return [VllmTimes(*times) for times in self.ask({"steps": count})]
