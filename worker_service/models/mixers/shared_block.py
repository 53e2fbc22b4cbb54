"""Attention and an MLP whose weights several layers share, before Mamba-2 (Zamba2).

The block gets the residual stream, followed by the embeddings of the tokens. Each layer adds
products of a low rank, of its own, to those of the block, and a linear function of what the block
makes to the inputs of its Mamba-2.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from worker_service.distributed.layout import Layout, Shard, consecutive
from worker_service.models.interface import ModelContext, WeightTarget
from worker_service.models.kv_cache_spec import LayerKV, LayerState
from worker_service.models.layers.activations import ACTIVATIONS
from worker_service.models.layers.norms import NormSpec, norm_targets
from worker_service.models.layers.rotary import RotarySettings
from worker_service.models.linear.linear import Linear, RowParallelLinear
from worker_service.models.mixers.attention import Attention, AttentionSpec
from worker_service.models.mixers.mamba import Mamba2Spec
from worker_service.models.native import LayerInputs, MixerPlace


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedBlockSpec:
    """A shared block, then Mamba-2, in place of attention. Implements `decoder.MixerSpec`; the
    layer's norm must not precede it, and `LayerInputs.embedding` is that of tokens.

    Attributes of `SharedBlockMixer` with tensors, for `LayerSpec.names`: `block` (norm, queries,
    keys, values, output, norm, gate with up, down), `attention.qkv.narrow` and
    `attention.qkv.wide.0` to 2 (of queries, keys, values) if `adapts_attention`, `up.narrow`,
    `up.wide.0`, `linear`, `mamba_norm`, and those of `mamba`.
    """

    block: int
    """Which of the shared blocks it is."""

    attention: AttentionSpec
    inner_size: int
    """Of the MLP."""

    activation: str
    """Of the MLP's gate, its name in `config.json`."""

    bias: bool
    """Whether the MLP has biases."""

    rank: int
    """Of the layer's own products."""

    adapts_attention: bool
    """Whether there are some of queries, keys and values, not only of the MLP."""

    mamba: Mamba2Spec
    norm: NormSpec

    @property
    def rotary(self) -> RotarySettings | None:
        """Of attention."""
        return self.attention.rotary

    def require_shards(self, layout: Layout) -> None:
        """Raise InvalidOption unless the ranks can share all parts."""
        self.attention.require_shards(layout)
        self.mamba.require_shards(layout)
        self.inner(layout)

    def inner(self, layout: Layout) -> Shard:
        """A rank's columns of the MLP."""
        return layout.even_shard(self.inner_size, "columns of the MLP")

    def kept(self, context: ModelContext, max_model_len: int) -> tuple[LayerKV | LayerState, ...]:
        """See `decoder.MixerSpec`."""
        parts = self.attention, self.mamba
        return tuple(kept for part in parts for kept in part.kept(context, max_model_len))

    def build(self, place: MixerPlace) -> "SharedBlockMixer":
        """See `decoder.MixerSpec`."""
        return SharedBlockMixer(self, place)


class SharedBlock(nn.Module):
    """The weights of a block."""

    def __init__(self, spec: SharedBlockSpec, place: MixerPlace, attention: Attention) -> None:
        """attention: whose weights become the block's."""
        super().__init__()
        context, kernels, full = place.context, place.kernels, Shard.full(place.size)
        inner = spec.inner(context.communicator.layout)
        self.attention_norm = spec.norm.build(2 * place.size, context, kernels)
        assert isinstance(attention.qkv, Linear)
        self.qkv, self.output = attention.qkv, attention.output
        self.feed_forward_norm = spec.norm.build(place.size, context, kernels)
        self.up = Linear(
            full, consecutive([inner] * 2), bias=spec.bias, context=context, sources=[0] * 2
        )
        self.down = RowParallelLinear(inner, place.size, bias=spec.bias, context=context)
        for product in (self.qkv, self.output, self.up, self.down):
            product.can_adapt = False  # an adapter would change all layers, or one of them

    def targets(self, *names: str, transposed: bool = False) -> Iterator[WeightTarget]:
        """Destinations of the tensors of modules with these names, in the order of
        `SharedBlockSpec`."""
        first_norm, *of_qkv, output, second_norm, up, down = names
        yield from norm_targets(first_norm, self.attention_norm)
        yield from self.qkv.targets(*of_qkv, transposed=transposed)
        yield from self.output.targets(output, transposed=transposed)
        yield from norm_targets(second_norm, self.feed_forward_norm)
        yield from self.up.targets(up, transposed=transposed)
        yield from self.down.targets(down, transposed=transposed)


