"""What adapters add to products: the sums of torch, for their rows alone, and the same bits in any
batch."""

from collections.abc import Sequence
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from pagewire_kernels import reference
from pagewire_kernels.cpu.adapters import ActiveRows, DeltaPart, EmbeddingDeltas, NativeDeltas
from pagewire_kernels.cpu.experts import NativeExperts
from pagewire_kernels.cpu.heads import NativeHeads
from pagewire_kernels.cpu.linear import HugeMemory, NativeGatedWeight, NativeWeight
from pagewire_kernels.cpu.native_library import Library
from pagewire_kernels.quantized_weight import QuantizedWeight, quantize
from pagewire_kernels.reference import Gate, Routing
from tests.support.native import native_libraries

pytestmark = pytest.mark.parametrize(
    "library", native_libraries(), ids=lambda found: found.instruction_set
)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
FORMATS = pytest.mark.parametrize("format_name", ["dense", "int8", "int4", "w8a8"])

INPUTS = 96
MAX_RANK = 9


class Made(NamedTuple):
    """A packed weight with three slots, of which two have an adapter that changes it."""

    weight: NativeWeight | NativeGatedWeight
    deltas: NativeDeltas
    rows: ActiveRows
    parts: list[list[DeltaPart]]

    def apply(self, x: Tensor, slots: Sequence[int | None], bias: Tensor | None = None) -> Tensor:
        """slots: of the rows of x."""
        present = sorted({slot for slot in slots if slot is not None})
        chosen = [[i for i, slot in enumerate(slots) if slot == one] for one in present]
        self.rows.set(present, [torch.tensor(rows) for rows in chosen])
        return self.weight.apply(x, bias, deltas=self.deltas)


def _random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _parts(sizes: Sequence[int], dtype: torch.dtype, seed: int) -> list[DeltaPart]:
    """A delta of each layer of a stack but the second one, of different ranks."""
    parts, first = [], 0
    for i, size in enumerate(sizes):
        rank = 1 + (4 * i + seed) % MAX_RANK
        a = (_random(rank, INPUTS, seed=seed + i) / 10).to(dtype)
        b = (_random(size, rank, seed=seed + i + 50) / 10).to(dtype)
        if i != 1:
            parts.append(DeltaPart(a, b, 0.5 + i, first))
        first += size
    return parts


def _weight(num_outputs: int, dtype: torch.dtype, format_name: str) -> Tensor | QuantizedWeight:
    dense = (_random(num_outputs, INPUTS, seed=9) / 10).to(dtype)
    return dense if format_name == "dense" else quantize(dense, format_name)


def _sums(
    library: Library, dtype: torch.dtype, format_name: str, x: Tensor, num_outputs: int
) -> Tensor:
    """float32 [num_rows, num_outputs]: of the weight alone, not activated."""
    weight = _weight(num_outputs, dtype, format_name)
    packed = NativeWeight(weight, library, HugeMemory(), dtype)
    return packed.apply(x, output_dtype=torch.float32)


def make(
    library: Library, dtype: torch.dtype, format_name: str, sizes: Sequence[int], activation: str
) -> Made:
    weight = _weight(sum(sizes), dtype, format_name)
    packed: NativeWeight | NativeGatedWeight
    if activation:
        packed = NativeGatedWeight(weight, activation, library, HugeMemory(), dtype)
    else:
        packed = NativeWeight(weight, library, HugeMemory(), dtype)
    rows, parts = ActiveRows(), [_parts(sizes, dtype, seed) for seed in (1, 2)]
    deltas = packed.make_deltas(rows, 3, len(sizes), MAX_RANK)
    for slot, of_adapter in zip((0, 2), parts, strict=True):
        deltas.fill(slot, deltas.pack(of_adapter))
    return Made(packed, deltas, rows, parts)


def _slots(num_rows: int) -> list[int | None]:
    """Rows of the base, of both adapters, and of slot 1, whose adapter does not change it."""
    pattern = (0, None, 2, 2, 0, 1, 0, None, 2, 0, 0)
    return [pattern[i % len(pattern)] for i in range(num_rows)]


def _delta(made: Made, x: Tensor, slots: Sequence[int | None], num_outputs: int) -> Tensor:
    """float32 [num_rows, num_outputs]."""
    found = torch.zeros(len(x), num_outputs)
    for i, slot in enumerate(slots):
        for part in made.parts[0 if slot == 0 else 1] if slot in (0, 2) else ():
            outputs = slice(part.first_output, part.first_output + len(part.b))
            inner = x[i].float() @ part.a.float().T * part.scale
            found[i, outputs] += inner @ part.b.float().T
    return found


SIZES = pytest.mark.parametrize("sizes", [(20, 7, 33), (5,), (64, 32, 32)], ids=str)
ROWS = pytest.mark.parametrize("num_rows", [1, 5, 150])
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.04}


