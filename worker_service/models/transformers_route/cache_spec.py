"""From a trial run's attention calls to the shape of the KV cache."""

from collections.abc import Iterator
from typing import Any

from worker_service.errors import UnsupportedModel
from worker_service.models.interface import KVCacheSpec
from worker_service.models.transformers_backend.attention import AttentionCall


def cache_spec(architecture: str, config: Any, calls: list[AttentionCall]) -> KVCacheSpec:
    """The cache that all layers can share; raises UnsupportedModel, naming why there is none.

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
