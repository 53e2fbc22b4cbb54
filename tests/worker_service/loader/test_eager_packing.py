"""A weight's original is gone before the next layer's is filled."""

import weakref

import pytest
import torch

from pagewire_kernels.interface import AttentionNeeds
from pagewire_kernels.select import select_kernels
from tests.support.checkpoints import checkpoint
from worker_service.distributed.communicator import Communicator
from worker_service.distributed.layout import Layout
from worker_service.loader.model_files import read_config
from worker_service.loader.weights import (
    EagerPacking,
    fill_dummy_weights,
    load_weights,
    open_checkpoint,
)
from worker_service.models.interface import ModelContext, WeightTarget
from worker_service.models.linear import Linear
from worker_service.models.native import NativeModel
from worker_service.models.registry import build_native_model

CPU = torch.device("cpu")


def empty_model(family: str) -> NativeModel:
    kernels = select_kernels(CPU, AttentionNeeds(dtype=torch.float32, head_dim=16))
    context = ModelContext(dtype=torch.float32, device=CPU, communicator=Communicator(Layout()))
    model = build_native_model(read_config(checkpoint(family)), None, context, kernels)
    assert model is not None
    return model


def linears(model: NativeModel) -> list[Linear]:
    return [module for module in model.modules() if isinstance(module, Linear)]


class Watch:
    """Called after each target; records the maximum number of filled originals in memory."""

    def __init__(self, model: NativeModel) -> None:
        self._packing = EagerPacking(model)
        self._originals = [
            weakref.ref(linear.weight) for linear in linears(model) if linear.weight is not None
        ]
        self._filled: set[int] = set()
        self.most = 0

    def __call__(self, weight: WeightTarget) -> None:
        self._filled.add(weight.target.untyped_storage().data_ptr())
        there = [original for ref in self._originals if (original := ref()) is not None]
        self.most = max(self.most, sum(w.data_ptr() in self._filled for w in there))
        self._packing(weight)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2", "opt"])
def test_at_most_one_layer_is_in_memory_twice(family: str) -> None:
    model = empty_model(family)
    watch = Watch(model)
    load_weights(model, open_checkpoint(checkpoint(family)), on_filled=watch)
    assert watch.most == 1
    assert all(linear.weight is None for linear in linears(model))


def test_dummy_weights_are_packed_one_by_one_too() -> None:
    model = empty_model("llama")
    watch = Watch(model)
    fill_dummy_weights(model.weight_targets(), on_filled=watch)
    assert watch.most == 1
    assert all(linear.weight is None for linear in linears(model))


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_packing_early_changes_no_weight(family: str) -> None:
    early, late = empty_model(family), empty_model(family)
    widths = {layer: layer.weight.shape[1] for layer in linears(late) if layer.weight is not None}
    files = open_checkpoint(checkpoint(family))
    load_weights(early, files, on_filled=EagerPacking(early))
    load_weights(late, files)
    late.finish_loading()
    for ours, theirs in zip(linears(early), linears(late), strict=True):
        rows = torch.eye(widths[theirs])
        assert torch.equal(ours(rows), theirs(rows))
