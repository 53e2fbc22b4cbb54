"""Workloads of the offline benchmark: prompts as token ids, and numbers of output tokens."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from benchmarks.models.synthetic_tokenizer import FIRST_WORD_ID

LENGTHS_SEED = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One request of a workload."""

    prompt: list[int]
    num_output_tokens: int
    adapter: str | None = None
    """The name of one of `Settings.lora_modules`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Lengths:
    """Tokens of one request."""

    prompt: int
    output: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """A named set of requests."""

    name: str
    num_requests: int
    lengths: Callable[[np.random.Generator], Lengths]
    shared: int = 0
    """Length of the prefix that all prompts share, in addition to their own tokens."""
    counts_prompt_tokens: bool = False
    """Whether its figure counts prompt tokens, too, as that of a prefill workload."""
    scales: bool = True
    """Whether slow machines run fewer requests."""

    def make_jobs(self, draw: np.random.Generator, vocab_size: int, scale: float = 1) -> list[Job]:
        """Make jobs with the same lengths in every run, but new token ids, so that no run uses the
        prefix cache of another."""
        lengths = np.random.default_rng(LENGTHS_SEED)

        def some(count: int) -> list[int]:
            ids: list[int] = draw.integers(FIRST_WORD_ID, vocab_size, size=count).tolist()
            return ids

        beginning = some(self.shared)
        number = max(1, round(self.num_requests * scale)) if self.scales else self.num_requests
        turns = [self.lengths(lengths) for _ in range(number)]
        return [
            Job(prompt=beginning + some(one.prompt), num_output_tokens=one.output) for one in turns
        ]

    def num_tokens(self, jobs: list[Job]) -> int:
        """The tokens that its figure counts."""
        outputs = sum(job.num_output_tokens for job in jobs)
        prompts = sum(len(job.prompt) for job in jobs)
        return outputs + prompts * self.counts_prompt_tokens


def _fixed(prompt: int, output: int) -> Callable[[np.random.Generator], Lengths]:
    return lambda _: Lengths(prompt=prompt, output=output)


def _between(
    prompt: tuple[int, int], output: tuple[int, int]
) -> Callable[[np.random.Generator], Lengths]:
    def draw_lengths(draw: np.random.Generator) -> Lengths:
        ends = [int(draw.integers(low, high + 1)) for low, high in (prompt, output)]
        return Lengths(prompt=ends[0], output=ends[1])

    return draw_lengths


_ALL = (
    # Sizes are of requests on a GPU; slow machines run a share of those that scale.
    Workload(name="mixed", num_requests=64, lengths=_between((32, 512), (32, 128))),
    Workload(name="single", num_requests=1, lengths=_fixed(128, 128)),
    Workload(name="streams", num_requests=16, lengths=_fixed(128, 128), scales=False),
    Workload(name="prefill", num_requests=8, lengths=_fixed(1024, 1), counts_prompt_tokens=True),
    Workload(name="prefix", num_requests=32, lengths=_fixed(32, 32), shared=512),
    # nano-vllm's own.
    Workload(
        name="nano-vllm", num_requests=256, lengths=_between((100, 1024), (100, 1024)), scales=False
    ),
)
WORKLOADS = {workload.name: workload for workload in _ALL}
FOUR = ("mixed", "single", "prefill", "prefix")
"""The workloads of machines without a GPU."""


def warm_up(jobs: list[Job]) -> list[Job]:
    """A small part of a workload, to warm up an engine."""
    return [
        Job(prompt=job.prompt, num_output_tokens=min(job.num_output_tokens, 4)) for job in jobs[:2]
    ]
