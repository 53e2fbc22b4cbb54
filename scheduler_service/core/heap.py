"""A priority queue whose items can leave from the middle."""

from collections.abc import Hashable, Iterator
from heapq import heapify, heappop, heappush
from typing import Any, Generic, TypeVar

Item = TypeVar("Item", bound=Hashable)
_ITEM = 2


class RemovableHeap(Generic[Item]):
    """Items by key, the lowest first; among equal keys the first to come.

    A removed item leaves a dead entry behind, which goes when it comes to the top, or when there
    are more dead entries than live ones: so memory is bounded by the live items.
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
        """Take out an item that is in the heap."""
        self._by_item.pop(item)[_ITEM] = None
        if len(self._entries) > 2 * len(self._by_item) + 64:
            self._entries = [entry for entry in self._entries if entry[_ITEM] is not None]
            heapify(self._entries)
