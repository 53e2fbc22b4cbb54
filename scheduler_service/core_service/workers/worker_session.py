"""The core's session with one worker group: connect, size its caches, step, and reconnect.

    GetInfo ──▶ ProfileBlocks, once ──▶ InitializeCache(epoch) ──▶ ExecuteSteps ──▶ drained
       ▲                                                                │
       └────────── a greater epoch, after a pause ◀─── broken, or a step overdue

Most groups are one worker. Several ranks get identical calls: each allocates the lowest number of
blocks that any rank has profiled, under the same epoch, and each gets the same plans.

While the workers' leases hold, the session reconnects; when one ends, the session is cancelled.
Either way the group's sequences return to the core's queue at once. Two things end a session for
good: steps that hang several times in a row, and an epoch drawn by another core, which then owns
the worker.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import TypeAlias

import grpc

from pagewire.connection_errors import in_words
from pagewire.v1 import model_pb2, status_pb2
from pagewire.v1 import scheduler_service_pb2 as pb
from pagewire.v1 import worker_service_pb2 as worker_pb
from pagewire.v1.worker_service_pb2_grpc import WorkerServiceStub
from scheduler_service.core.config import (
    KeptBlocks,
    Role,
    SchedulerConfig,
    WorkerGroupCapacity,
    WorkKind,
)
from scheduler_service.core.scheduling.pipeline import ResultMismatch
from scheduler_service.core_service.counters import CoreCounters
from scheduler_service.core_service.driver import CoreDriver
from scheduler_service.core_service.workers.errors import (
    CannotServe,
    GroupHung,
    SessionFailed,
    StepOverdue,
    WorkerTakenOver,
)
from scheduler_service.core_service.workers.kept_blocks import read_kept_blocks
from scheduler_service.core_service.workers.step_stream import StepStream
from scheduler_service.core_service.workers.step_watchdog import HangCounter, StepTimeout, StepTimes
from scheduler_service.errors import PagewireError
from scheduler_service.tasks import run_all
from scheduler_service.wire import decode_cache_group, decode_pooling_info

logger = logging.getLogger(__name__)

CALL_TIMEOUT_S = 10.0
"""Timeout of calls that a worker answers at once."""

PROFILE_TIMEOUT_S = 600.0
"""Timeout of a forward pass of the largest batch, and of allocating the caches."""

MAX_EPOCH = 2**63
"""Above any epoch that a worker can have seen; an epoch is a uint64 on the wire."""

MIN_PAUSE_S = 0.1
MAX_PAUSE_S = 5.0
STABLE_AFTER_S = 30.0
"""A stream that lasted this long was healthy, so the pauses between attempts start short again."""


Stubs: TypeAlias = Sequence[WorkerServiceStub]
"""The stubs of a group's ranks, in order."""
Dial: TypeAlias = Callable[[str], AbstractAsyncContextManager[WorkerServiceStub]]
"""Connects to the worker at an address, with a connection of its own."""


Joined: TypeAlias = Callable[[Sequence[pb.WorkerRegistration]], AbstractAsyncContextManager[None]]


_ROLES = {pb.WORKER_ROLE_PREFILL: Role.PREFILL, pb.WORKER_ROLE_DECODE: Role.DECODE}
GENERATION_ONLY = frozenset({WorkKind.GENERATION})
_PREFIX = "WORK_KIND_"


def role_of(registration: pb.WorkerRegistration) -> Role:
    """What a worker is for."""
    return _ROLES.get(registration.role, Role.BOTH)


def _work_kind(number: model_pb2.WorkKind.ValueType) -> WorkKind:
    """Raises ValueError for a number that this software does not know."""
    return WorkKind(model_pb2.WorkKind.Name(number).removeprefix(_PREFIX).lower())


