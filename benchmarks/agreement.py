"""Whether engines sample the same greedy tokens as `transformers` does, one prompt at a time.

For float32 only: in bfloat16, the most probable tokens of random weights often have equal logits,
so that a difference means nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.engines.engine import Engine
from benchmarks.workloads import Job

NUM_PROMPTS = 4
NUM_TOKENS = 24


@dataclass(frozen=True, kw_only=True, slots=True)
class Agreement:
    """Agreement of one engine with the reference."""

    equal_requests: int
    requests: int
    equal_tokens: int
    """Tokens before the first difference, over all requests."""
    tokens: int


def agreements(
    engines: Sequence[Engine], reference: Engine, vocab_size: int
) -> dict[str, Agreement]:
    """Agreement of all engines (prompts together) with a reference (each prompt alone)."""
    jobs = _jobs(vocab_size)
    expected = [tokens for job in jobs for tokens in _run(reference, [job])]
    return {engine.name: agreement(_run(engine, jobs), expected) for engine in engines}


def agreement(got: Sequence[Sequence[int]], expected: Sequence[Sequence[int]]) -> Agreement:
    """How far outputs agree."""
    equal = [_num_equal(*pair) for pair in zip(got, expected, strict=True)]
    return Agreement(
        equal_requests=sum(map(list.__eq__, map(list, got), map(list, expected))),
        requests=len(expected),
        equal_tokens=sum(equal),
        tokens=sum(map(len, expected)),
    )


def _num_equal(got: Sequence[int], expected: Sequence[int]) -> int:
    """Number of tokens before the first difference."""
    pairs = enumerate(zip(got, expected, strict=True))
    return next((index for index, (one, other) in pairs if one != other), len(expected))


def _jobs(vocab_size: int) -> list[Job]:
    draw = np.random.default_rng(1)
    lengths = draw.integers(32, 256, size=NUM_PROMPTS).tolist()
    return [
        Job(prompt=draw.integers(0, vocab_size, size=length).tolist(), num_output_tokens=NUM_TOKENS)
        for length in lengths
    ]


def _run(engine: Engine, jobs: list[Job]) -> list[list[int]]:
    engine.resume()
    outputs = engine.run(jobs)
    engine.pause()
    return outputs.token_ids
