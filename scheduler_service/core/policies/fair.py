"""Fair shares for tenants, counted in tokens."""

from collections import Counter
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from operator import attrgetter

from scheduler_service.core.policies.policy import Policy
from scheduler_service.core.sequence import Sequence, SequenceGroup
from scheduler_service.core.tenants import Tenants, TenantUsage

PROMPT_TOKEN_COST = 1
OUTPUT_TOKEN_COST = 2
_NUM_IDLE_KEPT = 64
_tenant_of = attrgetter("tenant")


@dataclass(slots=True, eq=False)
class _Account:
    """The service that one tenant has received."""

    service: float = 0.0
    """Its virtual token counter: the cost of its tokens, divided by its weight."""
    last_turn: int = 0
    """The number of the choice by which it was last served."""


class Fair(Policy):
    """The tenant with the least service is next: the Virtual Token Counter of Sheng et al.,
    "Fairness in Serving Large Language Models", OSDI 2024, algorithm 2, with weights.

    A prompt is charged in whole when a worker group takes its request, cached tokens included;
    output tokens as the results come in. A charge is divided by the tenant's weight. A tenant that
    comes back to the queue is lifted to the least service of those that wait, or if none does, of
    the last that waited: it has no claim to service that it did not request. Among tenants with
    equal service, the least recently served is next.

    The bound: while two tenants have requests waiting, and neither is held up by its own limits,
    their services (cost / weight) grow by amounts that differ by at most 2U, for U = max(L, 2M)
    divided by the smaller weight; L is the longest prompt, and M the most tokens that the model's
    worker groups can hold. Why: the service of those that wait differs by at most U at any time,
    since only the least is chosen; after that its prompt takes it at most L further, and its
    outputs, before they end, at most 2M. That outputs are charged only with their results, a few
    steps late, changes nothing: tokens in flight are among the M. Recomputing after a preemption is
    not charged; the bound is about tokens that tenants get, not about work.

    The rank is the arrival: when memory runs out, the latest request is preempted. It has the least
    to recompute, and recomputation is not charged to its tenant.
    """

    preempts = True

    def __init__(self, tenants: Tenants) -> None:
        super().__init__(tenants)
        self._accounts: dict[str, _Account] = {}
        self._last_to_wait = _Account()
        self._num_turns = 0

    def __len__(self) -> int:
        """Number of accounts that are kept."""
        return len(self._accounts)

    def queue_name(self, tenant: TenantUsage) -> str:
        """The tenant's name: each tenant has a queue."""
        return tenant.name

    def key(self, head: SequenceGroup) -> tuple[float, int]:
        """The service of the group's tenant."""
        account = self._account(head.tenant)
        return account.service, account.last_turn

    def precedes(self, waiting: SequenceGroup, seq_group: SequenceGroup) -> bool:
        """As for any policy, but only within a tenant: others are ordered by their service."""
        return waiting.tenant is seq_group.tenant and super().precedes(waiting, seq_group)

    def yielding(
        self, seq_group: SequenceGroup, others: Iterable[SequenceGroup]
    ) -> Iterator[SequenceGroup]:
        """The latest requests of the tenant with the most places in the batch for its weight, as
        long as it keeps at least as many for its weight as the waiting group's tenant gets. So a
        tenant that floods the batch does not make others wait, and nothing is preempted in
        return."""
        running: dict[TenantUsage, list[SequenceGroup]] = {}
        for other in others:
            if other.num_running:
                running.setdefault(other.tenant, []).append(other)
        num_held = sum(other.num_running for other in running.pop(seq_group.tenant, ()))
        share = (num_held + seq_group.num_unfinished) / seq_group.tenant.config.weight
        places = {t: sum(o.num_running for o in seq_groups) for t, seq_groups in running.items()}
        while places:
            tenant = max(places, key=lambda tenant: places[tenant] / tenant.config.weight)
            last = max(running[tenant], key=lambda other: other.rank)
            running[tenant].remove(last)
            places[tenant] -= last.num_running
            if places[tenant] / tenant.config.weight < share:
                return
            yield last

    def open_queue(self, tenant: TenantUsage, first: SequenceGroup | None) -> None:
        """Raise the counter of a tenant that returns."""
        first_account = self._last_to_wait if first is None else self._account(first.tenant)
        account = self._account(tenant)
        account.service = max(account.service, first_account.service)
        self._forget_idle(first_account.service)

    def close_queue(self, tenant: TenantUsage) -> None:
        """Remember the tenant whose request was the last to wait."""
        self._last_to_wait = self._account(tenant)

    def record_placed(self, seq_group: SequenceGroup) -> None:
        """Charge the prompt, the first time only."""
        account = self._account(seq_group.tenant)
        self._num_turns += 1
        account.last_turn = self._num_turns
        if not seq_group.placement.was_placed:
            cost = PROMPT_TOKEN_COST * seq_group.num_prompt_tokens
            account.service += cost / seq_group.tenant.config.weight

    def record_tokens(self, rows: Rows[Sequence]) -> None:
        """Charge one token for each row, even if the sampled token is discarded."""
        counts: Counter[TenantUsage] = Counter(map(_tenant_of, rows))
        for tenant, num_tokens in counts.items():
            cost = OUTPUT_TOKEN_COST * num_tokens
            self._account(tenant).service += cost / tenant.config.weight

    def _account(self, tenant: TenantUsage) -> _Account:
        account = self._accounts.get(tenant.name)
        if account is None:
            account = self._accounts[tenant.name] = _Account()
        return account

    def _forget_idle(self, min_service: float) -> None:
        """Drop accounts of tenants without requests that would be lifted anyway. Runs only when
        most accounts may be such, so that its cost is constant per request."""
        if len(self._accounts) > 2 * len(self._tenants) + _NUM_IDLE_KEPT:
            self._accounts = {
                name: account
                for name, account in self._accounts.items()
                if name in self._tenants or account.service > min_service
            }
