"""What a family of decoders is: a `DecoderSettings`, which says which parts a layer has, where its
norms are, how it sees positions, and what its tensors are called.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from itertools import chain
from typing import Protocol, runtime_checkable

from torch import Tensor, nn

from pagewire_kernels.select import Kernels
from worker_service.distributed.layout import Layout
from worker_service.errors import InvalidOption
from worker_service.models.decoder.altup import AltUpSpec
from worker_service.models.decoder.hyper import HyperConnectionsSpec
from worker_service.models.decoder.per_layer import PerLayerSpec
from worker_service.models.interface import ModelContext
from worker_service.models.kv_cache_spec import LayerKV, LayerState
from worker_service.models.layers.norms import NormSpec
from worker_service.models.layers.paged_attention import PagedAttention
from worker_service.models.layers.rotary import RotarySettings
from worker_service.models.mixers.attention import AttentionSpec
from worker_service.models.native import LayerInputs, MixerPlace, ModelSettings


class NormPlace(Enum):
    """Where the norms of a layer are."""

    BEFORE = auto()
    """Before each part, whose output is added to the residual stream; that of the feed-forward part
    has a norm of its own if `LayerSpec.names` has one."""

    AROUND = auto()
    """Before each part, and of its output."""

    AFTER = auto()
    """Of the output of each part alone."""

    AFTER_SUM = auto()
    """Of the sum of each part's output and the residual stream, which continues with it."""


class Mixer(Protocol):
    """The module that a `MixerSpec` builds."""

    def __call__(self, x: Tensor, inputs: LayerInputs) -> Tensor:
        """x: [num_tokens, inputs]; returns [num_tokens, size]."""


@runtime_checkable
class PagedMixer(Mixer, Protocol):
    """Attention over the paged cache."""

    paged: PagedAttention

    def write_kv(self, x: Tensor, inputs: LayerInputs) -> Tensor:
        """Write what rows leave in the layer's caches. Returns their queries."""


class MixerSpec(Protocol):
    """How the tokens of a sequence affect each other in a layer: attention, of keys and values or
    of latents, or a part that keeps a state, such as a convolution."""

    @property
    def rotary(self) -> RotarySettings | None:
        """Of the table that `build` expects; None: there is none."""

    def require_shards(self, layout: Layout) -> None:
        """Raise InvalidOption unless the ranks can share the part."""

    def kept(self, context: ModelContext, max_model_len: int) -> tuple[LayerKV | LayerState, ...]:
        """What a rank keeps of a sequence: keys and values, a state, or both."""

    def build(self, place: MixerPlace) -> Mixer:
        """The part, a `nn.Module`. `LayerSpec.names` lists its attributes that have tensors."""


