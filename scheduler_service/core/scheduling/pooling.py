"""Scheduling of requests for vectors: a prefill whose last row brings one, or whose rows bring one
for each of their tokens, and no decoding.

While the last one is in flight it counts as the sequence's only token of output, so that
preemption, recovery and moves treat the request as they do one whose last token is sampled.
"""

from dataclasses import dataclass

from scheduler_service.core.config import PoolingType, SchedulerConfig, WorkerGroupCapacity
from scheduler_service.core.request import Pooling
from scheduler_service.core.scheduling.batch import Batch
from scheduler_service.core.scheduling.sampling import SamplingScheduler
from scheduler_service.core.sequence import Sequence, SequenceGroup, SequenceStatus, Strategy
from scheduler_service.core.step_plan import RowCandidates, RowOutput, RowVectors

FLOAT_BYTES = 4
"""Bytes of a number of a vector."""

MAX_VECTOR_BYTES = 16 << 20
"""Maximum size of all vectors of a step's result, unless those of one row cannot be less."""

MAX_PART_BYTES = 1 << 20
"""Maximum size of the vectors that travel together to a frontend, unless one alone is larger."""

MAX_ROW_BYTES = 128 << 20
"""Maximum size of the vectors of one row: half of what a message may have."""


class Pooled(Strategy):
    """One sequence, whose hidden states make vectors. Only the last token's do not depend on which
    tokens are found in the prefix cache."""

    output = RowOutput.VECTOR
    streams = False

    def __init__(self, work: Pooling) -> None:
        self.work = work
        self.reuses_prefixes = work.type is PoolingType.LAST
        self.brings_all = work.type is PoolingType.ALL


def row_bytes(work: Pooling, num_tokens: int, capacity: WorkerGroupCapacity) -> int:
    """Bytes of the vectors of a row that computes all tokens of a text."""
    number = num_tokens if work.type is PoolingType.ALL else 1
    return number * work.vector_size(capacity) * FLOAT_BYTES


@dataclass(slots=True, eq=False)
class PoolingScheduler(SamplingScheduler):
    """Admits prompts as those of sampled choices are, and delivers their vectors."""

    config: SchedulerConfig
    capacity: WorkerGroupCapacity

    def place(self, seq_group: SequenceGroup, now_us: int) -> None:
        """Set the size of its vectors."""
        strategy = seq_group.strategy
        assert isinstance(strategy, Pooled)
        strategy.vector_bytes = row_bytes(strategy.work, 1, self.capacity)
        SamplingScheduler.place(self, seq_group, now_us)

    def max_row_tokens(self, seq: Sequence, batch: Batch) -> int:
        """As many as the result has capacity for the vectors of."""
        strategy, num_tokens = seq.seq_group.strategy, seq.growth.length - seq.prefill.num_computed
        num_vectors = (MAX_VECTOR_BYTES - batch.vector_bytes) // strategy.vector_bytes
        if strategy.brings_all and self.config.enable_chunked_prefill:
            return min(num_tokens, max(num_vectors, not batch.vector_bytes))
        num_needed = num_tokens if strategy.brings_all else 1
        return num_tokens if num_vectors >= num_needed or not batch.vector_bytes else 0

    def end_prefill(self, seq: Sequence, batch: Batch) -> None:
        """Wait for the result without a place: batches of short texts are as large as a step."""
        SamplingScheduler.end_prefill(self, seq, batch)
        self.running.retire(seq)

    def receive(
        self, seq: Sequence, step_id: int, value: RowCandidates | RowVectors, now_us: int
    ) -> None:
        """Deliver vectors in parts, the last of which ends their request. Those of a preempted
        sequence count, too."""
        del step_id
        assert isinstance(value, RowVectors)
        if seq.status.is_finished:
            return
        size, values = seq.seq_group.strategy.vector_bytes, value.values
        num_vectors = max(1, MAX_PART_BYTES // size)
        for start in range(0, len(values), num_vectors * size):
            part = values[start : start + num_vectors * size]
            seq.frontend.outbox.vectors.append(
                (seq.handle, value.first_token + start // size, part)
            )
        if value.is_last:
            self.departures.end_sequence(seq, SequenceStatus.FINISHED_STOPPED, now_us)
