"""A step's bitmasks: which tokens may follow in the rows of sequences with a constraint.

What a mask needs are the sequence's output tokens, and nothing of the step's forward pass. So it is
computed on the host while the forward pass runs: on a CPU worker by a thread of its own, on a GPU
by the thread that has launched the pass.
"""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from worker_service.array_types import Int32Array, Int64Array
from worker_service.structured.constraint import Constraint
from worker_service.structured.matching import OutputMatcher

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from worker_service.structured.grammars import Grammars


@dataclass(frozen=True, kw_only=True, slots=True)
class MaskedRows:
    """The rows of a batch that have a constraint, and what it allows."""

    rows: Int64Array
    """[m], rising."""

    bitmask: Int32Array
    """[m, ceil(vocab_size / 32)]: a bit per token, the lowest first, 1 where it is allowed."""

    failed: npt.NDArray[np.bool_]
    """[m]: rows whose constraint cannot be followed any more; nothing is allowed in them."""


class ConstrainedRow(NamedTuple):
    """A row of a batch whose sequence has a constraint."""

    row: int
    slot: int
    output: Int32Array
    """Its output tokens so far."""


class _Asked(NamedTuple):
    """What a sequence asked for."""

    constraint: Constraint
    min_tokens: int
    compiled: "Future[LLMatcher] | None"
    """Kept for its first mask, since others may be compiled meanwhile, more than are cached. None
    in a fork that goes on with its parent's matcher."""


class TokenMasks:
    """The matchers of the sequences that a runner knows, by slot. Belongs to the model thread."""

    def __init__(self, grammars: "Grammars") -> None:
        self._grammars = grammars
        self._asked: dict[int, _Asked] = {}
        self._matchers: dict[int, OutputMatcher] = {}
        """Of those that have sampled: ranks that never do have none."""

    def add(
        self, slot: int, constraint: Constraint, min_tokens: int, parent_slot: int | None
    ) -> None:
        """A sequence with a constraint has come into a slot, perhaps as a fork.

        Raises ValueError for a constraint that cannot be put into a grammar.
        """
        compiled = None
        parent = None if parent_slot is None else self._matchers.get(parent_slot)
        if parent is not None:
            self._matchers[slot] = parent.fork(constraint, min_tokens)
        else:
            compiled = self._grammars.expect(constraint)
        self._asked[slot] = _Asked(constraint, min_tokens, compiled)

    def remove(self, slots: Int64Array) -> None:
        """The sequences in these slots are forgotten."""
        for slot in slots.tolist() if self._asked else ():
            self._asked.pop(slot, None)
            self._matchers.pop(slot, None)

    def constrained(self, slots: Int64Array) -> list[tuple[int, int]]:
        """(row, slot) of those of a batch's rows that have a constraint."""
        if not self._asked:
            return []
        return [(row, slot) for row, slot in enumerate(slots.tolist()) if slot in self._asked]

    def begin(self, rows: Sequence[ConstrainedRow]) -> "Future[MaskedRows]":
        """Compute beside what the caller does; the outputs must stay as they are meanwhile."""
        return self._grammars.beside.submit(self.compute, rows)

    def compute(self, rows: Sequence[ConstrainedRow]) -> MaskedRows:
        """The masks of these rows, of which there is at least one."""
        vocab_size = self._grammars.vocab_size
        matchers = [self._follow(each) for each in rows]
        # One token more than there are logits: llguidance's own end of sequence.
        bitmask = np.zeros((len(rows), vocab_size // 32 + 1), np.uint32)
        alive = [(each.matcher, i) for i, each in enumerate(matchers) if not each.has_failed]
        if alive:
            num_bytes = bitmask.shape[1] * bitmask.itemsize
            self._grammars.executor.unsafe_compute_mask_ptr(
                alive, bitmask.ctypes.data, num_bytes, len(rows)
            )
        bitmask[:, vocab_size // 32] &= np.uint32((1 << vocab_size % 32) - 1)
        for each, allowed in zip(matchers, bitmask, strict=True):
            each.settle(allowed)
        return MaskedRows(
            rows=np.array([each.row for each in rows], np.int64),
            bitmask=np.ascontiguousarray(bitmask[:, : -(-vocab_size // 32)]).view(np.int32),
            failed=np.array([each.has_failed for each in matchers]),
        )

    def _follow(self, row: ConstrainedRow) -> OutputMatcher:
        """The row's matcher, where its output ends."""
        matcher = self._matchers.get(row.slot)
        if matcher is None:
            asked = self._asked[row.slot]
            assert asked.compiled is not None, "who has a matcher from the start keeps it"
            start = asked.compiled.result().deep_copy()
            matcher = OutputMatcher(asked.constraint, asked.min_tokens, start)
            self._matchers[row.slot] = matcher
        matcher.take_in(row.output)
        return matcher
