"""Layers with a state: what they are called, and the same bits for a token in any step."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers.models.granitemoehybrid import modeling_granitemoehybrid as mamba2
from transformers.models.mamba import modeling_mamba as mamba1

from pagewire_kernels.batch import AttentionMetadata
from pagewire_kernels.cpu.layers import NativeLayerKernels
from pagewire_kernels.cpu.native_library import Library
from pagewire_kernels.cpu.program import Program, record
from pagewire_kernels.cpu.tasks import describe_batch
from pagewire_kernels.interface import LayerKernels
from pagewire_kernels.reference.backend import TorchLayerKernels
from tests.support.native import native_libraries
from tests.support.paged_states import PagedStates

IMPLEMENTATIONS: dict[str, LayerKernels] = {"torch": TorchLayerKernels()}
IMPLEMENTATIONS |= {
    found.instruction_set: NativeLayerKernels(found) for found in native_libraries()
}
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}

each_dtype = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
each_implementation = pytest.mark.parametrize(
    "kernels", IMPLEMENTATIONS.values(), ids=IMPLEMENTATIONS.keys()
)


def _random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _in_wider_rows(rows: Tensor) -> Tensor:
    """The same rows at a larger distance."""
    wide = torch.full((len(rows), rows[0].numel() + 24), torch.nan, dtype=rows.dtype)
    wide[:, 8:-16] = rows.flatten(1)
    return wide[:, 8:-16].view(rows.shape)


class Layer:
    """The rows of three sequences, of 40 tokens each, and the operation of a layer over them."""

    num_seqs, length = 3, 40

    def __init__(self, dtype: torch.dtype, units: tuple[int, int], **rows: Tensor) -> None:
        """units: their number and size; rows: [num_seqs * length, ...]."""
        self.dtype, self._units = dtype, units
        self.rows = {name: tensor.to(dtype) for name, tensor in rows.items()}
        self.units_dtype = torch.float32

    def states(self) -> PagedStates:
        """Pages before the first token."""
        return PagedStates(self.num_seqs, *self._units, dtype=self.units_dtype)

    def run(
        self, kernels: LayerKernels, states: PagedStates, ranges: Sequence[tuple[int, int, int]]
    ) -> Tensor:
        """Compute rows of sequences, each from a position up to an end."""
        chosen = torch.cat(
            [torch.arange(first, end) + seq * self.length for seq, first, end in ranges]
        )
        rows = {name: _in_wider_rows(tensor[chosen]) for name, tensor in self.rows.items()}
        return self.apply(kernels, states, states.metadata(ranges), rows)

    def apply(
        self,
        kernels: LayerKernels,
        states: PagedStates,
        metadata: AttentionMetadata,
        rows: dict[str, Tensor],
    ) -> Tensor:
        """The operation."""
        raise NotImplementedError

    def expected(self) -> Tensor:
        """Results of all rows in float32, of another implementation."""
        raise NotImplementedError

    def sequences(self, name: str) -> Tensor:
        """Rows by sequence, [num_seqs, length, ...]."""
        return self.rows[name].float().unflatten(0, (self.num_seqs, self.length))


class Convolution(Layer):
    def __init__(
        self, dtype: torch.dtype, width: int = 4, channels: int = 200, num_units: int = 1,
        activation: str | None = "silu", bias: bool = True,
    ) -> None:  # fmt: skip
        size = (width - 1) * channels // num_units
        super().__init__(dtype, (num_units, size), x=_random(120, channels))
        self.units_dtype = dtype
        self.weight, self.activation = _random(width, channels, seed=1), activation
        self.bias = _random(channels, seed=2) if bias else None

    def apply(self, kernels: Any, states: Any, metadata: Any, rows: Any) -> Tensor:
        return kernels.causal_convolution(
            rows["x"], self.weight, self.bias, states.units, metadata, self.activation
        )

    def expected(self) -> Tensor:
        x = self.sequences("x").mT
        padded = functional.pad(x, (len(self.weight) - 1, 0))
        y = functional.conv1d(padded, self.weight.T[:, None], self.bias, groups=x.shape[1])
        return (y if self.activation is None else functional.silu(y)).mT.flatten(0, 1)


class Mamba1(Layer):
    def __init__(
        self, dtype: torch.dtype, channels: int = 96, state_size: int = 16, num_units: int = 1,
        has_gate: bool = True,
    ) -> None:  # fmt: skip
        gate = {"gate": _random(120, channels, seed=5)} if has_gate else {}
        super().__init__(
            dtype,
            (num_units, state_size * channels // num_units),
            x=_random(120, channels),
            dt=_random(120, channels, seed=1) * 3,
            b=_random(120, state_size, seed=2),
            c=_random(120, state_size, seed=3),
            **gate,
        )
        self.a = -torch.exp(_random(state_size, channels, seed=4))
        self.d, self.dt_bias = _random(channels, seed=6), _random(channels, seed=7)

    def apply(self, kernels: Any, states: Any, metadata: Any, rows: Any) -> Tensor:
        x, dt, b, c, gate = (rows.get(name) for name in ("x", "dt", "b", "c", "gate"))
        columns = self.a, self.d, self.dt_bias
        return kernels.mamba1_scan(x, dt, b, c, gate, *columns, states.units, metadata)

    def expected(self) -> Tensor:
        x, dt, b, c = (self.sequences(name).mT for name in ("x", "dt", "b", "c"))
        y = mamba1.mamba_selective_scan(
            x, dt, self.a.T, b, c, D=self.d, delta_bias=self.dt_bias, delta_softplus=True,
            z=self.sequences("gate").mT if "gate" in self.rows else None,
        )  # fmt: skip
        return y.mT.flatten(0, 1)


class Mamba2(Layer):
    def __init__(
        self, dtype: torch.dtype, num_heads: int = 4, head_dim: int = 64, num_groups: int = 2,
        state_size: int = 128, dt_limits: tuple[float, float] = (0.0, float("inf")),
        has_gate: bool = True,
    ) -> None:  # fmt: skip
        gate = {"gate": _random(120, num_heads, head_dim, seed=7)} if has_gate else {}
        super().__init__(
            dtype,
            (num_heads, head_dim * state_size),
            x=_random(120, num_heads, head_dim),
            dt=_random(120, num_heads, seed=1) * 3,
            b=_random(120, num_groups, state_size, seed=2),
            c=_random(120, num_groups, state_size, seed=3),
            **gate,
        )
        self.columns = [
            -torch.exp(_random(num_heads, seed=4)),
            _random(num_heads, seed=5),
            _random(num_heads, seed=6),
        ]
        self.dt_limits = dt_limits

    def apply(self, kernels: Any, states: Any, metadata: Any, rows: Any) -> Tensor:
        x, dt, b, c, gate = (rows.get(name) for name in ("x", "dt", "b", "c", "gate"))
        columns, limits = self.columns, self.dt_limits
        y = kernels.mamba2_scan(
            x, dt, b, c, gate, *columns, states.units, metadata, dt_limits=limits
        )
        return y.flatten(1)

    def expected(self) -> Tensor:
        x, dt, b, c = (self.sequences(name) for name in ("x", "dt", "b", "c"))
        a, d, dt_bias = self.columns
        y = mamba2.mamba2_chunk_scan(
            x, dt, a, b, c, 16, D=d, dt_bias=dt_bias, dt_softplus=True, dt_limit=self.dt_limits
        )
        y = y.view_as(x) * functional.silu(self.sequences("gate")) if "gate" in self.rows else y
        return y.flatten(2).flatten(0, 1)


LAYERS: dict[str, Callable[[torch.dtype], Layer]] = {
    **{f"convolution of {w}": lambda dtype, w=w: Convolution(dtype, w) for w in range(2, 9)},
    "convolution without bias": lambda dtype: Convolution(dtype, 3, 64, bias=False),
    "linear convolution": lambda dtype: Convolution(dtype, 3, 72, activation=None),
    "convolution in units": lambda dtype: Convolution(dtype, 4, 7 * 80, num_units=7),
    "mamba1": Mamba1,
    "mamba1 in units": lambda dtype: Mamba1(dtype, 7 * 48, 16, num_units=7),
    "mamba1 without gate": lambda dtype: Mamba1(dtype, 70, 5, has_gate=False),
    "mamba2": Mamba2,
    "mamba2 of small heads": lambda dtype: Mamba2(dtype, 3, 12, 1, 20, has_gate=False),
    "mamba2 without gate": lambda dtype: Mamba2(dtype, has_gate=False),
    "mamba2 of odd heads": lambda dtype: Mamba2(dtype, 6, 80, 3, 64),
    "mamba2 with limits": lambda dtype: Mamba2(dtype, dt_limits=(0.3, 1.5)),
}

each_layer = pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS.keys())
ALL = [(seq, 0, 40) for seq in range(3)]


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
@each_layer
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
@each_layer
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
@each_layer
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
@pytest.mark.parametrize("gates_first", [False, True])
@pytest.mark.parametrize(("num_groups", "size"), [(1, 300), (4, 32), (3, 20)])
def test_a_gated_norm_is_what_it_is_called(
    kernels: LayerKernels, dtype: torch.dtype, gates_first: bool, num_groups: int, size: int
) -> None:
    shape = num_groups, size
    x, gate = (_in_wider_rows(_random(9, *shape, seed=seed).to(dtype)) for seed in range(2))
    for weight in (_random(*shape, seed=2), _random(size, seed=3).to(dtype)):
        found = kernels.gated_rms_norm(x, gate, weight, 1e-5, gates_first=gates_first)
        gates = functional.silu(gate.float())
        inputs = x.float() * gates if gates_first else x.float()
        expected = functional.rms_norm(inputs, (size,), eps=1e-5) * weight.float()
        expected = expected if gates_first else expected * gates
        tolerance = TOLERANCE[dtype]
        torch.testing.assert_close(found.float(), expected, rtol=tolerance, atol=tolerance)
        for row in range(9):
            rows = slice(row, row + 1)
            alone = kernels.gated_rms_norm(
                x[rows], gate[rows], weight, 1e-5, gates_first=gates_first
            )
            assert torch.equal(alone, found[rows])


@pytest.mark.skipif(not native_libraries(), reason="no compiled kernels for this processor")
@pytest.mark.parametrize("library", native_libraries(), ids=lambda library: library.instruction_set)
def test_a_recorded_program_computes_the_same_states(library: Library) -> None:
    kernels, dtype = NativeLayerKernels(library), torch.bfloat16
    convolution, scan = Convolution(dtype, channels=256), Mamba2(dtype)
    weight = _random(4, 64, seed=8)

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
