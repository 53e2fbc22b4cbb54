"""The cache writes of latent attention, of Triton's norms, RoPE and cache writes."""

from torch import Tensor

from pagewire_kernels.triton.kv_cache import write_kv
from pagewire_kernels.triton.layers import rms_norm
from pagewire_kernels.triton.rotary import rotate


def write_latents(
    query: Tensor,
    rotated: Tensor,
    latents: Tensor,
    norm: Tensor,
    cache: Tensor,
    slot_mapping: Tensor,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    eps: float,
    scale: float = 1.0,
) -> None:
    """Write RoPE'd ends of queries, and normed latents with the RoPE'd end of keys; as
    `reference.write_latents`."""
    rank = norm.shape[0]
    rotated.copy_(query)
    entry = latents.new_empty(latents.shape).unsqueeze(1)
    entry[:, 0, :rank] = rms_norm(latents[:, :rank], norm, eps)
    entry[:, 0, rank:] = latents[:, rank:]
    if cos.shape[1]:
        rotate(rotated, entry[:, :, rank:], positions, cos, sin)
    write_kv(entry, entry, cache, cache, slot_mapping, key_scale=scale, value_scale=scale)
