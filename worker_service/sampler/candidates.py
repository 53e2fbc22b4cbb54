"""Rows whose tokens the core chooses: log probabilities for logits, and the best of them told."""

import numpy as np
import torch
from torch import Tensor

from worker_service.array_types import Float32Array, Int32Array, Int64Array
from worker_service.sampler.entries import Candidates
from worker_service.sampler.upload import upload
from worker_service.sampling.logprobs import most_probable


def to_logprobs(logits: Tensor, rows: Int64Array) -> None:
    """Turns these rows' logits into log probabilities, in place: what edits change are those."""
    index = upload(rows, logits.device)
    logits[index] = torch.log_softmax(logits[index], dim=-1)


def offer(logprobs: Tensor, rows: Int64Array, counts: Int32Array) -> dict[int, Candidates]:
    """The most probable tokens of these rows, by row; none that was excluded. Of equal ones
    those with the lowest ids, however many a neighbour asks for.

    logprobs: float32 [n, vocab_size]; counts: [len(rows)], how many are told of each.
    """
    index = upload(rows, logprobs.device)
    # One more than is told, to see whether those that are told end among equals.
    token_ids, values = most_probable(logprobs[index], int(counts.max()) + 1)
    found = {}
    for place, (row, count) in enumerate(zip(rows.tolist(), counts.tolist(), strict=True)):
        ids, best = token_ids[place], values[place]
        kept = min(count, int(np.isfinite(best).sum()))
        if kept and best[kept - 1] == best[-1] and len(best) < logprobs.shape[1]:
            ids, best = _sorted(logprobs[row])
        found[row] = Candidates(token_ids=ids[:kept].astype(np.int32), logprobs=best[:kept])
    return found


def _sorted(logprobs: Tensor) -> tuple[Int64Array, Float32Array]:
    """All tokens of a row: ids and log probabilities, the lower id first among equals."""
    values = logprobs.cpu().numpy()
    ids = np.argsort(-values, kind="stable")
    return ids, values[ids]
