"""The interface by which a worker group schedules requests of all strategies."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import TypeAlias

from scheduler_service.core.kv_cache.alloc_status import AllocStatus
from scheduler_service.core.scheduling.batch import Batch
from scheduler_service.core.sequence import Sequence, SequenceGroup
from scheduler_service.core.step_plan import RowCandidates, RowVectors

AddRows: TypeAlias = Callable[[Iterable[Sequence], Batch], None]
"""Adds rows for the next tokens of sequences that prefill."""


class StrategyScheduler(ABC):
    """Schedules the requests of one strategy in one worker group."""

    @abstractmethod
    def place(self, seq_group: SequenceGroup, now_us: int) -> None:
        """End what already has all the tokens that it can have here of a group that was routed
        here and is in no queue yet."""

    @abstractmethod
    def admit(self, seq_group: SequenceGroup, batch: Batch, add_rows: AddRows) -> AllocStatus:
        """Admit the waiting sequences of a group to the batch; LATER if some keep waiting."""

    def max_row_tokens(self, seq: Sequence, batch: Batch) -> int:
        """Most tokens of an admitted sequence's next row; 0 if it may get none now."""
        del batch
        return seq.growth.length - seq.prefill.num_computed

    @abstractmethod
    def end_prefill(self, seq: Sequence, batch: Batch) -> None:
        """Decide what follows the last row of a prefill, which is in the batch."""

    @abstractmethod
    def reserve(self, seq: Sequence, batch: Batch) -> bool:
        """Reserve memory for a decoding sequence's last token. Returns False if it gets no row in
        this step, or has one already."""

    def receive(
        self, seq: Sequence, step_id: int, value: RowCandidates | RowVectors, now_us: int
    ) -> None:
        """Process the result of a row, other than a token."""
        raise AssertionError(f"seq_id={seq.seq_id} has no use for {type(value).__name__}")
