"""What a model computes between its matrix products and attention.

Each operation goes row by row, a row being a token: a row's result is bitwise the same whatever
else is in the batch and on whichever thread. Norms, rotations and activations are computed in
float32 and rounded once, to the type of what they return.
"""

from typing import Protocol

from torch import Tensor

from pagewire_kernels import reference
from pagewire_kernels.reference import ACTIVATIONS

__all__ = ["ACTIVATIONS", "LayerKernels", "TorchLayerKernels"]


class LayerKernels(Protocol):
    """Row-wise operations. Weights, biases and tables have the type and device of the rows.

    Rows have a dense last axis and otherwise any strides. `activation` is one of `ACTIVATIONS`.
    """

    name: str

    def embed(self, table: Tensor, token_ids: Tensor) -> Tensor:
        """Rows of a table. table: [num_tokens, size]; token_ids: int64 [num_rows].

        Returns a new [num_rows, size].
        """
        ...

    def rms_norm(
        self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None
    ) -> Tensor:
        """x / rms(x) * weight over the last axis (Zhang and Sennrich 2019).

        With a residual, x is first added to it, in place and rounded to its type, and the sum is
        normalised. x, residual: [num_tokens, size]; weight: [size]. Returns a new [num_tokens,
        size].
        """
        ...

    def layer_norm(
        self,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        residual: Tensor | None = None,
    ) -> Tensor:
        """(x - mean) / deviation * weight + bias over the last axis; a residual as in `rms_norm`.

        x, residual: [num_tokens, size]; weight, bias: [size], both or neither. Returns a new
        [num_tokens, size].
        """
        ...

    def activate(self, x: Tensor, activation: str) -> Tensor:
        """activation(x). x: [num_tokens, size], dense, and may be overwritten: the result may be x.

        Returns [num_tokens, size].
        """
        ...

    def act_and_mul(self, gate_up: Tensor, activation: str) -> Tensor:
        """activation(gate) * up, where `gate_up` holds gate, then up, on its last axis.

        gate_up: [num_tokens, 2 * size]. Returns a new [num_tokens, size].
        """
        ...

    def rotate_and_write_kv(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        slot_mapping: Tensor,
        positions: Tensor,
        cos: Tensor,
        sin: Tensor,
        *,
        query_norm: Tensor | None = None,
        key_norm: Tensor | None = None,
        eps: float = 1e-6,
        key_scale: float = 1.0,
        value_scale: float = 1.0,
    ) -> None:
        """Turn queries in place; turn keys and store them, and values as they are, in their slots.

        query: [num_tokens, num_heads, head_dim]; key, value: [num_tokens, num_kv_heads, head_dim],
        of which key is undefined afterwards. key_cache, value_cache: a layer's views,
        [num_blocks, block_size, num_kv_heads, head_dim], of the rows' type, or of float8_e4m3fn,
        for which keys and values are divided by their scale. slot_mapping: int64 [num_tokens]; a
        negative slot is not written. positions: int64 [num_tokens], rows of the tables cos and sin,
        [num_positions, rotary_dim // 2]: the first half of a head's first rotary_dim elements is
        turned against the second (Su et al. 2021). query_norm, key_norm: [head_dim], weights of an
        RMS norm of each head before that (Qwen3), or None; eps is theirs.
        """
        ...


class TorchLayerKernels:
    """Plain torch, on any device: what runs where there is nothing faster."""

    name = "torch"
    embed = staticmethod(reference.embed)
    rms_norm = staticmethod(reference.rms_norm)
    layer_norm = staticmethod(reference.layer_norm)
    activate = staticmethod(reference.activate)
    act_and_mul = staticmethod(reference.act_and_mul)
    rotate_and_write_kv = staticmethod(reference.rotate_and_write_kv)
