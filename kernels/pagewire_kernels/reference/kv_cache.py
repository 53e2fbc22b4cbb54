"""Operations on a paged KV cache in plain torch."""

import torch
from torch import Tensor

from pagewire_kernels.interface import SCALE_BYTES

FP8 = torch.float8_e4m3fn


def write_kv(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> None:
    """Write each row's key and value to its slot; rows with a negative slot are skipped.

    key, value: [num_tokens, num_kv_heads, head_dim]; key_cache, value_cache: [num_blocks,
    block_size, num_kv_heads, head_dim]; slot_mapping: int64 [num_tokens]. For a float8_e4m3fn cache
    they are divided by their scale and clamped to its finite range; other caches ignore the scales.
    For an int8 cache they are quantized by `quantize_heads`.
    """
    kept = (slot_mapping >= 0).nonzero().squeeze(1)
    slots = slot_mapping[kept]
    block_size = key_cache.shape[1]
    block = torch.div(slots, block_size, rounding_mode="floor")
    offset = slots - block * block_size
    _put(key_cache, block, offset, key[kept], key_scale)
    _put(value_cache, block, offset, value[kept], value_scale)


def _put(cache: Tensor, block: Tensor, offset: Tensor, rows: Tensor, scale: float) -> None:
    if cache.dtype == FP8:
        limit = torch.finfo(FP8).max
        rows = (rows.float() / scale).clamp(-limit, limit).to(FP8)
        cache, rows = cache.view(torch.uint8), rows.view(torch.uint8)  # fp8 has no index_put
    elif cache.dtype == torch.int8:
        rows = quantize_heads(rows)
    cache[block, offset] = rows


def quantize_heads(heads: Tensor) -> Tensor:
    """Quantize heads to codes and a scale each: int8 [..., head_dim + SCALE_BYTES].

    heads: [..., head_dim]. An element is code * scale, rounded to nearest, ties to even; the
    element with the largest magnitude has the code 127 or -127. The scale is NaN if an element is
    not finite, and 0 if it would be subnormal.
    """
    heads = heads.float()
    scale = heads.abs().amax(-1, keepdim=True) / 127
    scale = scale.where(scale.isfinite(), torch.nan)
    scale = scale.where(~(scale < torch.finfo(torch.float32).tiny), 0.0)
    codes = (heads / scale).round().where(scale > 0, 0.0).to(torch.int8)
    return torch.cat([codes, scale.view(torch.int8)], dim=-1)


def dequantize_heads(stored: Tensor) -> Tensor:
    """Dequantize heads of an int8 cache: float32 [..., head_dim]."""
    codes, scale = stored[..., :-SCALE_BYTES], stored[..., -SCALE_BYTES:]
    return codes.float() * scale.contiguous().view(torch.float32)


def swap_blocks(source: Tensor, target: Tensor, pairs: Tensor) -> None:
    """Copy whole blocks within a cache, or from one cache to another, on any devices.

    source, target: [num_blocks, ...], with equal shapes beyond the first axis; pairs: int64 [n, 2]
    of (source block, target block), with distinct targets. All sources are read before any target
    is written.
    """
    moved = source.index_select(0, pairs[:, 0].to(source.device)).to(target.device)
    target.index_copy_(0, pairs[:, 1].to(target.device), moved)