@dataclass(eq=False)
class WorkerSession:
    """A worker group's session: from the first calls to its registered workers to its last step."""

    ranks: Sequence[pb.WorkerRegistration]
    """All of them, in order."""
    driver: CoreDriver
    config: SchedulerConfig
    on_change: Callable[[], None]
    """Called whenever `state` has changed."""
    step_timeout: StepTimeout
    dial: Dial
    counters: CoreCounters
    joined: Joined
    """The context in which the workers have the adapters of their model."""

    def __post_init__(self) -> None:
        self.state = status_pb2.WORKER_STATE_STARTING
        self.epoch = max(rank.last_epoch for rank in self.ranks)
        self._group_id = self.ranks[0].group_id
        self._num_previous_steps = 0
        self.max_cached_tokens = 0
        """Maximum length of a sequence that is alone in the group's cache; 0 before it is sized."""
        self._blocks: worker_pb.ProfileBlocksResponse | None = None
        self._stream: StepStream | None = None
        self._draining = asyncio.Event()
        self._step_times = StepTimes(self.step_timeout)
        self._hang_counter = HangCounter()
        self._has_drawn = False
        """Whether this session has drawn an epoch; earlier ones are of other sessions or cores."""

    @property
    def is_draining(self) -> bool:
        """Whether the group accepts no new requests."""
        return self._draining.is_set()

    @property
    def has_stream(self) -> bool:
        """Whether steps may be running; if not, the workers are being connected or sized."""
        return self._stream is not None

    @property
    def num_steps(self) -> int:
        """Steps executed since the group was whole."""
        return self._num_previous_steps + (self._stream.num_steps if self._stream else 0)

    def drain(self) -> None:
        """Accept no new requests; `run` returns when the group has no requests left."""
        self._draining.set()
        if self._stream is not None:
            self._stream.drain()
            self.driver.drain_worker_group(self._group_id)
            self._set_state(status_pb2.WORKER_STATE_DRAINING)

    async def run(self) -> None:
        """Keep the group busy until it is drained.

        Raises CannotServe, WorkerTakenOver or GroupHung.
        """
        pause_s = MIN_PAUSE_S
        while not self._draining.is_set():
            started_at = self.driver.clock()
            failure = await self._try_session()
            if failure is None:
                break
            if self.driver.clock() - started_at > STABLE_AFTER_S:
                pause_s = MIN_PAUSE_S
            await self._pause(failure, pause_s)
            pause_s = min(2 * pause_s, MAX_PAUSE_S)

    async def _try_session(self) -> str | None:
        """One attempt, from connecting to drained; returns why it failed, or None."""
        self._set_state(status_pb2.WORKER_STATE_STARTING)
        try:
            # Over new connections, because a connection that was cut off may look alive for a long
            # time.
            async with AsyncExitStack() as stack:
                stubs = [
                    await stack.enter_async_context(self.dial(rank.address)) for rank in self.ranks
                ]
                capacity = await self._prepare(stubs)
                async with self.joined(self.ranks):
                    await self._execute_steps(stubs, capacity)
        except grpc.aio.AioRpcError as error:
            return f"{error.code().name}: {in_words(error.details())}"
        except StepOverdue as error:
            self._hang_counter.record(error)
            self.counters.counts.num_steps_overdue += 1
            return str(error)
        except (SessionFailed, ResultMismatch, PagewireError) as error:
            return str(error)
        except GroupHung:
            self.counters.counts.num_groups_hung += 1
            raise
        except (CannotServe, WorkerTakenOver):
            raise
        except Exception as error:
            logger.exception("unexpected error in a worker session group_id=%s", self._group_id)
            return f"unexpected {type(error).__name__}"
        return None

    async def _prepare(self, stubs: Stubs) -> WorkerGroupCapacity:
        """Draw a new epoch and make the workers allocate their caches for it."""
        infos = await run_all(*map(self._get_info, stubs, self.ranks))
        self._hang_counter.check(infos)
        self._draw_epoch(max(info.last_epoch for info in infos))
        blocks = self._blocks = self._blocks or await self._profile_blocks(stubs)
        request = worker_pb.InitializeCacheRequest(
            num_gpu_blocks=blocks.num_gpu_blocks,
            num_cpu_blocks=blocks.num_cpu_blocks,
            epoch=self.epoch,
        )
        # A worker whose graphs cannot be captured fails in the same way in every epoch.
        with _final(grpc.StatusCode.FAILED_PRECONDITION):
            caches = await run_all(
                *(stub.InitializeCache(request, timeout=PROFILE_TIMEOUT_S) for stub in stubs)
            )
        kept = None
        if all(cache.keeps_blocks for cache in caches):
            kept = await read_kept_blocks(stubs, self.epoch, timeout_s=PROFILE_TIMEOUT_S)
        return self._capacity(blocks, infos, kept)

    def _draw_epoch(self, last_epoch: int) -> None:
        """An epoch above all that the workers have seen.

        Raises WorkerTakenOver if one was not ours, and CannotServe if no core can have drawn it.
        """
        if last_epoch > MAX_EPOCH:
            raise CannotServe(
                f"a worker reports epoch {last_epoch}, above the largest that a core can draw"
            )
        if self._has_drawn and last_epoch > self.epoch:
            raise WorkerTakenOver(f"epoch {last_epoch} is above {self.epoch}, the last drawn here")
        self.epoch = max(self.epoch, last_epoch) + 1
        self._has_drawn = True

    async def _get_info(
        self, stub: WorkerServiceStub, rank: pb.WorkerRegistration
    ) -> worker_pb.GetInfoResponse:
        info = await stub.GetInfo(worker_pb.GetInfoRequest(), timeout=CALL_TIMEOUT_S)
        if info.worker_id != rank.worker_id:
            raise SessionFailed(
                f"{rank.address} is worker {info.worker_id}, "
                f"not {rank.worker_id}: does --advertise name this worker?"
            )
        return info

    async def _profile_blocks(self, stubs: Stubs) -> worker_pb.ProfileBlocksResponse:
        """Blocks that fit on every rank; profiled once, as it costs a forward pass and memory does
        not change."""
        request = worker_pb.ProfileBlocksRequest(
            max_num_seqs=self.config.max_num_seqs,
            max_num_batched_tokens=self.config.max_num_batched_tokens,
        )
        # A retry would not help: a worker will not have more memory later, nor other kernels.
        with _final(grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.FAILED_PRECONDITION):
            found = await run_all(
                *(stub.ProfileBlocks(request, timeout=PROFILE_TIMEOUT_S) for stub in stubs)
            )
        blocks = worker_pb.ProfileBlocksResponse(
            num_gpu_blocks=min(counts.num_gpu_blocks for counts in found),
            num_cpu_blocks=min(counts.num_cpu_blocks for counts in found),
        )
        if self.ranks[0].model.cache_groups and blocks.num_gpu_blocks < 1:
            raise CannotServe("not a single block fits into the worker's memory")
        return blocks

    def _capacity(
        self,
        blocks: worker_pb.ProfileBlocksResponse,
        infos: Sequence[worker_pb.GetInfoResponse],
        kept: KeptBlocks | None,
    ) -> WorkerGroupCapacity:
        model = self.ranks[0].model
        moves_blocks = all(info.moves_blocks for info in infos)
        try:
            return WorkerGroupCapacity(
                worker_group_id=self._group_id,
                model=model.name,
                num_gpu_blocks=blocks.num_gpu_blocks,
                num_cpu_blocks=blocks.num_cpu_blocks,
                cache_groups=tuple(map(decode_cache_group, model.cache_groups)),
                max_model_len=model.max_model_len,
                vocab_size=model.vocab_size,
                num_speculative_tokens=min(info.num_speculative_tokens for info in infos),
                arithmetic=model.arithmetic,
                work_kinds=frozenset(map(_work_kind, model.work_kinds)) or GENERATION_ONLY,
                whole_prompt=model.whole_prompt,
                max_loras=model.max_loras,
                kv_layout=self._kv_layout() if moves_blocks else (),
                addresses=tuple(rank.address for rank in self.ranks),
                epoch=self.epoch,
                role=role_of(self.ranks[0]),
                kept=kept,
                **decode_pooling_info(model.pooling),
            )
        except ValueError as error:
            raise CannotServe(str(error)) from error

    def _kv_layout(self) -> tuple[tuple[str, str], ...]:
        """The model, how its weights are stored, and what is where in a block."""
        model = self.ranks[0].model
        return (
            ("model files", model.fingerprint),
            ("dtype", model.dtype),
            ("weights", model.weights),
            ("cache layout", model.cache_layout),
            ("number of ranks", str(len(self.ranks))),
            ("bytes of blocks", " ".join(str(rank.model.block_bytes) for rank in self.ranks)),
        )

    async def _execute_steps(self, stubs: Stubs, capacity: WorkerGroupCapacity) -> None:
        """Step until drained; at the end, in any case, remove the group from the core."""
        if self._draining.is_set():
            return
        calls = [stub.ExecuteSteps() for stub in stubs]
        self._stream = StepStream(
            calls,
            self.driver,
            sampler=self._sampler(),
            group_id=self._group_id,
            epoch=self.epoch,
            times=self._step_times,
            meter=self.counters.steps_of(capacity.model),
        )
        try:
            work = self._add_group(capacity)
            self.max_cached_tokens = capacity.num_cache_tokens + 1  # the last one is not computed
            self._set_state(status_pb2.WORKER_STATE_READY)
            logger.info(
                "group ready group_id=%s num_ranks=%d epoch=%d num_gpu_blocks=%d",
                self._group_id,
                len(self.ranks),
                self.epoch,
                capacity.num_gpu_blocks,
            )
            await self._stream.run(work)
        finally:
            for call in calls:
                call.cancel()
            self._hang_counter.record_stream(self._stream.num_steps)
            self._num_previous_steps, self._stream = self.num_steps, None
            self.driver.remove_worker_group(self._group_id)
            self._set_state(status_pb2.WORKER_STATE_LOST)

    def _sampler(self) -> int:
        """Index of the rank that samples. Raises CannotServe unless there is exactly one."""
        samplers = [index for index, rank in enumerate(self.ranks) if rank.samples]
        if len(self.ranks) == 1:
            return 0
        if len(samplers) != 1:
            raise CannotServe(f"expected one rank that samples, got ranks {samplers}")
        return samplers[0]

    def _add_group(self, capacity: WorkerGroupCapacity) -> asyncio.Event:
        try:
            return self.driver.add_worker_group(capacity)
        except ValueError as error:
            raise CannotServe(str(error)) from error

    async def _pause(self, failure: str, pause_s: float) -> None:
        self.counters.counts.num_link_failures += 1
        logger.warning(
            "worker session failed group_id=%s worker_id=%s epoch=%d retry_in_s=%g reason=%s",
            self._group_id,
            ",".join(rank.worker_id for rank in self.ranks),
            self.epoch,
            pause_s,
            failure,
        )
        with suppress(TimeoutError):
            async with asyncio.timeout(pause_s):
                await self._draining.wait()

    def _set_state(self, state: status_pb2.WorkerState.ValueType) -> None:
        if state != self.state:
            self.state = state
            self.on_change()


@contextmanager
def _final(*codes: grpc.StatusCode) -> Iterator[None]:
    """Raise CannotServe for calls that a worker refuses with one of these codes, for good."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        if error.code() in codes:
            raise CannotServe(error.details()) from error
        raise
