"""A step's bitmasks: which tokens may follow in the rows of sequences with a constraint.

A mask depends on the sequence's output tokens, and not on the step's forward pass. Therefore it is
computed on the host while the forward pass runs: on a CPU worker by a separate thread, on a GPU by
the thread that has launched the pass.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from worker_service.array_types import Int32Array, Int64Array, UInt32Array
from worker_service.plan import Constraint
from worker_service.structured.thoughts import Progress, Stage, ThoughtTexts

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from worker_service.structured.grammars import Grammars


class OutputMatcher:
    """One sequence's constraint and the output tokens matched so far.

    Fails permanently if a token violates the constraint, or if the constraint exceeds its limits.
    """

    def __init__(
        self,
        constraint: Constraint,
        min_tokens: int,
        matcher: "LLMatcher",
        thought: ThoughtTexts | None = None,
    ) -> None:
        self._constraint = constraint
        self._min_tokens = min_tokens
        self.matcher = matcher
        """Of the text after the thought; while a thought is possible, of the output."""
        self._thought = thought
        self._progress = Progress(Stage.ABSENT) if thought is None else thought.begin
        self._is_wrong = False
        """Whether the output matches only if it begins with a thought."""
        self._num_followed = 0
        self._has_ended = False
        self._ends = _bits(constraint.end_token_ids)
        self._lasts = _bits(constraint.last_token_ids)
        ending = (*constraint.end_token_ids.tolist(), *constraint.last_token_ids.tolist())
        self._ending = frozenset(ending)

    @property
    def has_failed(self) -> bool:
        """Whether the output can no longer be matched."""
        return bool(self.matcher.is_error()) or (self._is_wrong and not self._may_think)

    @property
    def needs_matcher(self) -> bool:
        """Whether the constraint determines which tokens are allowed, perhaps not alone."""
        is_inside = self._progress.stage is Stage.INSIDE
        return not (self.has_failed or self._is_wrong or is_inside)

    @property
    def _may_think(self) -> bool:
        return self._progress.stage in (Stage.POSSIBLE, Stage.INSIDE)

    @property
    def error(self) -> str:
        """Why it has failed, for log lines."""
        return str(self.matcher.get_error()) or "the output neither matches nor begins a thought"

    def fork(self) -> "OutputMatcher":
        """A copy for a fork of the sequence, or for its drafts."""
        fork = copy(self)
        fork.matcher = self.matcher.deep_copy()
        return fork

    def num_allowed(self, drafts: Int32Array) -> int:
        """How many of these tokens may follow the output as text, and the one that ends it."""
        if self._has_ended or self.has_failed:
            return 0
        if self._thought is not None and self._may_think:
            return self._num_allowed_in(self._thought, drafts)
        tokens = drafts.tolist()
        ends = [index for index, token in enumerate(tokens) if token in self._ending]
        num_texts = ends[0] if ends else len(tokens)
        num_valid = int(self.matcher.validate_tokens(tokens[:num_texts]))
        return num_valid + (num_valid == num_texts < len(tokens))

    def _num_allowed_in(self, thought: ThoughtTexts, drafts: Int32Array) -> int:
        """The same where the first tokens may be part of a thought."""
        ahead = self.fork()
        for index, token in enumerate(drafts.tolist()):
            if not ahead._may_think:
                return index + ahead.num_allowed(drafts[index:])
            is_text = ahead.needs_matcher and ahead.matcher.validate_tokens([token])
            if token in self._ending or not (is_text or thought.is_allowed(ahead._progress, token)):
                return index
            ahead._push(token)
        return len(drafts)

    def follow(self, output: Int32Array) -> None:
        """Match the rest of the output, which extends the output of the last call."""
        for token in output[self._num_followed :].tolist():
            if self._has_ended or token in self._ending:
                self._has_ended = True  # later tokens are irrelevant
            else:
                self._push(token)
        self._num_followed = len(output)

    def _push(self, token: int) -> None:
        if self._thought is None or not self._may_think:
            self.matcher.consume_token(token)
            return
        if self._progress.stage is Stage.POSSIBLE and not self._is_wrong:
            self._is_wrong = not self.matcher.try_consume_tokens([token])
        stage, rest = self._progress = self._thought.advance(self._progress, token)
        if stage is Stage.AFTER:
            self.matcher.reset()
            self._is_wrong = bool(rest)

    def settle(self, allowed: UInt32Array) -> None:
        """Turn the tokens allowed as text into all that are allowed, in place.

        allowed: [num_words], a bit per token, the lowest first.
        """
        if self.has_failed:
            allowed[:] = 0
            return
        if self._thought is not None and self._may_think:
            allowed |= self._thought.allowed(self._progress)
        _clear(allowed, self._ends)
        _clear(allowed, self._lasts)
        if self._has_ended:
            allowed[:] = 0
        can_continue = bool(allowed.any())
        if self._has_ended or (self.needs_matcher and self.matcher.is_accepting()):
            if self._num_followed >= self._min_tokens or not can_continue:
                _set(allowed, self._ends)
            if not can_continue:
                _set(allowed, self._lasts)


Bits = tuple[npt.NDArray[np.int64], UInt32Array]


def _bits(token_ids: Int32Array) -> Bits:
    """Words, each once, and the bits of the tokens in them."""
    words, inverse = np.unique(token_ids.astype(np.int64) // 32, return_inverse=True)
    bits = np.zeros(len(words), np.uint32)
    ones = np.left_shift(np.uint32(1), (token_ids % 32).astype(np.uint32))
    np.bitwise_or.at(bits, inverse, ones)
    return words, bits


def _clear(allowed: UInt32Array, bits: Bits) -> None:
    words, ones = bits
    allowed[words] &= ~ones


def _set(allowed: UInt32Array, bits: Bits) -> None:
    words, ones = bits
    allowed[words] |= ones


@dataclass(frozen=True, kw_only=True, slots=True)
class MaskedRows:
    """The rows of a batch that have a constraint, and what it allows."""

    rows: Int64Array
    """[m], rising."""

    bitmask: Int32Array
    """[m, ceil(vocab_size / 32)]: a bit per token, the lowest first, 1 where it is allowed."""

    failed: npt.NDArray[np.bool_]
    """[m]: rows whose matcher has failed; no token is allowed in them."""


class ConstrainedRow(NamedTuple):
    """A row of a batch whose sequence has a constraint."""

    row: int
    row_id: int
    output: Int32Array
    """Its output tokens so far, drafts included."""
    num_drafts: int = 0
    """How many of them, the last ones, are drafts. The row before it then has one less."""


class TokenMasks:
    """The matchers of a runner's sequences, by row id. For the model thread only."""

    def __init__(self, grammars: "Grammars") -> None:
        self._grammars = grammars
        self._matchers: dict[int, OutputMatcher | Callable[[], OutputMatcher]] = {}
        """Makers of matchers until sequences sample: ranks that never sample have no matchers."""

    def add(
        self, row_id: int, constraint: Constraint, min_tokens: int, parent_row_id: int | None
    ) -> None:
        """Add a sequence with a constraint, perhaps a fork.

        Raises ValueError for a constraint that cannot be expressed as a grammar.
        """
        parent = None if parent_row_id is None else self._matchers.get(parent_row_id)
        if isinstance(parent, OutputMatcher):
            self._matchers[row_id] = parent.fork()
            return
        compiled = self._grammars.expect(constraint)  # kept, since the cache may drop it

        def make() -> OutputMatcher:
            thought = constraint.thought and self._grammars.thought(constraint.thought)
            return OutputMatcher(constraint, min_tokens, compiled.result().deep_copy(), thought)

        self._matchers[row_id] = make

    def __len__(self) -> int:
        """Number of sequences with a constraint."""
        return len(self._matchers)

    def remove(self, row_ids: Int64Array) -> None:
        """The sequences in these rows are forgotten."""
        for row_id in row_ids.tolist() if self._matchers else ():
            self._matchers.pop(row_id, None)

    def constrained(self, row_ids: Int64Array) -> list[tuple[int, int]]:
        """(row of the batch, row id) of each constrained sequence."""
        if not self._matchers:
            return []
        rows = enumerate(row_ids.tolist())
        return [(row, row_id) for row, row_id in rows if row_id in self._matchers]

    def begin(self, rows: Sequence[ConstrainedRow]) -> "Future[MaskedRows]":
        """Compute on another thread; the outputs must not change in the meantime."""
        return self._grammars.mask_thread.submit(self.compute, rows)

    def compute(self, rows: Sequence[ConstrainedRow]) -> MaskedRows:
        """The masks of these rows, at least one."""
        vocab_size = self._grammars.vocab_size
        matchers: list[OutputMatcher] = []
        for row in rows:
            if row.num_drafts:
                matchers.append(matchers[-1].fork())
                matchers[-1].follow(row.output)
            else:
                matchers.append(self._follow(row))
        # One more token than logits: llguidance's own end of sequence.
        bitmask = np.zeros((len(rows), vocab_size // 32 + 1), np.uint32)
        alive = [
            (matcher.matcher, i) for i, matcher in enumerate(matchers) if matcher.needs_matcher
        ]
        if alive:
            num_bytes = bitmask.shape[1] * bitmask.itemsize
            self._grammars.executor.unsafe_compute_mask_ptr(
                alive, bitmask.ctypes.data, num_bytes, len(rows)
            )
        bitmask[:, vocab_size // 32] &= np.uint32((1 << vocab_size % 32) - 1)
        for matcher, allowed in zip(matchers, bitmask, strict=True):
            matcher.settle(allowed)
        return MaskedRows(
            rows=np.array([masked.row for masked in rows], np.int64),
            bitmask=np.ascontiguousarray(bitmask[:, : -(-vocab_size // 32)]).view(np.int32),
            failed=np.array([matcher.has_failed for matcher in matchers]),
        )

    def num_allowed(self, row: ConstrainedRow, drafts: Int32Array) -> int:
        """How many of these drafts the constraint allows after the row's output."""
        return self._follow(row).num_allowed(drafts)

    def _follow(self, row: ConstrainedRow) -> OutputMatcher:
        """The row's matcher, at the end of its output."""
        matcher = self._matchers[row.row_id]
        if not isinstance(matcher, OutputMatcher):
            matcher = self._matchers[row.row_id] = matcher()
        matcher.follow(row.output)
        return matcher
