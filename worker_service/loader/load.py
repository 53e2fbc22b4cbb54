"""`load_model`: finds the model, selects kernels, builds it, and tries it."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from pagewire_kernels.select import Kernels, can_keep_weights_packed
from worker_service.config import (
    CHECKPOINT_METHODS,
    QUANTIZATIONS,
    CacheConfig,
    ModelConfig,
    local_model,
)
from worker_service.cpu_cores import restrict_to
from worker_service.distributed.communicator import Communicator
from worker_service.errors import InvalidOption, UnsupportedModel
from worker_service.gguf.header import is_gguf
from worker_service.gguf.tokenizer_process import TokenizerProcess
from worker_service.kv_cache.memory_budget import require_host_memory
from worker_service.load_progress import FrontendFiles, LoadProgress
from worker_service.loader.build import ModelBuilder, refuse_ranks
from worker_service.loader.device import (
    freed_memory_returns,
    initialize_vector_math,
    pin_threads,
    resolve_device,
    resolve_dtype,
    set_threads,
    warn_of_rounding,
)
from worker_service.loader.files.assets import iter_assets
from worker_service.loader.files.config import WHOLE_MODEL, read_config, special_tokens
from worker_service.loader.files.fingerprint import fingerprint
from worker_service.loader.files.overrides import Overrides
from worker_service.loader.files.places import resolve_config, resolve_model
from worker_service.loader.kernels import CACHE_DTYPES, choose_kernels, require_cache_dtype
from worker_service.loader.loaded_model import LoadedModel
from worker_service.loader.pooling.pooler import PoolerBuilder, pools
from worker_service.loader.quantized.schemes import Schemes, quantization_method, read_schemes
from worker_service.loader.texts import Texts, start_reading_texts
from worker_service.loader.trial import try_model
from worker_service.loader.weights.checkpoint import Checkpoint, open_checkpoint, warn_of_unused
from worker_service.models.interface import Model, ModelContext, Pools
from worker_service.models.linear.packing import can_pack
from worker_service.models.registry import limit_model_len, native_settings, with_generator
from worker_service.pooling_facts import PoolingFacts

logger = logging.getLogger(__name__)


def _device_of(config: ModelConfig, cache: CacheConfig) -> torch.device:
    """The device to load the model on. Raises InvalidOption for options that exclude it."""
    is_alone = config.layout.world_size == 1
    device = resolve_device(config.device, config.local_rank, is_alone=is_alone)
    require_cache_dtype(cache.kv_cache_dtype, device, config.attention_backend)
    if config.quantization_cache is not None and not is_alone:
        raise InvalidOption(
            "quantization_cache: expected one rank, since several round their own shards, got"
            f" {config.layout.world_size}"
        )
    return device


def _without_stored_method(
    config: ModelConfig, model_dir: Path, hf_config: Mapping[str, Any]
) -> ModelConfig:
    """The options without a quantization that only names how the checkpoint is stored.

    Raises InvalidOption if the checkpoint is stored otherwise.
    """
    if config.quantization is None:
        return config
    stored = quantization_method(model_dir, hf_config)
    if stored is not None and CHECKPOINT_METHODS.get(config.quantization) == stored:
        return replace(config, quantization=None)
    if config.quantization in QUANTIZATIONS:
        return config
    raise InvalidOption(
        f"quantization: expected {stored or 'none'}, the method of the checkpoint {model_dir}, got"
        f" {config.quantization}; without the flag it is found"
        + ("" if stored else f", and {', '.join(QUANTIZATIONS)} round a dense checkpoint")
    )


def _read_settings(
    config: ModelConfig, model_dir: Path, overrides: Overrides
) -> tuple[ModelConfig, dict[str, Any], Schemes]:
    """The options for this checkpoint, the content of `config.json`, and how the checkpoint is
    quantized."""
    hf_config = with_generator(read_config(model_dir, overrides))
    config = _without_stored_method(config, model_dir, hf_config)
    return config, hf_config, read_schemes(model_dir / "config.json", hf_config)


def check_model(config: ModelConfig, cache: CacheConfig) -> None:
    """Raise the error of `load_model` if options, `config.json` or headers of weights show it, and
    OutOfMemory if its cache is larger than the memory.

    Takes milliseconds, unless the model is on the hub and not in its cache: then its `config.json`
    is downloaded. Passing does not mean that the model can be loaded.
    """
    device = _device_of(config, cache)
    require_host_memory(device, cache.kv_cache_memory or 0, cache.swap_space or 0)
    overrides = Overrides.from_options(config)
    model_dir = resolve_config(config.model, config.revision)
    if model_dir is None:
        return
    config, hf_config, schemes = _read_settings(config, model_dir, overrides)
    settings = native_settings(hf_config)
    if settings is None:
        refuse_ranks(config.layout, hf_config)
    else:
        settings.require_shards(config.layout)
        limit_model_len(config.max_model_len, settings.max_model_len)
    if config.load_format != "dummy" and local_model(config.model) is not None:
        open_checkpoint(model_dir, schemes)


def load_model(
    config: ModelConfig,
    cache: CacheConfig | None = None,
    progress: LoadProgress | None = None,
    tokenizer: TokenizerProcess | None = None,
) -> LoadedModel:
    """Load the model that `config` names onto its device, ready to run.

    cache: options of its KV cache, on which the choice of the attention backend depends; progress:
    reports how far it is; tokenizer: makes the tokenizer's files of a GGUF file, None: a thread.

    Raises a `WorkerError` that names the invalid option, or the file and tensor at fault.
    """
    started = time.monotonic()
    cache = cache or CacheConfig()
    builder = _prepare(config, cache, progress or LoadProgress())
    texts = _start_reading_texts(builder, tokenizer)
    model, pooler = _build(builder)
    block_size = cache.block_size or builder.kernels.attention.abilities.default_block_size
    eos_token_ids, bos_token_id = special_tokens(builder.model_dir, builder.hf_config)
    assets, get_tokenizer = texts()
    if (published := builder.progress.files) is not None:
        of_model = published.fingerprint
    else:
        of_model = _fingerprint(builder, assets, None if pooler is None else pooler.pooling)
    loaded = LoadedModel(
        model=model,
        config=_resolved(builder, model),
        block_size=block_size,
        model_dir=builder.model_dir,
        hf_config=builder.hf_config,
        eos_token_ids=eos_token_ids,
        bos_token_id=bos_token_id,
        assets=assets,
        tokenizer=get_tokenizer,
        fingerprint=of_model,
        pooler=pooler,
        weights=builder.checkpoint.stored_as,
        communicator=builder.context.communicator,
        kernels=builder.kernels,
        batch_invariant=_is_batch_invariant(builder, model, block_size),
    )
    _log(loaded, time.monotonic() - started)
    return loaded


def _prepare(config: ModelConfig, cache: CacheConfig, progress: LoadProgress) -> ModelBuilder:
    """Find the model's files, and choose the kernels and everything else that it is built from."""
    device = _device_of(config, cache)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # Triton launches there, whatever device its tensors are on
    initialize_vector_math()
    has_weights, overrides = config.load_format != "dummy", Overrides.from_options(config)
    model_dir = resolve_model(config.model, config.revision, weights=has_weights, progress=progress)
    config, hf_config, schemes = _read_settings(config, model_dir, overrides)
    dtype = resolve_dtype(config.dtype, hf_config, device)
    if device.type == "cpu":
        _choose_cores(config)
    kernels = choose_kernels(config, cache, hf_config, dtype, device)
    context = _context(config, cache, model_dir, schemes, dtype, device, kernels)
    context = replace(context, generates=not pools(config, hf_config, model_dir))
    checkpoint = Checkpoint((), {})
    if has_weights:  # report damaged files before anything is built
        checkpoint = open_checkpoint(model_dir, schemes)
        _warn_of_unused(config, hf_config, checkpoint)
    parts = config, hf_config, model_dir, checkpoint, context, kernels, progress, overrides
    return ModelBuilder(*parts)


