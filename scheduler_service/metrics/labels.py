"""Label values that come from outside, of which there must never be more than a few."""

OTHER = "other"
"""Stands for all values that came after the label was full."""


class BoundedLabel:
    """Lets the first `max_values` different values pass, and calls the rest `other`.

    Each value of a label is a time series in Prometheus and memory here, for as long as the process
    lives; and whoever can call can make values up.
    """

    def __init__(self, max_values: int) -> None:
        self._max_values = max_values
        self._known: set[str] = set()

    def value(self, value: str) -> str:
        """The label for a value."""
        if value not in self._known:
            if len(self._known) >= self._max_values:
                return OTHER
            self._known.add(value)
        return value
