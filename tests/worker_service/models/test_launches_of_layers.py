"""What each kind of layer launches on a GPU: kernels of ours, and torch's operations between them.

A kernel is one launch here, computed by the reference, unless the GPU's kernels have no function of
their own for it: then it is what torch launches for it.
"""

from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pagewire_kernels import reference
from pagewire_kernels.batch import RowAdapters
from pagewire_kernels.reference.backend import LayerKernels, ReferenceBackend
from pagewire_kernels.select import Kernels
from pagewire_kernels.slot_deltas import NO_SLOT
from pagewire_kernels.triton import TritonLayerKernels
from tests.support.checkpoints import checkpoint
from tests.support.paged_driver import PagedDriver
from worker_service.adapters.store import AdapterStore
from worker_service.loader.files.config import read_config
from worker_service.models.adapters import AdapterSlots
from worker_service.models.feed_forward.experts import ExpertWeights
from worker_service.models.interface import ModelContext
from worker_service.models.mixers.latent_attention import Expansion
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


class Launched:
    """A Triton kernel that is counted, and leaves zeros in its first argument."""

    def __init__(self, launches: Launches, name: str) -> None:
        self._launch = launches.counted(name, lambda y, *_, **__: y.zero_())

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return self._launch


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    """Counts the kernels of experts and adapters, too, which models on a GPU call by themselves."""
    counter = Launches()
    compute = counter.counted("apply_gate", reference.backend.LayerKernels().apply_gate)
    monkeypatch.setattr("pagewire_kernels.triton.experts.apply_gate", compute)
    for name in ("_multiply", "_combine"):
        kernel = Launched(counter, f"{name.removeprefix('_')}_experts")
        monkeypatch.setattr(f"pagewire_kernels.triton.experts.{name}", kernel)
    for name in ("add_deltas", "add_embedding_deltas"):
        compute = counter.counted(name, getattr(reference, name))
        monkeypatch.setattr(f"pagewire_kernels.triton.{name}", compute)
    return counter


def _launches(
    family: str, launches: Launches, *, with_adapters: bool = False
) -> list[tuple[str, ...]]:
    """Of each kind of layer of a model, in the order in which they occur behind the first layer,
    which has no residual to add."""
    place = ModelContext(dtype=torch.float32, device=torch.device("cpu"), packs_with_triton=True)
    model = build_native_model(read_config(checkpoint(family)), None, place, _kernels(launches))
    assert isinstance(model, NativeModel)
    for parameter in [*model.parameters(), *model.buffers()]:
        parameter.data.zero_()
    assert [*model.weight_targets()], "layers now have the names by which adapters find them"
    for module in [*model.modules()]:
        if isinstance(module, ExpertWeights | Expansion):
            module.pack()
    adapters: RowAdapters = ()
    if with_adapters:
        model.adapters = AdapterSlots(model, AdapterStore(1), 1, 16)
        adapters = torch.tensor([0, 0, NO_SLOT, 0], dtype=torch.int32)
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
        driver.run([(0, 0, [5, 6, 7]), (1, 0, [8])], adapters)
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

SLOTS = Counter(lt=1, mul=1, add=1, where=1)
"""Finds the slots of products with weights of several experts, or heads."""
EXPERTS = Counter(SLOTS + SLOTS + Counter(index=3))
"""Of both products, and the inputs of the first one by slot."""
LATENTS = Counter(SLOTS + SLOTS + Counter(arange=4, repeat_interleave=2, repeat=2, index=2))
"""Of the products of queries, and of sums of latents, with the weights of keys and values."""

WITH_ADAPTERS = {
    "llama": Counter(add_deltas=4),
    "mixtral": Counter(add_deltas=5) + EXPERTS,
    "deepseek_v2": Counter(add_deltas=9) + EXPERTS + LATENTS,
    "deepseek_v3": Counter(add_deltas=10) + EXPERTS + LATENTS,
}
"""By family, what a layer launches beside that if all of its weights have slots of adapters.
`add_deltas` is two kernels for each product."""


@pytest.mark.parametrize("family", LAYERS)
def test_a_layer_launches(family: str, launches: Launches) -> None:
    assert _launches(family, launches) == LAYERS[family]


@pytest.mark.parametrize("family", WITH_ADAPTERS)
def test_a_layer_with_adapters_launches(family: str, launches: Launches) -> None:
    [plain], [changed] = (
        [Counter(names) for names in _launches(family, launches, with_adapters=with_adapters)]
        for with_adapters in (False, True)
    )
    assert changed == plain + WITH_ADAPTERS[family]
