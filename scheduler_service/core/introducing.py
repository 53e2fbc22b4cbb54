"""Telling a worker of a sequence."""

from scheduler_service.core.sequence import Sequence
from scheduler_service.core.step_plan import NewSequence


def introduce(seq: Sequence, block_ids: list[int]) -> NewSequence:
    """All that a worker must know of a sequence that has `num_computed` tokens in its blocks."""
    group = seq.group
    return NewSequence(
        seq_id=seq.seq_id,
        choice_index=seq.choice_index,
        token_ids=[*group.request.prompt_token_ids, *seq.output_token_ids],
        num_prompt_tokens=group.num_prompt_tokens,
        num_computed_tokens=seq.num_computed,
        block_ids=block_ids,
        sampling=group.request.sampling,
        prompt_logprobs_start=group.prompt_logprobs_start,
        traceparent=group.request.traceparent,
    )
