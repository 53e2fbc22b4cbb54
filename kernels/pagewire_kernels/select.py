"""Selection of the attention backend and the layer kernels for a device and a model."""

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from typing import Any, Protocol

import torch

from pagewire_kernels.batch import StepBatch
from pagewire_kernels.cpu import NativeBackend, library
from pagewire_kernels.cpu.checks import DTYPES
from pagewire_kernels.cpu.layers import NativeLayerKernels
from pagewire_kernels.cpu.native_library import Library
from pagewire_kernels.cpu.recorded_model import Embed, Head, Layers, RecordedModel
from pagewire_kernels.interface import AttentionBackend, AttentionNeeds, Computed
from pagewire_kernels.quantized_weight import QuantizedWeight
from pagewire_kernels.reference.backend import LayerKernels, ReferenceBackend
from pagewire_kernels.self_check import check_products, self_check

logger = logging.getLogger(__name__)


BACKEND_NAMES = ("flash", "triton", "cpu", "reference")
_GPU_NAMES = ("flash", "triton")

Check = Callable[[AttentionBackend, torch.device, AttentionNeeds], None]


def select_backend(
    device: torch.device,
    name: str | None = None,
    needs: AttentionNeeds | None = None,
) -> AttentionBackend:
    """Return the backend called `name`, or the first in the order of `candidates` that supports
    `needs` on `device`.

    A GPU backend must pass a check on the device. If no backend was requested by name, one that
    fails is skipped with a warning. needs: None for a head size of 64 in float32.

    Raises ValueError if there is no such backend, or if it does not run on `device`, does not
    support `needs`, or fails its check.
    """
    needs = needs or AttentionNeeds(dtype=torch.float32, head_dim=64)
    if name is not None and name not in BACKEND_NAMES:
        expected = ", ".join(BACKEND_NAMES)
        raise ValueError(f"attention backend: expected one of {expected}, got {name!r}")
    if name == "cpu" and device.type != "cpu":
        raise ValueError(f"attention backend 'cpu' does not run on device {device}")
    if name in _GPU_NAMES and device.type != "cuda":
        raise ValueError(f"attention backend {name!r} does not run on device {device}")
    return choose(device, name, needs, candidates(device, name, needs.batch_invariant))


def choose(
    device: torch.device,
    name: str | None,
    needs: AttentionNeeds,
    offered: Iterable[AttentionBackend],
    check: Check = self_check,
) -> AttentionBackend:
    """Return the first backend that has the required abilities and passes its check.

    name: of the requested backend, if any; offered: backends in order of preference.

    Raises ValueError with the obstacles of each if there is none.
    """
    passed_over: list[str] = []
    for backend in offered:
        obstacles = [*backend.abilities.obstacles(needs)]
        if not obstacles and device.type == "cuda" and backend.name != "reference":
            obstacles = [*_failure(partial(check, backend, device, needs))]
            if obstacles and name is None:
                logger.warning(
                    "attention backend failed its check name=%s error=%s",
                    label(backend),
                    obstacles[0],
                )
        if not obstacles:
            break
        passed_over.append(f"{label(backend)} {' and '.join(obstacles)}")
    else:
        option = f"--attention-backend {name}" if name else "attention backends"
        raise ValueError(f"{option}: none can serve this model here: {_listed(passed_over)}")
    reason = "requested" if name else f"default for device type {device.type}"
    if passed_over and not name:
        reason = f"{reason}, since {_listed(passed_over)}"
    logger.info("attention backend selected name=%s reason=%s", label(backend), reason)
    return backend


def _failure(check: Callable[[], None]) -> Iterator[str]:
    try:
        check()
    except Exception as error:  # compilers, drivers and packages raise anything
        lines = str(error).strip().splitlines()
        yield f"failed its check: {lines[0] if lines else type(error).__name__}"


def label(backend: AttentionBackend) -> str:
    """The name of a backend, with that of the package that implements it if there are several."""
    version = getattr(backend, "version", None)
    return backend.name if version is None else f"{backend.name} ({version})"


def _listed(passed_over: list[str]) -> str:
    return "; ".join(passed_over) or "none is available on this machine"


def candidates(
    device: torch.device,
    name: str | None,
    batch_invariant: bool,
    native: Callable[[], Library | None] = library,
) -> Iterator[AttentionBackend]:
    """Yield the backends available on this machine, best first; only those called `name` if given.

    On a GPU, packages of FlashAttention that take blocks of 16 tokens precede the Triton kernels.
    Those whose blocks of 256 tokens waste memory and share fewer prefixes follow them.
    """
    if device.type == "cpu" and name in (None, "cpu") and (found := native()) is not None:
        yield NativeBackend(found)
    if device.type == "cuda" and find_spec("triton") is not None:
        yield from _on_gpu(device, name, batch_invariant)
    if name in (None, "reference"):
        yield ReferenceBackend()


