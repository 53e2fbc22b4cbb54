"""A decoder: its embeddings, its layers and its head."""

import re
from collections.abc import Iterator, Sequence
from itertools import accumulate, chain
from typing import ClassVar

import torch
from torch import Tensor

from pagewire_kernels.batch import StepBatch
from pagewire_kernels.select import Kernels
from worker_service.distributed.layout import Shard
from worker_service.errors import InvalidOption
from worker_service.models.decoder.altup import Streams
from worker_service.models.decoder.layer import DecoderLayer
from worker_service.models.decoder.per_layer import (
    PerLayerEmbeddings,
)
from worker_service.models.decoder.specs import DecoderSettings, PagedMixer
from worker_service.models.interface import ModelContext, WeightTarget
from worker_service.models.kv_cache_spec import KVCacheSpec
from worker_service.models.layers.norms import LayerNorm, RMSNorm, norm_targets
from worker_service.models.layers.paged_attention import PagedAttention
from worker_service.models.layers.rotary import RotaryTables
from worker_service.models.linear.linear import Linear
from worker_service.models.native import (
    LayerInputs,
    ModelSettings,
    NativeModel,
)

KV_SCALE_NAMES = r".*\.self_attn\.(?:[kv]_proj\.)?[kv]_scale"
"""Canonical names of the scales of keys and values in an fp8 cache, one number each."""

_NAMES = """
embed_tokens     wte word_embeddings embed_in embeddings
embed_positions  wpe
embedding_norm   word_embeddings_layernorm
layers           h blocks
norm             ln_f final_layer_norm norm_f final_layernorm final_norm
project_in
project_out
embed_tokens_per_layer
per_layer_model_projection
per_layer_projection_norm
altup_projections
altup_unembed_projections
"""
"""Names of the modules of a model, which are the canonical ones after `model.`, and of the same
modules in other families."""

_CANONICAL = {
    name: names[0] for names in map(str.split, _NAMES.strip().splitlines()) for name in names
}
_DENSE_MLP = re.compile(r"\.block_sparse_moe\.(?=(?:gate|up|down)_proj\.)")
"""The module of an MLP in place of experts, as transformers writes Kimi Linear."""

_MODULE = re.compile(r"(?:(?:model|transformer|gpt_neox|backbone)\.)?(?:decoder\.)?(\w+)(\..+)")


