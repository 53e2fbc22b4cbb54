"""LoRA adapters in GGUF files, as llama.cpp's converter writes them."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from worker_service.adapters.peft_format import LoraModule, ModelAdapter, check_tensor, module_of
from worker_service.errors import AdapterNotFound, BadAdapter, BadCheckpoint
from worker_service.loader.gguf.architectures import architecture_of
from worker_service.loader.gguf.file import Gguf, open_gguf
from worker_service.loader.gguf.names import Orders, name_of, names_of, orders_of
from worker_service.loader.tensors import OpenFiles

_ALPHA = "adapter.lora.alpha"
_INVOCATION = "adapter.alora.invocation_tokens"
_EMBEDDING = "token_embd.weight"
_PARTS = {"lora_a": "A", "lora_b": "B"}


def read_gguf_lora(path: Path, config: Mapping[str, Any]) -> ModelAdapter:
    """Read an adapter of the model whose `config.json` this is.

    Raises AdapterNotFound if there is no such file, and BadAdapter for one that is damaged, is of
    another architecture, or has settings or tensors that are not computed.
    """
    if not path.is_file():
        raise AdapterNotFound(f"path: expected a GGUF file, got {str(path)!r}")
    try:
        gguf = open_gguf(path)
        _check_settings(path, gguf, architecture_of(config["model_type"]))
        pairs: dict[str, dict[str, Tensor]] = {}
        for module, part, tensor in _matrices(path, gguf, config):
            check_tensor(f"{module}.lora_{part}", tensor)
            pairs.setdefault(module, {})[part] = tensor
    except BadCheckpoint as error:
        raise BadAdapter(str(error)) from None
    if not pairs:
        raise BadAdapter(f"{path}: expected at least one module, got none")
    alpha = gguf.metadata.get(_ALPHA, 0.0)
    modules = {module: _module(module, pair, alpha) for module, pair in pairs.items()}
    return ModelAdapter.of_modules(modules)


def _check_settings(path: Path, gguf: Gguf, architecture: str | None) -> None:
    if architecture is None:
        raise BadAdapter(f"{path}: expected a folder, since GGUF files have no such base")
    expected = {
        "general.type": "adapter",
        "adapter.type": "lora",
        "general.architecture": architecture,
        _INVOCATION: None,
    }
    for key, value in expected.items():
        if (got := gguf.metadata.get(key)) != value:
            wanted = "none" if value is None else f"{value!r}"
            raise BadAdapter(f"{path}: {key}: expected {wanted}, got {got!r}")


def _matrices(
    path: Path, gguf: Gguf, config: Mapping[str, Any]
) -> Iterator[tuple[str, str, Tensor]]:
    """(module, A or B, matrix), with the rows and names of `transformers`."""
    names = names_of(config["model_type"])
    orders = orders_of(gguf.metadata["general.architecture"], config)
    files = OpenFiles()
    for stored in gguf.tensors.values():
        weight, _, part = stored.stored_name.rpartition(".")
        module, _, kind = name_of(weight, names).rpartition(".")
        if part not in _PARTS or kind != "weight":
            expected = "only TENSOR.weight.lora_a and lora_b"
            raise BadAdapter(f"{path}: expected {expected}, got {stored.stored_name!r}")
        order = orders.get(module.rpartition(".")[2], Orders())
        rows, columns = (order.rows, None) if part == "lora_b" else (None, order.columns)
        try:
            tensor = replace(stored, files=files, rows=rows, columns=columns)[:]
        except RuntimeError:  # torch's, of a shape that heads do not divide
            expected = "a multiple of the numbers of heads"
            raise BadAdapter(
                f"{stored.stored_name}: expected {expected}, got {stored.shape}"
            ) from None
        if weight == _EMBEDDING and part == "lora_a":  # a row is a token's, of which one is read
            tensor = tensor.t()
        yield module, _PARTS[part], tensor


def _module(name: str, pair: Mapping[str, Tensor], alpha: float) -> LoraModule:
    """alpha: 0 means the rank, as in llama.cpp."""
    if len({tensor.dtype for tensor in pair.values()}) > 1:  # quantized types need wide rows
        pair = {part: tensor.float() for part, tensor in pair.items()}
    rank = pair["A"].shape[0] if "A" in pair else pair["B"].shape[1]
    return module_of(name, pair, {"r": rank, "lora_alpha": alpha or rank})
