"""KV that moves between worker groups, so that it is not computed again.

A request that a worker group has taken in may find more of its tokens in the prefix cache of
another one: of a prompt with a known beginning, or of all its tokens, because it ran there. If
reading them is faster than computing them, a *transfer* copies the missing entries into the group's
own prefix cache, where the request finds them like all others. It waits meanwhile.

1. The source *leases* the entries in its next plan: they keep their contents until the lease ends.
2. The target allocates memory, and its next plan *fetches* the entries into it, beside the steps of
   other requests: at the same time if the source has no step in flight, as its workers then begin
   the lease at once, and let a reader that comes first wait; else once that plan's result is in.
3. Once all ranks have reported the end of the fetch, the copies are found, and stay until the
   request is admitted or gone. The lease ends with the source's next plan.

A transfer that fails is no error: the request computes. Nothing depends on the source after the
lease was granted: a fetch from a source that is lost fails by itself. KV moves only between
groups whose workers compute the same bits and store them in the same way
(`WorkerGroupCapacity.stores_like`).
"""

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b

from scheduler_service.core.config import MoveKV, SchedulerConfig
from scheduler_service.core.kv_cache.exchange import CachedEntry
from scheduler_service.core.kv_cache.transfer_port import Lease
from scheduler_service.core.routing.fleet import ServedModel
from scheduler_service.core.scheduling.scheduler import Scheduler
from scheduler_service.core.sequence import Sequence, SequenceGroup
from scheduler_service.core.step_plan import FetchResult

logger = logging.getLogger(__name__)

MAX_FETCHES = 4
"""Of a worker group at a time: more would share the same memory and processors, and all of them
would be late."""

LEASE_MS, FETCH_MS = 120_000, 30_000
"""How long workers serve a lease, and take for a fetch."""

MIN_TOKENS_UNMEASURED = 64
"""Tokens that are worth a transfer while the time to compute them is not measured."""

_TOKEN_BYTES = 16


@dataclass(slots=True, eq=False)
class Transfer:
    """Entries of a prefix cache on their way from one worker group to another."""

    source: Scheduler
    target: Scheduler
    entries: list[CachedEntry]
    """At the source."""
    lease: Lease
    since_us: int
    ahead_of: SequenceGroup | None = None
    """The request that runs at the source and will continue at the target, if nothing waits yet."""
    waiting: dict[SequenceGroup, None] = field(default_factory=dict)
    """The requests that wait for it."""
    copies: list[CachedEntry] = field(default_factory=list)
    """At the target, once there is memory for them."""
    is_granted: bool = False
    """Whether the source's workers serve the lease, or will as soon as they have its plan."""
    fetch_id: int | None = None
    """Set while the target's workers may write to the copies."""
    has_lease: bool = True
    """Whether the source is there, and keeps the entries."""
    is_withdrawn: bool = False
    """Whether a sequence has failed since that may have computed them."""

    @property
    def size(self) -> int:
        """Memory that the copies take."""
        return sum(entry.size for entry in self.entries)


