"""Tokens with their log probabilities, and the comparison of two generations."""

from dataclasses import dataclass, field
from typing import NamedTuple

from conformance.assertions import fail
from pagewire import columns
from pagewire.v1 import plan_pb2

TOLERANCE = 0.25
"""Maximum difference of log probabilities on a worker that is not batch-invariant: far more than
rounding in bfloat16, far less than another context."""


class Sampled(NamedTuple):
    """One sampled token and the log probabilities that were reported with it."""

    token: int
    token_ids: list[int]
    """The token itself, then the most probable ones; empty if not requested."""

    logprobs: list[float]

    @property
    def top_ids(self) -> list[int]:
        """The most probable tokens."""
        return self.token_ids[1:]

    @property
    def top_logprobs(self) -> list[float]:
        """Their log probabilities."""
        return self.logprobs[1:]


def sampled(token: int, entry: plan_pb2.RowLogprobs | None) -> Sampled:
    """A token and its entry in the result, if there is one."""
    if entry is None:
        return Sampled(token, [], [])
    return Sampled(token, columns.unpack(entry.token_ids), columns.unpack_floats(entry.logprobs))


@dataclass(slots=True)
class Generation:
    """The tokens that a sequence sampled, in order."""

    steps: list[Sampled] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        """The tokens alone."""
        return [step.token for step in self.steps]

    def after(self, num_tokens: int) -> "Generation":
        """The steps after the first `num_tokens`."""
        return Generation(self.steps[num_tokens:])


def first_difference(found: Generation, expected: Generation, *, exact: bool) -> str | None:
    """The first difference between two generations; None if they are the same.

    Where a worker is not batch-invariant (`exact` is false), log probabilities may differ
    slightly, and either of two almost equally probable tokens may be chosen; the tokens after that
    have another context and are not compared.
    """
    if len(found.steps) != len(expected.steps):
        return f"{len(found.steps)} tokens instead of {len(expected.steps)}"
    for position, (ours, theirs) in enumerate(zip(found.steps, expected.steps, strict=True)):
        if exact and ours != theirs:
            return f"at output position {position}: {_shown(theirs)} became {_shown(ours)}"
        if not exact and not _is_near(ours, theirs):
            return f"at output position {position}: {_shown(theirs)} became {_shown(ours)}, too far"
        if ours.token != theirs.token:
            return None
    return None


def expect_same(what: str, found: Generation, expected: Generation, *, exact: bool) -> None:
    """Fail unless the generations are the same."""
    difference = first_difference(found, expected, exact=exact)
    if difference is not None:
        fail(f"{what}: expected the undisturbed sequence's tokens; {difference}")


def _is_near(ours: Sampled, theirs: Sampled) -> bool:
    """Whether rounding explains the difference."""
    pairs = zip(ours.top_logprobs, theirs.top_logprobs, strict=True)
    return all(abs(left - right) <= TOLERANCE for left, right in pairs)


def _shown(step: Sampled) -> str:
    logprobs = ", ".join(f"{value:.6g}" for value in step.logprobs[:3])
    return f"token {step.token} (log probabilities {logprobs})"
