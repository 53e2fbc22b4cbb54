"""Reading the adapters of a loaded model: folders of PEFT and the hub, and GGUF files."""

import os
from functools import partial

import torch
from torch import Tensor

from worker_service.adapters.peft_format import ModelAdapter, read_peft
from worker_service.errors import BadAdapter
from worker_service.gguf.header import is_gguf
from worker_service.loader.files.places import resolve_adapter
from worker_service.loader.gguf.adapter import read_gguf_lora
from worker_service.loader.loaded_model import LoadedModel
from worker_service.loader.quantized.schemes import read_schemes
from worker_service.loader.weights.checkpoint import open_checkpoint
from worker_service.models.native import NativeModel


def read_adapter(path: str, loaded: LoadedModel) -> ModelAdapter:
    """Read an adapter of a model. Raises AdapterNotFound or BadAdapter."""
    try:
        place = resolve_adapter(path)
        if is_gguf(place):
            return read_gguf_lora(place, loaded.hf_config)
        return read_peft(place, partial(_check_base_weight, loaded))
    except PermissionError as error:
        raise BadAdapter(
            f"path: {error.filename}: permission denied; the worker runs as user {os.geteuid()}"
        ) from error


def _check_base_weight(loaded: LoadedModel, name: str, saved: Tensor) -> None:
    """Raise BadAdapter unless a weight of the base that PEFT has saved is the model's.

    PEFT saves the embedding and the LM head of the base if an adapter changes one of them.
    """
    model = loaded.model
    saved_as = f"{name}.base_layer.weight"
    if not isinstance(model, NativeModel):
        raise BadAdapter(
            f"{saved_as}: expected none, since {model.architecture} runs through transformers,"
            " where it is not compared; save the adapter with save_embedding_layers=False"
        )
    schemes = read_schemes(loaded.model_dir / "config.json", loaded.hf_config)
    sources = open_checkpoint(loaded.model_dir, schemes).sources(model)
    canonical = model.canonical_name(f"{name}.weight")
    found = sources.get(canonical)
    if found is None and canonical == "lm_head.weight":
        found = sources.get(model.head_name)
    if found is None:
        raise BadAdapter(f"{saved_as}: expected no such weight of {model.architecture}")
    if found.is_quantized:
        raise BadAdapter(
            f"{saved_as}: expected none, since that of the model is quantized and cannot be"
            " compared; save the adapter with save_embedding_layers=False"
        )
    if list(saved.shape) != found.shape or not torch.equal(found[...].to(saved.dtype), saved):
        raise BadAdapter(
            f"{saved_as}: expected the weight {found.shape} of the model, got another one"
            f" {list(saved.shape)}; the adapter is of another base, or it was resized"
        )
