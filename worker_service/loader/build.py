"""Builds a model and fills it from its checkpoint: natively, or through `transformers`."""

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from pagewire_kernels.select import Kernels
from worker_service.config import ModelConfig
from worker_service.distributed.layout import Layout
from worker_service.errors import InvalidOption, UnsupportedModel
from worker_service.load_progress import LoadProgress
from worker_service.loader.files.overrides import Overrides
from worker_service.loader.weights.checkpoint import STACK_NAME, Checkpoint, has_own_head
from worker_service.loader.weights.fill import EagerPacking, fill_dummy_weights, load_weights
from worker_service.loader.weights.kv_scales import load_kv_scales
from worker_service.loader.weights.rounded_cache import with_rounded_weights
from worker_service.models.decoder_families.common import CORRECTIONS, STACKED_EXPERTS
from worker_service.models.interface import Model, ModelContext, WeightTarget
from worker_service.models.native import NativeModel
from worker_service.models.registry import (
    NATIVE_MODELS,
    STORED_NAME,
    build_native_model,
    ignored_settings,
    native_settings,
    stored_name,
    variant_of,
)

logger = logging.getLogger(__name__)


def refuse_ranks(layout: Layout, hf_config: Mapping[str, Any]) -> None:
    """Raise InvalidOption if a model that is not native is to run on several ranks."""
    for option in ("tensor_parallel_size", "pipeline_parallel_size"):
        if getattr(layout, option) > 1:
            raise InvalidOption(
                f"{option}: expected 1 for {hf_config['architectures'][0]}, got"
                f" {getattr(layout, option)}; models that run on several ranks:"
                f" {', '.join(NATIVE_MODELS)}"
            )