def _on_gpu(
    device: torch.device, name: str | None, batch_invariant: bool
) -> Iterator[AttentionBackend]:
    from pagewire_kernels.flash_attention import FlashBackend, installed_calls
    from pagewire_kernels.triton import TritonBackend, packed_attention, write_kv

    def flash(*, small_blocks: bool) -> Iterator[AttentionBackend]:
        for call in installed_calls(device) if name in (None, "flash") else ():
            if (call.abilities.block_multiple <= 16) == small_blocks:
                # Triton kernels do what the packages do not.
                yield FlashBackend(call, write_kv, packed_attention)

    yield from flash(small_blocks=True)
    if name in (None, "triton"):
        yield TritonBackend(batch_invariant=batch_invariant)
    yield from flash(small_blocks=False)


class ForwardFn(Protocol):
    """A model's embedding and layers, and its LM head if that is part of a recorded program."""

    def __call__(self, batch: StepBatch) -> Computed:
        """Run the forward pass. The head is computed for `batch.sampled`, if it is part of the
        program."""


@dataclass(frozen=True, slots=True)
class Kernels:
    """The kernels of a model, except for those of its linear layers."""

    attention: AttentionBackend
    """Of layers that see all tokens."""
    layers: LayerKernels
    windowed: AttentionBackend | None = None
    """Of layers with a window; None: the same."""

    @property
    def backends(self) -> list[AttentionBackend]:
        """All attention backends, each once."""
        windowed = self.attention_of(1)
        return [self.attention] if windowed is self.attention else [self.attention, windowed]

    def attention_of(self, window: int | None) -> AttentionBackend:
        """The backend of layers with this window."""
        return self.attention if window is None else self.windowed or self.attention

    def prepare(self, embed: Embed, layers: Layers, head: Head | None) -> ForwardFn:
        """Return a function that computes a model's parts in order: eagerly, or as a recorded
        program. head: None for a model without one."""
        if self.layers.name == "native" and (found := library()) is not None:
            return RecordedModel(embed, layers, head, found)

        def run(batch: StepBatch) -> Computed:
            return Computed(layers(embed(batch), batch))

        return run


MAX_GROUP_MULTIPLE = 16
"""Largest multiple of tokens that blocks of models with several cache groups can have."""

SelectBackend = Callable[[torch.device, str | None, AttentionNeeds], AttentionBackend]


def select_kernels(
    device: torch.device,
    needs: AttentionNeeds,
    attention: str | None = None,
    windowed: AttentionNeeds | None = None,
    select: SelectBackend = select_backend,
) -> Kernels:
    """Select attention backends, as `select_backend`, and the layer kernels for them.

    windowed: the requirements of layers with a window, which then get a backend of their own; None
    if `needs` are those of all layers. A backend whose blocks are of a larger multiple of tokens
    than `MAX_GROUP_MULTIPLE` serves models of one cache group only, so that it must serve all.
    """
    backends = [select(device, attention, wanted) for wanted in (needs, windowed) if wanted]
    multiple = max(backend.abilities.block_multiple for backend in backends)
    if windowed is not None and multiple > MAX_GROUP_MULTIPLE:
        head_dim = max(needs.head_dim, windowed.head_dim)
        backends = [select(device, attention, replace(windowed, head_dim=head_dim))]
    backend, of_windows = backends[0], backends[-1]
    if label(of_windows) == label(backend):
        of_windows = backend
    layers = layer_kernels(backend, device, needs.dtype)
    logger.info("layer kernels selected name=%s", layers.name)
    return Kernels(backend, layers, of_windows)


def layer_kernels(
    backend: AttentionBackend, device: torch.device, dtype: torch.dtype
) -> LayerKernels:
    """Return the fastest layer kernels of the device; plain torch for the reference backend."""
    if backend.name in _GPU_NAMES:
        from pagewire_kernels.triton import TritonLayerKernels  # imports triton

        return TritonLayerKernels()
    is_native = device.type == "cpu" and backend.name == "cpu" and dtype in DTYPES
    if is_native and (found := library()) is not None:
        return NativeLayerKernels(found)
    return LayerKernels()


def can_keep_weights_packed(
    layers: LayerKernels,
    device: torch.device,
    dtype: torch.dtype,
    pack: Callable[[QuantizedWeight], Any] | None = None,
) -> bool:
    """Return whether the Triton kernels multiply correctly by quantized weights on this GPU.

    If they fail their check, a warning is logged. pack: see `check_products`; None for the
    packing of the Triton kernels.
    """
    if layers.name != "triton":
        return False
    if pack is None:
        from pagewire_kernels.triton import TritonQuantizedWeight

        pack = partial(TritonQuantizedWeight, dtype=dtype, device=device, batch_invariant=False)
    failures = [*_failure(partial(check_products, pack, device, dtype))]
    for failure in failures:
        logger.warning("quantized weights are dequantized: their kernels %s", failure)
    return not failures
