"""A `transformers` model that implements `interface.Model`."""

import copy
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import MoeModelOutputWithPast

from pagewire_kernels.batch import AttentionMetadata
from worker_service.errors import UnsupportedModel
from worker_service.models.interface import KVCacheSpec, ModelContext
from worker_service.models.transformers_backend.attention import (
    AttentionCall,
    AttentionState,
    attach,
    cache_spec,
)
from worker_service.models.transformers_backend.batch_invariant import InvariantOps
from worker_service.models.transformers_backend.packed import Tables


class TransformersModel:
    """A `transformers` model over a paged cache; see `interface.Model`."""

    def __init__(
        self,
        causal_lm: Any,
        state: AttentionState,
        architecture: str,
        max_model_len: int,
        context: ModelContext,
        num_parameters: int,
        tables: Tables,
    ) -> None:
        self.architecture = architecture
        self.max_model_len = max_model_len
        self.vocab_size = int(causal_lm.config.get_text_config().vocab_size)
        self.num_parameters = num_parameters
        attach(causal_lm, state)
        self._state = state
        self._decoder = causal_lm.base_model
        self._head = _head_alone(causal_lm)
        self._ops: AbstractContextManager[Any] = nullcontext()
        if context.device.type == "cpu" or context.needs_fixed_products:
            self._ops = InvariantOps(context.device.type, tables)
        self.kv_cache_spec = self._try_out(causal_lm.config.get_text_config(), context)

    @torch.inference_mode()
    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        kv_cache: Tensor,
        metadata: AttentionMetadata,
    ) -> Tensor:
        """Last hidden states of all rows, [num_tokens, hidden_size]."""
        self._state.kv_cache, self._state.metadata = kv_cache, metadata
        try:
            return self._run(token_ids, positions)
        finally:
            self._state.kv_cache = self._state.metadata = None

    @torch.inference_mode()
    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """Logits of the model's own head: float32 [num_rows, vocab_size]."""
        with self._ops:
            output = self._head(inputs_embeds=hidden_states.unsqueeze(0), use_cache=False)
        logits: Tensor = output.logits
        return logits[0].float()

    def _run(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        with self._ops:
            output = self._decoder(
                input_ids=token_ids.unsqueeze(0),
                position_ids=positions.unsqueeze(0),
                use_cache=False,
            )
        hidden: Tensor = output.last_hidden_state
        return hidden[0]

    @torch.inference_mode()
    def _try_out(self, config: Any, context: ModelContext) -> KVCacheSpec:
        """Run two tokens without a cache, and derive the cache's shape from the attention calls."""
        tokens = torch.zeros(2, dtype=torch.int64, device=context.device)
        calls: list[AttentionCall] = []
        self._state.calls = calls
        try:
            self._run(tokens, torch.arange(2, device=context.device))
        except Exception as error:  # whatever a model's own code raises when run in this way
            raise UnsupportedModel(
                f"{self.architecture} cannot be served: a trial run failed with"
                f" {type(error).__name__}: {error}"
            ) from error
        spec = cache_spec(self.architecture, config, calls)
        return spec if context.cache_dtype is None else replace(spec, dtype=context.cache_dtype)


@dataclass
class _DecoderOutput(MoeModelOutputWithPast):
    """Every field that a head reads from its decoder's output."""

    cross_attentions: Any = None


class _PassThrough(nn.Module):
    """Replaces the decoder; returns the hidden states that it is called with."""

    def forward(self, *absent: None, inputs_embeds: Tensor, **others: Any) -> _DecoderOutput:
        return _DecoderOutput(last_hidden_state=inputs_embeds)


def _head_alone(causal_lm: Any) -> nn.Module:
    """The model without its decoder: its own code computes logits from hidden states, with any
    scales and caps that it has."""
    head: nn.Module = copy.copy(causal_lm)
    head._modules = dict(causal_lm._modules)
    head._modules[causal_lm.base_model_prefix] = _PassThrough()
    return head