@DTYPES
@FORMATS
@SIZES
@ROWS
def test_what_adapters_add_is_the_sum_of_torch(
    library: Library, dtype: torch.dtype, format_name: str, sizes: tuple[int, ...], num_rows: int
) -> None:
    made, slots = make(library, dtype, format_name, sizes, ""), _slots(num_rows)
    x = _random(num_rows, INPUTS, seed=3).to(dtype)
    base, found = made.weight.apply(x), made.apply(x, slots)
    delta = _delta(made, x, slots, sum(sizes))
    assert found.dtype == dtype
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(found.float(), base.float() + delta, atol=tolerance, rtol=tolerance)
    without = [i for i, slot in enumerate(slots) if slot not in (0, 2)]
    assert torch.equal(found[without], base[without])
    assert num_rows == 1 or not torch.equal(found, base)


@DTYPES
@FORMATS
@pytest.mark.parametrize("size", [40, 7, 64])
def test_they_are_added_before_the_activation(
    library: Library, dtype: torch.dtype, format_name: str, size: int
) -> None:
    made, slots = make(library, dtype, format_name, (size, size), "silu"), _slots(30)
    x = _random(30, INPUTS, seed=3).to(dtype)
    sums = _sums(library, dtype, format_name, x, 2 * size)
    gate, up = (sums + _delta(made, x, slots, 2 * size)).split(size, dim=1)
    tolerance = TOLERANCE[dtype]
    found = made.apply(x, slots)
    expected = torch.nn.functional.silu(gate) * up
    torch.testing.assert_close(found.float(), expected, atol=tolerance, rtol=tolerance)
    without = [i for i, slot in enumerate(slots) if slot not in (0, 2)]
    assert torch.equal(found[without], made.weight.apply(x)[without])


@DTYPES
@FORMATS
@pytest.mark.parametrize("activation", ["", "gelu"])
def test_a_row_has_the_same_bits_in_any_batch(
    library: Library, dtype: torch.dtype, format_name: str, activation: str
) -> None:
    made, slots = make(library, dtype, format_name, (40, 40), activation), _slots(300)
    x = _random(300, INPUTS, seed=3).to(dtype)
    expected = made.apply(x, slots)
    for first, end in ((0, 1), (17, 22), (40, 300)):
        assert torch.equal(made.apply(x[first:end], slots[first:end]), expected[first:end])


@DTYPES
@FORMATS
@pytest.mark.parametrize("activation", ["", "silu"])
def test_sums_are_multiplied_by_factors_before_the_bias_is_added(
    library: Library, dtype: torch.dtype, format_name: str, activation: str
) -> None:
    """Of the first layer of the stack alone: the adapter does not change the second one."""
    made, slots, size = make(library, dtype, format_name, (20, 20), activation), _slots(30), 20
    factors = 0.5 + _random(size, seed=4).abs()
    [part] = made.parts[0]
    made.deltas.fill(0, made.deltas.pack([part._replace(factors=factors)]))
    x, bias = _random(30, INPUTS, seed=3).to(dtype), _random(2 * size, seed=5).to(dtype)
    sums = _sums(library, dtype, format_name, x, 2 * size)
    sums += _delta(made, x, slots, 2 * size)
    sums[[slot == 0 for slot in slots], :size] *= factors
    expected = sums + bias
    if activation:
        gate, up = expected.split(size, dim=1)
        expected = torch.nn.functional.silu(gate) * up
    found, tolerance = made.apply(x, slots, bias), TOLERANCE[dtype]
    torch.testing.assert_close(found.float(), expected, atol=tolerance, rtol=tolerance)
    without = [i for i, slot in enumerate(slots) if slot not in (0, 2)]
    assert torch.equal(found[without], made.weight.apply(x, bias)[without])
    for first, end in ((0, 1), (17, 22)):
        assert torch.equal(made.apply(x[first:end], slots[first:end], bias), found[first:end])


@DTYPES
@FORMATS
@pytest.mark.parametrize("activation", ["", "silu"])
def test_norms_of_changed_rows_are_those_of_the_weight_that_is_multiplied(
    library: Library, dtype: torch.dtype, format_name: str, activation: str
) -> None:
    packed = make(library, dtype, format_name, (39, 39), activation).weight
    dense = (_random(78, INPUTS, seed=9) / 10).to(dtype)
    weight = dense if format_name == "dense" else quantize(dense, format_name).dequantize()
    a, b = _random(3, INPUTS, seed=1) / 10, _random(50, 3, seed=2)
    expected = torch.linalg.vector_norm(weight.float()[20:70] + b @ a, dim=1)
    torch.testing.assert_close(packed.norms(20, a, b), expected, atol=0, rtol=1e-6)