class AdaptedProduct(nn.Module):
    """The sum of a product and of those of a low rank."""

    def __init__(
        self, base: Linear, narrow: Linear, wide: Sequence[Linear], place: MixerPlace
    ) -> None:
        """wide: of the parts of the product, each of which gets its part of what `narrow` makes."""
        super().__init__()
        self.base, self.narrow, self.wide = base, narrow, nn.ModuleList(wide)
        self._kernels = place.kernels.layers

    def forward(self, x: Tensor) -> Tensor:
        """x: [num_tokens, inputs]; returns [num_tokens, columns of `base`]."""
        narrow = self.narrow(x).chunk(len(self.wide), dim=1)
        parts = [wide(part) for wide, part in zip(self.wide, narrow, strict=True)]
        added = parts[0] if len(parts) == 1 else self._kernels.concatenate(parts)
        return self._kernels.add(self.base(x), added)


class SharedBlockMixer(nn.Module):
    """See `SharedBlockSpec`. Implements `decoder.PagedMixer`."""

    block: SharedBlock | None
    """None if an earlier layer of this rank has it."""

    def __init__(self, spec: SharedBlockSpec, place: MixerPlace) -> None:
        super().__init__()
        s, context, layout = spec, place.context, place.context.communicator.layout
        rank, full, inner = Shard.full(s.rank), Shard.full(place.size), s.inner(layout)
        self.attention = s.attention.build(place._replace(inputs=2 * place.size))
        shared = place.shared.get(s.block)
        if not isinstance(shared, SharedBlock):
            shared = place.shared[s.block] = SharedBlock(s, place, self.attention)
            self.block = shared
        else:
            self.block = None
        self._shared, self._kernels = shared, place.kernels.layers
        self.attention.output, self.attention.qkv = shared.output, shared.qkv
        if s.adapts_attention:
            heads = layout.even_shard(s.attention.num_heads, "attention heads")
            kv_heads = layout.kv_head_shard(s.attention.num_kv_heads)
            outputs = [part.times(s.attention.head_dim) for part in (heads, kv_heads, kv_heads)]
            self.attention.qkv = AdaptedProduct(
                shared.qkv,
                Linear(Shard.full(2 * place.size), [rank] * 3, bias=False, context=context),
                [Linear(rank, [part], bias=False, context=context) for part in outputs],
                place,
            )
        both = Linear(rank, consecutive([inner] * 2), bias=False, context=context, sources=[0] * 2)
        self.up = AdaptedProduct(
            shared.up, Linear(full, [rank], bias=False, context=context), [both], place
        )
        self.linear = Linear(full, [full], bias=False, context=context)
        self.mamba_norm = s.norm.build(place.size, context, place.kernels)
        self.mamba = s.mamba.build(place)
        self.paged, self._activation = self.attention.paged, ACTIVATIONS[s.activation]

    def forward(self, x: Tensor, inputs: LayerInputs) -> Tensor:
        """x: [num_tokens, size], the residual stream; returns the same shape."""
        (of_mamba,) = inputs.further
        attended = self.attention(self._rows(x, inputs), inputs)
        up = self.up(self._shared.feed_forward_norm(attended))
        y = self.linear(self._shared.down(self._kernels.act_and_mul(up, self._activation)))
        return self.mamba(self.mamba_norm(self._kernels.copy(x), y), of_mamba)

    def write_kv(self, x: Tensor, inputs: LayerInputs) -> Tensor:
        """Write the keys and values of rows to the layer's caches. Returns their queries."""
        return self.attention.write_kv(self._rows(x, inputs), inputs)

    def _rows(self, x: Tensor, inputs: LayerInputs) -> Tensor:
        """What attention gets: [num_tokens, 2 * size]."""
        assert inputs.embedding is not None, "the model keeps it"
        both = self._kernels.concatenate([x, inputs.embedding])
        rows: Tensor = self._shared.attention_norm(both)
        return rows
