"""The `triton` attention backend and layer kernels."""

import torch
from torch import Tensor

from pagewire_kernels import reference
from pagewire_kernels.batch import AttentionMetadata
from pagewire_kernels.interface import Abilities
from pagewire_kernels.triton.attention import paged_attention
from pagewire_kernels.triton.kv_cache import write_kv
from pagewire_kernels.triton.layers import act_and_mul, activate, layer_norm, rms_norm
from pagewire_kernels.triton.rotary import rotate_and_write_kv


def write_rows(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> None:
    """Write each row's key and value to its slot; as `reference.write_kv`, for any strides."""
    write_kv(
        _dense(key),
        _dense(value),
        key_cache,
        value_cache,
        slot_mapping,
        key_scale=key_scale,
        value_scale=value_scale,
    )


def _dense(rows: Tensor) -> Tensor:
    """The rows with a dense last axis, copied if necessary."""
    return rows if rows.stride(-1) == 1 else rows.contiguous()


class TritonBackend:
    """Attention and cache writes by Triton kernels.

    With `batch_invariant`, the result of a query row depends, bitwise, only on that row and on the
    KV of its sequence: not on the rest of the batch, nor on whether it is computed by a prefill, a
    chunk or a decode.
    """

    name = "triton"

    abilities = Abilities(fp8_cache=True, batch_invariant=True)

    write_kv = staticmethod(write_rows)

    def __init__(self, *, batch_invariant: bool = False) -> None:
        self._batch_invariant = batch_invariant

    def paged_attention(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        metadata: AttentionMetadata,
        *,
        scale: float,
        sliding_window: int | None = None,
        soft_cap: float | None = None,
        sinks: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        key_scale: float = 1.0,
        value_scale: float = 1.0,
    ) -> Tensor:
        """Causal attention of flattened query rows; as `reference.paged_attention`."""
        return paged_attention(
            _dense(query),
            key_cache,
            value_cache,
            metadata,
            scale=scale,
            sliding_window=sliding_window,
            soft_cap=soft_cap,
            sinks=sinks,
            alibi_slopes=alibi_slopes,
            key_scale=key_scale,
            value_scale=value_scale,
            batch_invariant=self._batch_invariant,
        )


class TritonLayerKernels:
    """One launch per operation. Results are bitwise independent of the batch, since a row is
    computed by a single program, in an order that depends only on its size."""

    name = "triton"
    embed = staticmethod(reference.embed)
    copy = staticmethod(torch.clone)
    rms_norm = staticmethod(rms_norm)
    layer_norm = staticmethod(layer_norm)
    activate = staticmethod(activate)
    act_and_mul = staticmethod(act_and_mul)
    rotate_and_write_kv = staticmethod(rotate_and_write_kv)
