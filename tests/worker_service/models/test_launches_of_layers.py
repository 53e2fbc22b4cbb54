"""What each kind of layer launches on a GPU: kernels of ours, and torch's operations between them.

A kernel is one launch here, computed by the reference, unless the GPU's kernels have no function of
their own for it: then it is what torch launches for it.
"""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pagewire_kernels import reference
from pagewire_kernels.reference.backend import LayerKernels, ReferenceBackend
from pagewire_kernels.select import Kernels
from pagewire_kernels.triton import TritonLayerKernels
from tests.support.checkpoints import checkpoint
from tests.support.paged_driver import PagedDriver
from worker_service.loader.model_files import read_config
from worker_service.models.interface import ModelContext
from worker_service.models.native import NativeModel
from worker_service.models.registry import build_native_model

PRODUCTS = {"linear", "mm", "addmm"}
ALLOCATIONS = {"empty", "empty_like", "new_empty", "empty_strided"}


class Launches(TorchDispatchMode):
    """Names of launches, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self._is_kernel = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if not (self._is_kernel or func.is_view or name in ALLOCATIONS):
            self.names.append("product" if name in PRODUCTS else name)
        return func(*args, **(kwargs or {}))

    def counted(self, name: str, compute: Callable[..., Any]) -> Callable[..., Any]:
        """The same function as one launch."""

        def launch(*args: Any, **kwargs: Any) -> Any:
            self.names.append(name)
            self._is_kernel = True
            try:
                return compute(*args, **kwargs)
            finally:
                self._is_kernel = False

        return launch


def _kernels(launches: Launches) -> Kernels:
    backend, layers = ReferenceBackend(), LayerKernels()
    for name in ("paged_attention", "write_kv"):
        setattr(backend, name, launches.counted(name, getattr(backend, name)))
    for name in (name for name in dir(TritonLayerKernels) if not name.startswith("_")):
        of_gpu = getattr(TritonLayerKernels, name)
        if callable(of_gpu) and of_gpu is not getattr(reference, name, None):
            setattr(layers, name, launches.counted(name, getattr(layers, name)))
    return Kernels(backend, layers)


def _launches(family: str) -> list[tuple[str, ...]]:
    """Of each kind of layer of a model, in the order in which they occur behind the first layer,
    which has no residual to add."""
    launches = Launches()
    place = ModelContext(dtype=torch.float32, device=torch.device("cpu"))
    model = build_native_model(read_config(checkpoint(family)), None, place, _kernels(launches))
    assert isinstance(model, NativeModel)
    for parameter in [*model.parameters(), *model.buffers()]:
        parameter.data.zero_()
    by_layer: defaultdict[int, list[str]] = defaultdict(list)

    def begins(layer: int) -> Callable[..., None]:
        def begin(*_: Any) -> None:
            launches.names = by_layer[layer]

        return begin

    for index, layer in enumerate(model.layers):
        layer.register_forward_pre_hook(begins(index))
        layer.register_forward_hook(begins(-1))
    driver = PagedDriver(model)
    with launches:
        driver.run([(0, 0, [5, 6, 7]), (1, 0, [8])])
    return [*dict.fromkeys(tuple(by_layer[index]) for index in range(1, len(model.layers)))]


MLP = ("rms_norm", "product", "act_and_mul", "product")
ATTENTION = ("product", "rotate_and_write_kv", "paged_attention", "product")
MAMBA2 = ("product", "causal_convolution", "mamba2_scan", "gated_rms_norm", "product")

LAYERS: dict[str, list[tuple[str, ...]]] = {
    "llama": [("rms_norm", *ATTENTION, *MLP)],
    "lfm2": [
        ("rms_norm", *ATTENTION, *MLP),
        ("rms_norm", "product", "mul_", "causal_convolution", "mul_", "product", *MLP),
    ],
    "qwen3_5": [
        ("rms_norm", *ATTENTION[:-1], "multiply_sigmoid", "product", *MLP),
        (
            *("rms_norm", "product", "product", "causal_convolution", "gated_delta_rule"),
            *("gated_rms_norm", "product", *MLP),
        ),
    ],
    "granite_hybrid": [
        ("rms_norm", "product", "write_kv", "paged_attention", "product", "mul_", *MLP, "mul_"),
        ("rms_norm", *MAMBA2, "mul_", *MLP, "mul_"),
    ],
    "nemotron_h": [
        ("rms_norm", "product", "activate", "product"),
        ("rms_norm", "product", "write_kv", "paged_attention", "product"),
        ("rms_norm", *MAMBA2),
    ],
    "mamba2": [("rms_norm", *MAMBA2)],
    "mamba": [
        (
            "rms_norm",
            "product",
            "causal_convolution",
            "product",
            "product",
            "mamba1_scan",
            "product",
        )
    ],
}
"""By family, the kinds of its layers."""


@pytest.mark.parametrize("family", LAYERS)
def test_a_layer_launches(family: str) -> None:
    assert _launches(family) == LAYERS[family]
