"""A decoder: its embeddings, its layers and its head."""

import re
from collections.abc import Iterator, Sequence
from itertools import accumulate, chain

from torch import Tensor, nn

from pagewire_kernels.batch import StepBatch
from pagewire_kernels.select import Kernels
from worker_service.distributed.layout import Shard
from worker_service.errors import InvalidOption
from worker_service.models.decoder.altup import Streams
from worker_service.models.decoder.hyper import HyperStreams
from worker_service.models.decoder.inputs import InputParts
from worker_service.models.decoder.layer import DecoderLayer
from worker_service.models.decoder.names import KV_SCALE_NAMES, canonical_name, unused_names
from worker_service.models.decoder.per_layer import KeptEmbedding, LayerEmbeddings
from worker_service.models.decoder.specs import DecoderSettings, LayerSpec, PagedMixer
from worker_service.models.interface import ModelContext, WeightTarget
from worker_service.models.kv_cache_spec import KVCacheSpec
from worker_service.models.layers.paged_attention import PagedAttention
from worker_service.models.linear.linear import Linear
from worker_service.models.native import LayerInputs, ModelSettings, NativeModel


class DecoderModel(NativeModel):
    """A decoder of any family."""

    optional_names: re.Pattern[str] = re.compile(
        rf"lm_head\.weight|.*rotary_emb\.inv_freq|.*\.(attn|attention)\.(masked_)?bias|{KV_SCALE_NAMES}"
    )
    """Among them causal masks, which old checkpoints hold."""

    embedding_name = "model.embed_tokens.weight"
    layers_name = "model.layers"

    @classmethod
    def canonical_name(cls, name: str) -> str:
        return canonical_name(name)

    def __init__(
        self,
        settings: DecoderSettings,
        max_model_len: int,
        context: ModelContext,
        kernels: Kernels,
    ) -> None:
        super().__init__(settings, max_model_len, context, kernels)
        s, layout = settings, context.communicator.layout
        self.norm_name, self.unused_names = s.norm_name, unused_names(s)
        if s.has_head_bias:  # a model that makes vectors has no head
            self.optional_names = re.compile(rf"{self.optional_names.pattern}|lm_head\.bias")
        if s.draft_head is not None:
            self.head_names = re.compile(s.draft_head.tensor_names)
        self.logits_scale, self.logits_soft_cap = s.logits_scale, s.logits_soft_cap
        self._sources = s.sources
        here = self._layer_range
        others = (*s.layers[: here.start], *s.layers[here.stop :])
        self.names_elsewhere = _whole_names(others) - _whole_names(s.layers[here.start : here.stop])
        self.inputs = InputParts(s, context, kernels)
        self.virtual_token_size = self.inputs.virtual_token_size
        if s.scales_virtual_tokens:
            self.virtual_token_scale = self.inputs.scale
        tables, shared = self.rotary_tables, dict[int, nn.Module]()
        for layer in (s.layers[i] for i in self._layer_range):
            rotary = None if layer.attention is None else tables.table(layer.attention.rotary)
            self.layers.append(
                DecoderLayer(
                    layer,
                    s.hidden_size,
                    context,
                    kernels,
                    rotary,
                    is_transposed=s.is_transposed,
                    shared=shared,
                )
            )
        self.streams: Streams | HyperStreams | None = None
        if s.altup is not None:
            self.streams = Streams(s.altup, s.hidden_size, context, kernels.layers)
            self._received_width *= s.altup.num_streams
        if s.hyper_connections is not None:
            spec = s.hyper_connections
            self.streams = HyperStreams(spec, s.hidden_size, context, kernels.layers)
            self._received_width *= spec.num_streams
        self.layer_embeddings: LayerEmbeddings | KeptEmbedding | None = None
        if s.keeps_embedding:
            self.layer_embeddings = KeptEmbedding(s.hidden_size, context, kernels)
            self._received_width += self.layer_embeddings.received_width
        if s.per_layer is not None:
            mixer = s.layers[self._layer_range.start].attention
            table = None if mixer is None else tables.table(mixer.rotary)
            assert table is not None, "these models have no other layers"
            self.layer_embeddings = LayerEmbeddings(
                s.per_layer, s.num_layers, self._layer_range, s.hidden_size, table, context, kernels
            )
            self._received_width += self.layer_embeddings.received_width
        self._received_like = context.empty(self._received_width)
        self.project_out: Linear | None = None
        if layout.is_last_stage:
            if s.final_norm is not None:
                self.norm = s.final_norm.build(s.hidden_size, context, kernels)
            if s.embedding_size != s.hidden_size:
                inner, size = Shard.full(s.hidden_size), Shard.full(s.embedding_size)
                self.project_out = Linear(inner, [size], bias=False, context=context)

    def _cache_spec(
        self, settings: ModelSettings, max_model_len: int, context: ModelContext
    ) -> KVCacheSpec:
        assert isinstance(settings, DecoderSettings)
        kept = [
            [*chain.from_iterable(part.kept(context, max_model_len) for part in layer.mixers)]
            for layer in settings.layers
        ]
        ends = [0, *accumulate(map(len, kept))]  # before each layer, and at the end
        return KVCacheSpec(
            layers=tuple(chain.from_iterable(kept)),
            dtype=context.kv_dtype,
            stage=range(ends[self._layer_range.start], ends[self._layer_range.stop]),
        )

    def embed(self, batch: StepBatch) -> Tensor:
        assert self.embedding is not None
        return self.inputs(self.embedding(batch.token_ids), batch, self.adapters)

    def layer_inputs(self, batch: StepBatch) -> Iterator[LayerInputs]:
        found = list(super().layer_inputs(batch))
        start = self._layer_range.start
        for i, inputs in enumerate(found):
            source = self._sources[start + i]
            inputs = inputs if source is None else found[source - start]
            if self.layer_embeddings is not None:
                inputs = inputs._replace(embedding=self.layer_embeddings.of_layer(i))
            yield inputs

    def run_layers(self, residual: Tensor, batch: StepBatch) -> Tensor:
        embeddings = self.layer_embeddings
        if embeddings is not None:
            residual = embeddings.begin(residual, batch)
        if self.streams is not None and self.communicator.layout.is_first_stage:
            residual = self.streams.expand(residual)
        x = super().run_layers(residual, batch)
        if embeddings is not None:
            x = embeddings.end(x)
        return x if self.project_out is None else self.project_out(x)

    def finish(self, residual: Tensor, x: Tensor | None) -> Tensor:
        if self.streams is None or self.norm is None:
            return super().finish(residual, x)
        normed: Tensor = self.norm(self.streams.reduce(residual))
        return normed

    def capture(self, layers: Sequence[int]) -> None:
        if self.streams is not None:
            raise InvalidOption(
                f"speculative: expected no head for {self.architecture}, whose residual stream"
                " consists of several"
            )
        super().capture(layers)

    def _apply_head(self, hidden_states: Tensor) -> Tensor:
        logits = super()._apply_head(hidden_states)
        if not self.communicator.layout.samples:
            return logits
        kernels, cap = self._kernels.layers, self.logits_soft_cap
        if self.logits_scale != 1.0:
            logits = kernels.scale(logits, self.logits_scale)
        return logits if cap is None else kernels.soft_cap(logits, cap)

    def weight_targets(self) -> Iterator[WeightTarget]:
        yield from super().weight_targets()
        yield from self.inputs.weight_targets()
        if self.layer_embeddings is not None:
            yield from self.layer_embeddings.weight_targets()
        if self.streams is not None:
            yield from self.streams.weight_targets()
        if self.project_out is not None:
            yield from self.project_out.targets("model.project_out")

    def kv_scale_holders(self) -> Iterator[tuple[str, PagedAttention]]:
        for name, layer in self.named_layers():
            assert isinstance(layer, DecoderLayer)
            source = self._sources[int(name.rpartition(".")[2])]
            holder = name if source is None else f"{self.layers_name}.{source}"
            holders = {f"{holder}.self_attn": layer}
            if layer.second is not None:
                holders = {f"{holder}.self_attn.0": layer, f"{holder}.self_attn.1": layer.second}
            for attention_name, part in holders.items():
                if isinstance(part.attention, PagedMixer):
                    yield attention_name, part.attention.paged


def _whole_names(layers: Sequence[LayerSpec]) -> frozenset[str]:
    """Names of layers' modules that do not depend on the layer's number."""
    names = chain.from_iterable(stored.split() for x in layers for stored in x.names.values())
    return frozenset(name for name in names if name.startswith("model."))