def test_a_slot_is_emptied_and_filled_again(library: Library) -> None:
    made = make(library, torch.float32, "dense", (40,), "")
    x = _random(4, INPUTS, seed=3)
    first = made.apply(x, [0] * 4)
    made.deltas.clear(0)
    assert torch.equal(made.apply(x, [0] * 4), made.weight.apply(x))
    made.deltas.fill(0, made.deltas.pack(made.parts[1]))
    assert torch.equal(made.apply(x, [0] * 4), made.apply(x, [2] * 4))
    made.deltas.fill(0, made.deltas.pack(made.parts[0]))
    assert torch.equal(made.apply(x, [0] * 4), first)


def test_matrices_are_packed_into_the_memory_that_is_given(library: Library) -> None:
    made, pieces = make(library, torch.bfloat16, "dense", (40,), ""), []

    def allocate(num_bytes: int) -> Tensor:
        pieces.append(torch.zeros(num_bytes, dtype=torch.uint8))
        return pieces[-1]

    packed = made.deltas.pack(made.parts[0], allocate)
    assert [piece.data_ptr() for piece in pieces] == [packed.a.data_ptr(), packed.b.data_ptr()]
    x = _random(4, INPUTS, seed=3).bfloat16()
    expected = made.apply(x, [0] * 4)
    made.deltas.fill(1, packed)
    assert torch.equal(made.apply(x, [1] * 4), expected)


@DTYPES
@pytest.mark.parametrize("size", [96, 37])
@pytest.mark.parametrize("num_rows", [1, 150])
def test_rows_of_an_embedding_are_those_of_torch_and_the_same_in_any_batch(
    library: Library, dtype: torch.dtype, size: int, num_rows: int
) -> None:
    rows, num_tokens = ActiveRows(), 50
    deltas = EmbeddingDeltas(size, num_tokens, rows, 3, MAX_RANK, library, dtype)
    parts = []
    for slot, rank in ((0, 5), (2, MAX_RANK)):
        a, b = _random(rank, num_tokens, seed=slot), _random(size, rank, seed=slot + 9)
        parts.append(DeltaPart(a.to(dtype), b.to(dtype), 0.5 + slot, 0))
        deltas.fill(slot, deltas.pack(parts[-1:]))
    table = _random(num_tokens, size, seed=7).to(dtype)
    token_ids, slots = torch.arange(num_rows) * 7 % (num_tokens + 2), _slots(num_rows)
    gathered = table[token_ids.clamp(max=num_tokens - 1)]

    def add(first: int, end: int) -> Tensor:
        present = sorted({slot for slot in slots[first:end] if slot is not None})
        chosen = [[i for i, s in enumerate(slots[first:end]) if s == one] for one in present]
        rows.set(present, [torch.tensor(places) for places in chosen])
        y = gathered[first:end].clone()
        deltas.add(y, token_ids[first:end])
        return y

    found, expected = add(0, num_rows), gathered.float().clone()
    for i, slot in enumerate(slots):
        if slot in (0, 2) and token_ids[i] < num_tokens:
            a, b, scale, *_ = parts[0 if slot == 0 else 1]
            expected[i] += a[:, token_ids[i]].float() * scale @ b.float().T
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(found.float(), expected, atol=tolerance, rtol=tolerance)
    without = [i for i, s in enumerate(slots) if s not in (0, 2) or token_ids[i] >= num_tokens]
    assert torch.equal(found[without], gathered[without])
    for first, end in ((0, 1), (17, 22), (40, 150)) if num_rows == 150 else ((0, 1),):
        assert torch.equal(add(first, end), found[first:end])


