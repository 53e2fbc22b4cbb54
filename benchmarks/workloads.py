"""What the offline benchmark runs: prompts as token ids, and how many tokens each asks for."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

FIRST_TOKEN_ID = 10
"""Below it there may be special tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One request of a workload."""

    prompt: list[int]
    num_output_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """A named way to make jobs; fresh token ids each time, so that no run finds another's cache."""

    name: str
    counts_prompt_tokens: bool
    """Whether its figure counts prompt tokens too, as one about prefill should."""

    make_jobs: Callable[[np.random.Generator, int], list[Job]]
    """From a generator and the vocabulary's size."""

    def num_tokens(self, jobs: list[Job]) -> int:
        """The tokens that its figure counts."""
        outputs = sum(job.num_output_tokens for job in jobs)
        prompts = sum(len(job.prompt) for job in jobs)
        return outputs + prompts * self.counts_prompt_tokens


def _prompt(draw: np.random.Generator, vocab_size: int, length: int) -> list[int]:
    return draw.integers(FIRST_TOKEN_ID, vocab_size, size=length).tolist()


def _mixed(draw: np.random.Generator, vocab_size: int) -> list[Job]:
    return [
        Job(
            prompt=_prompt(draw, vocab_size, int(draw.integers(32, 513))),
            num_output_tokens=int(draw.integers(32, 129)),
        )
        for _ in range(32)
    ]


def _single(draw: np.random.Generator, vocab_size: int) -> list[Job]:
    return [Job(prompt=_prompt(draw, vocab_size, 128), num_output_tokens=128)]


def _prefill(draw: np.random.Generator, vocab_size: int) -> list[Job]:
    return [Job(prompt=_prompt(draw, vocab_size, 1024), num_output_tokens=1) for _ in range(4)]


def _prefix(draw: np.random.Generator, vocab_size: int) -> list[Job]:
    shared = _prompt(draw, vocab_size, 512)
    return [
        Job(prompt=shared + _prompt(draw, vocab_size, 32), num_output_tokens=32) for _ in range(16)
    ]


WORKLOADS = (
    Workload(name="mixed", counts_prompt_tokens=False, make_jobs=_mixed),
    Workload(name="single", counts_prompt_tokens=False, make_jobs=_single),
    Workload(name="prefill", counts_prompt_tokens=True, make_jobs=_prefill),
    Workload(name="prefix", counts_prompt_tokens=False, make_jobs=_prefix),
)
"""32 requests of mixed lengths; one stream; four long prompts; a prefix that 16 requests share."""
