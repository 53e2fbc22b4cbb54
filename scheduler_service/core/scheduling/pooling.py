"""Scheduling of requests for a vector: a prefill whose last row brings one, and no decoding.

While the vector is in flight it counts as the sequence's only token of output, so that preemption,
recovery and moves treat the request as they do one whose last token is sampled.
"""

from dataclasses import dataclass

from scheduler_service.core.config import WorkerGroupCapacity
from scheduler_service.core.request import Pooling, PoolingType
from scheduler_service.core.scheduling.batch import Batch
from scheduler_service.core.scheduling.pipeline import FLOAT_BYTES
from scheduler_service.core.scheduling.sampling import SamplingScheduler
from scheduler_service.core.sequence import Sequence, SequenceStatus, Strategy
from scheduler_service.core.step_plan import RowCandidates, RowOutput

MAX_VECTOR_BYTES = 16 << 20
"""Maximum size of all vectors of a step's result."""


class Pooled(Strategy):
    """One sequence, whose hidden states make a vector. Only the last token's do not depend on which
    tokens are found in the prefix cache."""

    output = RowOutput.VECTOR
    streams = False

    def __init__(self, work: Pooling) -> None:
        self.reuses_prefixes = work.type is PoolingType.LAST


@dataclass(slots=True, eq=False)
class PoolingScheduler(SamplingScheduler):
    """Admits prompts as those of sampled choices are, and delivers their vectors."""

    capacity: WorkerGroupCapacity

    def may_prefill(self, seq: Sequence, batch: Batch) -> bool:
        """Whether the result has capacity for one more vector."""
        del seq
        vector_bytes = max(1, self.capacity.vector_size) * FLOAT_BYTES
        return batch.num_vectors < max(1, MAX_VECTOR_BYTES // vector_bytes)

    def receive(
        self, seq: Sequence, step_id: int, value: RowCandidates | bytes, now_us: int
    ) -> None:
        """Deliver a vector, which ends its request. A preempted sequence's counts, too."""
        del step_id
        assert isinstance(value, bytes)
        if not seq.status.is_finished:
            seq.frontend.outbox.vectors.append((seq.handle, value))
            self.departures.end_sequence(seq, SequenceStatus.FINISHED_STOPPED, now_us)
