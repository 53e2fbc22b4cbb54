"""Tenants: what each one uses, and its limits."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from scheduler_service.core.config import TenantConfig
from scheduler_service.core.context import Context, tenant_context
from scheduler_service.core.throughput import QueueThroughput


@dataclass(slots=True, eq=False)
class TenantUsage:
    """One tenant's limits, and the sums over its live requests."""

    name: str
    config: TenantConfig
    context: Context = ()
    """The salt of all its requests; empty if it has no name, or if tenants are not isolated."""
    num_requests: int = 0
    """Live requests."""
    num_queued_tokens: int = 0
    """Prompt tokens of requests that wait for a place in a batch."""
    kv_quota: int = 0
    """What its requests in worker groups count against its limit on KV memory."""
    ends: QueueThroughput = field(default_factory=QueueThroughput)
    """How fast its requests end."""

    def may_hold(self, kv_quota: int) -> bool:
        """Whether it may hold `kv_quota` more."""
        return self.may_ever_hold(self.kv_quota + kv_quota)

    def may_ever_hold(self, kv_quota: int) -> bool:
        """Whether it may hold `kv_quota` if it holds nothing else."""
        limit = self.config.max_kv_blocks
        return limit is None or kv_quota <= limit


class Tenants:
    """All tenants that have live requests, by name."""

    def __init__(
        self, default: TenantConfig, named: Mapping[str, TenantConfig], *, isolate: bool = True
    ) -> None:
        """`isolate`: whether workers keep the KV of tenants apart."""
        self._default = default
        self._named = named
        self._isolate = isolate
        self._live: dict[str, TenantUsage] = {}

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, name: str) -> bool:
        return name in self._live

    def find(self, name: str) -> TenantUsage:
        """The tenant of this name; a new one if it has no live requests."""
        live = self._live.get(name)
        if live is not None:
            return live
        context = tenant_context(name) if self._isolate and name else ()
        return TenantUsage(name, self._named.get(name, self._default), context)

    def add_request(self, tenant: TenantUsage, now_us: int) -> None:
        """Count a new live request."""
        self._live[tenant.name] = tenant
        tenant.num_requests += 1
        tenant.ends.observe(now_us, num_requests=0, num_tokens=0, is_empty=False)

    def remove_request(self, tenant: TenantUsage, num_prompt_tokens: int, now_us: int) -> None:
        """Count an ended request; drop the tenant with the last one."""
        tenant.num_requests -= 1
        tenant.ends.observe(
            now_us, num_requests=1, num_tokens=num_prompt_tokens, is_empty=tenant.num_requests == 0
        )
        if tenant.num_requests == 0:
            del self._live[tenant.name]

    def check(self) -> None:
        """Assert that only tenants with live requests are left, within their limits."""
        for tenant in self._live.values():
            assert tenant.num_requests > 0
            assert tenant.num_queued_tokens >= 0
            assert tenant.may_hold(0)
