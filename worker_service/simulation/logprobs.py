"""Log probabilities of the simulated model, as a step's result holds them."""

import numpy as np

from worker_service.sampler.entries import PromptLogprobs, TokenLogprobs
from worker_service.simulated.model import NextToken
from worker_service.simulation.sequence import SimulatedSequence


def token_logprobs(distribution: NextToken, token: int, num_top: int) -> TokenLogprobs:
    """A token's log probability and those of the most probable ones."""
    own = distribution.rank(token)
    ranks = [own, *range(num_top)]
    return TokenLogprobs(
        token_ids=np.array([token, *map(distribution.token, range(num_top))], np.int32),
        logprobs=np.array([distribution.logprob(rank) for rank in ranks], np.float32),
        rank=own + 1,
    )


def prompt_logprobs(
    sequence: SimulatedSequence, start: int, end: int, vocab_size: int, num_top: int
) -> PromptLogprobs:
    """Log probabilities of the prompt tokens from position `start`, at least 1, to `end`."""
    num_top = min(num_top, vocab_size)
    entries = [
        token_logprobs(
            NextToken(sequence.histories[position - 1], vocab_size),
            sequence.tokens[position],
            num_top,
        )
        for position in range(start, end)
    ]
    return PromptLogprobs(
        start=start,
        token_ids=np.stack([entry.token_ids for entry in entries]),
        logprobs=np.stack([entry.logprobs for entry in entries]),
        ranks=np.array([entry.rank for entry in entries], np.int32),
    )