class FeedForwardSpec(Protocol):
    """What follows attention in a layer."""

    @property
    def activation(self) -> str | None:
        """The activation's name in `config.json`; None for one whose parameters are learned."""

    def require_shards(self, layout: Layout) -> None:
        """Raise InvalidOption unless the ranks can share the part."""

    def build(self, size: int, context: ModelContext, kernels: Kernels) -> nn.Module:
        """The part: a module that maps rows, [num_tokens, size], to rows of this shape, the same on
        every rank. `LayerSpec.names` lists its attributes that have tensors: linear layers, norms,
        or others that are `native.HasTargets`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerSpec:
    """A layer: two parts, or one of them."""

    attention: MixerSpec | None
    """Attention, or another part in its place."""

    feed_forward: FeedForwardSpec | None
    norm: NormSpec
    names: Mapping[str, str]
    """Names of the checkpoint's tensors within the layer, by the path of attributes from
    `DecoderLayer`; see `native.part_targets`."""

    output_norm: NormSpec | None = None
    """That of the outputs of parts; None: as `norm`."""

    norm_place: NormPlace = NormPlace.BEFORE
    norms_attention: bool = True
    """Whether attention gets the norm of the residual stream, not the stream itself."""

    norms_feed_forward: bool = True
    """Whether the feed-forward part gets the norm of the residual stream, not the stream itself."""

    is_parallel: bool = False
    """Whether the feed-forward part has the input of attention, not its output. It shares the norm
    of attention if `names` has none of its own."""

    residual_multiplier: float = 1.0
    """The factor of what is added to the residual stream."""

    per_layer: PerLayerSpec | None = None
    """The embedding that the layer has of its own, if it has one."""

    has_scalar: bool = False
    """Whether the residual stream is multiplied by a number behind the layer."""

    altup: AltUpSpec | None = None
    """The streams of which the residual stream consists, if there are several. The layer has norms
    around both parts, and an embedding of its own."""

    hyper_connections: HyperConnectionsSpec | None = None
    """The streams of which the residual stream consists, if parts read weighted sums of them. The
    layer has norms before both parts, and behind them if it has any there."""

    second: "LayerSpec | None" = None
    """A layer behind this one that is part of it, whose names are among `names`."""

    shortcut: FeedForwardSpec | None = None
    """A part beside the feed-forward part, with the same input, whose output is added behind the
    second layer (shortcut-connected mixture of experts, Cai et al. 2024)."""

    @property
    def mixers(self) -> tuple[MixerSpec, ...]:
        """Of this layer and of the second one."""
        mixers = (self.attention, None if self.second is None else self.second.attention)
        return tuple(mixer for mixer in mixers if mixer is not None)

    @property
    def feed_forwards(self) -> tuple[FeedForwardSpec, ...]:
        """What follows attention in both, and beside them."""
        second = None if self.second is None else self.second.feed_forward
        parts = (self.feed_forward, second, self.shortcut)
        return tuple(part for part in parts if part is not None)


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftHeadSpec:
    """A head that drafts tokens for a decoder; see `draft_head.py`."""

    layer: LayerSpec
    layer_name: str
    """Canonical name of the layer."""

    names: Mapping[str, str]
    """Canonical names by attributes of `DraftHead`: `hidden_norm`, `norm` before the LM head, and
    those that there are of `fusion` (of captured hidden states), `embedding_norm` (otherwise that
    before the layer's attention) and `projection` (of embedding and hidden state to the layer's
    input; otherwise its attention reads both)."""

    tensor_names: str
    """A pattern of the canonical names of all its tensors."""

    embedding_name: str
    head_name: str
    """Canonical names of the weights of its own embedding and LM head, if it has them."""

    norms_residual: bool = False
    """Without a projection: whether the residual stream starts with the normalized hidden state."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderSettings(ModelSettings):
    """Shape of a decoder."""

    layers: tuple[LayerSpec, ...]
    final_norm: NormSpec | None
    embedding_norm: NormSpec | None = None
    embedding_scale: float = 1.0
    """The factor of embeddings, which is rounded to their dtype."""

    scales_virtual_tokens: bool | None = False
    """Whether it applies to embeddings that stand in place of those of tokens, too; None: there can
    be none."""

    logits_scale: float = 1.0
    logits_soft_cap: float | None = None
    """The limit that logits approach; None: there is none."""

    position_offset: int | None = None
    """The row of the table of learned positions for position 0; None: there is no table."""

    norm_name: str = "model.norm"
    """Canonical name of the norm after the last layer."""

    draft_head: DraftHeadSpec | None = None
    """The head in the model's own checkpoint that drafts tokens, if one is read."""

    ignores_further_layers: bool = False
    """Whether checkpoints may hold layers after the last one, which predict further tokens, and
    which the model itself does not use."""

    unused_names: str | None = None
    """A pattern of the canonical names of further tensors that the model does not use."""

    is_transposed: bool = False
    """Whether the checkpoint stores the weights of layers as [in_features, out_features]."""

    per_layer: PerLayerSpec | None = None
    """The embeddings that layers have of their own, if they have some."""

    altup: AltUpSpec | None = None
    """See `LayerSpec`."""

    hyper_connections: HyperConnectionsSpec | None = None
    """See `LayerSpec`."""

    keeps_embedding: bool = False
    """Whether every layer gets the input of the first one, as `LayerInputs.embedding`."""

    @property
    def activations(self) -> set[str]:
        parts = chain.from_iterable(layer.feed_forwards for layer in self.layers)
        return {part.activation for part in parts if part.activation is not None}

    @property
    def sources(self) -> list[int | None]:
        """Of each layer, the layer whose keys and values it attends to; None: its own, if any."""
        mixers = (layer.attention for layer in self.layers)
        return [part.source if isinstance(part, AttentionSpec) else None for part in mixers]

    def require_shards(self, layout: Layout) -> None:
        ModelSettings.require_shards(self, layout)
        self._require_stages(layout)
        for layer in self.layers:
            for mixer in layer.mixers:
                mixer.require_shards(layout)
            for part in layer.feed_forwards:
                part.require_shards(layout)

    def _require_stages(self, layout: Layout) -> None:
        """Raise InvalidOption if layers need what another stage has."""
        num_stages = layout.pipeline_parallel_size
        first_layer = layout.layer_range(self.num_layers).start
        for layer in layout.layer_range(self.num_layers):
            source = self.sources[layer]
            if source is not None and source < first_layer:
                raise InvalidOption(
                    f"pipeline_parallel_size: layer {layer} attends to keys and values of layer"
                    f" {source}, which {num_stages} stages separate"
                )
