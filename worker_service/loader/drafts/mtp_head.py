"""Loading the draft head that a model's own checkpoint holds (multi-token prediction)."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from worker_service.errors import InvalidOption, UnsupportedModel, WorkerError
from worker_service.loader.drafts.draft_head import build_head
from worker_service.loader.loaded_model import LoadedModel
from worker_service.loader.quantized.schemes import read_schemes
from worker_service.loader.weights.checkpoint import (
    STACK_NAME,
    Checkpoint,
    are_equal,
    open_checkpoint,
)
from worker_service.models.decoder.draft_head import DraftHead, HeadSettings
from worker_service.models.decoder.specs import DecoderSettings, DraftHeadSpec
from worker_service.models.decoder_families.common import STACKED_EXPERTS
from worker_service.models.native import ModelSettings, NativeModel
from worker_service.models.registry import native_settings


def load_mtp_head(target: LoadedModel) -> DraftHead | None:
    """Load the head of `target`'s checkpoint, and make `target` capture its last hidden states.

    Only the rank that samples has the head; the other ranks get None. Raises a `WorkerError` that
    names `speculative`, also if there is no such head.
    """
    try:
        return _load(target)
    except WorkerError as error:
        raise type(error)(f"speculative mtp: {error}") from error


def _load(target: LoadedModel) -> DraftHead | None:
    model, config = target.model, {**target.hf_config}
    settings, spec = _settings(config)
    if not isinstance(model, NativeModel) or spec is None:
        raise UnsupportedModel(
            "heads are read of DeepSeek-V3, GLM-4.5 to 4.7, Qwen3-Next and Qwen3.5, not of"
            f" {model.architecture}; leave the flag out, or draft otherwise"
        )
    checkpoint = None
    if target.config.load_format != "dummy":
        schemes = read_schemes(target.model_dir / "config.json", config)
        checkpoint = _of_head(open_checkpoint(target.model_dir, schemes), model, spec)
        if not checkpoint.tensors:
            raise InvalidOption(
                f"{target.model_dir} holds no head: expected tensors {spec.layer_name}.* in"
                " safetensors files"
            )
        is_stacked = any(name.endswith(STACK_NAME) for name in checkpoint.tensors)
        settings, spec = _settings({**config, STACKED_EXPERTS: is_stacked})
    assert isinstance(settings, DecoderSettings), "as its model is"
    assert spec is not None, "as above"
    stored = {} if checkpoint is None else checkpoint.tensors
    of_head = HeadSettings(
        spec=spec,
        decoder=replace(settings, architecture=model.architecture),
        captured_layers=(settings.num_layers,),
        draft_vocab_size=settings.vocab_size,
        has_embedding=spec.embedding_name in stored,
        has_head=spec.head_name in stored,
    )
    return build_head(DraftHead, of_head, target, target.kernels, checkpoint)


def _settings(config: Mapping[str, Any]) -> tuple[ModelSettings | None, DraftHeadSpec | None]:
    settings = native_settings(config)
    return settings, settings.draft_head if isinstance(settings, DecoderSettings) else None


def _of_head(found: Checkpoint, model: NativeModel, spec: DraftHeadSpec) -> Checkpoint:
    """The tensors of the head, under their canonical names, without its embedding and LM head if
    they are those of the target."""
    sources = found.sources(model)
    tensors = {name: part for name, part in sources.items() if model.head_names.fullmatch(name)}
    for name, shared in (
        (spec.embedding_name, model.embedding_name),
        (spec.head_name, model.head_name),
    ):
        pair = [sources[found] for found in (name, shared) if found in sources]
        if len(pair) == 2 and are_equal(*pair):
            del tensors[name]
    return replace(found, tensors=tensors)