class DecoderModel(NativeModel):
    """A decoder of any family."""

    optional_names: ClassVar[re.Pattern[str]] = re.compile(
        rf"lm_head\.weight|.*rotary_emb\.inv_freq|.*\.(attn|attention)\.(masked_)?bias|{KV_SCALE_NAMES}"
    )
    """Among them causal masks, which old checkpoints hold."""

    embedding_name = "model.embed_tokens.weight"
    layers_name = "model.layers"

    @classmethod
    def canonical_name(cls, name: str) -> str:
        """Llama's name, whether or not the checkpoint has an LM head, whose names have a prefix."""
        match = _MODULE.fullmatch(name := _DENSE_MLP.sub(".mlp.", name))
        if match is not None and match[1] == "embed_out":
            return f"lm_head{match[2]}"
        if match is None or match[1] not in _CANONICAL:
            return name
        return f"model.{_CANONICAL[match[1]]}{match[2]}"

    def __init__(
        self,
        settings: DecoderSettings,
        max_model_len: int,
        context: ModelContext,
        kernels: Kernels,
    ) -> None:
        super().__init__(settings, max_model_len, context, kernels)
        s, layout = settings, context.communicator.layout
        self.norm_name = s.norm_name
        self._embedding_scale = torch.tensor(s.embedding_scale, dtype=context.dtype).item()
        has_none = s.per_layer is not None or s.scales_virtual_tokens is None
        self.virtual_token_size = None if has_none else s.embedding_size
        self.virtual_token_scale = self._embedding_scale if s.scales_virtual_tokens else 1.0
        self._logits_scale = s.logits_scale
        self._logits_soft_cap = s.logits_soft_cap
        self._position_offset = s.position_offset or 0
        self._sources = s.sources
        unused = [r"mtp\..*"]
        shared = "|".join(str(i) for i, source in enumerate(s.sources) if source is not None)
        if shared:  # checkpoints may hold what transformers would not use
            unused.append(rf"model\.layers\.(?:{shared})\.self_attn\.[kv]_(?:proj|norm)\..*")
        if s.ignores_further_layers:
            ours = "|".join(map(str, range(s.num_layers)))
            unused.append(rf"model\.layers\.(?!(?:{ours})\.)\d+\..*")
        self.unused_names = re.compile("|".join(unused))
        if s.draft_head is not None:
            self.head_names = re.compile(s.draft_head.tensor_names)
        self.position_embedding: Tensor | None = None
        self.embedding_norm: RMSNorm | LayerNorm | None = None
        self.project_in: Linear | None = None
        self.project_out: Linear | None = None
        projects = s.embedding_size != s.hidden_size
        size, inner = Shard.full(s.embedding_size), Shard.full(s.hidden_size)
        if layout.is_first_stage:
            if s.position_offset is not None:
                num_positions = s.max_model_len + s.position_offset
                self.position_embedding = context.empty(num_positions, s.hidden_size)
            if s.embedding_norm is not None:
                self.embedding_norm = s.embedding_norm.build(s.hidden_size, context, kernels)
            if projects:
                self.project_in = Linear(size, [inner], bias=False, context=context)
        tables = RotaryTables(max_model_len, context)
        for layer in (s.layers[i] for i in self._layer_range):
            mixer = layer.attention
            rotary = None if mixer is None else tables.table(mixer.rotary)
            self.layers.append(
                DecoderLayer(
                    layer, s.hidden_size, context, kernels, rotary, is_transposed=s.is_transposed
                )
            )
        self.streams: Streams | None = None
        width = s.hidden_size
        if s.altup is not None:
            self.streams = Streams(s.altup, s.hidden_size, context, kernels.layers)
            width *= s.altup.num_streams
        self.per_layer: PerLayerEmbeddings | None = None
        self._per_layer_size = 0 if s.per_layer is None else s.per_layer.size
        self._embeddings: Tensor | None = None
        """[num_tokens, num_layers * size], those of this stage's layers and later ones."""
        following = s.num_layers - self._layer_range.start
        self._received_width = width + following * self._per_layer_size
        self._received_like = context.empty(self._received_width)
        if s.per_layer is not None and layout.is_first_stage:
            mixers = (layer.attention for layer in s.layers if layer.attention is not None)
            table = tables.table(next(mixers).rotary)
            assert table is not None
            self.per_layer = PerLayerEmbeddings(
                s.per_layer, s.num_layers, s.hidden_size, table, context, kernels.layers
            )
        if layout.is_last_stage:
            if s.final_norm is not None:
                self.norm = s.final_norm.build(s.hidden_size, context, kernels)
            if projects:
                self.project_out = Linear(inner, [size], bias=False, context=context)

    def _cache_spec(
        self, settings: ModelSettings, max_model_len: int, context: ModelContext
    ) -> KVCacheSpec:
        assert isinstance(settings, DecoderSettings)
        mixers = [layer.attention for layer in settings.layers]
        kept = [() if part is None else part.kept(context, max_model_len) for part in mixers]
        ends = [0, *accumulate(map(len, kept))]  # before each layer, and at the end
        return KVCacheSpec(
            layers=tuple(chain.from_iterable(kept)),
            dtype=context.kv_dtype,
            stage=range(ends[self._layer_range.start], ends[self._layer_range.stop]),
        )

    def embed(self, batch: StepBatch) -> Tensor:
        assert self.embedding is not None
        x = self.embedding(batch.token_ids)
        if self._embedding_scale != 1.0:
            x = self._kernels.layers.scale(x, self._embedding_scale)
        if batch.has_virtual_tokens and self.adapters is not None:
            x = self.adapters.put_prompts(x, batch)
        if self.project_in is not None:
            x = self.project_in(x)
        if self.position_embedding is not None:
            positions = self.position_embedding[self._position_offset :]
            x = self._kernels.layers.embed(positions, batch.positions, x)
        return x if self.embedding_norm is None else self.embedding_norm(x)

    def layer_inputs(self, batch: StepBatch) -> Iterator[LayerInputs]:
        found = list(super().layer_inputs(batch))
        start = self._layer_range.start
        for i, inputs in zip(self._layer_range, found, strict=True):
            source = self._sources[i]
            inputs = inputs if source is None else found[source - start]
            if self._embeddings is not None:
                size = self._per_layer_size
                first = (i - start) * size
                inputs = inputs._replace(embedding=self._embeddings[:, first : first + size])
            yield inputs

    def run_layers(self, residual: Tensor, batch: StepBatch) -> Tensor:
        layout, size = self.communicator.layout, self._per_layer_size
        following = (self.num_layers - self._layer_range.start) * size
        if self.per_layer is not None:
            self._embeddings = self.per_layer(batch.token_ids, residual, batch.positions)
        elif size:
            residual, self._embeddings = residual.tensor_split([-following], dim=1)
        if self.streams is not None and layout.is_first_stage:
            residual = self.streams.expand(residual)
        x = super().run_layers(residual, batch)
        embeddings, self._embeddings = self._embeddings, None
        if embeddings is not None and not layout.is_last_stage:
            x = torch.cat([x, embeddings[:, len(self._layer_range) * size :]], dim=1)
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
        kernels, cap = self._kernels.layers, self._logits_soft_cap
        if self._logits_scale != 1.0:
            logits = kernels.scale(logits, self._logits_scale)
        return logits if cap is None else kernels.soft_cap(logits, cap)

    def weight_targets(self) -> Iterator[WeightTarget]:
        yield from super().weight_targets()
        if self.per_layer is not None:
            yield from self.per_layer.weight_targets()
        if self.streams is not None:
            yield from self.streams.weight_targets()
        if self.position_embedding is not None:
            yield WeightTarget("model.embed_positions.weight", self.position_embedding)
        if self.embedding_norm is not None:
            yield from norm_targets("model.embedding_norm", self.embedding_norm)
        for name in ("project_in", "project_out"):
            if (linear := getattr(self, name)) is not None:
                yield from linear.targets(f"model.{name}")

    def kv_scale_holders(self) -> Iterator[tuple[str, PagedAttention]]:
        for name, layer in self.named_layers():
            assert isinstance(layer, DecoderLayer)
            source = self._sources[int(name.rpartition(".")[2])]
            holder = name if source is None else f"{self.layers_name}.{source}"
            if isinstance(layer.attention, PagedMixer):
                yield f"{holder}.self_attn", layer.attention.paged
