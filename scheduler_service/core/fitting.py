"""How far a request can get in a worker group, and whether it fits there."""

from scheduler_service.core.config import WorkerGroupCapacity
from scheduler_service.core.sequence import SequenceGroup


def fits(seq_group: SequenceGroup, capacity: WorkerGroupCapacity) -> bool:
    """Whether a worker group can compute the sequences of a group, at least one at a time."""
    tenant, placement = seq_group.tenant, seq_group.placement
    num_tokens = max(seq_group.max_known_tokens, placement.exceeded_tokens + 1)
    has_limit = tenant.config.max_kv_blocks is not None
    return (
        seq_group.request.work.kind in capacity.work_kinds
        and (seq_group.adapter is None or capacity.max_loras > 0)
        and max_output_tokens(seq_group, capacity) > 0
        and num_tokens <= num_cache_tokens(seq_group, capacity)
        and not (has_limit and not tenant.may_ever_hold(max_kv_quota(seq_group, capacity)))
    )


def is_inexact(seq_group: SequenceGroup, capacity: WorkerGroupCapacity) -> bool:
    """Whether its next tokens there may differ from those of an undisturbed run, because its
    earlier tokens were computed with another arithmetic."""
    return seq_group.has_output and seq_group.placement.arithmetic not in ("", capacity.arithmetic)


def max_kv_quota(seq_group: SequenceGroup, capacity: WorkerGroupCapacity) -> int:
    """What the memory that its sequences can need there counts against its tenant's limit, even if
    the worker group has less; what they share counts once per sequence."""
    num_tokens = max_length(seq_group, capacity) - 1
    num_source_tokens = seq_group.num_source_tokens
    return seq_group.num_unfinished * capacity.kv_quota(num_tokens, num_source_tokens)


def max_output_tokens(seq_group: SequenceGroup, capacity: WorkerGroupCapacity) -> int:
    """Maximum number of tokens of each sequence's output there."""
    return seq_group.request.work.max_output_tokens(capacity, seq_group.num_prompt_tokens)


def max_length(seq_group: SequenceGroup, capacity: WorkerGroupCapacity) -> int:
    """Maximum number of tokens that it requests and that the worker group's model allows."""
    return seq_group.num_prompt_tokens + max_output_tokens(seq_group, capacity)


def num_cache_tokens(seq_group: SequenceGroup, capacity: WorkerGroupCapacity) -> int:
    """Tokens of the longest of its sequences that the worker group's cache can hold, with the
    states of the others if they run in lockstep."""
    return capacity.num_cache_tokens_beside(seq_group.num_source_tokens, seq_group.num_joint - 1)


def reach(seq_group: SequenceGroup, capacity: WorkerGroupCapacity) -> int:
    """Maximum length of one of its sequences in the worker group's cache, if alone there."""
    return min(max_length(seq_group, capacity), num_cache_tokens(seq_group, capacity) + 1)
