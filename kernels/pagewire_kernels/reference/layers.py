"""Embedding, norms, rotary embedding and activations in plain torch, computed in float32."""

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from pagewire_kernels.reference.kv_cache import write_kv

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "relu2")


def embed(table: Tensor, indices: Tensor, sums: Tensor | None = None) -> Tensor:
    """Gather rows of a table. table: [num_entries, size]; indices: int64 [num_rows].

    With `sums`, [num_rows, size] in the table's dtype, the rows are added to them in place.
    """
    rows = functional.embedding(indices, table)
    return rows if sums is None else sums.add_(rows)


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor:
    """x / rms(x) * weight over the last axis (Zhang and Sennrich 2019).

    With a residual, x is first added to it, in place and rounded to its dtype, and the sum is
    normalized. x, residual: [num_tokens, size]. Returns x's shape and dtype.
    """
    x = _added(x, residual)
    return functional.rms_norm(x.float(), weight.shape, weight.float(), eps).to(x.dtype)


def layer_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    residual: Tensor | None = None,
) -> Tensor:
    """(x - mean) / deviation * weight + bias over the last axis; `residual` as in `rms_norm`."""
    x = _added(x, residual)
    weight = None if weight is None else weight.float()
    bias = None if bias is None else bias.float()
    return functional.layer_norm(x.float(), x.shape[-1:], weight, bias, eps).to(x.dtype)


def _added(x: Tensor, residual: Tensor | None) -> Tensor:
    """The input of the norm: x, or the residual after x was added to it."""
    return x if residual is None else residual.copy_(residual.float() + x.float())


