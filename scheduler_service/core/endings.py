"""How requests end, wherever they are: what is reported, and what is settled."""

from collections.abc import Iterable

from scheduler_service.core.admission.deadlines import DeadlineTimers
from scheduler_service.core.admission.request_registry import RequestRegistry
from scheduler_service.core.config import SchedulerConfig, WorkKind
from scheduler_service.core.inspection import Inspector
from scheduler_service.core.request_timing import RequestEvent, to_us
from scheduler_service.core.routing.fleet import Fleet
from scheduler_service.core.scheduling import results
from scheduler_service.core.scheduling.scheduler import Scheduler
from scheduler_service.core.sequence import Sequence, SequenceGroup, SequenceStatus
from scheduler_service.errors import PagewireError

ABORTED = SequenceStatus.FINISHED_ABORTED


class Endings:
    """Ends live requests, and forgets those that have ended."""

    def __init__(
        self,
        config: SchedulerConfig,
        registry: RequestRegistry,
        fleet: Fleet,
        deadlines: DeadlineTimers,
        inspector: Inspector,
    ) -> None:
        self._config = config
        self._registry, self._fleet = registry, fleet
        self._deadlines, self._inspector = deadlines, inspector
        self._traced: list[SequenceGroup] = []

    def end(
        self,
        seq_group: SequenceGroup,
        status: SequenceStatus,
        error: PagewireError | None,
        now: float,
    ) -> None:
        """End all that is left of a live group."""
        seq_group.error = error
        for seq in list(seq_group.unfinished()):
            self.end_sequence(seq, status, now)

    def end_sequence(self, seq: Sequence, status: SequenceStatus, now: float) -> None:
        """End a sequence of a live group, and the group with the last of them."""
        seq_group = seq.seq_group
        scheduler = self._fleet.scheduler_of(seq_group)
        if scheduler is not None:
            scheduler.end_sequence(seq, status, to_us(now))
            self.close_ended([scheduler], now)
        else:
            seq_group.end(seq, status)
            if seq_group.num_unfinished == 0:
                self._fleet.models[seq_group.request.model].discard(seq_group)
                self.close(seq_group, now)
        self._fleet.wake(seq_group.request.model)  # others may use what it held

    def close_ended(self, schedulers: Iterable[Scheduler], now: float) -> bool:
        """Close the groups that have ended in schedulers; return whether there were any."""
        ended = [
            seq_group for scheduler in schedulers for seq_group in scheduler.departures.pop_ended()
        ]
        for seq_group in ended:
            self.close(seq_group, now)
        return bool(ended)

    def close(self, seq_group: SequenceGroup, now: float) -> None:
        """Report how a group ended, and forget it."""
        results.finish_request(seq_group, seq_group.clock.finish(to_us(now)))
        seq_group.record_event(RequestEvent.ENDED, to_us(now))
        if seq_group.request.traceparent:
            self._traced.append(seq_group)
        self._inspector.record_end(seq_group, to_us(now))
        self._settle_accounts(seq_group)
        self._deadlines.forget(seq_group)
        self._registry.remove(seq_group, to_us(now))  # last: this clears its sequences

    def _settle_accounts(self, seq_group: SequenceGroup) -> None:
        """Update the statistics and limits of an ended group's model."""
        model = self._fleet.models.get(seq_group.request.model)
        if model is not None:
            if seq_group.has_begun and seq_group.request.work.kind is WorkKind.GENERATION:
                for seq in seq_group.choices():
                    model.router.record_answer(len(seq.output_token_ids))
            seq_group.placement.release(seq_group.tenant)
            model.wake_drained()
            if seq_group.tenant.config.max_kv_blocks is not None:
                self._fleet.wake_tenant_limited()
            self._fleet.drop_if_unused(model)
        totals = self._fleet.totals.get(seq_group.request.model)
        if totals is not None and seq_group.has_begun and self._config.enable_prefix_caching:
            totals.num_prefix_queries += seq_group.num_prompt_tokens
            totals.num_prefix_hits += seq_group.num_cached_tokens

    def pop_traced(self) -> list[SequenceGroup]:
        """Requests that have ended since the last call, of those whose trace is recorded; without
        their sequences."""
        traced, self._traced = self._traced, []
        return traced
