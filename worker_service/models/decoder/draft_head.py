"""Draft heads: one layer that predicts tokens from hidden states of its target, the model for which
it was trained. `specs.DraftHeadSpec` describes a head as data.

Row t of a sequence has two inputs: the embedding of token t + 1, and a hidden state for token t.
For tokens that the target has computed, this state is the target's: a linear function of the inputs
of three of its layers at token t (EAGLE-3, Li et al. 2025), or what enters its LM head (multi-token
prediction, DeepSeek-AI 2024). For drafts, it is the head's own output of row t - 1. The output of
row t predicts token t + 2. Embedding and LM head are usually those of the target.

Since there is one layer, keys and values depend only on a row's inputs. Rows that predict nothing
therefore need only a small part of the head, `write_kv`.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pagewire_kernels.batch import StepBatch
from pagewire_kernels.select import Kernels
from worker_service.distributed.layout import Shard
from worker_service.models.decoder.layer import DecoderLayer
from worker_service.models.decoder.names import KV_SCALE_NAMES
from worker_service.models.decoder.specs import DecoderSettings, DraftHeadSpec, PagedMixer
from worker_service.models.interface import ModelContext, WeightTarget
from worker_service.models.kv_cache_spec import KVCacheSpec
from worker_service.models.layers.rotary import RotaryTables
from worker_service.models.linear.linear import Linear
from worker_service.models.linear.vocabulary import VocabEmbedding, VocabHead
from worker_service.models.native import LayerInputs, LoadableModule, NativeModel, part_targets


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadSettings:
    """Shape of a head."""

    spec: DraftHeadSpec
    decoder: DecoderSettings
    """Sizes of the head, as those of a decoder. The vocabulary is the target's."""

    captured_layers: tuple[int, ...]
    """The layers of the target whose inputs `fuse` gets, in this order; the number of layers stands
    for the input of the LM head."""

    draft_vocab_size: int
    has_embedding: bool
    has_head: bool
    """Whether the checkpoint has its own, or the target's are used."""


