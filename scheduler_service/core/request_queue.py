"""The queues in which requests wait.

`ModelQueue` holds the requests for one model that are in no worker group, in the order of the
scheduling policy. `WaitingQueue` holds requests by rank: one of the per-key queues of a model, or
those that were routed to a worker group and are not yet in its batch.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
from heapq import heapify, heappop, heappush
from itertools import chain
from typing import Any, Generic, TypeAlias, TypeVar

from scheduler_service.core.policies import Policy
from scheduler_service.core.sequence import SequenceGroup
from scheduler_service.core.tenants import TenantUsage

Item = TypeVar("Item", bound=Hashable)
_ITEM = 2


class RemovableHeap(Generic[Item]):
    """Items by key, the lowest first; among equal keys the first to come.

    A removed item leaves a dead entry behind, which is dropped when it reaches the top, or when
    there are more dead entries than live ones: so memory is bounded by the live items.
    """

    def __init__(self) -> None:
        self._entries: list[list[Any]] = []  # [key, count, item or None]
        self._by_item: dict[Item, list[Any]] = {}
        self._num_pushed = 0

    def __len__(self) -> int:
        return len(self._by_item)

    def __contains__(self, item: Item) -> bool:
        return item in self._by_item

    def __iter__(self) -> Iterator[Item]:
        """The items, in no particular order."""
        return iter(self._by_item)

    def push(self, key: Any, item: Item) -> None:
        """Add an item that is not in the heap."""
        assert item not in self._by_item
        self._num_pushed += 1
        entry = [key, self._num_pushed, item]
        self._by_item[item] = entry
        heappush(self._entries, entry)

    def peek(self) -> tuple[Any, Item] | None:
        """The lowest key and its item; None if there is none."""
        entries = self._entries
        while entries and entries[0][_ITEM] is None:
            heappop(entries)
        return (entries[0][0], entries[0][_ITEM]) if entries else None

    def remove(self, item: Item) -> None:
        """Remove an item that is in the heap."""
        self._by_item.pop(item)[_ITEM] = None
        if len(self._entries) > 2 * len(self._by_item) + 64:
            self._entries = [entry for entry in self._entries if entry[_ITEM] is not None]
            heapify(self._entries)


class WaitingQueue:
    """Groups by rank, or in the order in which they were added, with the sums that admission and
    routing use."""

    def __init__(self, *, is_fifo: bool = False) -> None:
        self._is_fifo = is_fifo
        self._heap: RemovableHeap[SequenceGroup] = RemovableHeap()
        self._skipped: dict[SequenceGroup, None] = {}
        self._sizes: dict[SequenceGroup, tuple[int, int]] = {}
        self.num_source_tokens = 0
        """Tokens of the sources of all groups."""
        self.num_tokens = 0
        """Prompt tokens of all groups."""
        self.num_sequences = 0
        """Sequences that were waiting when their groups were added."""

    def __len__(self) -> int:
        return len(self._sizes)

    def __contains__(self, seq_group: SequenceGroup) -> bool:
        return seq_group in self._sizes

    def __iter__(self) -> Iterator[SequenceGroup]:
        """The groups, in no particular order."""
        return iter(self._sizes)

    def head(self) -> SequenceGroup | None:
        """The group to be served first, except those skipped; None if there is none."""
        top = self._heap.peek()
        return top[1] if top is not None else None

    def first(self) -> SequenceGroup:
        """The head of a queue that has one."""
        head = self.head()
        assert head is not None
        return head

    def add(self, seq_group: SequenceGroup) -> None:
        """Queue a group at its rank; no effect if it is queued already."""
        if seq_group in self:
            return
        self._heap.push(self._key(seq_group), seq_group)
        size = self._sizes[seq_group] = (seq_group.num_prompt_tokens, len(seq_group.waiting()))
        seq_group.tenant.num_queued_tokens += size[0]
        self.num_tokens += size[0]
        self.num_source_tokens += seq_group.num_source_tokens
        self.num_sequences += size[1]

    def discard(self, seq_group: SequenceGroup) -> None:
        """Take a group out, if it is in."""
        if seq_group not in self:
            return
        if seq_group in self._skipped:
            del self._skipped[seq_group]
        else:
            self._heap.remove(seq_group)
        num_tokens, num_sequences = self._sizes.pop(seq_group)
        seq_group.tenant.num_queued_tokens -= num_tokens
        self.num_tokens -= num_tokens
        self.num_source_tokens -= seq_group.num_source_tokens
        self.num_sequences -= num_sequences

    def skip(self, head: SequenceGroup) -> None:
        """Skip the head until `end_round`."""
        self._heap.remove(head)
        self._skipped[head] = None

    def end_round(self) -> None:
        """Return skipped groups to their places."""
        skipped, self._skipped = self._skipped, {}
        for seq_group in skipped:
            self._heap.push(self._key(seq_group), seq_group)

    def _key(self, seq_group: SequenceGroup) -> tuple[int, ...]:
        return () if self._is_fifo else seq_group.rank

    def pop_all(self) -> list[SequenceGroup]:
        """Empty the queue; its groups in no particular order."""
        seq_groups = list(self)
        for seq_group in seq_groups:
            self.discard(seq_group)
        return seq_groups


Kind = TypeVar("Kind", bound=Hashable)
"""The key of requests that may be placed on the same worker groups."""


_Key: TypeAlias = tuple[str | None, Kind, bytes | None]


class ModelQueue(Generic[Kind]):
    """Waiting groups in the policy's order, with the sums that admission uses.

    Each of the policy's queues is split by the kind and the adapter of its requests, so that all
    requests of those that no worker group has room for are skipped at once. Among queues with equal
    policy keys, the one whose head has the lowest rank is first.

    A queue's position in the heap may be out of date, because its tenant was served; since its
    key can only have grown, it is enough to update the queue at the top of the heap.
    """

    def __init__(self, policy: Policy, kind_of: Callable[[SequenceGroup], Kind]) -> None:
        """`kind_of` is called for a group when it is added, and by `reorder`."""
        self._policy = policy
        self._kind_of = kind_of
        self._queues: dict[_Key[Kind], WaitingQueue] = {}
        """The per-key queues, by the policy's key for the tenant, the kind and the adapter."""
        self._key_of: dict[SequenceGroup, _Key[Kind]] = {}
        self._order: RemovableHeap[WaitingQueue] = RemovableHeap()
        self._num_queues: Counter[str | None] = Counter()
        """Number of per-key queues that each of the policy's queues is split into."""
        self._tenant_limited: dict[WaitingQueue, tuple[SequenceGroup, int]] = {}
        """Skipped queues, with their heads and what their tenants held of their limits."""
        self._limited_of: dict[TenantUsage, set[WaitingQueue]] = {}
        """These queues by the tenants of the heads."""
        self._skipped: dict[WaitingQueue, None] = {}
        """Queues that are skipped, as a whole or in part, until the end of the round."""
        self._num_of_kind: Counter[Kind] = Counter()
        """Number of queues of each kind."""
        self.num_tokens = 0
        """Prompt tokens of all groups."""

    def __len__(self) -> int:
        return len(self._key_of)

    def __contains__(self, seq_group: SequenceGroup) -> bool:
        return seq_group in self._key_of

    def __iter__(self) -> Iterator[SequenceGroup]:
        """The groups, in no particular order."""
        return chain.from_iterable(self._queues.values())

    @property
    def kinds(self) -> Iterable[Kind]:
        """The kinds of all groups."""
        return self._num_of_kind

    @property
    def has_tenant_limited(self) -> bool:
        """Whether any queue is skipped because of its tenant's limit."""
        return bool(self._tenant_limited)

    def head(self) -> SequenceGroup | None:
        """The group to be served first; None if all are skipped."""
        while (top := self._order.peek()) is not None:
            key, queue = top
            head = queue.first()
            if key == self._place(head):
                return head
            self._order.remove(queue)
            self._order.push(self._place(head), queue)
        return None

    def add(self, seq_group: SequenceGroup) -> None:
        """Queue a group by its key; no effect if it is queued already."""
        if seq_group in self:
            return
        if not self._num_queues[self._policy.queue_name(seq_group.tenant)]:
            self._policy.open_queue(seq_group.tenant, self.head())
        queue = self._queue_for(seq_group)
        queue.add(seq_group)
        self.num_tokens += seq_group.num_prompt_tokens
        if queue.head() is seq_group and queue not in self._tenant_limited:
            self._put_in_order(queue)

    def discard(self, seq_group: SequenceGroup) -> None:
        """Take a group out, if it is in."""
        key = self._key_of.pop(seq_group, None)
        if key is None:
            return
        queue = self._queues[key]
        queue.discard(seq_group)
        self.num_tokens -= seq_group.num_prompt_tokens
        if queue.head() is None and queue in self._order:
            self._order.remove(queue)
        if not queue:
            del self._queues[key]
            self._end_limit(queue)
            self._skipped.pop(queue, None)
            self._num_of_kind[key[1]] -= 1
            if not self._num_of_kind[key[1]]:
                del self._num_of_kind[key[1]]
            self._num_queues[key[0]] -= 1
            if not self._num_queues[key[0]]:
                del self._num_queues[key[0]]
                self._policy.close_queue(seq_group.tenant)

    def kind_of(self, seq_group: SequenceGroup) -> Kind:
        """The kind of a group in the queue."""
        return self._key_of[seq_group][1]

    def skip_tenant_limited(self, head: SequenceGroup) -> None:
        """Skip a queue because its head would exceed the KV memory that its tenant may hold, or
        would take it from another one."""
        queue = self._queues[self._key_of[head]]
        self._order.remove(queue)
        self._tenant_limited[queue] = head, head.tenant.kv_quota
        self._limited_of.setdefault(head.tenant, set()).add(queue)

    def is_behind_tenant_limited(self, seq_group: SequenceGroup) -> bool:
        """Whether a group of the same tenant that ranks before this one waits for the tenant's
        limit, in another queue: what comes free of the limit is for that one."""
        queues = self._limited_of.get(seq_group.tenant, ())
        return any(self._tenant_limited[queue][0].rank < seq_group.rank for queue in queues)

    def retry_tenant_limited(self) -> None:
        """Stop skipping queues that have another head now, or whose tenants hold less memory. The
        others stay skipped: there may be many, and this runs in every step."""
        self._retry(
            queue
            for queue, (head, kv_quota) in self._tenant_limited.items()
            if queue.first() is not head or head.tenant.kv_quota < kv_quota
        )

    def skip_queue(self, head: SequenceGroup) -> None:
        """Skip the whole queue until `end_round`: no worker group has room for its kind."""
        queue = self._queues[self._key_of[head]]
        self._order.remove(queue)
        self._skipped[queue] = None

    def skip(self, head: SequenceGroup) -> None:
        """Skip this request only, until `end_round`."""
        queue = self._queues[self._key_of[head]]
        queue.skip(head)
        self._skipped[queue] = None
        self._order.remove(queue)
        if queue.head() is not None:
            self._put_in_order(queue)

    def end_round(self) -> None:
        """Stop skipping queues and requests, except those of tenants at their limits."""
        skipped, self._skipped = self._skipped, {}
        for queue in skipped:
            queue.end_round()
            if queue not in self._tenant_limited:
                self._put_in_order(queue)

    def reorder(self) -> None:
        """Assign all requests to per-key queues again, because the worker groups have changed."""
        self._retry(self._tenant_limited)
        self.end_round()
        seq_groups = [seq_group for queue in self._queues.values() for seq_group in queue.pop_all()]
        self._queues, self._order = {}, RemovableHeap()
        self._num_queues.clear()
        self._num_of_kind.clear()
        for seq_group in seq_groups:
            self._queue_for(seq_group).add(seq_group)
        for queue in self._queues.values():
            self._put_in_order(queue)

    def num_tokens_before(self, seq_group: SequenceGroup) -> int:
        """Lower bound of the prompt tokens that are served before a group: those before it in its
        per-key queue, in which it need not be itself. Linear in that queue."""
        key = self._key(seq_group)
        queue = self._queues.get(key, ())
        return sum(other.num_prompt_tokens for other in queue if other.rank < seq_group.rank)

    def check(self) -> None:
        """Assert the invariants."""
        seq_groups = list(self)
        assert set(self._key_of) == set(seq_groups)
        assert len(self) == len(seq_groups)
        assert self.num_tokens == sum(seq_group.num_prompt_tokens for seq_group in seq_groups)
        assert Counter(name for name, _, _ in self._queues) == self._num_queues
        assert Counter(kind for _, kind, _ in self._queues) == self._num_of_kind
        assert not self._skipped
        assert {*self._order, *self._tenant_limited} == set(self._queues.values())
        assert all(self._queues.values()), "no per-key queue is empty"
        of_tenants = [(head.tenant, queue) for queue, (head, _) in self._tenant_limited.items()]
        indexed = [(tenant, queue) for tenant, same in self._limited_of.items() for queue in same]
        assert Counter(indexed) == Counter(of_tenants)

    def _place(self, head: SequenceGroup) -> tuple[Any, tuple[int, ...]]:
        return self._policy.key(head), head.rank

    def _retry(self, tenant_limited: Iterable[WaitingQueue]) -> None:
        queues = list(tenant_limited)
        first = self.head() if queues else None
        for queue in queues:
            self._end_limit(queue)
            self._policy.open_queue(queue.first().tenant, first)
            self._put_in_order(queue)

    def _end_limit(self, queue: WaitingQueue) -> None:
        """Forget that a queue is skipped because of its tenant's limit, if it is."""
        if queue in self._tenant_limited:
            head, _ = self._tenant_limited.pop(queue)
            self._limited_of[head.tenant].discard(queue)
            if not self._limited_of[head.tenant]:
                del self._limited_of[head.tenant]

    def _put_in_order(self, queue: WaitingQueue) -> None:
        if queue in self._order:
            self._order.remove(queue)
        self._order.push(self._place(queue.first()), queue)

    def _key(self, seq_group: SequenceGroup) -> _Key[Kind]:
        name = self._policy.queue_name(seq_group.tenant)
        return name, self._kind_of(seq_group), seq_group.adapter

    def _queue_for(self, seq_group: SequenceGroup) -> WaitingQueue:
        """The per-key queue of a new group, created if it is the first."""
        key = self._key(seq_group)
        self._key_of[seq_group] = key
        queue = self._queues.get(key)
        if queue is None:
            queue = self._queues[key] = WaitingQueue()
            self._num_queues[key[0]] += 1
            self._num_of_kind[key[1]] += 1
        return queue


AnyQueue: TypeAlias = ModelQueue[Any] | WaitingQueue
"""A queue of waiting requests."""
