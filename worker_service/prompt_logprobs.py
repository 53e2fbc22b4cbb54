"""Log probabilities of prompt tokens."""

from torch import Tensor

from worker_service.array_types import Int32Array
from worker_service.models.interface import Model
from worker_service.sampler.entries import PromptLogprobs
from worker_service.sampler.upload import upload
from worker_service.sampling.logprobs import joined, logprob_table

MAX_LOGITS_BYTES = 64 * 2**20
"""Logits computed at once. They need a whole vocabulary's row per token, so a long prompt's would
not fit into memory."""


def prompt_logprobs(
    model: Model, hidden: Tensor, token_ids: Int32Array, start: int, num_top: int
) -> PromptLogprobs:
    """Log probabilities of consecutive prompt tokens and of the most probable ones in their place.

    hidden: [num_tokens, hidden_size], the states that predict them; token_ids: the prompt's own;
    start: position of the first.
    """
    targets = upload(token_ids.astype("int64"), hidden.device)
    piece = max(1, MAX_LOGITS_BYTES // (4 * model.vocab_size))
    tables = [
        logprob_table(model.compute_logits(part), target, num_top)
        for part, target in zip(hidden.split(piece), targets.split(piece), strict=True)
    ]
    return joined(start, tables, num_top)
