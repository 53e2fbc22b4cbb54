"""Prompts, lengths and arrival times: drawn from a seed, so that every target gets the same."""

import math
from dataclasses import dataclass
from random import Random
from typing import Self

FIRST_TOKEN_ID = 10
"""Lower ids may be special tokens."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """Numbers of tokens, drawn evenly from `low` to `high`, both included."""

    low: int
    high: int

    def __post_init__(self) -> None:
        if not 1 <= self.low <= self.high:
            raise ValueError(f"expected LOW from 1 to HIGH, got {self.low}-{self.high}")

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low}-{self.high}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse `256`, or `32-512` for any number from 32 to 512. Raises ValueError."""
        low, dash, high = text.partition("-")
        if not low.isdecimal() or (dash and not high.isdecimal()):
            raise ValueError(f"expected a number of tokens, or LOW-HIGH, got {text!r}")
        return cls(int(low), int(high or low))

    def draw(self, random: Random) -> int:
        """Draw one number."""
        return random.randint(self.low, self.high)


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request, and when it is due."""

    due_s: float
    """Seconds from the run's start."""
    prompt: list[int]
    """Token ids."""
    num_output_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """Requests that arrive as a Poisson process, whose prompts share a prefix and nothing else."""

    num_requests: int
    rate: float
    """Mean arrivals per second; infinite: all at once."""
    input_tokens: Lengths
    output_tokens: Lengths
    vocab_size: int
    """Prompts consist of random token ids below this."""
    prefix_tokens: int = 0
    """Length of the prefix that all prompts share, in addition to `input_tokens`."""

    def __post_init__(self) -> None:
        if self.vocab_size <= FIRST_TOKEN_ID:
            raise ValueError(f"vocab_size must be above {FIRST_TOKEN_ID}, not {self.vocab_size}")

    @property
    def max_total_tokens(self) -> int:
        """Most tokens of a prompt and its answer together."""
        return self.prefix_tokens + self.input_tokens.high + self.output_tokens.high

    def arrivals(self, seed: int) -> list[Arrival]:
        """All requests in order of arrival.

        For one seed, prompts and lengths are the same at every rate, and gaps are scaled.
        """
        random = Random(seed)
        prefix = self._tokens(random, self.prefix_tokens)
        due_s = 0.0
        arrivals = []
        for _ in range(self.num_requests):
            gap = random.expovariate(1.0)
            due_s += 0.0 if math.isinf(self.rate) else gap / self.rate
            prompt = prefix + self._tokens(random, self.input_tokens.draw(random))
            arrivals.append(Arrival(due_s, prompt, self.output_tokens.draw(random)))
        return arrivals

    def _tokens(self, random: Random, length: int) -> list[int]:
        return random.choices(range(FIRST_TOKEN_ID, self.vocab_size), k=length)