@dataclass(frozen=True, slots=True)
class ModelBuilder:
    """What a model is built from."""

    config: ModelConfig
    hf_config: Mapping[str, Any]
    model_dir: Path
    checkpoint: Checkpoint
    """Empty for dummy weights."""
    context: ModelContext
    kernels: Kernels
    progress: LoadProgress
    overrides: Overrides

    def build(self) -> Model:
        """The model with its weights. Raises a `WorkerError` that names the option, or the file and
        tensor at fault."""
        hf_config = self.hf_config
        if self.context.generates:
            hf_config = _with_own_head(hf_config, self.checkpoint)
        tensors = self.checkpoint.tensors
        for name, tensor in tensors.items():
            if name.endswith(STACK_NAME) and not name.startswith("mtp."):
                hf_config = {**hf_config, STACKED_EXPERTS: tuple(tensor.shape)}
        if tensors:
            corrects = any(name.endswith(".e_score_correction_bias") for name in tensors)
            hf_config = {**hf_config, CORRECTIONS: corrects}
        model = build_native_model(hf_config, self.config.max_model_len, self.context, self.kernels)
        if model is None:
            return self._build_variant(variant_of(hf_config))
        for key, value in ignored_settings(hf_config).items():
            logger.warning("config.json: %s is not used by %s: %s", key, model.architecture, value)
        whole = model if self.config.layout.world_size == 1 else self._outline(hf_config)
        model.num_parameters = _num_parameters(whole.weight_targets())
        self._fill(model, {weight.name for weight in whole.weight_targets()})
        model.finish_loading()
        for reason, num_bytes in model.dequantized.items():
            logger.info("weights dequantized num_bytes=%d reason=%s", num_bytes, reason)
        return model

    def _outline(self, hf_config: Mapping[str, Any]) -> NativeModel:
        """The model with the weights of all ranks, on the meta device."""
        dtype, generates = self.context.dtype, self.context.generates
        outline = ModelContext(dtype=dtype, device=torch.device("meta"), generates=generates)
        model = build_native_model(hf_config, self.config.max_model_len, outline, self.kernels)
        assert model is not None, "a rank's shard of it was built"
        return model

    def _fill(self, model: NativeModel, names: set[str]) -> None:
        """Load the weights. names: those of all ranks."""
        packing = EagerPacking(model)
        if self.config.load_format == "dummy":
            fill_dummy_weights(model.weight_targets(), on_filled=packing)
            return
        sources = self.checkpoint.sources(model)
        roundings = {
            sources[weight.name].name: weight.rounding
            for weight in model.weight_targets()
            if weight.name in sources and weight.rounding and weight.keep
        }
        checkpoint = self._rounded(roundings)
        load_weights(model, checkpoint, others=names, on_filled=packing, progress=self.progress)
        if self.context.cache_dtype == torch.float8_e4m3fn:
            load_kv_scales(model, checkpoint)

    def _rounded(self, roundings: Mapping[str, str]) -> Checkpoint:
        """The checkpoint, with rounded weights from the cache if there is one. roundings: formats
        by tensor name."""
        if self.config.quantization_cache is None:
            return self.checkpoint
        folder = Path(self.config.quantization_cache)
        return with_rounded_weights(
            self.checkpoint, roundings, self.context.dtype, folder, self.progress
        )

    def _build_variant(self, variant: str | None) -> Model:
        """Build the model through `transformers`. variant: what the layers of the native model of
        this name do not compute; None: there is no such model. Raises as `build`."""
        if variant is None:
            return self._build_through_transformers()
        logger.info("through transformers, since our own layers do not compute it: %s", variant)
        try:
            return self._build_through_transformers()
        except UnsupportedModel as error:
            raise UnsupportedModel(f"{error}; our own layers do not compute {variant}") from error

    def _build_through_transformers(self) -> Model:
        # Imported here because `transformers` takes seconds to import, and native models do not
        # use it.
        from worker_service.models.transformers_backend import build_transformers_model
        from worker_service.models.transformers_backend.build import generator_of

        config = self.config
        refuse_ranks(config.layout, self.hf_config)
        stored = stored_name(self.hf_config)
        if STORED_NAME in self.hf_config:  # our own layers do not compute this variant
            own = {k: v for k, v in self.hf_config.items() if k != STORED_NAME}
            builder = replace(self, hf_config=own | {"architectures": [stored]})
            return builder._build_through_transformers()
        if not self.context.generates and (found := generator_of(stored)) is not None:
            generator, base = found
            changed = {"architectures": [generator], "tie_word_embeddings": True}
            tensors = {f"{base}.{name}": part for name, part in self.checkpoint.tensors.items()}
            builder = replace(
                self,
                hf_config={**self.hf_config, **changed},
                checkpoint=replace(self.checkpoint, tensors=tensors),
            )
            model = builder._build_through_transformers()
            model.architecture = stored
            return model
        if config.quantization is not None and self.context.device.type != "cpu":
            raise InvalidOption(
                f"quantization: {self.hf_config['architectures'][0]} can be quantized on a CPU"
                f" only, got {self.context.device}; models that can be on a GPU:"
                f" {', '.join(NATIVE_MODELS)}"
            )

        @contextmanager
        def reader(roundings: Mapping[str, str]) -> Iterator[Any]:
            source = self._rounded(roundings)
            phase = self.progress.phase("loading weights", source.num_bytes)
            with phase as advance, source.opened.reporting(advance):
                yield lambda name: source.tensors[name].read()

        files = self.checkpoint.files
        return build_transformers_model(
            self.model_dir,
            self.hf_config,
            max_model_len=config.max_model_len,
            context=self.context,
            kernels=self.kernels,
            dummy_weights=config.load_format == "dummy",
            trust_remote_code=config.trust_remote_code,
            tensors=self.checkpoint.tensors,
            source=files[0] if len(files) == 1 else self.model_dir,
            reader=reader,
            edit_config=self.overrides.of_config if self.overrides.config else None,
        )


def _num_parameters(targets: Iterable[WeightTarget]) -> int:
    """Parameters of a model. What fills several targets, such as keys that are values, too, counts
    once."""
    found = {(w.name, w.axis, w.shard, id(w.order)): w.target.numel() for w in targets}
    return sum(found.values())


def _with_own_head(hf_config: Mapping[str, Any], checkpoint: Checkpoint) -> Mapping[str, Any]:
    """The configuration without `tie_word_embeddings` if the LM head that is stored of a native
    model is not the embedding."""
    settings = native_settings(hf_config)
    if settings is None or not settings.tie_word_embeddings:
        return hf_config
    _, model = NATIVE_MODELS[settings.architecture]
    if not has_own_head(model, checkpoint):
        return hf_config
    logger.warning(
        "config.json: tie_word_embeddings is true, but lm_head.weight is not %s: both are used, as"
        " if it were false",
        model.embedding_name,
    )
    return {**hf_config, "tie_word_embeddings": False}
