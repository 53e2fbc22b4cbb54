"""What a worker keeps of its caches when its core dies, for the next core."""

from collections.abc import Iterable

from pagewire.v1 import plan_pb2, worker_service_pb2
from scheduler_service.core import StepPlan
from scheduler_service.core.config import KeptBlocks
from scheduler_service.core_service.workers.kept_blocks import RankReport, common_blocks, entries_of
from scheduler_service.wire import decode_kept_sequence, encode_plan
from worker_service.engine.cached_blocks import CachedBlocks
from worker_service.service.wire import decode_plan, encode_cached_blocks


class BlockRecords:
    """The real records of a worker that executes nothing, over the wire."""

    def __init__(self, num_gpu_blocks: int, num_cpu_blocks: int) -> None:
        self.records = CachedBlocks(num_gpu_blocks, num_cpu_blocks)

    def execute(self, plan: StepPlan) -> None:
        """What a worker does with a plan's records."""
        other = StepPlan(
            step_id=plan.step_id,
            cached_blocks=plan.cached_blocks,
            uncached_blocks=plan.uncached_blocks,
            key_seed=plan.key_seed,
            withdrawn_step_id=plan.withdrawn_step_id,
        )
        decoded = decode_plan(plan_pb2.StepPlan.FromString(_bytes_of(other)), 0)
        self.records.begin(decoded)
        self.records.finish(decoded)

    def kept(self, sequences: Iterable[worker_service_pb2.KeptSequence] = ()) -> KeptBlocks:
        """What the next core receives, with the worker's sequences."""
        self.records.sequences = ["they are there"]  # type: ignore[list-item]
        self.records.settle()
        if not self.records.sequences:
            sequences = ()
        message = encode_cached_blocks(list(self.records.entries()))
        of_worker = {one.seq_id: decode_kept_sequence(one, "") for one in sequences}
        seed = self.records.key_seed if len(self.records) or of_worker else None
        return common_blocks([RankReport(seed, dict(entries_of(message)), of_worker)])


def _bytes_of(plan: StepPlan) -> bytes:
    return encode_plan(plan, epoch=1).SerializeToString()
