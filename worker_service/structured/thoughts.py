"""The thought that may precede the text that a constraint applies to (`Thought` in
`sampling.proto`).

Nearly every token is allowed inside a thought. Its masks are computed once for each text that may
be the beginning of an end, and take no parser.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from enum import Enum, auto
from functools import cache
from typing import NamedTuple

import numpy as np

from worker_service.array_types import UInt32Array
from worker_service.plan import Thought


class Stage(Enum):
    """Where an output is."""

    POSSIBLE = auto()
    """It is a proper prefix of one of the thought's starts."""
    ABSENT = auto()
    INSIDE = auto()
    AFTER = auto()


class Progress(NamedTuple):
    """What the continuation of an output depends on."""

    stage: Stage
    text: bytes = b""
    """POSSIBLE: the output. INSIDE: its longest suffix that is a proper prefix of an end. AFTER:
    the text behind the end in the same token, which is not allowed."""


class ThoughtTexts:
    """How the tokens of a vocabulary begin, continue and end thoughts of one kind."""

    def __init__(self, texts: Sequence[bytes], thought: Thought) -> None:
        """texts: by token id, also those of special tokens; empty for a token without."""
        self._texts = texts
        self._starts = [start.encode() for start in (thought.start, *thought.other_starts)]
        self._ends = [end.encode() for end in thought.ends]
        self._by_first_byte = defaultdict[int, list[int]](list)
        for token, text in enumerate(texts):
            if text:
                self._by_first_byte[text[0]].append(token)
        self._beyond = [token for token, text in enumerate(texts) if self._rest(text)]
        self.begin = Progress(Stage.POSSIBLE if thought.start else Stage.INSIDE)
        self.allowed = cache(self._allowed)

    def advance(self, progress: Progress, token: int) -> Progress:
        """Add a token to an output that is, or may be, inside a thought."""
        text = progress.text + self._texts[token]
        if progress.stage is Stage.POSSIBLE and not text.startswith(tuple(self._starts)):
            is_possible = any(start.startswith(text) for start in self._starts)
            return Progress(Stage.POSSIBLE if is_possible else Stage.ABSENT, text)
        rest = self._rest(text)
        if rest is not None:
            return Progress(Stage.AFTER, rest)
        size = max((size for size, _ in self._begun_ends(text)), default=0)
        return Progress(Stage.INSIDE, text[len(text) - size :])

    def is_allowed(self, progress: Progress, token: int) -> bool:
        """Whether `allowed` has the token."""
        return bool(self.allowed(progress)[token >> 5] >> (token & 31) & 1)

    def _allowed(self, progress: Progress) -> UInt32Array:
        """The tokens that continue a thought, or begin it: a bit each, the lowest first."""
        num_tokens = len(self._texts)
        allowed = np.zeros((num_tokens // 32 + 1) * 32, np.bool_)
        allowed[:num_tokens] = progress.stage is Stage.INSIDE
        for token in self._exceptions(progress):
            stage, rest = self.advance(progress, token)
            allowed[token] = stage is not Stage.ABSENT and not (stage is Stage.AFTER and rest)
        return np.packbits(allowed, bitorder="little").view(np.uint32)

    def _exceptions(self, progress: Progress) -> list[int]:
        """The tokens that may be forbidden inside a thought, or allowed before one."""
        text = progress.text
        if progress.stage is Stage.POSSIBLE:
            next_bytes = {start[len(text)] for start in self._starts if start.startswith(text)}
        else:
            next_bytes = {end[size] for size, end in self._begun_ends(text)}
        tokens = [token for byte in next_bytes for token in self._by_first_byte[byte]]
        return tokens if progress.stage is Stage.POSSIBLE else self._beyond + tokens

    def _rest(self, text: bytes) -> bytes | None:
        """What follows the first end in a text; None if there is none."""
        places = [place + len(end) for end in self._ends if (place := text.find(end)) >= 0]
        return text[min(places) :] if places else None

    def _begun_ends(self, text: bytes) -> Iterator[tuple[int, bytes]]:
        """Lengths of the suffixes of `text` that are proper prefixes of an end, and these."""
        for end in self._ends:
            for size in range(1, min(len(text), len(end) - 1) + 1):
                if end.startswith(text[-size:]):
                    yield size, end
