"""Durations that settings may have."""

MAX_SECONDS = 10**9
"""More than thirty years. It fits into what messages and timers hold."""


def check_seconds(**durations: float | None) -> None:
    """Raise ValueError that names the first setting that is not within 0 to `MAX_SECONDS`."""
    for name, seconds in durations.items():
        if seconds is not None and not 0 <= seconds <= MAX_SECONDS:
            raise ValueError(f"{name}: expected 0 to {MAX_SECONDS} seconds, got {seconds:g}")
