"""Where a request is served: its worker group, or what the router knows of its wait for one."""

from dataclasses import dataclass, field

from scheduler_service.core.tenants import TenantUsage


@dataclass(slots=True, eq=False)
class Placement:
    """The placement of one request. The router places and releases it."""

    is_placed: bool = False
    """Whether it is in a worker group."""
    was_placed: bool = False
    """Whether it has ever been in one, or another attempt at it has."""
    is_preempting: bool = False
    """Whether it was routed there because it may preempt others to find room."""
    kv_quota: int = 0
    """What it counts against its tenant's limit on KV memory while it is in a worker group."""
    num_cache_tokens: int = 0
    """Tokens of the longest of its sequences that the cache of its worker group can hold."""
    exceeded_tokens: int = 0
    """Tokens of the largest KV cache that it did not fit: only larger ones can hold it."""
    arithmetic: str = ""
    """Arithmetic of its latest worker group; empty if unknown."""
    previous_id: str = ""
    """Id of the worker group that it was moved from, which may have what it computed."""
    avoids: str = ""
    """Id of the worker group that gave it away, where it goes only if no other one has room."""
    num_tokens_at_move: int = 0
    """Its tokens when a worker group gave it away for the last time."""
    awaits: str | None = None
    """Id of the worker group whose capacity is reserved for it."""
    until_us: int | None = None
    """End of its wait for a worker group although another one has capacity."""
    slot_wait_us: int | None = None
    """When the router first found no slot for its adapter in any worker group."""
    refusals: dict[str, int] = field(default_factory=dict)
    """Worker groups that had no room for it, by id, with their `num_changes` at that time. They are
    asked again only after that number, or the request, has changed."""

    def place(self, tenant: TenantUsage, kv_quota: int, num_cache_tokens: int) -> None:
        """End its wait: it goes to a worker group, where it may need `kv_quota`."""
        self.is_placed = self.was_placed = True
        self.kv_quota, self.num_cache_tokens = kv_quota, num_cache_tokens
        tenant.kv_quota += kv_quota
        self.awaits = self.until_us = self.slot_wait_us = None
        self.avoids = ""
        self.refusals = {}

    def release(self, tenant: TenantUsage) -> None:
        """Return what it holds of its tenant's limit, if it is in a worker group."""
        tenant.kv_quota -= self.kv_quota
        self.kv_quota = 0
        self.is_placed = self.is_preempting = False


@dataclass(slots=True, eq=False)
class WorkerLosses:
    """Workers that died while they were computing one request; `routing/poison.py` counts them."""

    num_workers: int = 0
    num_lone: int = 0
    """Those that died in steps that it had to itself, again at the same point."""
    num_repeated: int = 0
    """Those that died while it did not get past the same point."""

    def pass_point(self) -> None:
        """Record that it got past the point at which workers died."""
        self.num_repeated = self.num_lone = 0