class DraftHead(LoadableModule):
    """A draft head. Without an embedding or LM head of its own, it uses those of the target; if
    these are sharded over several ranks, it has copies of them."""

    optional_names: re.Pattern[str] = re.compile(
        rf"d2t|t2d|.*rotary_emb\.inv_freq|{KV_SCALE_NAMES}"
    )

    def __init__(
        self, settings: HeadSettings, target: NativeModel, context: ModelContext, kernels: Kernels
    ) -> None:
        s, spec, size = settings.decoder, settings.spec, settings.decoder.hidden_size
        layer = spec.layer
        assert layer.attention is not None, "a head has both parts"
        super().__init__(s.architecture, context)
        self.vocab_size = s.vocab_size
        self.max_model_len = min(s.max_model_len, target.max_model_len)
        self.captured_layers = settings.captured_layers
        kept = layer.attention.kept(context, self.max_model_len)
        self.kv_cache_spec = KVCacheSpec(layers=kept, dtype=context.kv_dtype)
        inputs, rows = Shard.full(2 * size), [Shard.full(size)]
        self.fusion: Linear | None = None
        self.projection: Linear | None = None
        if "fusion" in spec.names:
            fused = Shard.full(len(settings.captured_layers) * target.hidden_size)
            self.fusion = Linear(fused, rows, bias=False, context=context)
        if "projection" in spec.names:
            self.projection = Linear(inputs, rows, bias=False, context=context)
        width = inputs.size if self.projection is None else size
        self._rotary_tables = RotaryTables(self.max_model_len, context)
        rotary = self._rotary_tables.table(layer.attention.rotary)
        self.layer = DecoderLayer(layer, size, context, kernels, rotary, attention_inputs=width)
        self.hidden_norm, self.norm = (layer.norm.build(size, context, kernels) for _ in range(2))
        norm = self.layer.attention_norm
        if "embedding_norm" in spec.names:
            norm = layer.norm.build(size, context, kernels)
        assert norm is not None, "each part of the layer has one before it"
        self.embedding_norm = norm
        self.embedding: VocabEmbedding | None = None
        self.head: VocabHead | None = None
        is_shared = target.communicator.layout.world_size > 1
        if settings.has_embedding or is_shared:
            self.embedding = VocabEmbedding(s.vocab_size, size, context, kernels.layers)
        if settings.has_head or is_shared:
            self.head = VocabHead(settings.draft_vocab_size, size, context, None)
        self._settings, self._spec = settings, spec
        self._target = [target]  # in a list: not a module of its own
        self._tokens: Tensor | None = None
        self.hidden_like = context.empty(0, size)
        """The dtype, device and width of hidden states."""

    def weight_targets(self) -> Iterator[WeightTarget]:
        """Destinations of the checkpoint's tensors."""
        if self.embedding is not None and self._settings.has_embedding:
            yield self.embedding.table_target(self._spec.embedding_name)
        if self.head is not None and self._settings.has_head:
            yield self.head.table_target(self._spec.head_name)
        yield from part_targets(self, self._spec.names, "")
        yield from self.layer.weight_targets(self._spec.layer_name)

    def copied_targets(self) -> Iterator[WeightTarget]:
        """Destinations of tensors of the target's checkpoint, by their canonical names there."""
        [target] = self._target
        if self.embedding is not None and not self._settings.has_embedding:
            yield self.embedding.table_target(target.embedding_name)
        if self.head is not None and not self._settings.has_head:
            yield self.head.table_target(target.head_name)

    def use_draft_vocabulary(self, tokens: Tensor) -> None:
        """Set the draft vocabulary. tokens: int64 [draft_vocab_size], the token id of each logit of
        the head."""
        self._tokens = tokens.to(self.hidden_like.device)

    def fuse(self, captured: Sequence[Tensor]) -> Tensor:
        """Compute the hidden states for tokens that the target has computed.

        captured: [num_tokens, hidden_size of the target] each, in the order of `captured_layers`.
        Returns [num_tokens, hidden_size].
        """
        if self.fusion is not None:
            return self.fusion(torch.cat([*captured], dim=1))
        [hidden] = captured
        return hidden

    def write_kv(self, batch: StepBatch, hidden: Tensor) -> None:
        """Write the keys and values of rows to the cache.

        batch: its tokens are those at `positions` + 1; hidden: [num_tokens, hidden_size], hidden
        states for the tokens at `positions`.
        """
        x, _ = self._attended(batch.token_ids, hidden)
        attention = self.layer.attention
        assert isinstance(attention, PagedMixer), "a head keeps no state"
        attention.write_kv(x, self._layer_inputs(batch))

    def forward(self, batch: StepBatch, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Run the head, which also writes keys and values; arguments as for `write_kv`.

        Returns the input of `compute_logits`, and the hidden states for the next rows if their
        tokens are drafts: [num_rows, hidden_size] each. Overwrites `hidden`.
        """
        x, residual = self._attended(batch.token_ids, hidden)
        x = self.layer.attend_and_mix(x, residual, self._layer_inputs(batch))
        output = self.norm(residual, x)
        # The hidden states of a target are residual streams for EAGLE-3, and normalized otherwise.
        return output, residual if self.projection is None else output

    def compute_logits(self, rows: Tensor) -> Tensor:
        """Compute logits: float32 [num_rows, vocab_size], minus infinity outside of the draft
        vocabulary. rows: [num_rows, hidden_size]."""
        logits: Tensor = (self.head or self._target[0].compute_logits)(rows)
        if self._tokens is None:
            return logits
        of_all = logits.new_full((len(rows), self.vocab_size), float("-inf"))
        of_all[:, self._tokens] = logits
        return of_all

    def _attended(self, token_ids: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return the inputs of the attention, and the residual stream."""
        embed = self.embedding or self._target[0].embedding
        assert embed is not None, "the target is a whole model"
        parts = [self.embedding_norm(embed(token_ids)), self.hidden_norm(hidden)]
        if self.projection is None:
            return torch.cat(parts, dim=1), parts[1] if self._spec.norms_residual else hidden
        residual = self.projection(torch.cat(parts, dim=1))
        norm = self.layer.attention_norm
        assert norm is not None, "as above"
        return norm(residual), residual

    def _layer_inputs(self, batch: StepBatch) -> LayerInputs:
        self._rotary_tables.fill(batch.positions)
        [caches], [metadata] = batch.caches, batch.attention
        return LayerInputs(batch.positions, caches, metadata)


class EagleHead(DraftHead):
    """A head of EAGLE-3, by the names in the authors' checkpoints."""

    @classmethod
    def canonical_name(cls, name: str) -> str:
        """vLLM's tools number the layer, and some add the prefix of a whole model."""
        return re.sub(r"^layers\.0\.", "midlayer.", name.removeprefix("model."))
