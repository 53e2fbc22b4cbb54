"""Whether blocks are sooner moved between device and host than their tokens computed again."""

from scheduler_service.core.stats.throughput import StepRates


def is_swap_cheaper(
    rates: StepRates, *, num_sequences: int, num_moves: int, num_tokens: int
) -> bool:
    """Whether to move blocks to the host and back, `num_moves` in all, rather than compute
    `num_tokens`.

    As long as nothing of the kind was measured: for several sequences, but not for a single one.
    """
    us_per_block, us_per_token = rates.us_per_moved_block, rates.us_per_prefill_token
    if us_per_block is None or us_per_token is None:
        return num_sequences > 1
    return num_moves * us_per_block < num_tokens * us_per_token


def is_fetch_cheaper(rates: StepRates, block_size: int) -> bool:
    """Whether to bring a block back that is on the host already, rather than compute its tokens.

    As long as nothing of the kind was measured: yes.
    """
    us_per_block, us_per_token = rates.us_per_moved_block, rates.us_per_prefill_token
    if us_per_block is None or us_per_token is None:
        return True
    return us_per_block < block_size * us_per_token
