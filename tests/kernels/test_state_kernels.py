"""Layers with a state: what they are called, and the same bits for a token in any step."""

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from pagewire_kernels.batch import AttentionMetadata
from pagewire_kernels.cpu.layers import NativeLayerKernels
from pagewire_kernels.cpu.native_library import Library
from pagewire_kernels.cpu.program import Program, record
from pagewire_kernels.cpu.tasks import describe_batch
from pagewire_kernels.reference.backend import LayerKernels
from tests.support.native import native_libraries
from tests.support.paged_states import PagedStates
from tests.support.state_layers import (
    ALL,
    LAYERS,
    LIKE_OTHERS,
    Convolution,
    Layer,
    Mamba2,
    check_saves,
    in_wider_rows,
    random,
)

IMPLEMENTATIONS: dict[str, LayerKernels] = {"torch": LayerKernels()}
IMPLEMENTATIONS |= {
    found.instruction_set: NativeLayerKernels(found) for found in native_libraries()
}
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}

each_dtype = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
each_implementation = pytest.mark.parametrize(
    "kernels", IMPLEMENTATIONS.values(), ids=IMPLEMENTATIONS.keys()
)


each_layer = pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS.keys())
each_kind = pytest.mark.parametrize(
    "make",
    [
        pytest.param(make, id=name, marks=pytest.mark.long if name in LIKE_OTHERS else [])
        for name, make in LAYERS.items()
    ],
)


@each_implementation
@each_dtype
@each_layer
def test_a_layer_is_what_it_is_called(
    kernels: LayerKernels, make: Callable[[torch.dtype], Layer], dtype: torch.dtype
) -> None:
    layer = make(dtype)
    y = layer.run(kernels, layer.states(), ALL)
    assert y.dtype == dtype
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(y.float(), layer.expected(), rtol=tolerance, atol=tolerance * 5)


@each_implementation
@each_kind
def test_a_token_has_the_same_bits_in_any_step(
    kernels: LayerKernels, make: Callable[[torch.dtype], Layer]
) -> None:
    layer = make(torch.bfloat16)
    together = layer.states()
    expected = layer.run(kernels, together, ALL).unflatten(0, (3, 40))
    alone = layer.states()
    for seq, cuts in enumerate(([0, 40], [0, 1, 2, 3, 20, 40], [0, 17, *range(18, 41)])):
        parts = [[(seq, *part)] for part in pairwise(cuts)]
        y = torch.cat([layer.run(kernels, alone, part) for part in parts])
        assert torch.equal(y, expected[seq])
    assert torch.equal(alone.pages.isnan(), together.pages.isnan())
    assert torch.equal(alone.pages.nan_to_num(), together.pages.nan_to_num())
    mixed = layer.states()
    steps = [[(2, 0, 5)], [(0, 0, 3), (2, 5, 6)], [(2, 6, 30), (1, 0, 40), (0, 3, 40)]]
    steps.append([(2, 30, 40)])
    rows: dict[int, list[Tensor]] = {0: [], 1: [], 2: []}
    for step in steps:
        lengths = [end - first for _, first, end in step]
        for (seq, *_), y in zip(step, layer.run(kernels, mixed, step).split(lengths), strict=True):
            rows[seq].append(y)
    assert torch.equal(torch.stack([torch.cat(rows[seq]) for seq in range(3)]), expected)


@each_implementation
@each_kind
def test_states_are_saved_where_they_are_reached(
    kernels: LayerKernels, make: Callable[[torch.dtype], Layer]
) -> None:
    check_saves(make(torch.bfloat16), kernels)


@each_implementation
@each_kind
def test_a_state_without_pages_begins_at_zero_and_is_not_kept(
    kernels: LayerKernels, make: Callable[[torch.dtype], Layer]
) -> None:
    layer, absent = make(torch.float32), make(torch.float32).states()
    absent.tables.fill_(-1)
    before = layer.run(kernels, absent, ALL)
    assert absent.pages.isnan().all()
    assert torch.equal(before, layer.run(kernels, layer.states(), ALL))
    assert torch.equal(layer.run(kernels, absent, ALL), before)


@each_implementation
@each_kind
def test_a_state_that_is_not_finite_stays_in_its_sequence(
    kernels: LayerKernels, make: Callable[[torch.dtype], Layer]
) -> None:
    layer = make(torch.float32)
    expected = layer.run(kernels, layer.states(), ALL).unflatten(0, (3, 40))
    layer.rows["x"][50] = torch.nan
    states = layer.states()
    found = layer.run(kernels, states, ALL).unflatten(0, (3, 40))
    assert torch.equal(found[[0, 2]], expected[[0, 2]])
    assert torch.equal(found[1, :10], expected[1, :10])
    assert found[1, 10].isnan().all()
    again = layer.run(kernels, states, [(1, 0, 10)])
    assert torch.equal(again, expected[1, :10])


