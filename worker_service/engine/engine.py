"""The worker's state: the current epoch, its caches, and the stream that may send plans.

The event loop calls the engine; the model thread computes. Epochs fence: a core with a greater
epoch takes the worker over, and the caches and the stream of an older one are dropped.
"""

import asyncio
import logging
from collections.abc import Sequence

from worker_service.block_transfer.leases import LeasedBlocks
from worker_service.block_transfer.transfers import Peers, Transfers
from worker_service.block_transfer.transport import ReadRequest
from worker_service.engine.cached_blocks import CachedBlocks
from worker_service.engine.executor import BlockCounts, Executor, Runner
from worker_service.engine.model_host import ModelHost
from worker_service.engine.step_stats import StepMeter
from worker_service.engine.step_stream import StepStream
from worker_service.engine.tracing import MakeTraces
from worker_service.errors import (
    InvalidPlan,
    NotReady,
    OutOfOrder,
    ProfilingFailed,
    StaleEpoch,
    WorkerError,
)
from worker_service.plan import CachedEntry, KeptSequence

logger = logging.getLogger(__name__)

MAX_EPOCH_STEP = 2**32
"""Greatest step between epochs. A core takes the epoch after the greatest seen; one this far above
is an error, and would lock out all cores once no greater number is left."""


class Engine:
    """An executor of plans and at most one stream of plans."""

    def __init__(
        self, executor: Executor, peers: Peers, make_traces: MakeTraces | None = None
    ) -> None:
        self.model = ModelHost(executor)
        self.last_epoch = 0
        """The greatest epoch seen."""
        self.meter = StepMeter()
        """Counters of the steps of all streams."""
        self._peers = peers
        self._make_traces = make_traces
        self._runner: Runner | None = None
        self._profiles: dict[tuple[int, int], BlockCounts] = {}
        """Numbers of blocks that fit together with the largest batch, by its sequences and
        tokens. Added to on the model thread."""
        self._stream: StepStream | None = None
        self._stream_epoch = 0
        self._cached_blocks = CachedBlocks()
        """Replaced and changed on the model thread."""
        self.is_draining = False
        """Whether new epochs are refused."""
        self._idle = asyncio.Event()
        self._idle.set()
        self._busy = asyncio.Event()

    @property
    def is_streaming(self) -> bool:
        """Whether a stream is open."""
        return self._stream is not None

    async def profile_blocks(self, max_num_seqs: int, max_num_batched_tokens: int) -> BlockCounts:
        """How many KV blocks fit together with the largest batch. Measured once for each batch, so
        that a core that returns does not wait for another forward pass.

        Raises ProfilingFailed if the batch cannot be computed: another attempt would end as this
        one.
        """
        if max_num_seqs < 1 or max_num_batched_tokens < max_num_seqs:
            got = f"{max_num_seqs} and {max_num_batched_tokens}"
            raise InvalidPlan(
                "max_num_batched_tokens", f"expected 1 <= max_num_seqs <= this, got {got}"
            )
        self.model.check_loaded()
        batch = (max_num_seqs, max_num_batched_tokens)
        if batch not in self._profiles:
            if self._stream is not None:  # of a core that has died, perhaps
                self._stream.keep_no_sequences()
            try:
                await self.model.prepare(
                    "the largest batch, which measures memory", lambda: self._measure_blocks(*batch)
                )
            except WorkerError:
                raise
            except Exception as error:  # compilers and drivers raise anything
                logger.exception("profiling failed")
                what = f"{type(error).__name__}: {error}".splitlines()[0]
                raise ProfilingFailed(f"the largest batch cannot be computed: {what}") from error
        return self._profiles[batch]

    def _measure_blocks(self, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        """Runs on the model thread, also to the end of a call that is cancelled or late."""
        batch = (max_num_seqs, max_num_batched_tokens)
        if batch not in self._profiles:  # such a call may have added it meanwhile
            self._cached_blocks.clear()  # the batch may use the caches
            self._profiles[batch] = self.model.executor.profile_blocks(
                max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens
            )

    async def cached_blocks(
        self, epoch: int
    ) -> tuple[int, list[CachedEntry], Sequence[KeptSequence]]:
        """The seed of the keys, the records that older epochs have left, and the sequences of the
        last one. Raises OutOfOrder unless the epoch has caches and has had no stream."""
        self.model.check_loaded()
        if epoch != self.last_epoch or epoch == self._stream_epoch or self._runner is None:
            raise OutOfOrder(f"epoch {epoch} has no caches, or has had its stream")
        records = self._cached_blocks

        def read() -> tuple[int, list[CachedEntry], Sequence[KeptSequence]]:
            return records.key_seed or 0, list(records.entries()), records.sequences

        return await self.model.thread.run(read)

    async def initialize_cache(self, num_gpu_blocks: int, num_cpu_blocks: int, epoch: int) -> None:
        """Allocate the caches of a new epoch."""
        if self.is_draining:
            raise NotReady("the worker is shutting down")
        has_cache = bool(self.model.facts.cache_groups)
        if has_cache != (num_gpu_blocks > 0):
            expected = "at least 1" if has_cache else "0, as the model has no cache groups"
            raise InvalidPlan("num_gpu_blocks", f"expected {expected}, got {num_gpu_blocks}")
        if epoch <= self.last_epoch:
            raise StaleEpoch(f"epoch {epoch} is not above {self.last_epoch}, seen before")
        self._check_within_reach(epoch)
        self._fence(epoch)
        self._runner = None

        def make_runner() -> Runner:
            self._check_newest(epoch)
            sizes = (num_gpu_blocks, num_cpu_blocks)
            self._cached_blocks.settle()
            if self._cached_blocks.sizes != sizes:
                self._cached_blocks = CachedBlocks(*sizes)
            return self.model.executor.make_runner(*sizes, epoch)

        runner = await self.model.prepare(f"the caches of epoch {epoch}", make_runner)
        self._check_newest(epoch)
        self._runner = runner
        logger.info(
            "cache initialised epoch=%d num_gpu_blocks=%d num_cpu_blocks=%d",
            epoch,
            num_gpu_blocks,
            num_cpu_blocks,
        )

    def open_stream(self, epoch: int) -> StepStream:
        """The stream of an epoch, which must be the greatest seen and not have had one before.

        A draining worker accepts it, too: the core may have opened it before it knew.
        """
        self._check_newest(epoch)
        if self._runner is None:
            raise OutOfOrder("no cache: InitializeCache comes before ExecuteSteps")
        if epoch == self.last_epoch and self._stream_epoch == epoch:
            raise OutOfOrder(f"epoch {epoch} has had its stream; a new one needs a greater epoch")
        self._check_within_reach(epoch)
        self._fence(epoch)
        self._stream_epoch = epoch
        traces = self._make_traces(epoch, self.meter) if self._make_traces else None
        transfers = Transfers(self._runner.block_memory, self._peers)
        self._stream = StepStream(
            epoch,
            self._runner,
            transfers,
            self.model.thread,
            self.meter,
            traces,
            self._cached_blocks,
        )
        self._idle.clear()
        self._busy.set()
        logger.info("step stream opened epoch=%d", epoch)
        return self._stream

    async def leased_blocks(self, request: ReadRequest) -> LeasedBlocks:
        """The blocks that a reader requests, if need be once their lease has begun. Raises
        LeaseDenied, and OutOfOrder for another epoch or rank."""
        if self._stream is None or request.epoch != self._stream.epoch:
            epoch = 0 if self._stream is None else self._stream.epoch
            raise OutOfOrder(f"epoch {request.epoch} is not that of the step stream, {epoch}")
        if request.rank != self._peers.rank:
            raise OutOfOrder(f"expected rank {self._peers.rank}, got {request.rank}")
        return await self._stream.leased_blocks(request.lease_id, request.token, request.block_ids)

    def close_stream(self, stream: StepStream) -> None:
        """Discard the rest of a stream; called when its RPC ends, for whatever reason."""
        stream.close()
        if stream is self._stream:
            self.model.executor.interrupt(stream.epoch)
            self._forget_stream()
            logger.info("step stream closed epoch=%d", stream.epoch)

    def end_idle_spans(self) -> None:
        """End the spans of requests that have had no step for a while; called periodically."""
        if self._stream is not None and self.model.thread.busy_s == 0:
            self._stream.end_idle_spans()

    def close_any_stream(self) -> None:
        """End the open stream, if any, with NotReady."""
        if self._stream is not None:
            self._stream.close(NotReady("the worker is shutting down"))
        self.model.executor.interrupt(self.last_epoch)

    async def wait_idle(self) -> None:
        """Wait until no stream is open."""
        await self._idle.wait()

    async def wait_closed(self) -> None:
        """Wait until the open stream is closed; if none is open, until the next one is."""
        await self._busy.wait()
        await self._idle.wait()

    def stop(self) -> bool:
        """Close the open stream and end the model thread, as `ModelHost.stop` does."""
        self.close_any_stream()
        return self.model.stop()

    def _check_newest(self, epoch: int) -> None:
        if epoch < self.last_epoch:
            raise StaleEpoch(f"epoch {epoch} is below {self.last_epoch}, which has taken over")

    def _check_within_reach(self, epoch: int) -> None:
        if epoch > self.last_epoch + MAX_EPOCH_STEP:
            raise InvalidPlan(
                "epoch", f"expected at most 2^32 above {self.last_epoch}, seen before, got {epoch}"
            )

    def _fence(self, epoch: int) -> None:
        """Record an epoch; end the stream and the rendezvous of an older one."""
        if epoch > self.last_epoch:
            self.model.executor.interrupt(self.last_epoch)
        if self._stream is not None and self._stream.epoch < epoch:
            logger.warning("step stream fenced epoch=%d by_epoch=%d", self._stream.epoch, epoch)
            self._stream.close(StaleEpoch(f"epoch {epoch} has taken over"))
            self._forget_stream()
        self.last_epoch = max(self.last_epoch, epoch)

    def _forget_stream(self) -> None:
        self._stream = None
        self._busy.clear()
        self._idle.set()
