"""Rows whose tokens the core chooses: log probabilities for logits, and the best of them told."""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from worker_service.sampler.entries import Candidates
from worker_service.sampler.logprobs import most_probable
from worker_service.sampler.upload import upload

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]


def to_logprobs(logits: Tensor, rows: Int64Array) -> None:
    """Turns these rows' logits into log probabilities, in place: what edits change are those."""
    index = upload(rows, logits.device)
    logits[index] = torch.log_softmax(logits[index], dim=-1)


def offer(logprobs: Tensor, rows: Int64Array, counts: Int32Array) -> dict[int, Candidates]:
    """The most probable tokens of these rows, by row; none that was excluded.

    logprobs: float32 [n, vocab_size]; counts: [len(rows)], how many are told of each.
    """
    index = upload(rows, logprobs.device)
    token_ids, values = most_probable(logprobs[index], int(counts.max()))
    found = {}
    for place, (row, count) in enumerate(zip(rows.tolist(), counts.tolist(), strict=True)):
        kept = min(count, int(np.isfinite(values[place]).sum()))
        found[row] = Candidates(
            token_ids=token_ids[place, :kept].astype(np.int32), logprobs=values[place, :kept]
        )
    return found
