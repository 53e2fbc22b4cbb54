"""What a request that is in no worker group remembers of its search for one."""

from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class Wait:
    """From when it is queued until a worker group takes it."""

    awaits: str | None = None
    """Id of the worker group that keeps its room for it."""
    until_us: int | None = None
    """Until when it may wait for a worker group although another would take it."""
    refusals: dict[str, int] = field(default_factory=dict)
    """Ids of worker groups that had no room for it, and how often each had changed by then: they
    need not be looked at before they change again, or the request does."""
