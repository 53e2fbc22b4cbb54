"""The EAGLE-3 draft head (Li et al. 2025): one layer that predicts tokens from hidden states of its
target, the model for which it was trained.

Row t of a sequence has two inputs: token t + 1, and a hidden state for token t. For tokens that the
target has computed, this state is a linear function of the inputs of three of the target's layers
at token t (the fused state); for drafts, it is the head's own output of row t - 1. The output of
row t predicts token t + 2. The embedding is usually that of the target, and logits are computed for
the draft vocabulary only, the most frequent tokens.

Since there is one layer, keys and values depend only on a row's inputs. Rows that predict nothing
therefore need only a small part of the head, `write_kv`.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from pagewire_kernels.batch import StepBatch
from pagewire_kernels.select import Kernels
from worker_service.distributed.layout import Shard
from worker_service.models.decoder import (
    DecoderLayer,
    DecoderSettings,
    PagedMixer,
    RotaryTables,
)
from worker_service.models.interface import ModelContext, WeightTarget
from worker_service.models.kv_cache_spec import KVCacheSpec
from worker_service.models.layers import norm_targets
from worker_service.models.linear import Linear, VocabEmbedding, VocabHead
from worker_service.models.native import LayerInputs, LoadableModule, NativeModel


@dataclass(frozen=True, kw_only=True, slots=True)
class EagleSettings:
    """Shape of a head."""

    decoder: DecoderSettings
    """Shape of the head, as that of a decoder of one layer. The vocabulary is the target's."""

    draft_vocab_size: int
    captured_layers: tuple[int, ...]
    """The layers of the target whose inputs are fused, in the order of the inputs of `fc`."""

    norm_before_residual: bool
    """Whether the residual stream starts with the normalized hidden state."""

    has_embedding: bool
    has_head: bool
    """Whether the checkpoint has its own, or the target's are used."""


class EagleHead(LoadableModule):
    """A draft head. Without an embedding or LM head of its own, it uses those of the target; if
    these are sharded over several ranks, it has copies of them."""

    optional_names: ClassVar[re.Pattern[str]] = re.compile(r"d2t|t2d|.*rotary_emb\.inv_freq")

    def __init__(
        self, settings: EagleSettings, target: NativeModel, context: ModelContext, kernels: Kernels
    ) -> None:
        s, size = settings.decoder, settings.decoder.hidden_size
        [layer] = s.layers
        assert layer.attention is not None, "as every layer of Llama"
        super().__init__(s.architecture, context)
        self.vocab_size = s.vocab_size
        self.max_model_len = min(s.max_model_len, target.max_model_len)
        self.captured_layers = settings.captured_layers
        kept = layer.attention.kept(context, self.max_model_len)
        self.kv_cache_spec = KVCacheSpec(layers=kept, dtype=context.kv_dtype)
        fused = Shard.full(len(settings.captured_layers) * target.hidden_size)
        self.fc = Linear(fused, [Shard.full(size)], bias=False, context=context)
        self.hidden_norm = layer.norm.build(size, context, kernels)
        rotary = RotaryTables(self.max_model_len, context).table(layer.attention.rotary)
        self.layer = DecoderLayer(layer, size, context, kernels, rotary, attention_inputs=2 * size)
        self.norm = layer.norm.build(size, context, kernels)
        self.embedding: VocabEmbedding | None = None
        self.head: VocabHead | None = None
        is_shared = target.communicator.layout.world_size > 1
        if settings.has_embedding or is_shared:
            self.embedding = VocabEmbedding(s.vocab_size, size, context, kernels.layers)
        if settings.has_head or is_shared:
            self.head = VocabHead(settings.draft_vocab_size, size, context, None)
        self._has_embedding, self._has_head = settings.has_embedding, settings.has_head
        self._norm_before_residual = settings.norm_before_residual
        self._target = [target]  # in a list: not a module of its own
        self._tokens: Tensor | None = None
        self.hidden_like = context.empty(0, size)
        """The dtype, device and width of hidden states."""

    def weight_targets(self) -> Iterator[WeightTarget]:
        """Destinations of the checkpoint's tensors, by their names in the authors' checkpoints."""
        if self.embedding is not None and self._has_embedding:
            yield self.embedding.table_target("embed_tokens.weight")
        if self.head is not None and self._has_head:
            yield self.head.table_target("lm_head.weight")
        yield from self.fc.targets("fc")
        yield from norm_targets("midlayer.hidden_norm", self.hidden_norm)
        yield from self.layer.weight_targets("midlayer")
        yield from norm_targets("norm", self.norm)

    def copied_targets(self) -> Iterator[WeightTarget]:
        """Destinations of tensors of the target's checkpoint, by their canonical names there."""
        [target] = self._target
        if self.embedding is not None and not self._has_embedding:
            yield self.embedding.table_target(target.embedding_name)
        if self.head is not None and not self._has_head:
            yield self.head.table_target(target.head_name)

    @classmethod
    def canonical_name(cls, name: str) -> str:
        """The name in the authors' checkpoints. vLLM's tools number the layer, and some add the
        prefix of a whole model."""
        return re.sub(r"^layers\.0\.", "midlayer.", name.removeprefix("model."))

    def use_draft_vocabulary(self, tokens: Tensor) -> None:
        """Set the draft vocabulary. tokens: int64 [draft_vocab_size], the token id of each logit of
        the head."""
        self._tokens = tokens.to(self.hidden_like.device)

    def fuse(self, captured: Sequence[Tensor]) -> Tensor:
        """Compute the hidden states for tokens that the target has computed.

        captured: [num_tokens, hidden_size of the target] each, in the order of `captured_layers`.
        Returns [num_tokens, hidden_size].
        """
        return self.fc(torch.cat([*captured], dim=1))

    def write_kv(self, batch: StepBatch, hidden: Tensor) -> None:
        """Write the keys and values of rows to the cache.

        batch: its tokens are those at `positions` + 1; hidden: [num_tokens, hidden_size], hidden
        states for the tokens at `positions`.
        """
        x, _ = self._attended(batch.token_ids, hidden)
        attention = self.layer.attention
        assert isinstance(attention, PagedMixer), "as every layer of Llama"
        attention.write_kv(x, _layer_inputs(batch))

    def forward(self, batch: StepBatch, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Run the head, which also writes keys and values; arguments as for `write_kv`.

        Returns the input of `compute_logits`, and the hidden states for the next rows if their
        tokens are drafts: [num_rows, hidden_size] each. Overwrites `hidden`.
        """
        x, residual = self._attended(batch.token_ids, hidden)
        x = self.layer.attend_and_mix(x, residual, _layer_inputs(batch))
        return self.norm(residual, x), residual

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
        norm, normed = self.layer.attention_norm, self.hidden_norm(hidden)
        assert norm is not None, "as every layer of Llama"
        inputs = torch.cat([norm(embed(token_ids)), normed], dim=1)
        return inputs, normed if self._norm_before_residual else hidden


def _layer_inputs(batch: StepBatch) -> LayerInputs:
    [caches], [metadata] = batch.caches, batch.attention
    return LayerInputs(batch.positions, caches, metadata)
