"""Slots of a worker group for adapters: how many its requests may use together.

A slot is held for all requests with one adapter that are placed in the group, whether they run,
wait or are swapped out. So the sequences that the workers know have at most `max_loras` adapters at
a time, and the workers never exchange the weights of an adapter that a running sequence needs.

Workers keep the adapters that were used last. `is_resident` predicts which these are.
"""

from collections import Counter
from collections.abc import Iterable


class AdapterSlots:
    """The adapters of the requests in one worker group, by digest."""

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._num_requests: Counter[bytes] = Counter()
        """Requests in the group by adapter, for adapters that have any."""
        self._resident: dict[bytes, None] = {}
        """The adapters that were used last, at most one for each slot, in order of use."""

    def has_room_for(self, adapter: bytes, before: Iterable[bytes] = ()) -> bool:
        """Whether a request with this adapter may enter. `before`: those of requests that enter
        first."""
        used = self._num_requests.keys() | set(before)
        return adapter in used or len(used) < self._num_slots

    def is_resident(self, adapter: bytes) -> bool:
        """Whether the workers most likely have the adapter on their devices."""
        return adapter in self._resident

    def usage(self) -> dict[bytes, int]:
        """Requests in the group by adapter, of those that workers most likely have on their
        devices."""
        return {adapter: self._num_requests[adapter] for adapter in self._resident}

    def add(self, adapter: bytes) -> None:
        """Count a request that enters; there is room for it."""
        assert self.has_room_for(adapter)
        self._num_requests[adapter] += 1
        self._resident.pop(adapter, None)
        self._resident[adapter] = None
        if len(self._resident) > self._num_slots:
            del self._resident[next(a for a in self._resident if a not in self._num_requests)]

    def remove(self, adapter: bytes) -> None:
        """Stop counting a request that leaves."""
        self._num_requests[adapter] -= 1
        if not self._num_requests[adapter]:
            del self._num_requests[adapter]

    def check(self, adapters: Counter[bytes]) -> None:
        """Assert the invariants; `adapters` are those of all requests in the group."""
        assert self._num_requests == adapters
        assert len(adapters) <= self._num_slots
        assert adapters.keys() <= self._resident.keys()
        assert len(self._resident) <= self._num_slots
