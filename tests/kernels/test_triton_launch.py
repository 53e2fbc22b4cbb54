"""Later launches call the compiled kernel of the first one, and nothing but it.

Triton's own launcher runs up to the driver, which is replaced: kernels are not compiled, and what
they are launched with is recorded.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from pagewire_kernels.triton import launch, layers

SIZE = 64
WEIGHT = torch.ones(SIZE)


@dataclass
class Device:
    """A driver without a GPU, and the launches that reached it."""

    stream: int = 1
    specializations: list[Any] = field(default_factory=list)
    """One per kernel that would have been compiled."""
    launches: list[tuple[Any, ...]] = field(default_factory=list)
    """(specialization, grid, stream, arguments)."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return self.stream

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def compiled(self, key: Any) -> "Recorded":
        self.specializations.append(key)
        return Recorded(self, key)


class Recorded(CompiledKernel):  # type: ignore[misc]
    """A compiled kernel that records what it is launched with."""

    name = "recorded"
    src = packed_metadata = None

    def __init__(self, device: Device, key: Any) -> None:
        self.module = self.function = None

        def record(x: int, y: int, z: int, stream: int, *rest: Any) -> None:
            _function, _metadata, _launch, enter, leave, *arguments = rest
            for hook in (enter, leave):
                hook(_launch)
            device.launches.append((key, (x, y, z), stream, arguments))

        self._run = record

    def _init_handles(self) -> None:
        """There is nothing to load."""


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    """A device for which nothing is compiled yet."""
    device, kernel = Device(), layers._norm

    def compile_for(_kernel: JITFunction, key: Any, *_: Any) -> Recorded:
        return kernel.device_caches[0][0].setdefault(key, device.compiled(key))

    monkeypatch.setattr(JITFunction, "_do_compile", compile_for)
    monkeypatch.setattr(kernel, "device_caches", defaultdict(kernel.create_binder))
    monkeypatch.setattr(launch, "_derived", {})
    driver.set_active(device)
    yield device
    driver.set_active(None)  # found again when it is used


@pytest.fixture
def through_triton(monkeypatch: pytest.MonkeyPatch, device: Device) -> list[int]:
    """The number of recorded launches when Triton's launcher was called."""
    calls, run = [], JITFunction.run

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(len(device.launches))
        return run(*args, **kwargs)

    monkeypatch.setattr(JITFunction, "run", counted)
    return calls


def rows(count: int = 3, *, start: int = 0, stride: int = SIZE) -> Tensor:
    """Zeros, [count, SIZE], from an aligned address on."""
    memory = torch.zeros(start + count * stride + 4)
    first = start - memory.data_ptr() % 16 // 4
    return memory[first % 4 + start :].as_strided((count, SIZE), (stride, 1))


def test_a_later_launch_passes_what_triton_would_have_passed(
    device: Device, through_triton: list[int]
) -> None:
    first, second = rows(), rows()
    layers.rms_norm(first, WEIGHT, 1e-6)
    layers.rms_norm(second, WEIGHT, 1e-5)
    assert through_triton == [0]
    (key, grid, _, arguments), (later_key, later_grid, _, later) = device.launches
    assert (later_key, later_grid) == (key, grid)
    assert len(device.specializations) == 1
    differing = [i for i, pair in enumerate(zip(arguments, later, strict=True)) if differ(*pair)]
    assert differing == [0, 1, 2, 4, 5]  # output, x, x for residual and bias, eps
    assert later[1] is second
    assert later[5] == 1e-5


def differ(one: Any, other: Any) -> bool:
    return one is not other if isinstance(one, Tensor) else bool(one != other)


def test_memory_that_is_not_aligned_is_left_to_triton(
    device: Device, through_triton: list[int]
) -> None:
    for x in (rows(), rows(start=1), rows(), rows(start=1)):
        layers.rms_norm(x, WEIGHT, 1e-6)
    assert through_triton == [0, 1, 3]
    aligned, unaligned, *rest = [key for key, *_ in device.launches]
    assert aligned != unaligned
    assert rest == [aligned, unaligned]


def test_a_first_launch_that_is_not_aligned_is_not_kept(
    device: Device, through_triton: list[int]
) -> None:
    for x in (rows(start=1), rows(), rows()):
        layers.rms_norm(x, WEIGHT, 1e-6)
    assert through_triton == [0, 1]
    unaligned, *aligned = [key for key, *_ in device.launches]
    assert aligned == 2 * [device.specializations[1]]
    assert unaligned == device.specializations[0]


def test_another_stride_or_number_of_rows_is_another_launch(
    device: Device, through_triton: list[int]
) -> None:
    for x in (rows(), rows(stride=2 * SIZE), rows(count=5)):
        for _ in range(2):
            layers.rms_norm(x, WEIGHT, 1e-6)
    assert through_triton == [0, 2, 4]
    strides = [arguments[7] for *_, arguments in device.launches]
    assert strides == 2 * [SIZE] + 2 * [2 * SIZE] + 2 * [SIZE]
    assert [grid for _, grid, *_ in device.launches] == 4 * [(3, 1, 1)] + 2 * [(5, 1, 1)]


def test_a_launch_is_queued_on_the_stream_of_its_caller(device: Device) -> None:
    for stream in (1, 2):  # as during the capture of a graph
        device.stream = stream
        layers.rms_norm(rows(), WEIGHT, 1e-6)
    assert [stream for _, _, stream, _ in device.launches] == [1, 2]


def test_hooks_of_profilers_see_every_launch(device: Device) -> None:
    seen: list[Any] = []

    def hook(metadata: Any) -> None:
        seen.append(metadata.get()["name"])

    for chain in (knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook):
        chain.add(hook)
    try:
        for _ in range(2):
            layers.rms_norm(rows(), WEIGHT, 1e-6)
    finally:
        for chain in (knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook):
            chain.remove(hook)
    assert seen == 4 * ["recorded"]


def test_integers_given_as_factors_are_not_compiled_into_the_kernel(device: Device) -> None:
    for eps in (1, 0.5):
        layers.rms_norm(rows(), WEIGHT, eps)
    assert len(device.specializations) == 1
    assert [arguments[5] for *_, arguments in device.launches] == [1.0, 0.5]
