"""Where the tests of the GPU's kernels run: on a GPU, or without one in Triton's interpreter.

Triton decides when it is imported, by TRITON_INTERPRET, for the whole process. So the tests are
marked `gpu` unless it is set, and `test_triton_interpreted.py` runs them all in a process of
its own for which it is.
"""

import os
from dataclasses import fields, is_dataclass
from types import ModuleType
from typing import Any, TypeVar

import numpy as np
import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def row_wise_product(a: np.ndarray, b: np.ndarray, dtype: Any = None) -> np.ndarray:
    """a @ b for a of [..., rows, inner], with every row's product computed by itself.

    The interpreter has bfloat16 as the upper halves of float32 numbers.
    """
    a, b = (
        (tensor.astype(np.uint32) << 16).view(np.float32) if tensor.dtype == np.uint16 else tensor
        for tensor in (a, b)
    )
    return np.matmul(a[..., :, None, :], b[..., None, :, :], dtype=dtype)[..., 0, :]


def _make_dots_row_wise() -> None:
    """Compute each row of the interpreter's `tl.dot` by itself, as the tile of a GPU does.

    The interpreter multiplies by numpy, whose BLAS chooses a kernel by the number of rows on some
    processors (Zen, Haswell): the same row then has other bits in another batch, which would say
    nothing about the kernels under test.
    """
    from triton.runtime import interpreter

    row_wise = ModuleType("numpy, except for its product of matrices")
    vars(row_wise).update(vars(np))  # found without a call: the interpreter asks millions of times
    row_wise.matmul = row_wise_product  # type: ignore[attr-defined]
    interpreter.np = row_wise


EXACT = {"add": np.add, "sub": np.subtract, "mul": np.multiply}


def _prepare_the_interpreter_once() -> None:
    """Spare the interpreter what takes longer than what small kernels compute: it patches
    `triton.language` for every launch and for every call of a function within it, makes a table of
    types whenever it looks for one, and checks integers for overflow by six of its operations."""
    import triton.language as tl
    from triton.runtime import interpreter

    patch, to_numpy = interpreter._patch_lang, interpreter._get_np_dtype
    patched: dict[frozenset[str], Any] = {}
    types: dict[str, Any] = {}

    def patch_once(function: Any) -> Any:
        modules = [*function.__globals__.values()]
        names = frozenset(
            module.__name__ for module in (tl, tl.core) if any(module is one for one in modules)
        )
        if names not in patched:
            patched[names] = patch(function)
        return type(patched[names])()  # with nothing to restore

    def to_numpy_once(dtype: Any) -> Any:
        name = str(dtype)
        if name not in types:
            types[name] = to_numpy(dtype)
        return types[name]

    def check_overflow(left: Any, right: Any, operation: Any) -> None:
        kind = left.type.scalar
        if kind.int_bitwidth < 64:
            sides = (side.handle.data.astype(np.int64) for side in (left, right))
            exact = EXACT[operation.__name__](*sides)
            least, most = kind.get_int_min_value(), kind.get_int_max_value()
            assert np.all((exact >= least) & (exact <= most)), f"{kind} overflow detected"

    interpreter._patch_lang = patch_once
    interpreter.interpreter_semantic.binary_op_sanitize_overflow_impl = check_overflow
    interpreter._get_np_dtype = to_numpy_once


if INTERPRETED:
    _make_dots_row_wise()
    _prepare_the_interpreter_once()

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
OVERFLOW = "ignore:overflow encountered in exp:RuntimeWarning"
MARKS = [pytest.mark.filterwarnings(OVERFLOW) if INTERPRETED else pytest.mark.gpu]
"""The interpreter is numpy, which warns where a GPU gives infinity and says nothing."""

DTYPES = (torch.float32, torch.float16) + (() if INTERPRETED else (torch.bfloat16,))
"""The interpreter's `tl.dot` gives garbage in bfloat16."""

TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
"""Per dtype: float32 sums differ in order only; the others also in the output's rounding, and
attention's weights are rounded before they are multiplied with values."""

Columns = TypeVar("Columns")


def assert_agrees(output: torch.Tensor, expected: torch.Tensor, factor: float = 1.0) -> None:
    """The tensors are equal but for the tolerance of their type."""
    tolerance = TOLERANCE[expected.dtype] * factor
    torch.testing.assert_close(output.cpu(), expected.cpu(), atol=tolerance, rtol=tolerance)


def on_device(columns: Columns) -> Columns:
    """A dataclass or named tuple of tensors and numbers, with its tensors on the device."""
    if is_dataclass(columns):
        names = [field.name for field in fields(columns) if field.init]
    else:
        names = columns._fields  # type: ignore[attr-defined]
    values = {name: getattr(columns, name) for name in names}
    return type(columns)(
        **{
            name: value.to(DEVICE) if isinstance(value, torch.Tensor) else value
            for name, value in values.items()
        }
    )
