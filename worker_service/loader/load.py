"""`load_model`: finds the model, selects kernels, builds it, and tries it.

The attention features that a model needs are read from its configuration, by the same keys that
native models read when they are built. Some features of models that run through transformers appear
only at run time; the trial run then fails with the backend's error.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
from tokenizers import Tokenizer

from pagewire_kernels.interface import AttentionNeeds
from pagewire_kernels.select import Kernels, can_keep_weights_packed, select_kernels
from worker_service.config import (
    CHECKPOINT_METHODS,
    QUANTIZATIONS,
    CacheConfig,
    ModelConfig,
    local_model,
)
from worker_service.cpu_cores import restrict_to
from worker_service.distributed.communicator import Communicator, require_symmetric_memory
from worker_service.distributed.layout import Layout
from worker_service.errors import InvalidOption, UnsupportedModel, WorkerError
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
from worker_service.loader.files.model_files import (
    WHOLE_MODEL,
    fingerprint,
    iter_assets,
    read_config,
    read_tokenizer,
    resolve_config,
    resolve_model,
    special_tokens,
)
from worker_service.loader.pooling.pooler import PoolerBuilder, pools
from worker_service.loader.quantized.schemes import (
    Schemes,
    quantization_method,
    read_schemes,
)
from worker_service.loader.trial import try_model
from worker_service.loader.weights.checkpoint import Checkpoint, open_checkpoint, warn_of_unused
from worker_service.models.encoder_families import ENCODERS
from worker_service.models.interface import Model, ModelContext, Pools
from worker_service.models.kv_cache_spec import BLOCK_UNIT
from worker_service.models.linear import can_pack, cpu_arithmetic
from worker_service.models.native import NativeModel
from worker_service.models.registry import limit_model_len, native_settings, with_generator
from worker_service.pooling_facts import PoolingFacts

logger = logging.getLogger(__name__)


FP8 = torch.float8_e4m3fn
CACHE_DTYPES = {"auto": None, "fp8": FP8, "int8": torch.int8}
"""By `--kv-cache-dtype`."""

_SOFT_CAP_KEYS = ("attn_logit_softcapping", "attention_logit_cap")
_MODELS_WITH_SINKS = ("gpt_oss",)
_MODELS_WITH_ALIBI = ("bloom", "mpt")
_ALWAYS_IN_A_WINDOW = ("MistralForCausalLM",)


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedModel:
    """A model with its weights on the device, and the facts about it that other modules need."""

    model: Model
    config: ModelConfig
    """The given configuration, with `device`, `dtype`, `max_model_len` and `attention_backend`
    resolved."""

    block_size: int
    """Tokens per KV block, of the cache group with most: as configured, or chosen by the attention
    backend's default."""

    model_dir: Path
    hf_config: Mapping[str, Any]
    """The content of `config.json`."""

    eos_token_ids: tuple[int, ...]
    """Tokens that end a sequence; may be empty."""

    bos_token_id: int | None
    assets: Mapping[str, bytes]
    """The files that frontends need, by name."""

    tokenizer: Callable[[], Tokenizer] | None
    """Returns the one that they describe; None if there is none that can be used, or if the model
    pools."""

    fingerprint: str
    weights: str
    """The format in which most weights are stored."""

    batch_invariant: bool
    """Whether the logits of a row are guaranteed to be bitwise independent of the batch and of how
    its tokens are divided into prefill chunks and decodes."""

    kernels: Kernels

    pooler: Pools | None = None
    """What follows the pooling; None: the model generates tokens."""

    communicator: Communicator = field(default_factory=lambda: Communicator(Layout()))
    """Connects the ranks that have shards of the model."""


ARITHMETIC_VERSION = 4
"""Incremented when a change to a kernel changes the rounding of its results."""


def arithmetic_of(loaded: LoadedModel) -> str:
    """Return the identity of the arithmetic behind a model's logits, such as `cpu/avx512_bf16/4`.

    It names everything that changes the rounding of a sum: instruction set or GPU architecture,
    attention backend, model implementation, tensor parallelism, dtype of the KV cache, and
    `--quantization`.
    """
    config, device = loaded.config, torch.device(loaded.config.device)
    backend = config.attention_backend or "none"
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        invariant = "-invariant" if loaded.batch_invariant else ""
        parts = ["cuda", f"sm{major}{minor}", f"{backend}{invariant}"]
        if isinstance(loaded.model, NativeModel) and loaded.model.packs_with_triton:
            parts.append("packed")
    else:
        parts = [device.type, cpu_arithmetic(getattr(torch, config.dtype))]
        parts += [] if backend == "cpu" else [backend]
    if not isinstance(loaded.model, NativeModel):
        parts.append("transformers")
    if config.layout.tensor_parallel_size > 1:
        parts.append(f"tp{config.layout.tensor_parallel_size}")
    stored = {FP8: "kv-fp8", torch.int8: "kv-int8"}.get(loaded.model.kv_cache_spec.dtype)
    parts += [] if stored is None else [stored]
    if config.quantization is not None:
        parts.append(config.quantization)
    return "/".join([*parts, str(ARITHMETIC_VERSION)])


