"""Copies of checkpoints that a test may change, and what loading them on a CPU gives."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from pagewire_kernels.interface import AttentionNeeds
from pagewire_kernels.select import select_kernels
from tests.support.checkpoints import checkpoint
from tests.support.paged_driver import PagedDriver
from tests.support.transformers_oracle import Oracle
from worker_service.config import ModelConfig
from worker_service.distributed.communicator import Communicator
from worker_service.distributed.layout import Layout
from worker_service.loader import LoadedModel, load_model
from worker_service.loader.files.config import read_config
from worker_service.loader.quantized.schemes import read_schemes
from worker_service.loader.weights.checkpoint import Checkpoint, open_checkpoint
from worker_service.loader.weights.fill import load_weights
from worker_service.models.interface import ModelContext
from worker_service.models.linear.linear import Linear
from worker_service.models.native import NativeModel
from worker_service.models.registry import build_native_model

TOKENS = list(range(3, 30))
CPU = torch.device("cpu")


def copy_checkpoint(family: str, folder: Path) -> Path:
    """A copy of the tiny checkpoint of `family`."""
    return Path(shutil.copytree(checkpoint(family), folder / family))


def edit_config(path: Path, **changes: Any) -> None:
    """Set keys of a checkpoint's `config.json`; None removes a key."""
    config = json.loads((path / "config.json").read_text()) | changes
    config = {key: value for key, value in config.items() if value is not None}
    (path / "config.json").write_text(json.dumps(config))


def edit_tensors(path: Path, edit: Callable[[dict[str, Tensor]], object]) -> None:
    """Write a checkpoint's tensors again after `edit` has changed them."""
    tensors = load_file(path / "model.safetensors")
    edit(tensors)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def load(path: Path, **options: Any) -> LoadedModel:
    """Load a checkpoint, in float32 unless options say otherwise."""
    return load_model(
        ModelConfig(model=str(path), **{"device": "cpu", "dtype": "float32", **options})
    )


def logits(loaded: LoadedModel) -> Tensor:
    """Those of `TOKENS`."""
    return PagedDriver(loaded.model).run([(0, 0, TOKENS)])[0]


def assert_same(model: Path | LoadedModel, reference: Path) -> None:
    """Logits within rounding, and the same greedy tokens as `transformers` for the reference."""
    loaded, oracle = load(model) if isinstance(model, Path) else model, Oracle(reference)
    driver = PagedDriver(loaded.model)
    [continued] = driver.generate([TOKENS], 12)
    assert len(continued) == 12
    tokens = TOKENS + continued
    found, expected = driver.run([(0, 0, tokens)])[0], oracle.logits(tokens)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * float(expected.std()) + 1e-4)
    assert expected.argmax(1)[len(TOKENS) - 1 : -1].tolist() == continued


def open_weights(path: Path) -> Checkpoint:
    """The weight files, with the settings of `config.json`."""
    return open_checkpoint(path, read_schemes(path / "config.json", read_config(path)))


def layouts(tensor: int, pipeline: int) -> list[Layout]:
    """Those of all ranks."""
    return [
        Layout(tensor_parallel_size=tensor, pipeline_parallel_size=pipeline, rank=rank)
        for rank in range(tensor * pipeline)
    ]


def empty_model(path: Path, layout: Layout) -> NativeModel:
    """A rank's native model without its weights."""
    context = ModelContext(dtype=torch.float32, device=CPU, communicator=Communicator(layout))
    kernels = select_kernels(CPU, AttentionNeeds(dtype=torch.float32, head_dim=16))
    model = build_native_model(read_config(path), None, context, kernels)
    assert model is not None
    return model


def linears(path: Path, layout: Layout | None = None) -> tuple[dict[str, Linear], NativeModel]:
    """A rank's packed layers by name, and their model."""
    model = empty_model(path, layout or Layout())
    load_weights(model, open_weights(path))
    model.finish_loading()
    named = {name: module for name, module in model.named_modules() if isinstance(module, Linear)}
    return named, model
