"""One worker group: the ranks that hold one copy of a model together, and their session.

A group steps while it is whole, that is while every rank is registered. The loss of a rank ends the
group's session: its sequences return to the core's queue at once, and the other ranks wait, with
their weights loaded, until the missing one has registered again. The same happens when a rank hangs
too often.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence

from pagewire.v1 import scheduler_service_pb2 as pb
from pagewire.v1 import status_pb2
from scheduler_service.core_service.workers.errors import CannotServe, GroupHung, WorkerTakenOver
from scheduler_service.core_service.workers.worker import Worker
from scheduler_service.core_service.workers.worker_session import WorkerSession
from scheduler_service.tasks import run_until_first

logger = logging.getLogger(__name__)

MakeSession = Callable[[Sequence[pb.WorkerRegistration]], WorkerSession]

_COMMON_FACTS = (
    "name",
    "fingerprint",
    "dtype",
    "cache_groups",
    "max_model_len",
    "vocab_size",
    "max_loras",
)
"""Properties in which the ranks of a group must agree; a block's size in bytes may differ."""


class WorkerGroup:
    """The registered ranks of a group. Never empty once the first rank has joined."""

    def __init__(self, first: pb.WorkerRegistration, make_session: MakeSession) -> None:
        self.group_id = first.group_id
        self.world_size: int = max(1, first.world_size)
        self.is_draining = False
        self.is_hung = False
        """Whether its steps hung too often, and no rank has registered since."""
        self._make_session = make_session
        self._workers: dict[int, Worker] = {}
        self._session: WorkerSession | None = None
        self._num_previous_steps = 0
        self._changed = asyncio.Event()
        """Set, and replaced by a new event, when a rank joins or leaves."""
        self._is_stepping = False
        """Whether the stream of some rank runs, or has run, the session of the present set of
        ranks."""
        self._session_lock = asyncio.Lock()

    @property
    def num_workers(self) -> int:
        """Registered workers."""
        return len(self._workers)

    @property
    def workers(self) -> list[Worker]:
        """The registered ranks, in order."""
        return [self._workers[rank] for rank in sorted(self._workers)]

    @property
    def registration(self) -> pb.WorkerRegistration:
        """The registration of the lowest registered rank."""
        return self.workers[0].registration

    @property
    def is_empty(self) -> bool:
        """Whether no rank is registered."""
        return not self._workers

    @property
    def is_full(self) -> bool:
        """Whether all ranks are registered."""
        return len(self._workers) == self.world_size

    @property
    def is_ready(self) -> bool:
        """Whether requests for the group's model can be served by it now."""
        return self.state == status_pb2.WORKER_STATE_READY

    @property
    def state(self) -> status_pb2.WorkerState.ValueType:
        """The group's state. A draining group stays so until it is gone."""
        if self.is_draining:
            return status_pb2.WORKER_STATE_DRAINING
        if self._session is not None:
            return self._session.state
        return status_pb2.WORKER_STATE_HUNG if self.is_hung else status_pb2.WORKER_STATE_STARTING

    @property
    def max_cached_tokens(self) -> int:
        """Maximum length of a sequence that is alone in its cache; 0 before that is sized."""
        return 0 if self._session is None else self._session.max_cached_tokens

    @property
    def epoch(self) -> int:
        """The epoch of the latest step stream."""
        if self._session is not None:
            return self._session.epoch
        return max((worker.registration.last_epoch for worker in self.workers), default=0)

    @property
    def num_steps(self) -> int:
        """Steps executed since the first rank registered."""
        return self._num_previous_steps + (self._session.num_steps if self._session else 0)

    @property
    def last_heartbeat(self) -> float:
        """The oldest of the ranks' last heartbeats."""
        return min(worker.last_heartbeat for worker in self.workers)

    def refusal_of(self, registration: pb.WorkerRegistration) -> str | None:
        """The reason why a rank cannot join, or None; does not count a worker that it would
        replace."""
        rank, world_size = registration.rank, max(1, registration.world_size)
        others = [worker for worker in self.workers if worker.registration.rank != rank]
        if rank >= world_size:
            return f"rank {rank}: expected less than world_size, {world_size}"
        if others and world_size != self.world_size:
            return (
                f"rank {rank} of {world_size}: group {self.group_id!r} has ranks of "
                f"{self.world_size}"
            )
        for other in others:
            if other.registration.role != registration.role:
                return f"rank {rank}: expected the role of the group's other ranks"
            for fact in _COMMON_FACTS:
                ours = getattr(other.registration.model, fact)
                theirs = getattr(registration.model, fact)
                if theirs != ours:
                    return (
                        f"rank {other.registration.rank} of group {self.group_id!r} has a model "
                        f"with {fact} {ours}; this rank has {theirs}"
                    )
        return None

    def join(self, worker: Worker) -> None:
        """Add a rank, in place of its previous process if there is one."""
        rank = worker.registration.rank
        previous = self._workers.get(rank)
        if previous is not None:
            is_same = previous.registration.worker_id == worker.registration.worker_id
            if not is_same and len(self._workers) == 1:
                self.is_draining = False  # none of the processes is left that were to end
            previous.dismiss(
                None
                if is_same
                else f"replaced in its group by worker {worker.registration.worker_id}"
            )
        self.world_size = max(1, worker.registration.world_size)
        self.is_hung = False
        self._workers[rank] = worker
        self._has_changed()

    def leave(self, worker: Worker) -> None:
        """Remove a rank; no effect if another process has taken its place."""
        rank = worker.registration.rank
        if self._workers.get(rank) is worker:
            del self._workers[rank]
            self._has_changed()
            if self.is_draining:  # its requests now run elsewhere
                self._dismiss_all("drained")

    def drain(self) -> None:
        """Accept no new requests; stop the ranks once running requests have moved or finished."""
        self.is_draining = True
        for worker in self.workers:
            worker.send(pb.WorkerDirective(drain=pb.Drain()))
        if self._session is not None and self.is_full:
            self._session.drain()
            if self._session.has_stream:
                return
        self._dismiss_all("drained")  # nothing runs here

    async def step(self) -> None:
        """Run the group's session, or wait for it to end. Each rank's stream calls this; once all
        ranks are registered, one of the calls runs the session for all. It is only one even if
        several ranks register in the same turn of the loop: otherwise the next one would use a
        group again that has hung too often.
        """
        changed = self._changed
        if self.is_full:
            if not self._is_stepping:
                self._is_stepping = True
                async with self._session_lock:  # a previous session has ended
                    if not changed.is_set():
                        await run_until_first(changed.wait(), self._run_session())
        else:
            logger.info(
                "group waits for ranks group_id=%s num_ranks=%d world_size=%d",
                self.group_id,
                len(self._workers),
                self.world_size,
            )
        await asyncio.Event().wait()

    async def _run_session(self) -> None:
        workers = self.workers
        session = self._session = self._make_session([worker.registration for worker in workers])
        if self.is_draining:
            session.drain()
        try:
            await session.run()
        except CannotServe as error:
            logger.warning("group unusable group_id=%s reason=%s", self.group_id, error)
            self._dismiss_all(str(error))
        except WorkerTakenOver as error:
            logger.warning("group taken over group_id=%s reason=%s", self.group_id, error)
            self._dismiss_all(None)  # ranks that are still ours register again
        except GroupHung as error:
            logger.error("group hung group_id=%s reason=%s", self.group_id, error)
            self.is_hung = True
            for rank in error.ranks:
                workers[rank].send_stop(str(error))
        else:
            self._dismiss_all("drained")
        finally:
            self._num_previous_steps, self._session = self.num_steps, None

    def _has_changed(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
        self._is_stepping = False

    def _dismiss_all(self, stop_reason: str | None) -> None:
        for worker in self.workers:
            worker.dismiss(stop_reason)
