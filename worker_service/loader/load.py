"""`load_model`: find, choose, build, fill, check."""

import logging
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from pagewire_kernels.backends import AttentionNeeds, Kernels, select_kernels
from worker_service.config import CacheConfig
from worker_service.distributed.layout import Layout
from worker_service.errors import InvalidOption, UnsupportedModel
from worker_service.loader.config import LoadedModel, ModelConfig
from worker_service.loader.device import pin_threads, resolve_device, resolve_dtype, set_threads
from worker_service.loader.eager_packing import EagerPacking
from worker_service.loader.fingerprint import fingerprint
from worker_service.loader.host_memory import freed_memory_returns
from worker_service.loader.kv_scales import load_kv_scales
from worker_service.loader.model_files import read_config, resolve_model, special_tokens
from worker_service.loader.needs import FP8, attention_needs
from worker_service.loader.trial import try_model
from worker_service.loader.weights import fill_dummy_weights, load_weights, open_checkpoint
from worker_service.models.interface import Model
from worker_service.models.native import NativeModel
from worker_service.models.placement import Placement
from worker_service.models.registry import NATIVE_MODELS, build_native_model
from worker_service.parallel.ranks import Ranks

logger = logging.getLogger(__name__)


def load_model(config: ModelConfig, cache: CacheConfig | None = None) -> LoadedModel:
    """The model `config` names, with its weights on its device, ready to run.

    cache: what its KV cache is to be like, as far as attention must know; None: by default.

    Raises a `WorkerError` that tells what is wrong with the option, the place or the checkpoint.
    """
    started = time.monotonic()
    is_alone = config.layout.world_size == 1
    device = resolve_device(config.device, config.local_rank, is_alone=is_alone)
    if config.batch_invariant and device.type == "cuda" and config.layout.world_size > 1:
        raise InvalidOption(
            "batch_invariant: on GPUs only with one rank, since several add up their parts in an"
            " order that depends on how many rows there are"
        )
    if device.type == "cuda":
        torch.cuda.set_device(device)  # where Triton launches, whatever device its tensors are on
    dummy = config.load_format == "dummy"
    model_dir = resolve_model(config.model, config.revision, weights=not dummy)
    hf_config = read_config(model_dir)
    dtype = resolve_dtype(config.dtype, hf_config, device)
    if device.type == "cpu" and config.cpus is not None:
        pin_threads(config.cpus)
    cache = cache or CacheConfig()
    cache_dtype = FP8 if cache.kv_cache_dtype == "fp8" else None
    needs = attention_needs(
        hf_config,
        dtype,
        cache_dtype=cache_dtype,
        block_size=cache.block_size,
        batch_invariant=config.batch_invariant,
    )
    kernels = _kernels(device, needs, config.attention_backend)

    place = Placement(
        dtype=dtype,
        device=device,
        cache_dtype=cache_dtype,
        batch_invariant=config.batch_invariant,
        ranks=Ranks(config.layout),
    )
    with freed_memory_returns():
        model = _build(config, hf_config, model_dir, place, kernels)
    if device.type == "cpu":
        set_threads(config.threads, model.num_parameters // config.layout.world_size)
    kernels.attention.warm_up(dtype)
    block_size = cache.block_size or kernels.attention.abilities.default_block_size
    same_bits = try_model(model, device, block_size)
    is_kept = device.type == "cpu" or config.batch_invariant  # elsewhere it would be chance
    if config.batch_invariant and not same_bits:
        raise UnsupportedModel(
            f"batch_invariant: {model.architecture} computes a row otherwise in another batch"
        )
    resolved = replace(
        config,
        device=str(device),
        dtype=str(dtype).removeprefix("torch."),
        max_model_len=model.max_model_len,
        attention_backend=kernels.attention.name,
    )
    eos_token_ids, bos_token_id = special_tokens(model_dir, hf_config)
    loaded = LoadedModel(
        model=model,
        config=resolved,
        block_size=block_size,
        model_dir=model_dir,
        hf_config=hf_config,
        eos_token_ids=eos_token_ids,
        bos_token_id=bos_token_id,
        fingerprint=fingerprint(model_dir, config.load_format),
        ranks=place.ranks,
        batch_invariant=same_bits and is_kept,
    )
    _log(loaded, time.monotonic() - started)
    return loaded


def _log(loaded: LoadedModel, seconds: float) -> None:
    logger.info(
        "model loaded architecture=%s parameters=%d dtype=%s device=%s batch_invariant=%s"
        " seconds=%.1f",
        loaded.model.architecture,
        loaded.model.num_parameters,
        loaded.config.dtype,
        loaded.config.device,
        loaded.batch_invariant,
        seconds,
    )


def _kernels(device: torch.device, needs: AttentionNeeds, attention: str | None) -> Kernels:
    if needs.cache_dtype == FP8 and device.type == "cpu" and attention != "reference":
        raise InvalidOption(
            "kv_cache_dtype: fp8 is for GPUs; on a CPU only --attention-backend reference has it"
        )
    try:
        return select_kernels(device, needs, attention)
    except ValueError as error:
        raise InvalidOption(str(error)) from error


def _build(
    config: ModelConfig,
    hf_config: Mapping[str, Any],
    model_dir: Path,
    place: Placement,
    kernels: Kernels,
) -> Model:
    model = build_native_model(hf_config, config.max_model_len, place, kernels)
    if model is None:
        _refuse_ranks(config.layout, hf_config)
        return _build_through_transformers(config, hf_config, model_dir, place, kernels)
    whole = model
    if config.layout.world_size > 1:
        whole = _outline(config, hf_config, place, kernels)
    names = {slot.name for slot in whole.weight_slots()}
    model.num_parameters = sum(slot.target.numel() for slot in whole.weight_slots())
    packing = EagerPacking(model)
    if config.load_format == "dummy":
        fill_dummy_weights(model.weight_slots(), on_filled=packing)
    else:
        checkpoint = open_checkpoint(model_dir)
        load_weights(
            model,
            checkpoint,
            others=names,
            on_filled=packing,
            show_progress=config.show_progress,
        )
        if place.cache_dtype == FP8:
            load_kv_scales(model, checkpoint)
    model.finish_loading()
    return model


def _outline(
    config: ModelConfig,
    hf_config: Mapping[str, Any],
    place: Placement,
    kernels: Kernels,
) -> NativeModel:
    """The whole model without memory for its weights: what all ranks have together."""
    outline = Placement(dtype=place.dtype, device=torch.device("meta"))
    model = build_native_model(hf_config, config.max_model_len, outline, kernels)
    assert model is not None, "a rank's share of it was built"
    return model


def _refuse_ranks(layout: Layout, hf_config: Mapping[str, Any]) -> None:
    for option in ("tensor_parallel_size", "pipeline_parallel_size"):
        if getattr(layout, option) > 1:
            raise InvalidOption(
                f"{option}: {hf_config['architectures'][0]} runs on one rank only, got"
                f" {getattr(layout, option)}; there are models for several ranks of"
                f" {', '.join(NATIVE_MODELS)}"
            )


def _build_through_transformers(
    config: ModelConfig,
    hf_config: Mapping[str, Any],
    model_dir: Path,
    place: Placement,
    kernels: Kernels,
) -> Model:
    if config.load_format != "dummy":
        open_checkpoint(model_dir)  # damaged files are told of before the library reads them
    # The library takes seconds to import, which native models do not pay for.
    from worker_service.models.transformers_backend import build_transformers_model

    return build_transformers_model(
        model_dir,
        hf_config,
        max_model_len=config.max_model_len,
        place=place,
        backend=kernels.attention,
        dummy_weights=config.load_format == "dummy",
        trust_remote_code=config.trust_remote_code,
    )
