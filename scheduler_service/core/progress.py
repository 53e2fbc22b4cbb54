"""How far a sequence is: its length and how long it may become, and what is computed of it.

Each part owns its fields; `Sequence` resets them when it leaves the batch.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol, TypeVar


# A sampled token whose value is still in flight counts in `length`, so that the next step can be
# planned before the last one's result is in: the worker feeds its own token forward. A row with
# drafts counts with all the tokens that it may bring, until its result says how many it brought.
@dataclass(slots=True, eq=False)
class Growth:
    """The length of a sequence, in tokens, and its limits."""

    length: int
    """Number of its tokens, including those sampled but not yet known; the most that it can have
    if rows with drafts are in flight."""
    num_drafts: int = 0
    """Drafts that its rows in flight may keep."""
    reserved_length: int = 0
    """The length up to which it can decode without asking the KV cache: the end of the memory that
    it has, or less if that is shared and must be copied first, or if the output ends."""
    max_length: int = 0
    """Number of its tokens at which it ends."""

    @property
    def next_position(self) -> int:
        """While it decodes: the lowest position that its next row may have."""
        return self.length - self.num_drafts - 1

    def limit(self, max_length: int) -> None:
        """Set the limit that holds in its worker group."""
        self.max_length = max_length

    def reserve(self, num_tokens: int) -> None:
        """Allow decoding up to a length, or to its end, without asking the KV cache."""
        self.reserved_length = min(num_tokens, self.max_length - 1)

    def release(self) -> None:
        """Ask the KV cache again before the next token: the sequence has lost its memory."""
        self.reserved_length = 0

    def advance(self, num_drafts: int = 0) -> None:
        """Count a token that is being sampled, and the drafts that may be kept with it."""
        self.length += 1 + num_drafts
        self.num_drafts += num_drafts

    def retract_drafts(self, num_drafts: int, num_kept: int) -> None:
        """Count only the drafts that a row has kept."""
        self.num_drafts -= num_drafts
        self.length -= num_drafts - num_kept

    def restart(self, num_known: int) -> None:
        """Count the known tokens alone: those in flight are lost, or are chosen again."""
        self.length = num_known
        self.num_drafts = 0


class _HasGrowth(Protocol):
    growth: Growth


Grows = TypeVar("Grows", bound=_HasGrowth)
"""A sequence, for what concerns its length."""


def extend_all(
    sequences: Iterable[Grows], reserve: Callable[[Grows], bool], rows: list[Grows]
) -> int:
    """Count a token that is being sampled for each decoding sequence, and add its row. Returns the
    sum of the lengths of these rows' sequences.

    A sequence beyond its reserved length gets one only if `reserve` grants it. This is
    `Growth.advance` without a call for each row, which would cost a tenth of a step's time.
    """
    total_length = 0
    for seq in sequences:
        growth = seq.growth
        length = growth.length
        if length > growth.reserved_length and not reserve(seq):
            continue
        growth.length = length = length + 1
        total_length += length
        rows.append(seq)
    return total_length


@dataclass(slots=True, eq=False)
class Prefill:
    """The computation of a sequence's first tokens, up to its first new one."""

    num_computed: int = 0
    """Tokens whose computation is planned, or was not needed; used only while it prefills."""
    first_step_id: int = 0
    """The step in which the sequence last entered the batch."""
    is_complete: bool = False
    """Whether the result of its last step is in. Until then, decoded tokens are not offered to the
    prefix cache."""

    def start(self, step_id: int, num_computed: int) -> None:
        """Begin to compute what comes after the first `num_computed` tokens."""
        self.first_step_id = step_id
        self.num_computed = num_computed

    def advance(self, num_tokens: int, length: int) -> bool:
        """Count tokens as computed; return whether these were the last of `length`."""
        self.num_computed += num_tokens
        return self.num_computed == length

    def confirm(self, *, is_complete: bool) -> None:
        """Record the result of a step."""
        self.is_complete = is_complete

    def skip(self, num_computed: int) -> None:
        """Record that all tokens are computed: they return from host memory."""
        self.num_computed = num_computed
        self.is_complete = True

    def rejoin(self, step_id: int) -> None:
        """Get rows from this step on; the KV was not ready when the sequence entered the batch."""
        self.first_step_id = step_id

    def reset(self) -> None:
        """Forget what is computed."""
        self.num_computed = 0
        self.is_complete = False
