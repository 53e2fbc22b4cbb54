"""The attention function that `transformers` calls, and the shape of the KV cache it needs."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from pagewire_kernels.batch import AttentionMetadata
from pagewire_kernels.interface import AttentionBackend
from worker_service.errors import UnsupportedModel
from worker_service.models.interface import KVCacheSpec

NAME = "pagewire"
"""Our attention function's name in a model's configuration."""

_STATE = "pagewire_state"


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionCall:
    """One layer's call, as a trial run recorded it."""

    layer: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    sliding_window: int | None
    is_causal: bool
    unknown_arguments: tuple[str, ...]
    """Arguments with a value that we do not support."""


@dataclass(slots=True)
class AttentionState:
    """The state that one model's attention function reads; set at each step."""

    backend: AttentionBackend
    kv_cache: Tensor | None = None
    metadata: AttentionMetadata | None = None
    calls: list[AttentionCall] = field(default_factory=list)
    """Filled while there is no cache: a trial run."""


def attach(model: nn.Module, state: AttentionState) -> None:
    """Set `state` on all modules of `model`, and register our function with `transformers`.

    No function for masks is registered: the kernel knows which positions a row attends to, and to
    prepare a mask the library would read the positions on the host.
    """
    AttentionInterface.register(NAME, attention_forward)
    for module in model.modules():
        setattr(module, _STATE, state)


# Arguments that do not change the result: positions are in keys and queries already, and other
# implementations use the rest.
_IDLE_ARGUMENTS = frozenset(
    {
        "cache_position",
        "cache_positions",
        "logits_to_keep",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "position_embeddings",
        "position_ids",
        "return_dict",
        "use_cache",
    }
)


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Store keys and values, and attend over the cache.

    query: [1, num_heads, num_tokens, head_dim]; key, value: [1, num_kv_heads, num_tokens,
    head_dim]. Returns [1, num_tokens, num_heads, head_dim] and no weights.
    """
    state: AttentionState = getattr(module, _STATE)
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    if state.kv_cache is None or state.metadata is None:
        unknown = [
            name
            for name, given in [("attention_mask", attention_mask), *others.items()]
            if name not in _IDLE_ARGUMENTS and given is not None and given is not False
        ]
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        state.calls.append(
            AttentionCall(
                layer=layer,
                num_kv_heads=key.shape[1],
                key_dim=key.shape[3],
                value_dim=value.shape[3],
                dtype=key.dtype,
                sliding_window=sliding_window,
                is_causal=bool(causal),
                unknown_arguments=tuple(sorted(unknown)),
            )
        )
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None
    key_cache, value_cache = state.kv_cache[:, layer, 0], state.kv_cache[:, layer, 1]
    state.backend.write_kv(
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        key_cache,
        value_cache,
        state.metadata.slot_mapping,
    )
    output = state.backend.paged_attention(
        query[0].transpose(0, 1),
        key_cache,
        value_cache,
        state.metadata,
        scale=query.shape[3] ** -0.5 if scaling is None else scaling,
        sliding_window=sliding_window,
        soft_cap=softcap,
        sinks=s_aux,
    )
    return output.unsqueeze(0), None


def cache_spec(architecture: str, config: Any, calls: list[AttentionCall]) -> KVCacheSpec:
    """The cache's shape, the same for all layers. Raises UnsupportedModel if there is none.

    config: the model's `transformers` configuration, that of the text part.
    """
    for feature in _obstacles(config, calls):
        raise UnsupportedModel(f"{architecture} cannot be served: {feature}")
    first = calls[0]
    return KVCacheSpec(
        num_layers=len(calls),
        num_kv_heads=first.num_kv_heads,
        head_dim=first.key_dim,
        dtype=first.dtype,
    )


def _obstacles(config: Any, calls: list[AttentionCall]) -> Iterator[str]:
    num_layers = int(config.num_hidden_layers)
    if sorted(call.layer for call in calls) != list(range(num_layers)):
        yield "not every layer attends once through transformers' attention interface"
    if len({(call.num_kv_heads, call.key_dim, call.dtype) for call in calls}) > 1:
        yield "its layers differ in KV heads or head size"
    if any(call.key_dim != call.value_dim for call in calls):
        yield "its keys and values differ in size"
    if not all(call.is_causal for call in calls):
        yield "its attention is not causal"
    unknown = sorted({name for call in calls for name in call.unknown_arguments})
    if unknown:
        yield f"its attention takes {', '.join(unknown)}"
    kinds = getattr(config, "layer_types", None)
    for call in calls:
        if kinds and kinds[call.layer] == "sliding_attention" and call.sliding_window is None:
            yield "its sliding window is not passed to the attention interface"