def attention_needs(
    config: Mapping[str, Any],
    dtype: torch.dtype,
    *,
    cache_dtype: torch.dtype | None,
    block_size: int | None,
    batch_invariant: bool,
) -> AttentionNeeds:
    """Derive the attention features that a model needs.

    config: content of `config.json`; dtype: of activations; cache_dtype: of the KV cache, None if
    it is `dtype`; block_size: tokens per KV block, None for the backend's default.
    """
    text = config.get("text_config") or config
    return AttentionNeeds(
        dtype=dtype,
        head_dim=head_dim(text),
        cache_dtype=cache_dtype,
        block_size=block_size,
        chunks=bool(text.get("attention_chunk_size", text.get("model_type") == "llama4_text")),
        sliding_window=any(_windows(text)),
        soft_cap=any(text.get(key) for key in _SOFT_CAP_KEYS),
        sinks=text.get("model_type") in _MODELS_WITH_SINKS,
        alibi=bool(text.get("alibi")) or text.get("model_type") in _MODELS_WITH_ALIBI,
        packed=any(name in ENCODERS for name in config.get("architectures") or ()),
        batch_invariant=batch_invariant,
    )


def head_dim(config: Mapping[str, Any]) -> int:
    """Elements of the largest attention head, from the usual fields of `config.json`; 64 without
    them. Of latent attention, those of the latent with the end of keys."""
    if latent := config.get("kv_lora_rank"):
        return int(latent) + int(config.get("qk_rope_head_dim", 64))
    others = _other_head_dims(config).values()
    return max(_plain_head_dim(config), config.get("global_head_dim") or 0, *others, 0)


def _plain_head_dim(config: Mapping[str, Any]) -> int:
    sizes, counts = (
        ("hidden_size", "n_embd", "dim", "d_model"),
        ("num_attention_heads", "n_head", "n_heads"),
    )
    size, heads = (
        next((config[key] for key in keys if config.get(key)), 0) for keys in (sizes, counts)
    )
    return int(config.get("head_dim") or size // (heads or 1) or 64)


def _other_head_dims(config: Mapping[str, Any]) -> dict[int, int]:
    """By layer, for those whose heads differ (Gemma 4)."""
    layers = (config.get("per_layer_config") or {}).items()
    return {int(index): layer["head_dim"] for index, layer in layers if layer.get("head_dim")}


def needs_of_windows(config: Mapping[str, Any], needs: AttentionNeeds) -> AttentionNeeds | None:
    """What layers with a window need of attention, if they have smaller heads than others, which
    may then be served by another backend. needs: those of all layers."""
    text = config.get("text_config") or config
    kinds, others = text.get("layer_types") or (), _other_head_dims(text)
    plain = _plain_head_dim(text)
    windows = [i for i, kind in enumerate(kinds) if kind == "sliding_attention"]
    size = max((others.get(index, plain) for index in windows), default=needs.head_dim)
    return replace(needs, head_dim=size) if size < needs.head_dim else None


def _windows(config: Mapping[str, Any]) -> Iterator[bool]:
    yield "sliding_attention" in (config.get("layer_types") or ())
    default = 4096 if (config.get("architectures") or [""])[0] in _ALWAYS_IN_A_WINDOW else None
    window = config.get("sliding_window", default)
    yield window is not None and config.get("use_sliding_window", True)


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
    config: ModelConfig, model_dir: Path
) -> tuple[ModelConfig, dict[str, Any], Schemes]:
    """The options for this checkpoint, the content of `config.json`, and how the checkpoint is
    quantized."""
    hf_config = with_generator(read_config(model_dir))
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
    model_dir = resolve_config(config.model, config.revision)
    if model_dir is None:
        return
    config, hf_config, schemes = _read_settings(config, model_dir)
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
    progress = progress or LoadProgress()
    device = _device_of(config, cache)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # Triton launches there, whatever device its tensors are on
    initialize_vector_math()
    has_weights = config.load_format != "dummy"
    model_dir = resolve_model(config.model, config.revision, weights=has_weights, progress=progress)
    config, hf_config, schemes = _read_settings(config, model_dir)
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

    def on_files(files: Mapping[str, bytes]) -> None:
        if context.generates:  # of others, the fingerprint depends on what follows the weights
            progress.publish(FrontendFiles(_fingerprint(config, model_dir, files), files))

    reading = partial(iter_assets, model_dir, tokenizer)
    texts = _start_reading_texts(model_dir, reading, on_files, generates=context.generates)
    builder = ModelBuilder(config, hf_config, model_dir, checkpoint, context, kernels, progress)
    with freed_memory_returns():
        model = builder.build()
    pooler = None
    if not context.generates:
        pooler = PoolerBuilder(config, hf_config, model_dir, checkpoint, context).build(model)
    facts = None if pooler is None else pooler.pooling
    warn_of_rounding(config.dtype, dtype, device, model.num_parameters)
    if device.type == "cpu":
        num_parameters = model.num_parameters // config.layout.world_size
        set_threads(config.threads, num_parameters, config.cpu_share)
    block_size = cache.block_size or kernels.attention.abilities.default_block_size
    eos_token_ids, bos_token_id = special_tokens(model_dir, hf_config)
    assets, get_tokenizer = texts()
    published = progress.files
    loaded = LoadedModel(
        model=model,
        config=replace(
            config,
            device=str(device),
            dtype=str(dtype).removeprefix("torch."),
            max_model_len=model.max_model_len,
            attention_backend="+".join(backend.name for backend in kernels.backends),
        ),
        block_size=block_size,
        model_dir=model_dir,
        hf_config=hf_config,
        eos_token_ids=eos_token_ids,
        bos_token_id=bos_token_id,
        assets=assets,
        tokenizer=get_tokenizer,
        fingerprint=published.fingerprint
        if published is not None
        else _fingerprint(config, model_dir, assets, facts),
        pooler=pooler,
        weights=checkpoint.stored_as,
        communicator=context.communicator,
        kernels=kernels,
        batch_invariant=_is_batch_invariant(config, model, context, block_size),
    )
    _log(loaded, time.monotonic() - started)
    return loaded


