"""Launches of Triton kernels without Python code that repeats what the last launch did.

`kernel[grid](...)` binds its arguments, derives from them for which code the kernel is specialized,
and looks that code up. This takes about ten microseconds of Python per launch, longer than a small
kernel runs, and an eager step of 32 layers has more than 200 launches. Nearly always the code is
that of the last launch with tensors of the same layouts, because Triton specializes by dtypes, by
the values of integers, all of which follow from layouts here, and by whether pointers are aligned
to 16 bytes. So the first launch of a `LayoutLaunch` goes through Triton, and the compiled kernel
that it returns is called directly by later ones, if their tensors are aligned. Calling a compiled
kernel is part of Triton's interface, respects the hooks of profilers, and launches on the current
stream, where it can be captured in a CUDA graph.
"""

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

Layouts = tuple[tuple[torch.Size, tuple[int, ...], torch.dtype] | None, ...]

Derived = TypeVar("Derived")

_ALIGNMENT = 16
"""Bytes to which Triton assumes pointers to be aligned, if they are."""

_KEEPS_COMPILED = torch.version.hip is None
"""On ROCm Triton specializes by the size of a tensor's storage, too, which is not in a layout."""

_MAX_DERIVED = 4096
"""Steps have many different numbers of rows, so the table is emptied at this size."""

_derived: dict[tuple[Callable[..., Any], int, Layouts], Any] = {}


class Compiled(NamedTuple):
    """The code of a launch whose tensors are aligned."""

    run: Callable[..., None]
    """A compiled kernel with its grid."""

    constants: tuple[Any, ...]
    """The values of all parameters after tensors and factors, which Triton passes on."""


class LayoutLaunch(NamedTuple):
    """The part of a launch that follows from the layouts of its tensors."""

    kernel: Any
    grid: tuple[int, ...]
    """Programs along up to three axes."""

    integers: tuple[int, ...]
    """The kernel's arguments after tensors and factors: strides and counts."""

    options: dict[str, Any]
    """Constants of the kernel, and options of its compilation."""

    shared: tuple[Tensor, ...]
    """The tensors after those that differ between launches."""

    compiled: list[Compiled]
    """Empty until the first launch."""


def layout_launch(
    kernel: Any,
    grid: tuple[int, ...],
    integers: tuple[int, ...],
    shared: tuple[Tensor, ...] = (),
    /,
    **options: Any,
) -> LayoutLaunch:
    """A launch of a kernel with parameters in this order: tensors, shared tensors, float factors,
    integers, constants."""
    return LayoutLaunch(kernel, grid, integers, options, shared, [])


def run(launch: LayoutLaunch, tensors: tuple[Tensor, ...], *factors: float) -> None:
    """Run a kernel.

    tensors: all but the shared ones, of the layouts or dtypes for which `launch` was derived.
    """
    compiled = launch.compiled
    if compiled:
        addresses = 0
        for tensor in tensors:
            addresses |= tensor.data_ptr()
        if addresses % _ALIGNMENT == 0:
            code = compiled[0]
            code.run(*tensors, *launch.shared, *factors, *code.constants)
            return
    tensors += launch.shared
    numbers = (*map(float, factors), *launch.integers)
    found = launch.kernel[launch.grid](*tensors, *numbers, **launch.options)
    if found is None or compiled or torch.compiler.is_compiling() or not _KEEPS_COMPILED:
        return  # Triton's interpreter compiles nothing
    if all(tensor.data_ptr() % _ALIGNMENT == 0 for tensor in tensors):
        names = _parameters(launch.kernel)[len(tensors) + len(numbers) :]
        constants = (launch.options[name] for name in names)
        x, y, z = (*launch.grid, 1, 1)[:3]
        compiled.append(Compiled(found[x, y, z], (*launch.integers, *constants)))


@cache
def _parameters(kernel: Any) -> tuple[str, ...]:
    return tuple(inspect.signature(kernel.fn).parameters)


def derived(derive: Callable[..., Derived], first: Tensor, *others: Tensor | None) -> Derived:
    """Return `derive(first, *others)`, or what it returned for other tensors of the same layouts on
    the same device.

    The layers of a step have equal layouts, and on the host checking them and choosing the
    arguments of a launch takes longer than the launch. A function that raises is called again. Code
    that is compiled runs without the host's checks, and its shapes are symbols.
    """
    if torch.compiler.is_compiling():
        return derive(first, *others)
    given = derive, first.get_device(), layouts(first, *others)
    try:
        found: Derived = _derived[given]
    except KeyError:
        found = derive(first, *others)
        if len(_derived) >= _MAX_DERIVED:
            _derived.clear()
        _derived[given] = found
    return found


def layouts(*tensors: Tensor | None) -> Layouts:
    """Shapes, strides and dtypes of tensors, on which checks depend; None for absent tensors."""
    return tuple(
        [
            None if tensor is None else (tensor.shape, tensor.stride(), tensor.dtype)
            for tensor in tensors
        ]
    )
