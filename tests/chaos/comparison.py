"""The parts of an answer that must not change, and where two answers differ."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

from pagewire_client import CompletionOutput, RequestOutput


@dataclass(frozen=True, kw_only=True)
class Choice:
    """All of one choice."""

    index: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[tuple[tuple[int, float, int, str], ...], ...] | None
    """By position: token, log probability, rank, text."""
    cumulative_logprob: float | None
    finish_reason: str | None
    stop_reason: str | int | None


@dataclass(frozen=True, kw_only=True)
class Answer:
    """An answer without its timings and cached tokens."""

    seed: int | None
    prompt_token_ids: tuple[int, ...]
    prompt_logprobs: tuple[Any, ...] | None
    choices: tuple[Choice, ...]
    prompt_tokens: int
    completion_tokens: int


def answer_of(output: RequestOutput) -> Answer:
    """The parts of a finished output that are compared."""
    assert output.usage is not None
    return Answer(
        seed=output.seed,
        prompt_token_ids=tuple(output.prompt_token_ids),
        prompt_logprobs=_positions(output.prompt_logprobs),
        choices=tuple(
            Choice(
                index=choice.index,
                token_ids=tuple(choice.token_ids),
                text=choice.text,
                logprobs=_positions(choice.logprobs),
                cumulative_logprob=choice.cumulative_logprob,
                finish_reason=choice.finish_reason,
                stop_reason=choice.stop_reason,
            )
            for choice in output.outputs
        ),
        prompt_tokens=output.usage.prompt_tokens,
        completion_tokens=output.usage.completion_tokens,
    )


def differences(got: Answer, expected: Answer) -> list[str]:
    """Every field that is not the same; empty for equal answers. Floats are compared exactly."""
    found = list(_differing("", got, expected, skip="choices"))
    if len(got.choices) != len(expected.choices):
        return [*found, f"{len(got.choices)} choices instead of {len(expected.choices)}"]
    for ours, theirs in zip(got.choices, expected.choices, strict=True):
        found += _differing(f"choice {theirs.index}: ", ours, theirs)
    return found


def is_beginning(got: CompletionOutput, expected: Choice) -> bool:
    """Whether the received part of a choice is a prefix of the expected one."""
    num_tokens = len(got.token_ids)
    logprobs = None if expected.logprobs is None else expected.logprobs[:num_tokens]
    return (
        tuple(got.token_ids) == expected.token_ids[:num_tokens]
        and expected.text.startswith(got.text)
        and (_positions(got.logprobs) == logprobs or num_tokens == 0)
    )


def is_repetition(got: Sequence[int], expected: Sequence[int]) -> bool:
    """Whether tokens were duplicated: removing a run of tokens that repeats the one before it gives
    the expected tokens."""
    surplus = len(got) - len(expected)
    return surplus > 0 and any(
        [*got[:end], *got[end + surplus :]] == list(expected)
        and list(got[end - surplus : end]) == list(got[end : end + surplus])
        for end in range(surplus, len(expected) + 1)
    )


def _differing(where: str, got: Any, expected: Any, skip: str = "") -> Iterator[str]:
    for field in fields(expected):
        ours, theirs = getattr(got, field.name), getattr(expected, field.name)
        if field.name != skip and ours != theirs:
            yield f"{where}{field.name}: {_first_difference(ours, theirs)}"


def _first_difference(got: Any, expected: Any) -> str:
    if not (isinstance(got, tuple | str) and isinstance(expected, tuple | str)):
        return f"{got!r} instead of {expected!r}"
    if isinstance(got, tuple) and is_repetition(got, expected):
        return f"{len(got) - len(expected)} entries came twice"
    shared = min(len(got), len(expected))
    at = next((i for i in range(shared) if got[i] != expected[i]), shared)
    return (
        f"length {len(got)} instead of {len(expected)}; from {at} on "
        f"{got[at : at + 3]!r} instead of {expected[at : at + 3]!r}"
    )


def _positions(positions: Sequence[Any] | None) -> tuple[Any, ...] | None:
    """Log probabilities as values that compare; a prompt's first position has none."""
    if positions is None:
        return None
    return tuple(
        None
        if position is None
        else tuple(
            sorted((token, p.logprob, p.rank, p.decoded_token) for token, p in position.items())
        )
        for position in positions
    )
