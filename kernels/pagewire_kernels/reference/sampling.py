"""From logits to tokens in plain torch, row after row and with a full sort."""

import numpy as np
import torch
from torch import Tensor

from pagewire_kernels.batch import SamplingMetadata
from pagewire_kernels.philox import uniform

NO_TOKEN = -1


def uniforms(seeds: Tensor, choice_indices: Tensor, positions: Tensor) -> Tensor:
    """One draw from [0, 1) per row with 53 random bits, a function of these numbers alone.

    The first two words of Philox4x32-10 (Salmon et al. 2011), keyed by the seed, low word first,
    with the counter (choice index, position, 0, 0). seeds: int64 [n], the bits of an unsigned seed;
    the others: int32 [n]. Returns float64 [n].
    """
    draws = uniform(
        seeds.cpu().numpy().view(np.uint64),
        choice_indices.cpu().numpy().view(np.uint32),
        positions.cpu().numpy(),
    )
    return torch.from_numpy(draws).to(seeds.device)


def apply_bitmask(logits: Tensor, rows: Tensor, bitmask: Tensor) -> None:
    """Minus infinity where a row's bit is 0, in place; other rows are left alone.

    logits: float [num_rows, vocab_size]; rows: int64 [m], none twice; bitmask: int32 [m,
    ceil(vocab_size / 32)], a bit per token, the lowest first.
    """
    columns = torch.arange(logits.shape[1], device=logits.device)
    allowed = bitmask[:, columns // 32] >> (columns % 32).int() & 1
    logits[rows] = logits[rows].masked_fill(allowed == 0, -torch.inf)


def sample(logits: Tensor, metadata: SamplingMetadata) -> Tensor:
    """One token per row, int64 [n]; -1 for a row with a NaN or without a finite maximum.

    logits: float32 [n, vocab_size], penalties applied. min-p and top-k look at the distribution
    after temperature, then top-p (Holtzman et al. 2020) at what they leave. They come down to the
    smallest logit that stays; all tokens with that very logit stay. Then the row's uniform draw
    picks the first token id at which the cumulative probability exceeds it.
    """
    draws = uniforms(metadata.seeds, metadata.choice_indices, metadata.positions)
    tokens = torch.full((len(logits),), NO_TOKEN, dtype=torch.int64, device=logits.device)
    for row, values in enumerate(logits):
        temperature = float(metadata.temperature[row])
        if not values.max().isfinite():
            continue
        if temperature == 0.0:
            tokens[row] = int((values == values.max()).nonzero()[0])
            continue
        scaled = values / metadata.temperature[row]
        weights = torch.exp(scaled - scaled.max()).double()
        weights = weights * (scaled >= _cut(scaled, weights, metadata, row))
        cumulative = weights.cumsum(0)
        above = cumulative > draws[row] * cumulative[-1]
        tokens[row] = int(above.nonzero()[0]) if above.any() else int(weights.nonzero()[-1])
    return tokens


def _cut(scaled: Tensor, weights: Tensor, metadata: SamplingMetadata, row: int) -> Tensor:
    """The smallest scaled logit that stays."""
    ordered, order = torch.sort(scaled, descending=True)
    cut = ordered[0] + torch.log(metadata.min_p[row]).float()
    top_k, top_p = int(metadata.top_k[row]), float(metadata.top_p[row])
    if top_k > 0:
        cut = torch.maximum(cut, ordered[min(top_k, len(ordered)) - 1])
    if top_p < 1.0:
        mass = (weights[order] * (ordered >= cut)).cumsum(0)
        has_crossed = mass >= top_p * mass[-1]
        cut = torch.maximum(cut, ordered[has_crossed.nonzero()[0]].squeeze())
    return cut


def gather_logprobs(logits: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Log softmax at some tokens of each row, and the rank of the first of them.

    logits: [n, vocab_size]; token_ids: int64 [n, m], m of at least 1. Returns float32 [n, m] and
    int32 [n]: one more than the number of tokens with a larger logit.
    """
    logits = logits.float()
    own = logits.gather(1, token_ids)
    ranks = (logits > own[:, :1]).sum(dim=-1, dtype=torch.int32) + 1
    return own - torch.logsumexp(logits, dim=-1, keepdim=True), ranks
