"""Loading a model through `transformers`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from pagewire_kernels.backends import AttentionBackend
from worker_service.errors import BadCheckpoint, InvalidOption, UnsupportedModel
from worker_service.models.placement import Placement
from worker_service.models.registry import limit_model_len
from worker_service.models.transformers_backend.attention import NAME, RouteState, attach
from worker_service.models.transformers_backend.model import TransformersModel
from worker_service.models.transformers_route.refusals import refuse_by_class, refuse_by_config
from worker_service.models.transformers_route.rotary import pin_long_rotary

_DUMMY_RANGE = 0.05


def build_transformers_model(
    model_dir: Path,
    hf_config: Mapping[str, Any],
    *,
    max_model_len: int | None,
    place: Placement,
    backend: AttentionBackend,
    dummy_weights: bool,
    trust_remote_code: bool,
) -> TransformersModel:
    """The model in `model_dir`, loaded by `transformers` from safetensors.

    Raises UnsupportedModel, naming the feature, for what paged attention cannot carry.
    """
    architecture = hf_config["architectures"][0]
    config = _read_config(model_dir, architecture, trust_remote_code)
    refuse_by_config(architecture, config)
    text_config = config.get_text_config()
    length = _model_len(max_model_len, text_config)
    state = RouteState(backend)
    attach(nn.Module(), state)  # registers the function's name, which loading looks up
    load = _make_dummy if dummy_weights else _load
    causal_lm = load(model_dir, config, place, trust_remote_code)
    pin_long_rotary(causal_lm, text_config, length)
    return TransformersModel(causal_lm, state, architecture, length, place)


def _read_config(model_dir: Path, architecture: str, trust_remote_code: bool) -> Any:
    try:
        return AutoConfig.from_pretrained(model_dir, trust_remote_code=trust_remote_code)
    except (ValueError, OSError, TypeError, KeyError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UnsupportedModel(
            f"{architecture} cannot be served: transformers does not know it: {reason}"
        ) from error


def _model_len(asked: int | None, config: Any) -> int:
    limit = getattr(config, "max_position_embeddings", None)
    if limit is None:
        if asked is None:
            raise InvalidOption("max_model_len: config.json tells no limit, so one must be given")
        return asked
    return limit_model_len(asked, int(limit))


def _load(model_dir: Path, config: Any, place: Placement, trust_remote_code: bool) -> Any:
    refuse_by_class(_model_class(config, trust_remote_code))
    transformers_logging.disable_progress_bar()
    try:
        causal_lm, info = AutoModelForCausalLM.from_pretrained(
            model_dir,
            config=config,
            dtype=place.dtype,
            attn_implementation=NAME,
            use_safetensors=True,
            output_loading_info=True,
            trust_remote_code=trust_remote_code,
        )
    except (RuntimeError, OSError) as error:
        raise BadCheckpoint(f"{model_dir} cannot be loaded: {error}") from error
    faults = {
        "missing tensors": info["missing_keys"],
        "unexpected tensors": info["unexpected_keys"],
        "misshapen tensors": info["mismatched_keys"],
    }
    found = [
        f"{kind}: {', '.join(sorted(map(str, names)))}" for kind, names in faults.items() if names
    ]
    if found:
        raise BadCheckpoint(f"weights do not fit {type(causal_lm).__name__}: {'; '.join(found)}")
    return causal_lm.eval().to(place.device)


def _make_dummy(model_dir: Path, config: Any, place: Placement, trust_remote_code: bool) -> Any:
    """Small random weights, the same each time."""
    refuse_by_class(_model_class(config, trust_remote_code))
    causal_lm = AutoModelForCausalLM.from_config(
        config, dtype=place.dtype, attn_implementation=NAME, trust_remote_code=trust_remote_code
    )
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in causal_lm.parameters():
            if parameter.dim() > 1:
                values = torch.empty(parameter.shape)
                parameter.copy_(values.uniform_(-_DUMMY_RANGE, _DUMMY_RANGE, generator=generator))
    return causal_lm.eval().to(place.device)


def _model_class(config: Any, trust_remote_code: bool) -> type:
    """The class that `AutoModelForCausalLM` will make."""
    try:
        with torch.device("meta"):
            return type(
                AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
            )
    except Exception as error:  # whatever a model's own code makes of its configuration
        raise UnsupportedModel(
            f"{config.architectures[0]} cannot be served: transformers cannot build it:"
            f" {type(error).__name__}: {error}"
        ) from error