Texts: TypeAlias = tuple[Mapping[str, bytes], Callable[[], Tokenizer] | None]
"""The files that frontends need, by name, and what returns the tokenizer that they describe."""


def _fingerprint(
    config: ModelConfig,
    model_dir: Path,
    files: Mapping[str, bytes],
    pooling: PoolingFacts | None = None,
) -> str:
    return fingerprint(model_dir, files, config.load_format, config.quantization, pooling)


def _start_reading_texts(
    model_dir: Path,
    reading: Callable[[], Iterable[tuple[str, bytes]]],
    on_files: Callable[[Mapping[str, bytes]], None],
    *,
    generates: bool,
) -> Callable[[], Texts]:
    """Read the files that frontends need by `reading`, give them to `on_files` at once, and begin
    to read their tokenizer if the model generates. Returns a function that waits for both.

    The files of a GGUF file are made while weights are read: a large vocabulary takes seconds. Its
    tokenizer is read once it is needed.
    Imports of `transformers`, which other files may need, are not safe in several threads.
    """

    def make() -> Texts:
        files = dict(reading())
        on_files(files)
        return files, tokenizer_of(files)

    def tokenizer_of(files: Mapping[str, bytes]) -> Callable[[], Tokenizer] | None:
        if not generates or "tokenizer.json" not in files:
            return None
        read = cache(partial(read_tokenizer, files["tokenizer.json"]))
        try:
            if not is_gguf(model_dir):
                read()
        except ValueError as error:
            logger.warning("no structured output error=tokenizer.json: %s", error)
            return None
        return read

    if not is_gguf(model_dir):
        files = dict(reading())
        on_files(files)
        return lambda: (files, tokenizer_of(files))
    made: Future[Texts] = Future()

    def run() -> None:
        try:
            made.set_result(make())
        except Exception as error:  # raised where the result is wanted
            made.set_exception(error)

    threading.Thread(target=run, name="tokenizer", daemon=True).start()
    return made.result


def release_windows(loaded: LoadedModel, cache: CacheConfig) -> LoadedModel:
    """The model with its windows as cache groups of their own. Models stay in one group whose
    attention backend needs blocks of a larger multiple of tokens than groups can have."""
    able = loaded.kernels.attention.abilities
    if able.block_multiple > BLOCK_UNIT:
        return loaded
    spec = replace(loaded.model.kv_cache_spec, releases_windows=True)
    loaded.model.kv_cache_spec = spec
    block_size = cache.block_size or spec.choose_block_size(able.default_block_size)
    return replace(loaded, block_size=block_size)


