"""Counters, latency histograms and snapshots of the core's state, for status pages and metrics."""

from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from enum import StrEnum
from math import ceil, log2

from scheduler_service.core.kv_cache.usage import CacheGroupUsage
from scheduler_service.core.request_timing import RequestEvent
from scheduler_service.core.sequence import Sequence
from scheduler_service.core.step_plan import FetchResult, StepPlan

FIRST_BOUND_US = 100
BUCKETS_PER_DOUBLING = 4
GROWTH = 2 ** (1 / BUCKETS_PER_DOUBLING)
NUM_BUCKETS = 96
"""Up to 24 doublings of the first bound: 28 minutes."""


class LatencyHistogram:
    """Counts by bucket: bucket i counts durations up to `FIRST_BOUND_US * GROWTH**i`.

    Counts only grow, so the difference of two readings describes the time between them.
    """

    __slots__ = ("counts",)

    def __init__(self) -> None:
        self.counts = [0] * NUM_BUCKETS

    def add(self, us: int, number: int = 1) -> None:
        """Record `number` observations of `us` microseconds."""
        bucket = 0
        if us > FIRST_BOUND_US:
            bucket = min(ceil(BUCKETS_PER_DOUBLING * log2(us / FIRST_BOUND_US)), NUM_BUCKETS - 1)
        self.counts[bucket] += number


def summed(histograms: Iterable[LatencyHistogram]) -> list[int]:
    """The sum of several histograms' counts."""
    none = [0] * NUM_BUCKETS
    return [sum(bucket) for bucket in zip(none, *(h.counts for h in histograms), strict=True)]


class MoveReason(StrEnum):
    """Why a request leaves a worker group that computes it."""

    DRAIN = "drain"
    HAND_OVER = "hand_over"
    EXCEEDS_CACHE = "exceeds_cache"
    REBALANCE = "rebalance"


@dataclass(slots=True)
class ModelTotals:
    """Running totals of one model's requests since the core's start."""

    num_generated_tokens: int = 0
    num_prefill_tokens: int = 0
    num_preemptions: int = 0
    num_swapped_out_blocks: int = 0
    num_swapped_in_blocks: int = 0
    num_copied_blocks: int = 0
    num_prefix_queries: int = 0
    """Prompt tokens looked up in the prefix cache, of requests that have ended."""
    num_prefix_hits: int = 0
    """The part of these tokens that was found."""
    num_recovered: int = 0
    """Requests that lost their worker group and were queued again."""
    num_inexact_recoveries: int = 0
    """Requests with output that were resumed on a worker group of another arithmetic."""
    num_moved: Counter[MoveReason] = field(default_factory=Counter)
    """Requests that left a worker group for another one."""
    num_fetches: int = 0
    """Times that blocks of another worker group arrived."""
    num_fetched_blocks: int = 0
    num_fetched_bytes: int = 0
    fetch_us: int = 0
    """Time from the beginning of these fetches to their ends."""
    num_failed_fetches: Counter[str] = field(default_factory=Counter)
    """By reason: times that such blocks did not arrive, and were computed."""
    num_draft_rows: int = 0
    """Rows that computed drafts."""
    num_drafts: int = 0
    """Drafts that they computed."""
    num_rows_by_accepted: Counter[int] = field(default_factory=Counter)
    """Number of these rows by how many of their drafts were accepted."""
    first_token: LatencyHistogram = field(default_factory=LatencyHistogram)
    """Time from a request's acceptance to its first token."""
    inter_token: LatencyHistogram = field(default_factory=LatencyHistogram)
    """Between two consecutive tokens of a sequence."""

    @property
    def fetch_s(self) -> float:
        """Time from the beginnings of fetches to their ends."""
        return self.fetch_us / 1e6

    @property
    def num_accepted_drafts(self) -> int:
        """Drafts that became output."""
        return sum(accepted * rows for accepted, rows in self.num_rows_by_accepted.items())

    def num_accepted_by_position(self) -> list[int]:
        """Of the first drafts of rows, of the second ones and so on: how many were accepted."""
        rows = self.num_rows_by_accepted
        max_accepted = max(rows, default=0)
        return [
            sum(rows[row] for row in range(place, max_accepted + 1))
            for place in range(1, max_accepted + 1)
        ]

    def add_plan(self, plan: StepPlan, num_prefill_tokens: int) -> None:
        """Count the work of a plan, in which prefills compute `num_prefill_tokens` tokens."""
        self.num_prefill_tokens += num_prefill_tokens
        self.num_swapped_out_blocks += len(plan.swap_out) // 2
        self.num_swapped_in_blocks += len(plan.swap_in) // 2
        self.num_copied_blocks += len(plan.copy) // 2

    def add_fetch(self, num_blocks: int, reports: SequenceOf[FetchResult]) -> None:
        """Count blocks of another worker group that have arrived; `reports`: of all ranks."""
        self.num_fetches += 1
        self.num_fetched_blocks += num_blocks
        self.num_fetched_bytes += sum(report.num_bytes for report in reports)
        self.fetch_us += max(report.duration_us for report in reports)

    def add_drafts(self, num_drafts: int, num_accepted: list[int]) -> None:
        """Count the drafts of a step's rows. num_accepted: of each row that computed any."""
        self.num_draft_rows += len(num_accepted)
        self.num_drafts += num_drafts
        self.num_rows_by_accepted.update(num_accepted)

    def add_prefill(self, seq: Sequence, num_tokens: int, is_last: bool, now_us: int) -> None:
        """Record that a running sequence's first `num_tokens` tokens are computed; with `is_last`,
        its next token has been sampled."""
        seq_group = seq.seq_group
        seq_group.clock.timeline.add(RequestEvent.PREFILLED, now_us, num_tokens)
        is_first_token = is_last and seq.choice_index == 0 and not seq.output_token_ids
        if is_first_token and seq_group.strategy.streams:
            seq_group.clock.timeline.add(RequestEvent.FIRST_TOKEN, now_us, num_tokens + 1)
            if not seq_group.request.is_continued:
                self.first_token.add(now_us - seq_group.clock.submitted_us)