@each_implementation
@each_dtype
@pytest.mark.parametrize(
    ("gates_first", "activation"), [(False, "silu"), (True, "silu"), (False, "sigmoid")]
)
@pytest.mark.parametrize(("num_groups", "size"), [(1, 300), (4, 32), (3, 20)])
def test_a_gated_norm_is_what_it_is_called(
    kernels: LayerKernels,
    dtype: torch.dtype,
    gates_first: bool,
    activation: str,
    num_groups: int,
    size: int,
) -> None:
    shape = num_groups, size
    options = {"gates_first": gates_first, "activation": activation}
    x, gate = (in_wider_rows(random(9, *shape, seed=seed).to(dtype)) for seed in range(2))
    for weight in (random(*shape, seed=2), random(size, seed=3).to(dtype)):
        found = kernels.gated_rms_norm(x, gate, weight, 1e-5, **options)
        gates = getattr(functional, activation)(gate.float())
        inputs = x.float() * gates if gates_first else x.float()
        expected = functional.rms_norm(inputs, (size,), eps=1e-5) * weight.float()
        expected = expected if gates_first else expected * gates
        tolerance = TOLERANCE[dtype]
        torch.testing.assert_close(found.float(), expected, rtol=tolerance, atol=tolerance)
        for row in range(9):
            rows = slice(row, row + 1)
            alone = kernels.gated_rms_norm(x[rows], gate[rows], weight, 1e-5, **options)
            assert torch.equal(alone, found[rows])


@pytest.mark.skipif(not native_libraries(), reason="no compiled kernels for this processor")
@pytest.mark.parametrize("library", native_libraries(), ids=lambda library: library.instruction_set)
def test_a_recorded_program_computes_the_same_states(library: Library) -> None:
    kernels, dtype = NativeLayerKernels(library), torch.bfloat16
    convolution, scan = Convolution(dtype, channels=256), Mamba2(dtype)
    weight = random(4, 64, seed=8)

    def run(
        states: tuple[PagedStates, PagedStates],
        metadata: AttentionMetadata,
        rows: dict[str, Tensor],
    ) -> Tensor:
        x = convolution.apply(kernels, states[0], metadata, {"x": rows["x"].flatten(1)})
        y = scan.apply(kernels, states[1], metadata, rows | {"x": x.view(-1, 4, 64)})
        heads = y.view(-1, 4, 64)
        return kernels.gated_rms_norm(heads, rows["x"], weight, 1e-5, gates_first=True)

    ranges = [[(1, 0, 12)], [(1, 12, 40), (0, 0, 1)], [(0, 1, 2), (2, 0, 30)]]
    eager = convolution.states(), scan.states()
    recorded = convolution.states(), scan.states()
    program = Program(library, max_rows=64)
    buffers = {name: torch.empty(64, *t.shape[1:], dtype=dtype) for name, t in scan.rows.items()}
    metadata = recorded[0].metadata(ranges[0])
    metadata.slot_mapping.set_(program.slot_mappings[0])
    with record(program):
        y = run(recorded, metadata, buffers)
    for step in ranges:
        chosen = torch.cat([torch.arange(first, end) + seq * 40 for seq, first, end in step])
        rows = {name: tensor[chosen] for name, tensor in scan.rows.items()}
        expected = run(eager, eager[0].metadata(step), rows)
        for name, tensor in rows.items():
            buffers[name][: len(chosen)] = tensor
        described = recorded[0].metadata(step)
        describe_batch(program.batches[0], len(chosen), described)
        program.run(2)
        assert torch.equal(y[: len(chosen)], expected)
    for one, other in zip(eager, recorded, strict=True):
        assert torch.equal(one.pages.nan_to_num(), other.pages.nan_to_num())


@each_implementation
def test_impossible_convolutions_are_refused(kernels: LayerKernels) -> None:
    states = Convolution(torch.float32).states()
    for width in (1, 9):
        with pytest.raises(ValueError, match=f"convolution width: expected 2 to 8, got {width}"):
            Convolution(torch.float32, width).run(kernels, states, ALL)
    layer = Convolution(torch.float32, activation="gelu")
    with pytest.raises(ValueError, match="expected silu or none, got 'gelu'"):
        layer.run(kernels, layer.states(), ALL)


def test_native_kernels_refuse_what_they_would_misread() -> None:
    if not native_libraries():
        pytest.skip("no compiled kernels for this processor")
    kernels = NativeLayerKernels(native_libraries()[0])
    layer, states = Convolution(torch.float32), Convolution(torch.bfloat16).states()
    with pytest.raises(ValueError, match=r"dense pages in torch\.float32"):
        layer.run(kernels, states, ALL)
    layer.weight = layer.weight.bfloat16()
    with pytest.raises(ValueError, match=r"dense float32 weight of shape \[4, 200\]"):
        layer.run(kernels, layer.states(), ALL)
    layer = Convolution(torch.float32)
    states = layer.states()
    states.units.places[0, 1] = 100
    with pytest.raises(ValueError, match="units of 600 elements within pages"):
        layer.run(kernels, states, ALL)
    scan = Mamba2(torch.float32, state_size=300)
    with pytest.raises(ValueError, match="states of at most 256 elements"):
        scan.run(kernels, scan.states(), ALL)