def describe_cache(loaded: LoadedModel) -> str:
    """The cache groups, each with its attention backend, and the share of blocks that is unused:
    `growing of 80 tokens (triton), window 512 of 16 tokens (flash), 1.2% unused`."""
    spec, size = loaded.model.kv_cache_spec, loaded.block_size
    if not spec.layers:
        return "none"
    parts = [
        f"{group.lifetime.value}{f' {group.span}' if group.span else ''} of {group.block_tokens}"
        f" tokens ({loaded.kernels.attention_of(group.span or None).name})"
        if group.has_tokens
        else f"{group.lifetime.value} of {group.num_blocks} blocks"
        for group in spec.groups(size)
    ]
    return ", ".join([*parts, f"{spec.padding(size):.1%} unused"])


def _choose_cores(config: ModelConfig) -> None:
    """Restrict this process to its CPUs, as far as the options name them or other workers of this
    machine use the rest."""
    if config.cpus is not None:
        pin_threads(config.cpus)
    elif config.cpu_share.count > 1 and config.threads is None:
        restrict_to(config.cpu_share)


def choose_kernels(
    config: ModelConfig,
    cache: CacheConfig,
    hf_config: Mapping[str, Any],
    dtype: torch.dtype,
    device: torch.device,
) -> Kernels:
    """The kernels of a model with this `config.json`. Raises InvalidOption if there are none."""
    needs = attention_needs(
        hf_config,
        dtype,
        cache_dtype=CACHE_DTYPES[cache.kv_cache_dtype],
        block_size=cache.block_size,
        batch_invariant=config.batch_invariant,
    )
    if config.symmetric_memory:
        require_symmetric_memory(device, torch.__version__)
    windowed = needs_of_windows(hf_config, needs)
    if windowed is not None:
        needs = replace(needs, sliding_window=False)
    try:
        return select_kernels(device, needs, config.attention_backend, windowed)
    except ValueError as error:
        raise InvalidOption(str(error)) from error


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
    if config.quantization is not None and checkpoint.is_quantized:
        logger.warning(
            "quantization: %s rounds dense weights only; most weights are stored as %s and stay so",
            config.quantization,
            checkpoint.stored_as,
        )


def _is_batch_invariant(
    config: ModelConfig, model: Model, context: ModelContext, block_size: int
) -> bool:
    """Try the model. Raises UnsupportedModel if it is not as batch-invariant as requested."""
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


def load_draft_model(name: str, target: LoadedModel, cache: CacheConfig) -> Model:
    """Load the model `name`, which drafts tokens for `target`, with the same KV block size.

    Raises a `WorkerError` that names `speculative_model`, also if the vocabularies differ.
    """
    config = replace(
        target.config,
        model=name,
        revision=None,
        max_model_len=None,
        layout=Layout(),  # the rank that samples has the whole draft model
        threads=torch.get_num_threads(),
        cpus=None,  # the threads are pinned already
    )
    try:
        draft = load_model(config, replace(cache, block_size=target.block_size))
    except WorkerError as error:
        raise type(error)(f"speculative_model: {error}") from error
    if (got := draft.model.vocab_size) != (expected := target.model.vocab_size):
        raise InvalidOption(
            f"speculative_model: expected a model with the {expected} tokens of"
            f" {target.config.model}, got {name} with {got}"
        )
    if draft.model.kv_cache_spec.has_states:
        raise InvalidOption(
            f"speculative_model: expected a model without states, got {name}, of whose layers some"
            " keep one"
        )
    if any(group.chunk for group in draft.model.kv_cache_spec.groups(target.block_size)):
        raise InvalidOption(
            f"speculative_model: expected a model without chunked attention, got {name}, whose"
            " chunks are shorter than its sequences"
        )
    return draft.model


def require_cache_dtype(dtype: str, device: torch.device, attention: str | None) -> None:
    """Raise InvalidOption if no attention backend of this device supports a KV cache dtype.

    dtype: `--kv-cache-dtype`; attention: `--attention-backend`.
    """
    if dtype == "fp8" and device.type == "cpu" and attention != "reference":
        raise InvalidOption(
            "kv_cache_dtype: expected auto or int8 on a CPU, got fp8, which needs a GPU or"
            " --attention-backend reference"
        )
    if dtype == "int8" and device.type != "cpu":
        raise InvalidOption("kv_cache_dtype: expected auto or fp8 on a GPU, got int8")
