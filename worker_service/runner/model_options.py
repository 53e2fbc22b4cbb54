"""What `--compile` and `--speculative` need of a loaded model."""

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from worker_service.config import RunnerConfig
from worker_service.errors import InvalidOption
from worker_service.loader import LoadedModel
from worker_service.models.interface import Model

logger = logging.getLogger(__name__)


def check_compile(loaded: LoadedModel) -> None:
    """Raise InvalidOption for a model whose layers cannot be compiled."""
    if loaded.config.batch_invariant:
        raise InvalidOption("batch_invariant: cannot be combined with --compile")
    if loaded.model.kv_cache_spec.has_states:
        raise InvalidOption(
            f"compile: expected none for {loaded.model.architecture}, some layers of which keep a"
            " state"
        )


def compile_layers(
    model: Model, device: torch.device, backend: str | Callable[..., Any] = "inductor"
) -> None:
    """Make each layer compile at its first call, for any number of rows.

    Layers are compiled one by one, not as a model: they are identical, so they share the compiled
    code. Raises InvalidOption for a model that is not in our own code, and on a CPU, whose kernels
    need addresses, which the compiler does not have.
    """
    if device.type == "cpu":
        raise InvalidOption("compile: expected a GPU, got a CPU")
    layers = getattr(model, "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise InvalidOption(f"compile: {model.architecture} has no layers of ours to compile")
    for layer in layers:
        layer.compile(dynamic=True, backend=backend)


def check_speculation(loaded: LoadedModel, runner: RunnerConfig) -> None:
    """Raise InvalidOption where drafts could change tokens, or are not supported."""
    if loaded.pooler is not None:
        raise InvalidOption("speculative: expected none with the runner pooling")
    is_on_gpu, num_stages = _is_on_gpu(loaded), loaded.communicator.layout.pipeline_parallel_size
    if is_on_gpu and num_stages > 1:
        raise InvalidOption(
            "speculative: expected none on GPUs with pipeline_parallel_size"
            f" {num_stages}, got {runner.speculative}; share layers by tensor_parallel_size, or"
            " leave the flag out"
        )
    if loaded.model.kv_cache_spec.has_states:
        check_drafts_with_states(loaded, runner)
    if not loaded.batch_invariant and is_on_gpu:
        logger.warning(
            "drafts may change tokens, as other requests in the batch do; batch_invariant"
            " prevents both"
        )
    elif not loaded.batch_invariant:
        raise InvalidOption(
            f"speculative: {loaded.model.architecture} computes a row differently in another"
            " batch, so drafts would change tokens; leave the flag out"
        )


def check_drafts_with_states(loaded: LoadedModel, runner: RunnerConfig) -> None:
    """Raise InvalidOption where a model that keeps states can have no drafts."""
    layout, name = loaded.communicator.layout, runner.speculative
    model = f"{loaded.model.architecture}, some layers of which keep a state"
    if _is_on_gpu(loaded):
        raise InvalidOption(f"speculative: expected none on a GPU for {model}, got {name}")
    if layout.pipeline_parallel_size > 1:
        raise InvalidOption(f"speculative: expected none with stages for {model}, got {name}")
    if layout.world_size > 1 and runner.drafts_by_layers:
        raise InvalidOption(
            f"speculative: expected ngram or suffix on {layout.world_size} ranks for {model},"
            f" got {name}"
        )


def _is_on_gpu(loaded: LoadedModel) -> bool:
    return torch.device(loaded.config.device).type != "cpu"