def _start_reading_texts(
    builder: ModelBuilder, tokenizer: TokenizerProcess | None
) -> Callable[[], Texts]:
    """Read what frontends need, and publish it as soon as its fingerprint is known."""
    generates = builder.context.generates

    def on_files(files: Mapping[str, bytes]) -> None:
        if generates:  # of others, the fingerprint depends on what follows the weights
            builder.progress.publish(FrontendFiles(_fingerprint(builder, files), files))

    def reading() -> Iterator[tuple[str, bytes]]:
        return builder.overrides.of_files(iter_assets(builder.model_dir, tokenizer))

    return start_reading_texts(builder.model_dir, reading, on_files, generates=generates)


def _build(builder: ModelBuilder) -> tuple[Model, Pools | None]:
    """The model with its weights, and what follows its pooling, if it pools."""
    config, context = builder.config, builder.context
    with freed_memory_returns():
        model = builder.build()
    warn_of_rounding(config.dtype, context.dtype, context.device, model.num_parameters)
    if context.device.type == "cpu":
        num_parameters = model.num_parameters // config.layout.world_size
        set_threads(config.threads, num_parameters, config.cpu_share)
    if context.generates:
        return model, None
    of_pooler = config, builder.hf_config, builder.model_dir, builder.checkpoint, context
    return model, PoolerBuilder(*of_pooler).build(model)