@dataclass(kw_only=True, slots=True)
class ModelSnapshot:
    """The requests for one model."""

    name: str
    totals: ModelTotals
    num_waiting: int = 0
    num_running: int = 0
    num_swapped: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerGroupSnapshot:
    """One worker group."""

    worker_group_id: str
    model: str
    draining: bool
    num_gpu_blocks: int
    num_free_gpu_blocks: int
    num_cpu_blocks: int
    num_free_cpu_blocks: int
    """Blocks that no swapped-out sequence needs."""
    num_running_sequences: int
    num_steps: int
    """Results received since the group joined."""
    block_size: int
    max_num_seqs: int
    us_per_decode_step: float
    """0 if unknown; so is the next field."""
    us_per_prefill_token: float
    plan_us: int
    """Planning that the worker waited for. This and the next three add up to the time since the
    group joined."""
    wire_us: int
    forward_us: int
    sample_us: int
    cache_groups: list[CacheGroupUsage]
    kv_moves: str
    """Groups with which it exchanges KV, and reasons why not with others, for people."""
    adapters: str
    """Adapters in its slots, with numbers of requests, for people."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CoreSnapshot:
    """The whole core. Requests are counted once: as running, else swapped, else waiting."""

    num_waiting: int
    num_running: int
    num_swapped: int
    num_finished: int
    """Requests ended since start, for any reason."""
    num_generated_tokens: int
    """Output tokens delivered since start."""
    num_prefill_tokens: int
    """Tokens computed by prefills since start, recomputed ones included."""
    num_preemptions: int
    num_swapped_out_blocks: int
    """Blocks copied from devices to hosts since start."""
    num_swapped_in_blocks: int
    """Blocks moved from hosts to devices since start."""
    num_fetched_blocks: int
    """Blocks copied from one worker group to another since start."""
    num_failed_fetches: int
    """Times that such blocks did not arrive."""
    first_token_counts: list[int]
    """Counts by bucket, as in `LatencyHistogram`; so are the next ones."""
    inter_token_counts: list[int]
    models: list[ModelSnapshot]
    """All models that were ever served or are requested."""
    num_by_tenant: dict[str, int]
    """Live requests by tenant."""
    worker_groups: list[WorkerGroupSnapshot] = field(default_factory=list)