@DTYPES
@pytest.mark.parametrize("format_name", ["dense", "int8"])
@pytest.mark.parametrize("scales_inputs", [False, True])
def test_what_adapters_add_to_experts_is_the_sum_of_torch_and_the_same_in_any_batch(
    library: Library, dtype: torch.dtype, format_name: str, *, scales_inputs: bool
) -> None:
    """Adapters of some experts, of which each has a rank of its own."""
    num_experts, hidden, inner, num_rows = 5, INPUTS, 64, 120
    shapes = ((2 * inner, hidden), (hidden, inner))
    plain = [
        [(_random(*shape, seed=e + 20 * i) / 10).to(dtype) for e in range(num_experts)]
        for i, shape in enumerate(shapes)
    ]
    stored = [
        [weight if format_name == "dense" else quantize(weight, format_name) for weight in weights]
        for weights in plain
    ]
    packed = NativeExperts(*stored, Gate(), library, HugeMemory(), dtype)
    rows = ActiveRows()
    deltas = [packed.make_deltas(i, rows, 3, 2, MAX_RANK) for i in range(2)]
    parts: dict[int, list[list[DeltaPart]]] = {}
    for slot in (0, 2):
        parts[slot] = [
            [
                DeltaPart(
                    (_random(1 + e + slot, shape[1], seed=e + slot) / 10).to(dtype),
                    (_random(shape[0], 1 + e + slot, seed=e + slot + 40) / 10).to(dtype),
                    0.5 + e,
                    0,
                    e,
                )
                for e in range(num_experts)
                if e != slot
            ]
            for shape in shapes
        ]
        for i in range(2):
            deltas[i].fill(slot, deltas[i].pack(parts[slot][i]))
    routing = Routing(num_experts=num_experts, num_chosen=2, scales_inputs=scales_inputs)
    x, logits = _random(num_rows, hidden, seed=3).to(dtype), _random(num_rows, num_experts, seed=4)
    slots = _slots(num_rows)

    def apply(first: int, end: int) -> Tensor:
        present = sorted({slot for slot in slots[first:end] if slot is not None})
        chosen = [[i for i, s in enumerate(slots[first:end]) if s == one] for one in present]
        rows.set(present, [torch.tensor(places) for places in chosen], end - first)
        return packed.apply(
            x[first:end],
            logits[first:end],
            routing,
            gate_up_deltas=deltas[0],
            down_deltas=deltas[1],
        )

    def product(part: int) -> reference.Product:
        def multiply(expert: int, inputs: Tensor, of_rows: Tensor) -> Tensor:
            weight = stored[part][expert]
            dense = weight if isinstance(weight, Tensor) else weight.dequantize()
            y = inputs.float() @ dense.float().T
            for i, row in enumerate(of_rows.tolist()):
                for delta in (
                    parts.get(slots[row] or 0, [[], []])[part] if slots[row] in parts else ()
                ):
                    if delta.expert == expert:
                        inner = inputs[i].float() @ delta.a.float().T * delta.scale
                        y[i] += inner @ delta.b.float().T
            return y

        return multiply

    found = apply(0, num_rows)
    expected = reference.gated_experts(
        x.float(),
        *reference.route(logits, routing),
        product(0),
        product(1),
        Gate(),
        routing,
    )
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    assert (found.float() - expected).abs().amax() <= expected.abs().amax() * tolerance
    base = packed.apply(x, logits, routing)
    without = [i for i, slot in enumerate(slots) if slot not in parts]
    assert torch.equal(found[without], base[without])
    assert not torch.equal(found, base)
    for first, end in ((0, 1), (17, 22), (40, num_rows)):
        assert torch.equal(apply(first, end), found[first:end])


@DTYPES
@ROWS
@pytest.mark.parametrize(("outputs", "num_spare"), [(20, 4), (65, 0)])
def test_heads_have_the_sums_of_separate_products_in_any_batch(
    library: Library, dtype: torch.dtype, num_rows: int, outputs: int, num_spare: int
) -> None:
    weights = (_random(3, outputs, INPUTS, seed=9) / 10).to(dtype)
    x = _random(num_rows, 3, INPUTS + 5, seed=3).to(dtype)[:, :, :INPUTS]
    rows, slots = ActiveRows(), _slots(num_rows)
    heads = NativeHeads(weights, library, HugeMemory())
    together = heads.make_deltas(rows, 3, MAX_RANK)
    apart = [NativeWeight(weight, library, HugeMemory()) for weight in weights]
    of_heads = [weight.make_deltas(rows, 3, 1, MAX_RANK) for weight in apart]
    for slot, seed, rank in ((0, 1, 9), (2, 20, 4)):
        parts = []
        for head, deltas in enumerate(of_heads):
            a = (_random(rank, INPUTS, seed=seed + head) / 10).to(dtype)
            b = (_random(outputs, rank, seed=seed + head + 50) / 10).to(dtype)
            parts.append(DeltaPart(a, b, 0.5 + head, 0, head))
            deltas.fill(slot, deltas.pack([parts[-1]._replace(expert=0)]))
        together.fill(slot, together.pack(parts))

    def set_rows(slots: Sequence[int | None]) -> None:
        chosen = [[i for i, slot in enumerate(slots) if slot == one] for one in (0, 2)]
        rows.set([0, 2], [torch.tensor(of_slot, dtype=torch.int64) for of_slot in chosen])

    set_rows(slots)
    found = heads.apply(x, num_spare, together)[:, :, :outputs]
    for head, (weight, deltas) in enumerate(zip(apart, of_heads, strict=True)):
        expected = weight.apply(x[:, head].contiguous(), deltas=deltas)
        assert torch.equal(found[:, head], expected)
    assert not torch.equal(found, heads.apply(x, num_spare)[:, :, :outputs])
    for first, end in ((0, 1), (17, 22), (40, 150)):
        set_rows(slots[first:end])
        alone = heads.apply(x[first:end], num_spare, together)[:, :, :outputs]
        assert torch.equal(alone, found[first:end])
