"""What chunked attention computes, by the mask of `transformers`."""

import torch
from torch import Tensor
from transformers.masking_utils import chunked_causal_mask_function

from tests.support.paged_batch import PagedSequences, Rows


def attended_in_chunks(
    sequences: PagedSequences, parts: list[Rows], chunk: int, *, scale: float
) -> Tensor:
    """The attention of a batch's rows, by torch's own function."""
    is_seen = chunked_causal_mask_function(chunk, torch.zeros(1, dtype=torch.int64))
    outputs = [
        torch.nn.functional.scaled_dot_product_attention(
            sequences.queries[sequence][start:end].transpose(0, 1),
            sequences.keys[sequence][:end].transpose(0, 1),
            sequences.values[sequence][:end].transpose(0, 1),
            attn_mask=is_seen(0, 0, torch.arange(start, end)[:, None], torch.arange(end)),
            scale=scale,
            enable_gqa=True,
        ).transpose(0, 1)
        for sequence, start, end in parts
    ]
    return torch.cat(outputs)
