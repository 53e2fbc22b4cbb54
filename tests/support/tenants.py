"""Groups of tenants, for tests of policies and queues without a core."""

from scheduler_service.core.admission.request_registry import RequestRegistry
from scheduler_service.core.sequence import SequenceGroup
from scheduler_service.core.tenants import Tenants
from tests.support.core_driver import make_request


def make_group(
    tenants: Tenants, tenant: str, *, num_prompt_tokens: int = 1, arrival: int = 0
) -> SequenceGroup:
    """A group that waits, of one sequence, and of no registry."""
    request = make_request(prompt_token_ids=[1] * num_prompt_tokens, tenant=tenant)
    return RequestRegistry(lambda request, number: (arrival,), tenants).make_seq_group(request, 0)