def rotate_and_write_kv(
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
    """Apply RoPE to `query` in place; write RoPE'd keys and raw values to the KV cache.

    query: [num_tokens, num_heads, head_dim]; key, value: [num_tokens, num_kv_heads, head_dim],
    which are not changed; positions: int64 [num_tokens]; cos, sin: [num_positions,
    rotary_dim // 2]: the first half of a head's first rotary_dim elements is rotated against the
    second (Su et al. 2021). query_norm, key_norm: [head_dim], weights of an RMS norm of each head
    before RoPE (Qwen3). Slots and scales as in `write_kv`. Results are rounded once, at the end.
    """
    rows = cos[positions].float()[:, None], sin[positions].float()[:, None]
    query.copy_(_norm_and_rotate(query, *rows, query_norm, eps))
    rotated = _norm_and_rotate(key, *rows, key_norm, eps).to(key.dtype)
    write_kv(
        rotated,
        value,
        key_cache,
        value_cache,
        slot_mapping,
        key_scale=key_scale,
        value_scale=value_scale,
    )


def rotate(
    query: Tensor,
    key: Tensor,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    query_norm: Tensor | None = None,
    key_norm: Tensor | None = None,
    eps: float = 1e-6,
) -> None:
    """Apply RoPE to `query` and `key` in place, without a cache; as `rotate_and_write_kv`."""
    rows = cos[positions].float()[:, None], sin[positions].float()[:, None]
    for heads, weight in ((query, query_norm), (key, key_norm)):
        heads.copy_(_norm_and_rotate(heads, *rows, weight, eps))


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
    """Apply RoPE to the ends of query heads; write normed latents, and the RoPE'd end of keys that
    all heads share, to the KV cache (DeepSeek-AI 2024, section 2.1).

    query, rotated: [num_tokens, num_heads, rotary_dim], of which `rotated` is written; latents:
    [num_tokens, rank + rotary_dim], latent, then the end of keys; norm: [rank], the weight of the
    latents' RMS norm; cache: [num_blocks, block_size, 1, rank + rotary_dim]; positions, cos, sin as
    in `rotate_and_write_kv`. scale: of an fp8 cache. Results are rounded once, at the end.
    """
    rows = cos[positions].float()[:, None], sin[positions].float()[:, None]
    rotated.copy_(_norm_and_rotate(query, *rows, None, eps))
    latent, end = latents.float().unsqueeze(1).split([norm.shape[0], query.shape[2]], dim=2)
    parts = rms_norm(latent, norm, eps), _norm_and_rotate(end, *rows, None, eps)
    entry = torch.cat(parts, dim=2).to(latents.dtype)
    write_kv(entry, entry, cache, cache, slot_mapping, key_scale=scale, value_scale=scale)


def sum_rows(hidden: Tensor, starts: Tensor, sums: Tensor) -> None:
    """Add rows `starts[i]` to `starts[i + 1]` to `sums[i]`, one after the other, so that the sum of
    a text does not depend on its chunks, nor on its batch.

    hidden: [num_tokens, size]; starts: int32 [num_seqs + 1]; sums: float32 [num_seqs, size].
    """
    lengths = starts.diff()
    for offset in range(int(lengths.max())):
        seqs = (lengths > offset).nonzero().squeeze(1)
        sums[seqs] += hidden[starts[seqs] + offset].float()


def _norm_and_rotate(
    heads: Tensor, cos: Tensor, sin: Tensor, weight: Tensor | None, eps: float
) -> Tensor:
    heads = heads.float()
    if weight is not None:
        heads = rms_norm(heads, weight, eps)
    half = cos.shape[-1]
    first, second, rest = heads.split([half, half, heads.shape[-1] - 2 * half], dim=-1)
    rotated = (first * cos - second * sin, second * cos + first * sin, rest)
    return torch.cat(rotated, dim=-1)


def activate(x: Tensor, activation: str) -> Tensor:
    """activation(x), in x's dtype; activation: one of `ACTIVATIONS`."""
    return _FUNCTIONS[activation](x.float()).to(x.dtype)


def act_and_mul(gate_up: Tensor, activation: str) -> Tensor:
    """activation(gate) * up, where `gate_up` holds gate, then up, on its last axis.

    gate_up: [num_tokens, 2 * size]; activation: one of `ACTIVATIONS`. Returns [num_tokens, size],
    in gate_up's dtype.
    """
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (_FUNCTIONS[activation](gate) * up).to(gate_up.dtype)


def scale(x: Tensor, factor: float) -> Tensor:
    """factor * x, in place. x: [num_rows, size]."""
    return x.mul_(factor)


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """cap * tanh(x / cap), in place, so that numbers are between -cap and cap; rounded once. x:
    [num_rows, size]."""
    wide = x.float().div_(cap).tanh_().mul_(cap)
    return x if wide is x else x.copy_(wide)


def xielu(x: Tensor, numbers: Tensor) -> Tensor:
    """xIELU (Huang and Schlag 2024), in place: a x^2 + beta x where x is positive, and otherwise
    b (e^min(x, epsilon) - 1 - x) + beta x.

    x: [num_rows, size]; numbers: float32 [4]: a, b, beta, epsilon.
    """
    wide, (positive, negative, beta, epsilon) = x.float(), numbers
    others = (torch.expm1(torch.minimum(wide, epsilon)) - wide) * negative
    return x.copy_(torch.where(wide > 0, positive * wide * wide, others) + beta * wide)


def add(sums: Tensor, x: Tensor) -> Tensor:
    """Add x to the sums in place, rounded once. Both: [num_rows, size], of one dtype."""
    return sums.add_(x)


def multiply(products: Tensor, x: Tensor) -> Tensor:
    """Multiply the products by x in place, rounded once. Both: [num_rows, size], of one dtype."""
    return products.mul_(x)


def multiply_sigmoid(products: Tensor, x: Tensor) -> Tensor:
    """Multiply the products by sigmoid(x) in place, rounded once. Both: [num_rows, size], of one
    dtype."""
    return products.copy_(products.float() / torch.exp(-x.float()).add_(1))


def multiply_softplus(products: Tensor, x: Tensor) -> Tensor:
    """Multiply the products by log(1 + e^x) in place, rounded once. Both: [num_rows, size], of one
    dtype."""
    return products.copy_(products.float() * functional.softplus(x.float()))


def sparsify(x: Tensor, num_deviations: float) -> Tensor:
    """max(x - mean - num_deviations * deviation, 0), in place: of each row, what exceeds the mean
    by more than a number of standard deviations. x: [num_rows, size]."""
    wide = x.float()
    deviation, mean = torch.std_mean(wide, dim=1, keepdim=True, correction=0)
    return x.copy_((wide - (mean + deviation * num_deviations)).clamp_(min=0))


MIN_MEAN_SQUARE = 1e-5
"""The least mean square by which `match_rms` divides."""


def match_rms(x: Tensor, like: Tensor) -> Tensor:
    """x * rms(like) / rms(x), in place. Both: [num_rows, size], of one dtype."""
    found, wanted = (rows.float().square().mean(1, keepdim=True) for rows in (x, like))
    found = found.clamp_(min=MIN_MEAN_SQUARE)
    return x.copy_(x.float() * wanted.sqrt() / found.sqrt())


def mix_streams(streams: Tensor, factors: Tensor) -> Tensor:
    """Add to each stream a sum of all, weighted by the row's factors (Baykal et al. 2023).

    streams: [num_rows, n * size]; factors: [num_rows, n * n], of one dtype: for each sum, those of
    all streams. Returns a tensor like `streams`.
    """
    n = math.isqrt(factors.shape[1])
    parts = streams.float().unflatten(1, (n, -1))
    mixed = torch.einsum("tqp,tpi->tqi", factors.float().unflatten(1, (n, n)), parts)
    return (mixed + parts).flatten(1).to(streams.dtype)


def correct_streams(streams: Tensor, x: Tensor, factors: Tensor, active: int) -> Tensor:
    """Add to each stream, in place, 1 + its factor times the difference of x and the active one.

    streams: [num_rows, n * size]; x: [num_rows, size]; factors: [num_rows, n]; of one dtype.
    Returns the streams.
    """
    parts = streams.float().unflatten(1, (factors.shape[1], -1))
    difference = x.float() - parts[:, active]
    parts = parts + (factors.float() + 1).unsqueeze(2) * difference.unsqueeze(1)
    return streams.copy_(parts.flatten(1))


def read_streams(
    streams: Tensor,
    gates: Tensor,
    numbers: Tensor,
    num_streams: int,
    *,
    eps: float,
    offset: float,
    magnitude: float,
    num_divisions: int = 0,
) -> Tensor:
    """The sum of the streams, each times its gate (hyper-connections, Zhu et al. 2025).

    streams: [num_rows, num_streams * size]; gates: float32 [num_rows, num_gates], products of the
    streams, overwritten by gates: sigmoid(factor * product / rms(streams) + bias), times magnitude
    beyond the first num_streams, plus offset; numbers: float32 [2, num_gates], these factors, then
    biases; eps: added to the mean square. Returns [num_rows, size], of the streams' dtype.

    num_divisions: if above 0, gates end with a matrix that mixes streams, num_streams^2 numbers,
    and only the first num_streams gates have the offset (manifold-constrained hyper-connections,
    Xie et al. 2026). The matrix is the softmax of its rows, plus the offset, divided by the sums of
    columns, plus the offset, as many times, with a division by those of rows in between.
    """
    wide, (factors, biases) = streams.float(), numbers
    inverse = torch.rsqrt(wide.square().mean(1, keepdim=True) + eps)
    products = gates * inverse * factors + biases
    found = torch.exp(-products).add_(1).reciprocal_()
    found[:, num_streams:] *= magnitude
    if num_divisions:
        found[:, :num_streams] += offset
        matrices = products[:, 2 * num_streams :].unflatten(1, (num_streams, num_streams))
        found[:, 2 * num_streams :] = _balance(matrices, num_divisions, offset).flatten(1)
    else:
        found += offset
    gates.copy_(found)
    parts = wide.unflatten(1, (num_streams, -1)).unbind(1)
    total = torch.zeros_like(parts[0])
    for i, part in enumerate(parts):
        total += part * gates[:, i : i + 1]
    return total.to(streams.dtype)


def gate_counts(num_streams: int, num_divisions: int) -> tuple[int, ...]:
    """Numbers of gates that a row of `read_streams` may have."""
    of_both = 2 * num_streams
    return (of_both + num_streams**2,) if num_divisions else (num_streams, of_both)


def _balance(products: Tensor, num_divisions: int, offset: float) -> Tensor:
    """Nearly doubly stochastic matrices (Sinkhorn and Knopp 1967); see `read_streams`. products:
    float32 [num_rows, num_streams, num_streams]."""
    matrices = torch.softmax(products, dim=2) + offset
    for i in range(num_divisions):
        if i:
            matrices = matrices / (matrices.sum(2, keepdim=True) + offset)
        matrices = matrices / (matrices.sum(1, keepdim=True) + offset)
    return matrices


def write_streams(streams: Tensor, x: Tensor, gates: Tensor) -> Tensor:
    """Add x to each stream, times its gate, in place. x: [num_rows, size], of the dtype of streams,
    [num_rows, num_streams * size]; gates: float32 [num_rows, num_streams], or more columns: a
    matrix of `read_streams`, by whose transpose the streams are multiplied first. Returns the
    streams."""
    num_streams, wide = streams.shape[1] // x.shape[1], streams.float()
    total = (gates[:, :num_streams, None] * x.float().unsqueeze(1)).flatten(1)
    if gates.shape[1] == num_streams:
        return streams.copy_(wide + total)
    parts = wide.unflatten(1, (num_streams, -1)).unbind(1)
    for source, part in enumerate(parts):
        first = (1 + source) * num_streams
        weights = gates[:, first : first + num_streams, None]
        total += (weights * part.unsqueeze(1)).flatten(1)
    return streams.copy_(total)


def _silu(x: Tensor) -> Tensor:
    """x * sigmoid(x).

    On CPUs, torch computes the elements after the last full vector of a thread's share by another
    formula, whose last bit differs, so that the result of a row would depend on its place in the
    batch. The operations used here compute all elements in the same way.
    """
    if x.device.type != "cpu":
        return functional.silu(x)
    return x / torch.exp(-x).add_(1)


def _gelu(x: Tensor) -> Tensor:
    """x * Phi(x), with Phi of the standard normal distribution; on CPUs see `_silu`."""
    if x.device.type != "cpu":
        return functional.gelu(x)
    return torch.erf(x * math.sqrt(0.5)).add_(1).mul_(x).mul_(0.5)


def _gelu_tanh(x: Tensor) -> Tensor:
    """The tanh approximation of GELU (Hendrycks and Gimpel 2016); on CPUs see `_silu`."""
    if x.device.type != "cpu":
        return functional.gelu(x, approximate="tanh")
    inner = (x * x * x).mul_(0.044715).add_(x).mul_(math.sqrt(2 / math.pi))
    return (torch.tanh(inner).add_(1) * x).mul_(0.5)


_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": _silu,
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "relu": functional.relu,
    "relu2": lambda x: functional.relu(x).square(),
}
