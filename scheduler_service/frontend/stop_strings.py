"""Stop strings in a text that comes in pieces.

Where a text stops is a function of the text alone, however it is cut into pieces: at the first
position where any stop string is complete; of several that end there, the longest. Text that may
turn out to be the start of a stop string is held back.

The automaton is Aho and Corasick's (1975): one step per character, whatever the number and length
of the stop strings. A node's depth is the length of the longest suffix of the text that begins a
stop string, hence just what must be held back.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(slots=True)
class _Node:
    depth: int
    children: "dict[str, _Node]" = field(default_factory=dict)
    fallback: "_Node | None" = None
    """The node of the longest proper suffix that begins a stop string; None at the root."""
    match: str | None = None
    """The longest stop string that ends here."""


class StopStrings:
    """The stop strings of one request; shared by its choices."""

    def __init__(self, strings: Iterable[str]) -> None:
        self.root = _Node(0)
        for string in strings:
            node = self.root
            for char in string:
                node = node.children.setdefault(char, _Node(node.depth + 1))
            node.match = string
        self._link()

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self.root.children)

    def _link(self) -> None:
        """Set fallbacks breadth first, so that a node's is done before its children's."""
        queue = deque([self.root])
        while queue:
            node = queue.popleft()
            for char, child in node.children.items():
                child.fallback = self.step(node.fallback, char) if node.fallback else self.root
                child.match = child.match or child.fallback.match
                queue.append(child)

    def step(self, node: _Node, char: str) -> _Node:
        """The node after one more character."""
        at: _Node | None = node
        while at is not None:
            child = at.children.get(char)
            if child is not None:
                return child
            at = at.fallback
        return self.root


class StopMatcher:
    """Watches one text for the stop strings."""

    def __init__(self, strings: StopStrings, *, include_stop: bool) -> None:
        self._strings = strings
        self._include_stop = include_stop
        self._node = strings.root
        self._held = ""
        self.matched: str | None = None
        """The stop string that ended the text."""

    def push(self, text: str, *, may_stop: bool = True) -> str:
        """Text that may be shown with one more piece; nothing may follow a match.

        With `may_stop` false a stop string that is complete within this piece is passed over.
        """
        if not text or not self._strings:
            return text
        held = self._held + text
        for position, char in enumerate(text, start=len(self._held) + 1):
            self._node = self._strings.step(self._node, char)
            if may_stop and self._node.match is not None:
                return self._stop(held[:position], self._node.match)
        shown = len(held) - self._node.depth
        self._held = held[shown:]
        return held[:shown]

    def flush(self) -> str:
        """What was held back, when the text ends without a stop string."""
        held, self._held = self._held, ""
        return held

    def _stop(self, text: str, match: str) -> str:
        self.matched = match
        self._held = ""
        return text if self._include_stop else text[: -len(match)]
