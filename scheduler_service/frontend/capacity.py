"""How many requests may be open: at this frontend, of one tenant, and in one call."""

import asyncio
from collections import Counter
from collections.abc import Awaitable
from contextlib import suppress
from dataclasses import dataclass

from scheduler_service.errors import QueueFull, Unavailable
from scheduler_service.frontend.auth import Principal

RETRY_DELAY_S = 1.0
"""Retry delay that clients get when this frontend, or their share of it, is full."""


@dataclass(eq=False)
class RequestCapacity:
    """Counts open requests, and calls for vectors, scores and labels, from `add` to `remove`."""

    max_concurrent_requests: int
    tenant_share: int
    """Maximum number of open requests of one tenant or one call."""

    def __post_init__(self) -> None:
        self._num_by_tenant: Counter[str] = Counter()
        self.num_open = 0
        self._none_open = asyncio.Event()
        self._none_open.set()
        self.is_draining = asyncio.Event()
        """Set when no new requests are accepted any longer, except late ones."""
        self._is_closed = False
        """Whether those are refused as well."""

    def check_accepting(self, *, is_late: bool) -> None:
        """Raise Unavailable during a shutdown. `is_late`: of a client that cannot see it."""
        if self._is_closed or (self.is_draining.is_set() and not is_late):
            raise shutting_down()

    def check_room(self, tenant: Principal) -> None:
        """Raise QueueFull if the frontend is full, or one tenant has its share of it."""
        if self.num_open >= self.max_concurrent_requests:
            raise QueueFull(
                f"the frontend is full: it has {self.num_open} open requests, and may have "
                f"max_concurrent_requests={self.max_concurrent_requests}; try again later",
                details={"max_concurrent_requests": self.max_concurrent_requests},
                retry_delay_s=RETRY_DELAY_S,
            )
        num_open = self._num_by_tenant[tenant.name]
        if tenant.name and num_open >= self.tenant_share:
            raise self._share_used(f"the tenant {tenant.name!r} has {num_open}")

    def check_call_share(self, num_open: int) -> None:
        """Raise QueueFull unless a call that has `num_open` requests open may open another."""
        if num_open >= self.tenant_share:
            raise self._share_used(f"this call has {num_open}")

    def _share_used(self, holder: str) -> QueueFull:
        return QueueFull(
            f"{holder} open requests, and may have max_tenant_requests={self.tenant_share}: "
            "wait until some of them have ended",
            details={"max_tenant_requests": self.tenant_share},
            retry_delay_s=RETRY_DELAY_S,
        )

    def share_of_call(self, tenant: Principal) -> int:
        """How many inputs a call of a tenant may have at the core: as many requests as the frontend
        and the tenant may have are shared by those that are open."""
        num_of_tenant = self._num_by_tenant[tenant.name] if tenant.name else 1
        return min(
            self.max_concurrent_requests // max(1, self.num_open),
            self.tenant_share // max(1, num_of_tenant),
        )

    def add(self, tenant: str) -> None:
        """Count an open request of a tenant."""
        self.num_open += 1
        self._num_by_tenant[tenant] += 1
        self._none_open.clear()

    def remove(self, tenant: str) -> None:
        """Stop counting an open request of a tenant."""
        self.num_open -= 1
        self._num_by_tenant[tenant] -= 1
        if not self._num_by_tenant[tenant]:
            del self._num_by_tenant[tenant]
        if not self.num_open:
            self._none_open.set()

    async def drain(self, grace_s: float, last_arrivals: Awaitable[object]) -> None:
        """Refuse new requests, except late ones until `last_arrivals` is done, and wait `grace_s`
        seconds for the open ones; afterwards none is accepted."""
        self.is_draining.set()
        with suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await last_arrivals
                await self._none_open.wait()
        self._is_closed = True


def shutting_down() -> Unavailable:
    """The error of requests that a shutdown refuses or ends."""
    return Unavailable("the frontend is shutting down", reason="SHUTTING_DOWN")
