"""What adapters add to products is the reference's, for the rows that have one, in any batch."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from pagewire_kernels import reference, triton
from pagewire_kernels.cpu.adapters import DeltaPart
from pagewire_kernels.slot_deltas import NO_SLOT, AddDeltas, SlotDeltas
from tests.support.gpu_kernels import DEVICE, DTYPES, MARKS, assert_agrees

pytestmark = MARKS

NUM_SLOTS = 3
MAX_RANK = 20
SHAPES = {
    # inputs, outputs of each part, ranks by slot
    "one part": (96, (70,), (20, 3, 16)),
    "three parts": (130, (65, 16, 5), (1, 17, 20)),
    "two": (8, (4, 5), (1, 1, 1)),
    "several splits": (1100, (64, 64), (20, 20, 8)),
}


def made_slots(
    shape: str, dtype: torch.dtype, add: AddDeltas, device: torch.device, *, is_embedding: bool
) -> SlotDeltas:
    """Slots with random adapters; the second one has factors, and the last one does not change the
    last part of several."""
    num_inputs, sizes, ranks = SHAPES[shape]
    draw = torch.Generator().manual_seed(1)
    starts = torch.tensor([0, *sizes]).cumsum(0).tolist()
    outputs = [slice(start, start + size) for start, size in zip(starts, sizes, strict=False)]
    a_shape = (num_inputs,) if is_embedding else (len(sizes), num_inputs)
    like = torch.empty(0, dtype=dtype, device=device)
    made = SlotDeltas(outputs, a_shape, NUM_SLOTS, MAX_RANK, add, like)
    for slot, rank in enumerate(ranks):
        parts = [
            DeltaPart(
                torch.randn(rank, num_inputs, generator=draw) / num_inputs**0.5,
                torch.randn(part.stop - part.start, rank, generator=draw) / rank**0.5,
                0.7 + slot,
                part.start,
                factors=factors_of(part) if slot == 1 else None,
            )
            for part in outputs
        ]
        made.fill(slot, made.pack(parts[: max(1, len(parts) - (slot == NUM_SLOTS - 1))]))
    return made


def factors_of(outputs: slice) -> Tensor:
    """Factors of some outputs, of which one is 1."""
    return 0.5 + (torch.arange(outputs.start, outputs.stop) + 4) % 8 / 8


def inputs_of(shape: str, dtype: torch.dtype, num_rows: int) -> tuple[Tensor, Tensor]:
    """The rows of a product, which has more columns than adapters change, and of what it
    multiplies."""
    num_inputs, sizes, _ = SHAPES[shape]
    draw = torch.Generator().manual_seed(2)
    y = torch.randn(num_rows, sum(sizes) + 3, generator=draw).to(dtype)
    return y, torch.randn(num_rows, num_inputs, generator=draw).to(dtype)


def rows_with(slots: Sequence[int]) -> Tensor:
    return torch.tensor(slots, dtype=torch.int32)


MIXES = {
    "one row": [1],
    "one adapter": [2] * 17,
    "a mix": [0, NO_SLOT, 2, 2, 1, NO_SLOT, *[0] * 20, 1, NO_SLOT],
    "no adapters": [NO_SLOT] * 3,
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("mix", MIXES)
def test_sums_are_the_references_and_other_rows_keep_their_bits(
    dtype: torch.dtype, shape: str, mix: str
) -> None:
    ours = made_slots(shape, dtype, triton.add_deltas, DEVICE, is_embedding=False)
    theirs = made_slots(shape, dtype, reference.add_deltas, torch.device("cpu"), is_embedding=False)
    slots = rows_with(MIXES[mix])
    before, x = inputs_of(shape, dtype, len(slots))
    found, expected = before.to(DEVICE, copy=True), before.clone()
    ours.add(found, x.to(DEVICE), slots.to(DEVICE))
    theirs.add(expected, x, slots)
    assert_agrees(found, expected, 2)
    has_none = slots == NO_SLOT
    assert torch.equal(found.cpu()[has_none], before[has_none])
    assert torch.equal(found.cpu()[:, -3:], before[:, -3:])
    changed = (found.cpu() != before).any(dim=1)
    assert torch.equal(changed, ~has_none)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("output_dtype", [None, torch.float32], ids=str)
def test_a_row_has_the_same_bits_in_any_batch(
    dtype: torch.dtype, output_dtype: torch.dtype | None
) -> None:
    shape, mix = "several splits", MIXES["a mix"]
    made = made_slots(shape, dtype, triton.add_deltas, DEVICE, is_embedding=False)
    before, x = inputs_of(shape, dtype, len(mix))
    before = before.to(output_dtype or dtype)
    together = before.to(DEVICE, copy=True)
    made.add(together, x.to(DEVICE), rows_with(mix).to(DEVICE))
    for row, slot in enumerate(mix[:8]):
        alone = before[row : row + 1].to(DEVICE, copy=True)
        made.add(alone, x[row : row + 1].to(DEVICE), rows_with([slot]).to(DEVICE))
        assert torch.equal(alone[0], together[row])


def made_experts(
    dtype: torch.dtype, add: AddDeltas, device: torch.device
) -> tuple[SlotDeltas, list[SlotDeltas]]:
    """Slots of three experts, of which the last adapter changes two, and as many of one expert
    each. What is added to both parts of one comes from one matrix."""
    num_inputs, sizes, ranks = SHAPES["several splits"]
    draw, whole = torch.Generator().manual_seed(1), sum(sizes)
    outputs = [slice(0, sizes[0]), slice(sizes[0], whole)]
    like, a_shape = torch.empty(0, dtype=dtype, device=device), (2, num_inputs)
    limits = NUM_SLOTS, MAX_RANK, add, like
    together = SlotDeltas(outputs, a_shape, *limits, num_experts=3)
    apart = [SlotDeltas(outputs, a_shape, *limits) for _ in range(3)]
    for slot, rank in enumerate(ranks):
        parts = [
            DeltaPart(
                torch.randn(rank - expert, num_inputs, generator=draw) / num_inputs**0.5,
                torch.randn(whole, rank - expert, generator=draw) / rank**0.5,
                0.7 + slot,
                0,
                expert,
            )
            for expert in range(3 - (slot == NUM_SLOTS - 1))
        ]
        together.fill(slot, together.pack(parts))
        for part in parts:
            of_expert = apart[part.expert]
            of_expert.fill(slot, of_expert.pack([part._replace(expert=0)]))
    return together, apart


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_of_experts_have_the_sums_of_their_expert_in_any_batch(dtype: torch.dtype) -> None:
    mix = rows_with(MIXES["a mix"])
    expert = torch.arange(len(mix)) * 3 // len(mix)
    expert[3:9] = torch.tensor([2, 0, 1, 1, 0, 2])  # not sorted
    together, apart = made_experts(dtype, triton.add_deltas, DEVICE)
    theirs, _ = made_experts(dtype, reference.add_deltas, torch.device("cpu"))
    before, x = inputs_of("several splits", dtype, len(mix))
    found, expected = before.to(DEVICE, copy=True), before.clone()
    together.add(found, x.to(DEVICE), mix.to(DEVICE), expert.to(DEVICE))
    theirs.add(expected, x, mix, expert)
    assert_agrees(found, expected, 2)
    is_kept = (mix == NO_SLOT) | ((mix == NUM_SLOTS - 1) & (expert == 2))
    assert torch.equal((found.cpu() == before).all(dim=1), is_kept)
    for one, of_expert in enumerate(apart):
        rows = (expert == one).nonzero().flatten()
        alone = before[rows].to(DEVICE)
        of_expert.add(alone, x[rows].to(DEVICE), mix[rows].to(DEVICE))
        assert torch.equal(alone, found[rows.to(DEVICE)])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("add", [triton.add_deltas, reference.add_deltas])
def test_factors_multiply_sums_without_their_bias(dtype: torch.dtype, add: AddDeltas) -> None:
    num_inputs, sizes, _ = SHAPES["three parts"]
    before, x = inputs_of("three parts", dtype, 3)
    bias, outputs = torch.linspace(-3, 3, sum(sizes) + 3).to(dtype), slice(0, sizes[0])
    a, b = torch.ones(1, num_inputs) / 8, torch.ones(sizes[0], 1)
    like = torch.empty(0, dtype=dtype, device=DEVICE)
    made = SlotDeltas([outputs], (1, num_inputs), 1, MAX_RANK, add, like)
    made.fill(0, made.pack([DeltaPart(a, b, 2.0, 0, factors=factors_of(outputs))]))
    found = before.to(DEVICE, copy=True)
    slots = rows_with([0, NO_SLOT, 0]).to(DEVICE)
    made.add(found, x.to(DEVICE), slots, bias=bias.to(DEVICE))
    changed = before.float()[:, outputs] - bias.float()[outputs] + x.float() @ a.T @ b.T * 2.0
    expected = before.clone()
    scaled = changed * factors_of(outputs) + bias.float()[outputs]
    expected[::2, outputs] = scaled.to(dtype)[::2]
    assert_agrees(found, expected, 4)


def test_two_changes_of_the_same_outputs_are_refused() -> None:
    made = made_slots("two", torch.float32, triton.add_deltas, DEVICE, is_embedding=False)
    parts = [DeltaPart(torch.ones(1, 8), torch.ones(n, 1), 1.0, 0) for n in (4, 9)]
    with pytest.raises(ValueError, match="expected one change of the outputs"):
        made.pack(parts)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_of_an_embedding_are_the_references(dtype: torch.dtype) -> None:
    shape, slots = "one part", rows_with(MIXES["a mix"])
    tokens = torch.arange(len(slots)) * 3
    ours = made_slots(shape, dtype, triton.add_embedding_deltas, DEVICE, is_embedding=True)
    theirs = made_slots(
        shape, dtype, reference.add_embedding_deltas, torch.device("cpu"), is_embedding=True
    )
    before, _ = inputs_of(shape, dtype, len(slots))
    found, expected = before.to(DEVICE, copy=True), before.clone()
    ours.add(found, tokens.to(DEVICE), slots.to(DEVICE))
    theirs.add(expected, tokens, slots)
    assert_agrees(found, expected, 2)
    assert torch.equal(found.cpu()[slots == NO_SLOT], before[slots == NO_SLOT])
    assert not torch.equal(found.cpu(), before)


def test_a_slot_that_is_cleared_or_filled_again_is_read_at_the_same_address() -> None:
    shape, dtype = "three parts", torch.float32
    made = made_slots(shape, dtype, triton.add_deltas, DEVICE, is_embedding=False)
    before, x = inputs_of(shape, dtype, 5)
    slots = rows_with([0, 1, NO_SLOT, 1, 2]).to(DEVICE)

    def added() -> Tensor:
        y = before.to(DEVICE, copy=True)
        made.add(y, x.to(DEVICE), slots)
        return y.cpu()

    first = added()
    made.clear(1)
    cleared = added()
    assert torch.equal(cleared[[1, 3]], before[[1, 3]])
    assert torch.equal(cleared[[0, 2, 4]], first[[0, 2, 4]])
    num_inputs, sizes, _ = SHAPES[shape]
    part = DeltaPart(torch.ones(2, num_inputs), torch.ones(sizes[0], 2), 1.0, 0)
    made.fill(1, made.pack([part]))
    filled = added()
    expected = before[1, : sizes[0]] + 2 * x[1].sum()
    assert_agrees(filled[1, : sizes[0]], expected, 10)
    assert torch.equal(filled[1, sizes[0] :], before[1, sizes[0] :]), "of the previous adapter"


def test_no_rows_are_no_work() -> None:
    made = made_slots("one part", torch.float32, triton.add_deltas, DEVICE, is_embedding=False)
    y, x = (tensor[:0].to(DEVICE) for tensor in inputs_of("one part", torch.float32, 1))
    made.add(y, x, rows_with([]).to(DEVICE))
    assert made.num_bytes > 0


@pytest.mark.parametrize("argument", ["x", "y", "slots"])
def test_what_would_be_misread_is_refused(argument: str) -> None:
    made = made_slots("one part", torch.float32, triton.add_deltas, DEVICE, is_embedding=False)
    y, x = inputs_of("one part", torch.float32, 2)
    slots = rows_with([0, 1])
    if argument == "x":
        x = x[:, 1:]
    elif argument == "y":
        y = y[:, :-4]
    else:
        slots = slots.long()
    error = TypeError if argument == "slots" else ValueError
    with pytest.raises(error, match=f"{argument}: expected"):
        made.add(y.to(DEVICE), x.to(DEVICE), slots.to(DEVICE))


@pytest.mark.gpu
def test_a_graph_reads_the_adapters_that_slots_have_when_it_is_replayed() -> None:
    shape, dtype = "three parts", torch.bfloat16
    made = made_slots(shape, dtype, triton.add_deltas, DEVICE, is_embedding=False)
    before, x = (tensor.to(DEVICE) for tensor in inputs_of(shape, dtype, 4))
    slots, y = rows_with([NO_SLOT] * 4).to(DEVICE), before.clone()
    made.add(y, x, slots)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made.add(y, x, slots)
    for mix in ([0, NO_SLOT, 2, 1], [1, 1, NO_SLOT, 0]):
        slots.copy_(rows_with(mix))
        y.copy_(before)
        graph.replay()
        expected = before.clone()
        made.add(expected, x, slots)
        assert torch.equal(y, expected)
        made.clear(1)
