"""Whose requests they are: what tenants have, and what they may have."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from scheduler_service.core.config import TenantConfig
from scheduler_service.core.stats.throughput import QueueThroughput


@dataclass(slots=True, eq=False)
class TenantUsage:
    """A tenant with live requests, and their sums."""

    name: str
    config: TenantConfig
    num_requests: int = 0
    """Live ones."""
    num_queued_tokens: int = 0
    """Prompt tokens of those that wait for a place in a batch."""
    num_kv_blocks: int = 0
    """The most blocks that those in worker groups can come to need."""

    ends: QueueThroughput = field(default_factory=QueueThroughput)
    """How fast its requests end."""

    def may_hold(self, num_blocks: int) -> bool:
        """Whether it may hold `num_blocks` more."""
        limit = self.config.max_kv_blocks
        return limit is None or self.num_kv_blocks + num_blocks <= limit

    def may_ever_hold(self, num_blocks: int) -> bool:
        """Whether it may hold `num_blocks` if it holds no others."""
        limit = self.config.max_kv_blocks
        return limit is None or num_blocks <= limit


class Tenants:
    """All tenants that have live requests, by name."""

    def __init__(self, default: TenantConfig, named: Mapping[str, TenantConfig]) -> None:
        self._default = default
        self._named = named
        self._live: dict[str, TenantUsage] = {}

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, name: str) -> bool:
        return name in self._live

    def find(self, name: str) -> TenantUsage:
        """The tenant of this name; a new one if it has no live requests."""
        return self._live.get(name) or TenantUsage(name, self._named.get(name, self._default))

    def add_request(self, tenant: TenantUsage, now_us: int) -> None:
        """A request of the tenant is live."""
        self._live[tenant.name] = tenant
        tenant.num_requests += 1
        tenant.ends.note(now_us, num_requests=0, num_tokens=0, is_empty=False)

    def remove_request(self, tenant: TenantUsage, num_prompt_tokens: int, now_us: int) -> None:
        """A request of the tenant is live no more."""
        tenant.num_requests -= 1
        tenant.ends.note(
            now_us, num_requests=1, num_tokens=num_prompt_tokens, is_empty=tenant.num_requests == 0
        )
        if tenant.num_requests == 0:
            del self._live[tenant.name]

    def check(self) -> None:
        """Assert that nothing is left of what has ended."""
        for tenant in self._live.values():
            assert tenant.num_requests > 0
            assert tenant.num_queued_tokens >= 0
            assert tenant.may_hold(0)