def _resolved(builder: ModelBuilder, model: Model) -> ModelConfig:
    """The options with what was chosen where they leave it open."""
    return replace(
        builder.config,
        device=str(builder.context.device),
        dtype=str(builder.context.dtype).removeprefix("torch."),
        max_model_len=model.max_model_len,
        attention_backend="+".join(backend.name for backend in builder.kernels.backends),
    )


def _fingerprint(
    builder: ModelBuilder, files: Mapping[str, bytes], pooling: PoolingFacts | None = None
) -> str:
    config = builder.config
    return fingerprint(builder.model_dir, files, config.load_format, config.quantization, pooling)


def _choose_cores(config: ModelConfig) -> None:
    """Restrict this process to its CPUs, as far as the options name them or other workers of this
    machine use the rest."""
    if config.cpus is not None:
        pin_threads(config.cpus)
    elif config.cpu_share.count > 1 and config.threads is None:
        restrict_to(config.cpu_share)


def _context(
    config: ModelConfig,
    cache: CacheConfig,
    model_dir: Path,
    schemes: Schemes,
    dtype: torch.dtype,
    device: torch.device,
    kernels: Kernels,
) -> ModelContext:
    """Raises UnsupportedModel for quantized activations, and InvalidOption for `--quantization`,
    without a kernel for them."""
    is_quantized = bool(schemes) or is_gguf(model_dir) or config.quantization is not None
    packs_with_triton = is_quantized and can_keep_weights_packed(kernels.layers, device, dtype)
    has_products = can_pack(dtype, device)
    if any(scheme.activations for _, scheme in schemes) and not has_products:
        raise UnsupportedModel(
            f"{model_dir / 'config.json'}: quantization_config: 8-bit input_activations (W8A8) need"
            f" the compiled CPU kernels; this is {device}"
        )
    if config.quantization is not None and not (packs_with_triton or has_products):
        raise InvalidOption(
            f"quantization: expected none, got {config.quantization}: it needs the compiled CPU"
            f" kernels, or on a GPU the Triton kernels; this is {device} with --attention-backend"
            f" {kernels.attention.name}"
        )
    if config.quantization == "w8a8" and not has_products:
        raise InvalidOption(
            f"quantization: expected int8, int4 or fp8 on {device}, got w8a8, which needs the"
            " compiled CPU kernels"
        )
    return ModelContext(
        dtype=dtype,
        device=device,
        cache_dtype=CACHE_DTYPES[cache.kv_cache_dtype],
        batch_invariant=config.batch_invariant,
        quantization=config.quantization,
        packs_with_triton=packs_with_triton,
        communicator=Communicator(
            config.layout,
            sums_in_order=config.batch_invariant,
            symmetric=config.symmetric_memory,
        ),
    )


def _warn_of_unused(
    config: ModelConfig, hf_config: Mapping[str, Any], checkpoint: Checkpoint
) -> None:
    """Log what is in the checkpoint, or asked for, and has no effect."""
    warn_of_unused(checkpoint)
    if (whole := hf_config.get(WHOLE_MODEL)) is not None:
        logger.warning("only the text model of %s is served", whole)
    settings, trained = native_settings(hf_config), hf_config.get("max_position_embeddings")
    if settings and config.max_model_len is None and settings.max_model_len < (trained or 0):
        logger.warning(
            "sequences have at most %d tokens, but max_position_embeddings is %d: attention of"
            " longer ones is not computed",
            settings.max_model_len,
            trained,
        )
    if config.quantization is not None and checkpoint.is_quantized:
        logger.warning(
            "quantization: %s rounds dense weights only; most weights are stored as %s and stay so",
            config.quantization,
            checkpoint.stored_as,
        )


def _is_batch_invariant(builder: ModelBuilder, model: Model, block_size: int) -> bool:
    """Try the model. Raises UnsupportedModel if it is not as batch-invariant as requested."""
    config, context = builder.config, builder.context
    same_bits = try_model(model, context.device, block_size)
    if config.batch_invariant and not same_bits:
        raise UnsupportedModel(
            f"batch_invariant: the logits of {model.architecture} depend on the batch, or are not"
            " finite (then a warning precedes this error)"
        )
    # Without --batch-invariant on a GPU, and without our kernels on a CPU, equal results of the
    # trial run are a coincidence.
    return same_bits and (can_pack(context.dtype, context.device) or config.batch_invariant)


def _log(loaded: LoadedModel, seconds: float) -> None:
    logger.info(
        "model loaded architecture=%s parameters=%d weights=%s dtype=%s device=%s"
        " batch_invariant=%s seconds=%.1f",
        loaded.model.architecture,
        loaded.model.num_parameters,
        loaded.weights,
        loaded.config.dtype,
        loaded.config.device,
        loaded.batch_invariant,
        seconds,
    )
