"""The tokens that a constraint allows, as sampling.proto defines them, and those a worker offers.

Rows with candidates make a worker report all allowed tokens, not only the chosen one. A `Language`
determines what is allowed: a set of texts simple enough to decide whether any text is a prefix of
one of them.
"""

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from conformance.assertions import Skipped, expect, expect_true
from conformance.sequence import sampler_params
from conformance.step_result import Candidates
from conformance.vocabulary import spell
from conformance.worker import Worker
from pagewire import columns
from pagewire.v1 import sampling_pb2


class Part(NamedTuple):
    """One part of a text, as regular expressions."""

    whole: str
    begun: str
    """Matches each prefix of what `whole` matches."""


def _any(choices: Iterable[bytes]) -> str:
    return "(?:" + "|".join(re.escape(text.decode("latin-1")) for text in choices) + ")"


def one_of(*texts: str) -> Part:
    """Any of these texts."""
    beginnings = {text.encode()[:end] for text in texts for end in range(len(text.encode()) + 1)}
    return Part(_any(text.encode() for text in texts), _any(beginnings))


WHITE_SPACE = Part(r"(?: |\r?\n[ \t]{0,32})?", r"(?: |\r?(?:\n[ \t]{0,32})?)")
"""Between the parts of a JSON text."""


class Language:
    """The texts that consist of these parts, one after the other."""

    def __init__(self, *parts: Part) -> None:
        self._whole = _compile("".join(part.whole for part in parts))
        begun = [
            "".join(part.whole for part in parts[:index]) + parts[index].begun
            for index in range(len(parts))
        ]
        self._begun = _compile("|".join(begun))

    def has(self, text: bytes) -> bool:
        """Whether `text` is one of the texts."""
        return self._whole.fullmatch(text) is not None

    def begins(self, text: bytes) -> bool:
        """Whether `text` is a prefix of one of the texts."""
        return self._begun.fullmatch(text) is not None


def texts(*choices: str) -> Language:
    """These texts and no others."""
    return Language(one_of(*choices))


def json_object_language(names: Sequence[str]) -> Language:
    """JSON objects with these properties in this order, each of them true or false."""
    parts = [one_of("{"), WHITE_SPACE]
    for place, name in enumerate(names):
        comma = [one_of(","), WHITE_SPACE] if place else []
        parts += [*comma, one_of(f'"{name}"'), WHITE_SPACE, one_of(":"), WHITE_SPACE]
        parts += [one_of("true", "false"), WHITE_SPACE]
    return Language(*parts, one_of("}"))


def _compile(pattern: str) -> "re.Pattern[bytes]":
    """Over bytes, because tokens may be parts of characters."""
    return re.compile(pattern.encode("latin-1"))


MAX_CANDIDATES = 256
"""Candidates of a row. If fewer tokens are allowed, they must be exactly those."""


@dataclass(frozen=True, kw_only=True)
class KnownConstraint:
    """A constraint, and the texts that it allows."""

    kind: dict[str, Any]
    """The field of `Constraint` that states it."""

    language: Language
    """The texts that match."""

    ends: Collection[int]
    lasts: Collection[int] = ()
    min_tokens: int = 0
    thought: sampling_pb2.Thought | None = None
    """What precedes the text that must match, which `allowed` says nothing of."""
    others: dict[str, Any] = field(default_factory=dict)
    """Further parameters."""

    def params(self, **fields: Any) -> sampling_pb2.SamplerParams:
        """The sampling parameters of a plan."""
        constraint = sampling_pb2.Constraint(
            end_token_ids=columns.pack(sorted(self.ends)),
            last_token_ids=columns.pack(sorted(self.lasts)),
            thought=self.thought,
            **self.kind,
        )
        mine = {"constraint": constraint, "min_tokens": self.min_tokens}
        return sampler_params(**(mine | self.others | fields))

    def allowed(self, texts: Sequence[bytes], output: Sequence[int]) -> set[int]:
        """The tokens that may follow an output that has not ended."""
        so_far = b"".join(texts[token] for token in output)
        ending = {*self.ends, *self.lasts}
        as_text = {
            token
            for token, text in enumerate(texts)
            if text and token not in ending and self.language.begins(so_far + text)
        }
        allowed = set(as_text)
        if self.language.has(so_far):
            if len(output) >= self.min_tokens or not as_text:
                allowed |= set(self.ends)
            if not as_text:
                allowed |= set(self.lasts)
        return allowed


def known_constraint(
    worker: Worker, kind: dict[str, Any], language: Language, **fields: Any
) -> KnownConstraint:
    """A constraint that a token without a text may end. Raises Skipped as `texts_of` does."""
    texts_of(worker)
    return KnownConstraint(kind=kind, language=language, **({"ends": [end_of(worker)]} | fields))


def known_choice(worker: Worker, *words: str, **fields: Any) -> KnownConstraint:
    """The choice of these texts. Raises Skipped as `texts_of` does."""
    kind = {"choice": sampling_pb2.ChoiceList(choices=words)}
    return known_constraint(worker, kind, texts(*words), **fields)


def texts_of(worker: Worker) -> list[bytes]:
    """Token texts of a worker that supports constraints. Raises Skipped for others."""
    if not worker.info.model.structured_output:
        raise Skipped("the worker does not support constraints")
    return worker.token_texts


def end_of(worker: Worker) -> int:
    """A token that may end an output: the model's own, or one without text."""
    if ends := columns.unpack(worker.info.model.eos_token_ids):
        return ends[0]
    texts = texts_of(worker)
    return next((token for token, text in enumerate(texts) if not text), len(texts) - 1)


def offered(
    worker: Worker, asked: KnownConstraint, outputs: Sequence[Sequence[int]]
) -> list[Candidates]:
    """The candidates that the worker reports after each of these outputs."""
    prompt = worker.prompt(1)
    params = asked.params(num_candidates=min(MAX_CANDIDATES, worker.vocab_size))
    with worker.open() as session:
        sequences = [
            session.new([*prompt, *output], num_prompt_tokens=len(prompt), sampling=params)
            for output in outputs
        ]
        result = session.step(*sequences)
        expect("rows that failed", result.errors, {})
        return [result.candidates[sequence.seq_id] for sequence in sequences]


def expect_allowed(worker: Worker, asked: KnownConstraint, *outputs: str | Sequence[int]) -> None:
    """Fail unless the worker offers exactly what is allowed after each of these outputs.

    A text is an output of the shortest tokens that spell it.
    """
    texts = texts_of(worker)
    spelt = [
        spell(texts, spelling) if isinstance(spelling, str) else spelling for spelling in outputs
    ]
    for output, found in zip(spelt, offered(worker, asked, spelt), strict=True):
        got, wanted = set(found.token_ids), asked.allowed(texts, output)
        where = repr(b"".join(texts[token] for token in output))
        wrong, missing = sorted(got - wanted), sorted(wanted - got)
        shown = ", ".join(f"{token} {texts[token]!r}" for token in wrong[:4])
        expect_true(not wrong, f"after {where} these tokens are offered but not allowed: {shown}")
        if len(wanted) <= MAX_CANDIDATES:
            shown = ", ".join(f"{token} {texts[token]!r}" for token in missing[:4])
            expect_true(
                not missing, f"after {where} these tokens are allowed but not offered: {shown}"
            )
