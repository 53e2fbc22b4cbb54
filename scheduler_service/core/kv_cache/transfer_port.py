"""What one worker group's plans say of blocks that other worker groups read, or that it reads."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from scheduler_service.core.config import WorkerGroupCapacity
from scheduler_service.core.kv_cache.exchange import CachedEntry, CacheExchange
from scheduler_service.core.step_plan import BlockFetch, BlockLease, FetchResult, StepPlan

Lease: TypeAlias = BlockLease
"""What a worker group lets others read, as its plan names it."""


@dataclass(slots=True, eq=False)
class TransferPort:
    """Leases of blocks, and fetches into blocks, of one worker group.

    A lease is granted once the result of the plan that began it is in: the workers serve it.
    A fetch is open until all ranks have reported its end: until then they may write its blocks.
    """

    exchange: CacheExchange
    world_size: int
    num_leases: int = 0
    """Leases so far, which number them."""
    num_fetches: int = 0
    num_changes: int = 0
    """Increases with every call that may change what is free or found in the cache."""
    leased: dict[int, list[CachedEntry]] = field(default_factory=dict)
    """By lease that is not ended."""
    open_fetches: dict[int, list[FetchResult]] = field(default_factory=dict)
    """By fetch: the reports of ranks so far."""
    _new_leases: list[BlockLease] = field(default_factory=list)
    _ended: list[int] = field(default_factory=list)
    _new_fetches: list[BlockFetch] = field(default_factory=list)
    _awaited: dict[int, list[int]] = field(default_factory=dict)
    """By plan in flight: the leases that it begins."""

    def lease(self, entries: list[CachedEntry], token: bytes, timeout_ms: int) -> BlockLease:
        """Let others read entries from the next plan on."""
        self.num_changes += 1
        self.num_leases += 1
        self.exchange.lease(entries)
        self.leased[self.num_leases] = entries
        lease = BlockLease(
            lease_id=self.num_leases,
            token=token,
            block_ids=[block for entry in entries for block in entry.blocks],
            keys=b"".join(entry.keys for entry in entries),
            timeout_ms=timeout_ms,
        )
        self._new_leases.append(lease)
        return lease

    def end_lease(self, lease_id: int) -> None:
        """Let others no longer read from the next plan on; its blocks are free in that plan."""
        self.num_changes += 1
        if any(lease.lease_id == lease_id for lease in self._new_leases):  # no plan has begun it
            self._new_leases = [one for one in self._new_leases if one.lease_id != lease_id]
            self.exchange.release(self.leased.pop(lease_id))
        else:
            self._ended.append(lease_id)

    def fetch(
        self,
        lease: BlockLease,
        source: WorkerGroupCapacity,
        entries: list[CachedEntry],
        timeout_ms: int,
    ) -> tuple[int, list[CachedEntry]]:
        """Copy the entries that another worker group has leased, from the next plan on; returns the
        number of the fetch, and the copies, for which there must be room."""
        self.num_changes += 1
        copies = self.exchange.allocate(entries)
        self.num_fetches += 1
        self.open_fetches[self.num_fetches] = []
        targets = [block for copy in copies for block in copy.blocks]
        pairs = zip(lease.block_ids, targets, strict=True)
        fetch = BlockFetch(
            fetch_id=self.num_fetches,
            addresses=[*source.addresses],
            source_epoch=source.epoch,
            lease_id=lease.lease_id,
            token=lease.token,
            blocks=[block for pair in pairs for block in pair],
            keys=lease.keys,
            timeout_ms=timeout_ms,
        )
        self._new_fetches.append(fetch)
        return fetch.fetch_id, copies

    def add_copies(self, copies: list[CachedEntry]) -> None:
        """Let what has arrived be found."""
        self.num_changes += 1
        self.exchange.add(copies)

    def release_copies(self, copies: list[CachedEntry]) -> None:
        """Give up the memory of copies, to which nothing writes any more."""
        self.num_changes += 1
        self.exchange.release(copies)

    @property
    def is_in_use(self) -> bool:
        """Whether the workers still have something to do for others, or to be instructed of."""
        return bool(self.leased or self._ended)

    @property
    def begins_leases(self) -> bool:
        """Whether the next plan begins any."""
        return bool(self._new_leases)

    @property
    def has_news(self) -> bool:
        """Whether the next plan has anything to say."""
        return bool(self._new_leases or self._ended or self._new_fetches)

    def begin_plan(self) -> None:
        """Give up the blocks of leases that the plan under construction ends."""
        for lease_id in self._ended:
            if lease_id in self.leased:
                self.exchange.release(self.leased.pop(lease_id))

    def end_plan(self, plan: StepPlan) -> None:
        """Complete a plan."""
        plan.leases, self._new_leases = self._new_leases, []
        plan.ended_lease_ids, self._ended = self._ended, []
        plan.fetches, self._new_fetches = self._new_fetches, []
        if plan.leases:
            self._awaited[plan.step_id] = [lease.lease_id for lease in plan.leases]

    def granted(self, step_id: int) -> list[int]:
        """The leases that the workers serve now: the result of this plan is in."""
        return self._awaited.pop(step_id, [])

    def ended(self, results: Sequence[FetchResult]) -> list[tuple[int, list[FetchResult]]]:
        """The fetches that have ended on all ranks with these reports, and all reports of each."""
        ended = []
        for result in results:
            if (reports := self.open_fetches.get(result.fetch_id)) is None:
                continue  # of no fetch that is open: nothing depends on it
            reports.append(result)
            if len(reports) == self.world_size:
                ended.append((result.fetch_id, self.open_fetches.pop(result.fetch_id)))
        return ended
