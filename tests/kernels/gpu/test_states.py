"""Layers with a state on the GPU against the reference."""

from collections.abc import Callable

import pytest
import torch

from pagewire_kernels.reference.backend import LayerKernels
from pagewire_kernels.triton import TritonLayerKernels
from tests.support.gpu_kernels import DEVICE, DTYPES, MARKS, assert_agrees
from tests.support.state_layers import (
    LAYERS,
    LIKE_OTHERS,
    Layer,
    Mamba1,
    check_saves,
    in_wider_rows,
    random,
)

pytestmark = MARKS

KERNELS: LayerKernels = TritonLayerKernels()
TORCH: LayerKernels = LayerKernels()

OF_EACH_KIND = (
    "convolution of 3",
    "mamba1 without gate",
    "mamba2 of small heads",
    "rg-lru",
    "delta rule of small heads",
)
"""The smallest layer of each kernel: all others take the interpreter minutes."""

each_layer = pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS.keys())

each_kind = pytest.mark.parametrize(
    "make",
    [
        pytest.param(make, id=name, marks=[] if name in OF_EACH_KIND else pytest.mark.long)
        for name, make in LAYERS.items()
    ],
)
"""All but the layers `OF_EACH_KIND` are long tests."""


def _is_long(name: str, dtype: torch.dtype) -> bool:
    return name not in OF_EACH_KIND and (dtype != torch.float32 or name in LIKE_OTHERS)


@pytest.mark.parametrize(
    ("make", "dtype"),
    [
        pytest.param(
            make,
            dtype,
            id=f"{name}-{dtype}",
            marks=pytest.mark.long if _is_long(name, dtype) else [],
        )
        for name, make in LAYERS.items()
        for dtype in DTYPES
    ],
)
def test_rows_and_states_agree_with_the_reference(
    make: Callable[[torch.dtype], Layer], dtype: torch.dtype
) -> None:
    layer = make(dtype)
    found, expected = layer.states(DEVICE), layer.states()
    for step in ([(0, 0, 9), (2, 0, 1)], [(2, 1, 2), (1, 0, 2), (0, 9, 10)]):
        y = layer.run(KERNELS, found, step)
        assert_agrees(y, layer.run(TORCH, expected, step))
    assert torch.equal(found.pages.isnan().cpu(), expected.pages.isnan())
    assert_agrees(found.pages.nan_to_num(), expected.pages.nan_to_num())


@each_layer
def test_a_token_has_the_same_bits_in_any_batch(make: Callable[[torch.dtype], Layer]) -> None:
    layer = make(torch.float32)
    together, alone = layer.states(DEVICE), layer.states(DEVICE)
    expected = layer.run(KERNELS, together, [(0, 0, 3), (1, 0, 7)])[3:]
    parts = [layer.run(KERNELS, alone, [(1, *part)]) for part in ((0, 1), (1, 6), (6, 7))]
    assert torch.equal(torch.cat(parts), expected)


@each_kind
def test_states_are_saved_where_they_are_reached(make: Callable[[torch.dtype], Layer]) -> None:
    check_saves(make(torch.float32), KERNELS, DEVICE)


@each_kind
def test_a_state_without_pages_begins_at_zero_and_is_not_kept(
    make: Callable[[torch.dtype], Layer],
) -> None:
    layer, absent = make(torch.float32), make(torch.float32).states(DEVICE)
    absent.tables.fill_(-1)
    step = [(0, 0, 2), (1, 0, 3)]
    expected = layer.run(KERNELS, layer.states(DEVICE), step)
    assert torch.equal(layer.run(KERNELS, absent, step), expected)
    assert absent.pages.isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gates_first", [False, True])
@pytest.mark.parametrize(("num_groups", "size"), [(1, 300), (3, 20)])
def test_a_gated_norm_agrees_with_the_reference(
    dtype: torch.dtype, gates_first: bool, num_groups: int, size: int
) -> None:
    shape = 5, num_groups, size
    x, gate = (in_wider_rows(random(*shape, seed=seed).to(dtype)) for seed in range(2))
    for weight in (random(num_groups, size, seed=2), random(size, seed=3).to(dtype)):
        columns = x.to(DEVICE), gate.to(DEVICE), weight.to(DEVICE)
        found = KERNELS.gated_rms_norm(*columns, 1e-5, gates_first=gates_first)
        expected = TORCH.gated_rms_norm(x, gate, weight, 1e-5, gates_first=gates_first)
        assert_agrees(found, expected)


def test_a_state_that_is_not_finite_stays_in_its_sequence() -> None:
    layer, step = Mamba1(torch.float32), [(0, 0, 4), (1, 0, 4)]
    expected = layer.run(KERNELS, layer.states(DEVICE), step)
    layer.rows["x"][2] = torch.nan
    found = layer.run(KERNELS, layer.states(DEVICE), step)
    assert torch.equal(found[4:], expected[4:])
    assert found[2:4].isnan().all()
