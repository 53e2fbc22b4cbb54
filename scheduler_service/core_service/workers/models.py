"""The models of all worker groups: what of them can be served, and in what they must agree."""

from collections.abc import Iterable
from typing import Any

from pagewire.v1 import model_pb2
from pagewire.v1 import scheduler_service_pb2 as pb
from scheduler_service.core.config import SchedulerConfig
from scheduler_service.core_service.workers.worker_group import WorkerGroup

_PARSERS = ("reasoning_parser", "tool_call_parser")
_AGREED_FACTS = ("fingerprint", "dtype", "structured_output", "max_loras", *_PARSERS)
"""Facts of a model that must be the same on all of its workers."""


def served_models(
    groups: Iterable[WorkerGroup], config: SchedulerConfig
) -> list[model_pb2.ModelInfo]:
    """See `WorkerRegistry.served_models`."""
    models: dict[str, model_pb2.ModelInfo] = {}
    for group in groups:
        model = group.registration.model
        if not group.is_ready:
            continue
        best = models.get(model.name, model)
        longest = max(best, model, key=lambda info: info.max_model_len)
        merged = models[model.name] = model_pb2.ModelInfo()
        merged.CopyFrom(longest)
        merged.max_cached_tokens = max(best.max_cached_tokens, group.max_cached_tokens)
        merged.aliases[:] = dict.fromkeys((*best.aliases, *model.aliases))
        if limit := text_limit(merged, config):
            merged.pooling.max_text_tokens = limit
    names = set(models)
    for name in sorted(models):  # an alias belongs to one model
        aliases = [alias for alias in models[name].aliases if alias not in names]
        models[name].aliases[:] = aliases
        names.update(aliases)
    return [models[name] for name in sorted(models)]


def text_limit(model: model_pb2.ModelInfo, config: SchedulerConfig) -> int:
    """Most tokens of a text that is pooled, if a step has fewer than the model takes and the
    text must be computed in one; else 0."""
    if not model.HasField("pooling"):
        return 0
    if config.enable_chunked_prefill and not model.whole_prompt:
        return 0
    limit = model.pooling.max_text_tokens or model.max_model_len
    return config.max_num_batched_tokens if config.max_num_batched_tokens < limit else 0


def refusal_of(registration: pb.WorkerRegistration, groups: Iterable[WorkerGroup]) -> str | None:
    """The reason why a worker cannot join the groups that have a model of its model's name, or
    None: they must serve the same model."""
    model = registration.model
    for other in groups:
        if other.group_id == registration.group_id:
            continue
        for fact in _AGREED_FACTS:
            theirs, ours = _fact(model, fact), _fact(other.registration.model, fact)
            if theirs != ours:
                return (
                    f"model {model.name!r} is served with {fact} {ours} by group "
                    f"{other.group_id!r}; this worker has {theirs}"
                )
    return None


def _fact(model: model_pb2.ModelInfo, name: str) -> Any:
    value = getattr(model, name)
    return "auto" if name in _PARSERS and not value else value