class Transfers:
    """All transfers of a core."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._open: dict[Transfer, None] = {}
        self._arrived: dict[Transfer, None] = {}
        """Those whose copies are kept for requests that are not admitted yet."""

    # Beginning.

    def consider(
        self, model: ServedModel, placed: Mapping[SequenceGroup, Scheduler], now_us: int
    ) -> None:
        """Begin transfers for requests that were handed over to worker groups, where they pay; the
        sources are woken."""
        if len(model.schedulers) < 2:
            return
        for seq_group, target in placed.items():
            if seq_group in target.seq_groups and not seq_group.is_suspect:
                self._consider(model, seq_group, target, now_us)
                model.woken |= self._fetch_next(target, now_us)
        model.woken.update(
            transfer.source.capacity.worker_group_id
            for transfer in self._open
            if transfer.source.port.has_news
        )

    def _consider(
        self, model: ServedModel, seq_group: SequenceGroup, target: Scheduler, now_us: int
    ) -> None:
        sources = [
            other
            for other in model.schedulers
            if other is not target and other.capacity.stores_like(target.capacity)
        ]
        found = [self._find(seq_group.waiting(), source, target) for source in sources]
        (num_tokens, entries), source = max(
            zip(found, sources, strict=True),
            key=lambda candidate: candidate[0][0],
            default=((0, []), target),
        )
        arriving = self._arriving(target)
        missing = []
        for entry in entries:
            transfer = arriving.get((entry.contents.group, entry.contents.key))
            if transfer is None:
                missing.append(entry)
            else:
                self._wait_for(transfer, seq_group, now_us)
        transfer = self._begin(num_tokens, missing, source, target, now_us)
        if transfer is not None:
            self._wait_for(transfer, seq_group, now_us)

    def _arriving(self, target: Scheduler) -> dict[tuple[int, bytes], Transfer]:
        """Transfers to a worker group by what they copy: cache group and key."""
        return {
            (entry.contents.group, entry.contents.key): transfer
            for transfer in self._open
            if transfer.target is target
            for entry in transfer.entries
        }

    def copy_ahead(self, model: ServedModel, source: Scheduler, now_us: int) -> None:
        """Copy what is computed of long prompts to the worker groups that will continue them, while
        the rest is computed, so that little is missing there when the requests are handed over."""
        partners = [s for s in model.schedulers if s.is_partner_of(source)]
        prefilling = source.prefilling_seq_groups() if partners else ()
        for seq_group in [g for g in source.seq_groups if g in prefilling]:  # in a certain order
            if seq_group.stays_where_it_began:
                continue
            sequences = seq_group.running()[:1]
            target = next((t.target for t in self._open if t.ahead_of is seq_group), None)
            if target not in partners:
                hits = {s: s.cache.prefixes.match(sequences[0]).num_tokens for s in partners}
                target = max(partners, key=lambda s: (hits[s], -s.probe.num_sequences))
            num_tokens, entries = self._find(sequences, source, target)
            arriving = self._arriving(target)
            missing = [e for e in entries if (e.contents.group, e.contents.key) not in arriving]
            transfer = self._begin(num_tokens, missing, source, target, now_us)
            if transfer is not None:
                transfer.ahead_of = seq_group
                model.woken |= self._fetch_next(target, now_us)

    def _find(
        self, sequences: Iterable[Sequence], source: Scheduler, target: Scheduler
    ) -> tuple[int, list[CachedEntry]]:
        """What a source has more of a request than the target: tokens, and the missing entries."""
        num_tokens, entries = 0, []
        sequences = [*sequences]
        fresh = [seq for seq in sequences if not seq.output_token_ids][:1]
        continued = [seq for seq in sequences if seq.output_token_ids]
        listed: set[tuple[int, bytes]] = set()
        for seq in fresh + continued:
            num_found, of_seq = source.cache.exchange.find(seq)
            here = target.cache.prefixes.match(seq, is_fetched=lambda num_moves, more: True)
            if num_found <= here.num_tokens:
                continue
            num_tokens += num_found - here.num_tokens
            for entry in target.cache.exchange.without_found(of_seq):
                key = (entry.contents.group, entry.contents.key)
                if key not in listed:
                    listed.add(key)
                    entries.append(entry)
        return num_tokens, entries

    def _begin(
        self,
        num_tokens: int,
        entries: list[CachedEntry],
        source: Scheduler,
        target: Scheduler,
        now_us: int,
    ) -> Transfer | None:
        """Begin to copy entries, without which `num_tokens` tokens would be computed; None if that
        does not pay, or memory is short at either end."""
        if not entries or not self.pays(num_tokens, len(entries), source, target):
            return None
        there, here = source.cache.exchange, target.cache.exchange
        if not there.can_lease(entries) or not here.can_receive(entries):
            return None
        lease = source.port.lease(entries, self._token(source), LEASE_MS)
        transfer = Transfer(source, target, entries, lease, now_us, is_granted=source.is_at_rest)
        self._open[transfer] = None
        return transfer

    def pays(self, num_tokens: int, num_entries: int, source: Scheduler, target: Scheduler) -> bool:
        """Whether it is faster to copy entries than to compute tokens, or copies are always
        made."""
        if self._config.move_kv is MoveKV.ALWAYS:
            return True
        measured = (s.rates.us_per_prompt_token() for s in (target, source))
        token_us = next((us for us in measured if us is not None), None)
        if token_us is None:
            return num_tokens >= MIN_TOKENS_UNMEASURED
        busy = [s for s in (source, target) if len(s.pipeline)]
        steps_us = sum(s.rates.us_per_decode_step or 0.0 for s in busy)
        return steps_us + target.rates.copy_us(num_entries) < num_tokens * token_us

    def _token(self, source: Scheduler) -> bytes:
        """What a reader of the next lease presents: unguessable without the core's key."""
        capacity = source.capacity
        key = self._config.lease_seed.to_bytes(8, "little")
        name = f"{capacity.worker_group_id} {capacity.epoch} {source.port.num_leases + 1}"
        return blake2b(name.encode(), key=key, digest_size=_TOKEN_BYTES).digest()

    def _wait_for(self, transfer: Transfer, seq_group: SequenceGroup, now_us: int) -> None:
        transfer.waiting[seq_group] = None
        transfer.target.await_kv(seq_group, now_us)

    # What results say.

    def receive(
        self, scheduler: Scheduler, step_id: int, results: Iterable[FetchResult], now_us: int
    ) -> set[str]:
        """Continue transfers after a result of a worker group; returns the ids of those that have
        something to plan now."""
        woken: set[str] = set()
        for lease_id in scheduler.port.granted(step_id):
            for transfer in [t for t in self._of(scheduler) if t.lease.lease_id == lease_id]:
                transfer.is_granted = True
                woken |= self._fetch_next(transfer.target, now_us)
        for fetch_id, reports in scheduler.port.ended([*results]):
            for transfer in [*self._open]:
                if transfer.target is scheduler and transfer.fetch_id == fetch_id:
                    woken |= self._end(transfer, reports, now_us)
            woken |= self._fetch_next(scheduler, now_us)
        return woken

    def _of(self, source: Scheduler) -> Iterator[Transfer]:
        return (transfer for transfer in self._open if transfer.source is source)

    def _fetch_next(self, target: Scheduler, now_us: int) -> set[str]:
        """Begin fetches of leases that were granted, the first first, up to `MAX_FETCHES`."""
        woken: set[str] = set()
        for transfer in [*self._open]:
            if len(target.port.open_fetches) >= MAX_FETCHES:
                break
            if transfer.target is target and transfer.is_granted and transfer.fetch_id is None:
                woken |= self._fetch(transfer, now_us)
        return woken

    def _fetch(self, transfer: Transfer, now_us: int) -> set[str]:
        """Copy what was leased, if it is still wanted."""
        source, target = transfer.source, transfer.target
        self._drop_gone(transfer)
        is_wanted = transfer.waiting or transfer.ahead_of in source.seq_groups
        has_room = target.cache.exchange.can_receive(transfer.entries)
        if transfer.is_withdrawn or not is_wanted or not has_room:
            return self._close(transfer, now_us)
        transfer.fetch_id, transfer.copies = target.port.fetch(
            transfer.lease, source.capacity, transfer.entries, FETCH_MS
        )
        return {target.capacity.worker_group_id}

    def _end(self, transfer: Transfer, reports: list[FetchResult], now_us: int) -> set[str]:
        """Let the copies be found if all have arrived on all ranks."""
        source, target = transfer.source, transfer.target
        failed = [report for report in reports if report.failure]
        transfer.fetch_id = None
        if failed or transfer.is_withdrawn:
            target.port.release_copies(transfer.copies)
            transfer.copies = []
        if failed:
            target.totals.num_failed_fetches[failed[0].failure] += 1
            logger.warning(
                "KV did not arrive, and is computed again group_id=%s source=%s reason=%s "
                "num_entries=%d message=%s",
                target.capacity.worker_group_id,
                source.capacity.worker_group_id,
                failed[0].failure,
                len(transfer.entries),
                failed[0].message,
            )
        elif not transfer.is_withdrawn:
            target.port.add_copies(transfer.copies)
            target.totals.add_fetch(transfer.size, reports)
            duration_us = max(report.duration_us for report in reports)
            target.rates.observe_fetch(len(transfer.entries), duration_us)
            self._arrived[transfer] = None
            logger.debug(
                "KV has arrived group_id=%s source=%s num_entries=%d duration_us=%d since_us=%d",
                target.capacity.worker_group_id,
                source.capacity.worker_group_id,
                len(transfer.entries),
                duration_us,
                now_us - transfer.since_us,
            )
        return self._close(transfer, now_us)

    def _close(self, transfer: Transfer, now_us: int) -> set[str]:
        """End a transfer's lease, and let its requests be admitted; copies are kept for them."""
        source, target = transfer.source, transfer.target
        del self._open[transfer]
        woken = {target.capacity.worker_group_id}
        if transfer.has_lease:
            source.port.end_lease(transfer.lease.lease_id)
            woken.add(source.capacity.worker_group_id)
        others = {g for t in self._open if t.target is target for g in t.waiting}
        for seq_group in transfer.waiting.keys() - others:
            target.end_kv_wait(seq_group, now_us)
        return woken

    # Ends.

    def withdraw(self, model: ServedModel, here: Scheduler, seq: Sequence) -> None:
        """Let nobody find in other worker groups what a sequence has computed that has failed in
        one, nor what may have come from there. A core that dies before the next plans of the others
        has not withdrawn their records: a request that finds these fails like the sequence did, and
        then they are withdrawn."""
        keys: set[bytes] = set()
        for other in model.schedulers:
            if other is not here and other.capacity.stores_like(here.capacity):
                keys |= other.cache.prefixes.withdraw(seq)
        for transfer in self._open:
            transfer.is_withdrawn |= any(entry.contents.has_any(keys) for entry in transfer.entries)

    def _drop_gone(self, transfer: Transfer) -> None:
        """Forget the requests that have ended, run, or left the worker group."""
        here = transfer.target.seq_groups
        transfer.waiting = {g: None for g in transfer.waiting if g in here and g.waiting()}

    def settle(self, scheduler: Scheduler, *, is_idle: bool) -> bool:
        """Give up what is kept for requests that have been admitted or are gone; `is_idle`: for
        all, because nothing runs and nothing was admitted. Returns whether there was any."""
        given_up = []
        for transfer in [t for t in self._arrived if t.target is scheduler]:
            self._drop_gone(transfer)
            if not transfer.waiting or is_idle:
                scheduler.port.release_copies(transfer.copies)
                given_up.append(transfer)
                del self._arrived[transfer]
        return bool(given_up)

    def remove(self, scheduler: Scheduler, now_us: int) -> set[str]:
        """End the transfers of a worker group that is gone; returns the ids of others that have
        something to plan now. Fetches from it that are open will fail."""
        woken: set[str] = set()
        self._arrived = {t: None for t in self._arrived if t.target is not scheduler}
        for transfer in [*self._open]:
            transfer.has_lease &= transfer.source is not scheduler
            if transfer.target is scheduler or (
                not transfer.has_lease and transfer.fetch_id is None
            ):
                woken |= self._close(transfer, now_us)
        return woken - {scheduler.capacity.worker_group_id}

    def is_source(self, model: ServedModel, scheduler: Scheduler) -> bool:
        """Whether others read from a worker group, or will: requests that have left it wait, and it
        has what they have computed."""
        group_id = scheduler.capacity.worker_group_id
        return scheduler.port.is_in_use or any(
            seq_group.placement.previous_id == group_id for seq_group in model.waiting
        )

    def check(self) -> None:
        """Assert the invariants."""
        for transfer in self._open:
            target = transfer.target
            assert (transfer.fetch_id is None) == (not transfer.copies)
            assert transfer.fetch_id is None or transfer.fetch_id in target.port.open_fetches
            # A request that has left the target and come back may be in `waiting`, and not wait.
