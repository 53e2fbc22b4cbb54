"""Experts in C++ are those of the reference, and a row has the same bits in any batch."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from pagewire_kernels import reference
from pagewire_kernels.cpu.build import INSTRUCTION_SETS, compiler, library_path
from pagewire_kernels.cpu.experts import NativeExperts, Plan, can_pack_experts, route
from pagewire_kernels.cpu.linear import HugeMemory
from pagewire_kernels.cpu.native_library import Library, instruction_sets
from pagewire_kernels.cpu.program import Program, record
from pagewire_kernels.quantized_weight import Int8Activations, QuantizedWeight, quantize
from pagewire_kernels.reference import Gate, Routing
from pagewire_kernels.reference.experts import SCORINGS
from tests.support.quantized_files import NF4
from tests.support.quantized_weights import random_weight

DTYPES = [torch.float32, torch.bfloat16]
UNGATED = Gate(activation="relu2", multiplies=False)
CLAMPED = Gate(limit=0.7, alpha=1.702, offset=1.0)
ACTIVE_CLAMPED = Gate(limit=0.2, limits_active=True)

pytestmark = pytest.mark.skipif(compiler() is None, reason="nothing to build the kernels with")


@pytest.fixture(scope="module", params=[*INSTRUCTION_SETS])
def kernels(request: pytest.FixtureRequest) -> Library:
    if request.param not in instruction_sets():
        pytest.skip(f"this processor lacks {request.param}")
    return Library(library_path(request.param), request.param)


def _random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


ROUTINGS = {
    "softmax": Routing(num_experts=37, num_chosen=5),
    "normalized": Routing(num_experts=128, num_chosen=8, normalizes=True),
    "all": Routing(num_experts=3, num_chosen=3, normalizes=True, scale=2.5),
    "one of one": Routing(num_experts=1, num_chosen=1),
    "sigmoid": Routing(num_experts=64, num_chosen=6, scoring="sigmoid", normalizes=True),
    "of chosen": Routing(num_experts=32, num_chosen=4, scoring="softmax_of_chosen"),
    "sigmoid of chosen": Routing(num_experts=16, num_chosen=3, scoring="sigmoid_of_chosen"),
    "sparsemixer": Routing(num_experts=37, num_chosen=2, scoring="sparsemixer", nearness=0.4),
    "groups": Routing(
        num_experts=64,
        num_chosen=6,
        scoring="sigmoid",
        normalizes=True,
        epsilon=1e-20,
        scale=2.5,
        num_groups=8,
        num_chosen_groups=3,
        num_best=2,
    ),
    "groups of one": Routing(
        num_experts=12,
        num_chosen=2,
        scoring="sigmoid",
        num_groups=12,
        num_chosen_groups=4,
        num_best=2,
    ),
    "greedy groups": Routing(num_experts=20, num_chosen=3, num_groups=5, num_chosen_groups=2),
    "minimum sum": Routing(
        num_experts=40, num_chosen=2, scoring="sigmoid", normalizes=True, min_sum=1.9
    ),
    "many": Routing(num_experts=1024, num_chosen=64, normalizes=True),
}


def _pairs(plan: Plan, num_rows: int) -> tuple[Tensor, Tensor]:
    """The experts of each row and their weights, from slots."""
    active, starts, rows, slots, weights = map(torch.from_numpy, plan.memory)
    num_active = plan.task.num_active
    of_slots = slots.view(num_rows, -1)
    places = torch.searchsorted(starts[:num_active], of_slots, right=True) - 1
    assert rows[of_slots].eq(torch.arange(num_rows)[:, None]).all()
    assert starts[num_active] == of_slots.numel()
    return active[places].long(), weights.view(num_rows, -1)


@pytest.mark.parametrize("name", ROUTINGS)
@pytest.mark.parametrize(("has_bias", "has_factors"), [(False, True), (True, False)])
def test_the_same_experts_are_chosen_as_by_the_reference(
    kernels: Library, name: str, has_bias: bool, has_factors: bool
) -> None:
    routing = ROUTINGS[name]
    logits = _random(300, routing.num_experts) * 3
    bias = _random(routing.num_experts, seed=1) * 0.3 if has_bias else None
    factors = _random(routing.num_experts, seed=2).abs() if has_factors else None
    chosen, weights = reference.route(logits, routing, bias, factors)
    found, of_found = _pairs(route(kernels, logits, routing, bias, factors), 300)
    assert torch.equal(found, chosen)
    torch.testing.assert_close(of_found, weights, rtol=2e-6, atol=1e-7)
    for row in (0, 7, 299):
        alone = _pairs(route(kernels, logits[row, None], routing, bias, factors), 1)
        assert torch.equal(alone[0], found[row, None])
        assert torch.equal(alone[1], of_found[row, None])


def test_of_equal_scores_the_first_expert_is_chosen(kernels: Library) -> None:
    routing = Routing(num_experts=40, num_chosen=4, normalizes=True)
    logits = torch.zeros(3, 40)
    logits[1, 20:] = 1
    logits[2, 39] = 1
    expected = torch.tensor([[0, 1, 2, 3], [20, 21, 22, 23], [0, 1, 2, 39]])
    assert torch.equal(_pairs(route(kernels, logits, routing), 3)[0], expected)
    assert torch.equal(reference.route(logits, routing)[0], expected)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("scoring", SCORINGS)
def test_groups_may_have_infinite_scores_and_those_of_no_number(
    kernels: Library, scoring: str
) -> None:
    routing = Routing(
        num_experts=8,
        num_chosen=3,
        scoring=scoring,
        num_groups=4,
        num_chosen_groups=2,
        num_best=2,
    )
    logits = _random(4, 8)
    logits[0], logits[1, 1::2], logits[2, ::2] = torch.nan, torch.nan, torch.inf
    logits[1, ::2] = torch.inf
    chosen, _ = _pairs(route(kernels, logits, routing), 4)
    assert torch.equal(chosen, reference.route(logits, routing)[0])


@pytest.mark.parametrize("normalizes", [False, True])
@pytest.mark.parametrize("scoring", SCORINGS)
def test_infinite_logits_have_the_weights_of_the_reference(
    kernels: Library, scoring: str, normalizes: bool
) -> None:
    routing = Routing(num_experts=20, num_chosen=3, scoring=scoring, normalizes=normalizes)
    logits = _random(5, 20)
    logits[0], logits[1], logits[2, 3:], logits[3, 5] = -torch.inf, -1000.0, -torch.inf, torch.inf
    chosen, weights = reference.route(logits, routing)
    found, of_found = _pairs(route(kernels, logits, routing), 5)
    assert torch.equal(found, chosen)
    torch.testing.assert_close(of_found, weights, rtol=2e-6, atol=1e-7, equal_nan=True)


def test_slots_are_sorted_by_expert_then_by_row(kernels: Library) -> None:
    routing = Routing(num_experts=16, num_chosen=3)
    plan = route(kernels, _random(50, 16), routing)
    _, starts, rows, _, _ = plan.memory
    for first, last in pairwise(starts[: plan.task.num_active + 1]):
        assert (rows[first + 1 : last] > rows[first : last - 1]).all()


@pytest.mark.parametrize("scoring", SCORINGS)
def test_one_number_that_is_none_spoils_its_own_row_only(kernels: Library, scoring: str) -> None:
    routing = Routing(num_experts=20, num_chosen=3, scoring=scoring)
    logits = _random(9, 20)
    chosen, weights = _pairs(route(kernels, logits, routing), 9)
    logits[4] = torch.nan
    found, of_found = _pairs(route(kernels, logits, routing), 9)
    others = torch.arange(9) != 4
    assert torch.equal(found[others], chosen[others])
    assert torch.equal(of_found[others], weights[others])
    assert found[4].tolist() == [0, 1, 2]
    assert of_found[4].isnan().all()


def _expert_weights(
    kind: str, num_experts: int, hidden: int, inner: int, dtype: torch.dtype
) -> tuple[list[Tensor | QuantizedWeight], list[Tensor | QuantizedWeight]]:
    shapes = ((2 * inner, hidden), (hidden, inner))
    if kind.startswith("random"):
        options = {
            "random int4": (4, {"offsets": True, "scales": "units"}),
            "random int5": (5, {"offsets": False}),
            "random int6": (6, {"offsets": False, "scales": "units"}),
            "random int8": (8, {"offsets": False, "scales": "float32"}),
            "random table4": (4, {"offsets": False, "table": tuple(range(-100, 60, 10))}),
            "random float4": (4, {"offsets": False, "table": NF4, "is_float": True}),
        }
        bits, keywords = options[kind]
        found = []
        for rows, columns in shapes:
            weight = random_weight(num_experts * rows, columns, bits, 32, **keywords)
            found.append([weight.rows(slice(i * rows, (i + 1) * rows)) for i in range(num_experts)])
        return found[0], found[1]
    dense = [
        [(_random(*s, seed=7 * i + 1) * s[1] ** -0.5).to(dtype) for i in range(num_experts)]
        for s in shapes
    ]
    if kind == "dense":
        return dense[0], dense[1]
    rounded = [[quantize(weight, kind) for weight in of_kind] for of_kind in dense]
    return rounded[0], rounded[1]


KINDS = [
    *("dense", "int8", "int4", "fp8"),
    *(f"random {kind}" for kind in ("int4", "int5", "int6", "int8", "table4", "float4")),
]


def _first_rows(weight: Tensor | QuantizedWeight, count: int) -> Tensor | QuantizedWeight:
    return weight[:count] if isinstance(weight, Tensor) else weight.rows(slice(count))


def _dense(weight: Tensor | QuantizedWeight) -> Tensor:
    return (weight if isinstance(weight, Tensor) else weight.dequantize()).float()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("kind", "gate"),
    [
        *((kind, gate) for kind in KINDS for gate in (Gate(), CLAMPED, UNGATED)),
        *((kind, ACTIVE_CLAMPED) for kind in ("dense", "int8")),
        *(("dense", Gate(activation=name)) for name in ("gelu", "gelu_tanh", "relu")),
    ],
    ids=str,
)
def test_experts_agree_with_the_reference(
    kernels: Library, kind: str, gate: Gate, dtype: torch.dtype
) -> None:
    num_experts, hidden, inner, num_rows = 6, 128, 64, 150
    gate_up, down = _expert_weights(kind, num_experts, hidden, inner, dtype)
    if not gate.multiplies:
        gate_up = [_first_rows(weight, inner) for weight in gate_up]
    packed = NativeExperts(gate_up, down, gate, kernels, HugeMemory(), dtype)
    routing = Routing(num_experts=num_experts, num_chosen=2, normalizes=True)
    x, logits = _random(num_rows, hidden).to(dtype), _random(num_rows, num_experts, seed=1)
    biases = (_random(num_experts, gate_up[0].shape[0]) * 0.1, _random(num_experts, hidden) * 0.1)
    shared, shared_gate = _random(num_rows, hidden, seed=2).to(dtype), _random(num_rows, 1)
    correction = _random(num_experts, seed=3) * 0.1
    factors = _random(num_experts, seed=4).abs()
    found = packed.apply(
        x,
        logits,
        routing,
        bias=correction,
        factors=factors,
        gate_up_bias=biases[0].to(dtype),
        down_bias=biases[1].to(dtype),
        shared=shared,
        shared_gate=shared_gate,
    )
    chosen, weights = reference.route(logits, routing, correction, factors)
    total = reference.gated_experts(
        x.float(),
        chosen,
        weights,
        lambda e, rows, _: rows @ _dense(gate_up[e]).T + biases[0][e].to(dtype).float(),
        lambda e, rows, _: rows @ _dense(down[e]).T + biases[1][e].to(dtype).float(),
        gate,
        routing,
    )
    expected = reference.add_shared(total, shared, shared_gate)
    error = (found.float() - expected).abs()
    scale = expected.abs().amax()
    assert error.amax() <= scale * (1e-5 if dtype == torch.float32 else 3e-2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_chosen", [1, 3])
def test_scaled_inputs_agree_with_the_reference(
    kernels: Library, num_chosen: int, dtype: torch.dtype
) -> None:
    num_experts, hidden, inner, num_rows = 5, 131, 67, 90
    gate_up, down = _expert_weights("dense", num_experts, hidden, inner, dtype)
    packed = NativeExperts(gate_up, down, Gate(), kernels, HugeMemory())
    routing = Routing(
        num_experts=num_experts,
        num_chosen=num_chosen,
        scoring="sigmoid_of_chosen",
        scales_inputs=True,
    )
    x, logits = _random(num_rows, hidden).to(dtype), _random(num_rows, num_experts, seed=1)
    found, chosen = packed.apply(x, logits, routing), reference.route(logits, routing)
    products = (
        lambda e, rows, _: rows.float() @ _dense(gate_up[e]).T,
        lambda e, rows, _: rows @ _dense(down[e]).T,
    )
    expected, by_outputs = (
        reference.gated_experts(
            x, *chosen, *products, Gate(), replace(routing, scales_inputs=scales_inputs)
        )
        for scales_inputs in (True, False)
    )
    error = (found.float() - expected).abs().amax()
    assert error <= expected.abs().amax() * (1e-5 if dtype == torch.float32 else 1e-2)
    assert (expected - by_outputs).abs().amax() > 10 * error
    for rows in (slice(0, 1), slice(7, 9), slice(30, 90)):
        assert torch.equal(packed.apply(x[rows], logits[rows], routing), found[rows])


def test_zero_experts_have_no_slots(kernels: Library) -> None:
    routing = Routing(num_experts=16, num_chosen=5, num_zero_experts=7, normalizes=True)
    logits = _random(40, 16)
    logits[3, :9] = -9  # its experts are all zero experts
    chosen, expected = reference.route(logits, routing)
    plan = route(kernels, logits, routing)
    _, starts, rows, slots, weights = map(torch.from_numpy, plan.memory)
    slots, is_zero = slots.view(40, 5), chosen >= 9
    assert torch.equal(slots < 0, is_zero)
    assert starts[plan.task.num_active] == (~is_zero).sum()
    of_rows = torch.arange(40)[:, None].expand(40, 5)
    assert torch.equal(rows[slots[~is_zero]], of_rows[~is_zero].int())
    torch.testing.assert_close(weights.view(40, 5), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("adds_zero_experts", [True, False])
@pytest.mark.parametrize("has_shared", [False, True])
def test_zero_experts_agree_with_the_reference(
    kernels: Library, has_shared: bool, adds_zero_experts: bool, dtype: torch.dtype
) -> None:
    num_experts, hidden, inner, num_rows = 5, 531, 67, 90
    gate_up, down = _expert_weights("dense", num_experts, hidden, inner, dtype)
    packed = NativeExperts(gate_up, down, Gate(), kernels, HugeMemory())
    routing = Routing(
        num_experts=num_experts + 3,
        num_chosen=3,
        num_zero_experts=3,
        scale=1.7,
        adds_zero_experts=adds_zero_experts,
    )
    x, logits = _random(num_rows, hidden).to(dtype), _random(num_rows, num_experts + 3, seed=1)
    logits[30:32, :5] = -9  # all their experts are zero experts
    correction = _random(num_experts + 3, seed=3) * 0.01
    shared = _random(num_rows, hidden, seed=2).to(dtype) if has_shared else None
    found = packed.apply(x, logits, routing, bias=correction, shared=shared)
    expected = reference.gated_experts(
        x,
        *reference.route(logits, routing, correction),
        lambda e, rows, _: rows.float() @ _dense(gate_up[e]).T,
        lambda e, rows, _: rows @ _dense(down[e]).T,
        Gate(),
        routing,
    )
    if shared is not None:
        expected = reference.add_shared(expected, shared)
    error = (found.float() - expected).abs().amax()
    assert error <= expected.abs().amax() * (1e-5 if dtype == torch.float32 else 1e-2)
    for rows in (slice(0, 1), slice(30, 32), slice(7, 9), slice(30, 90)):
        again = packed.apply(
            x[rows],
            logits[rows],
            routing,
            bias=correction,
            shared=None if shared is None else shared[rows],
        )
        assert torch.equal(again, found[rows])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("kind", "gate"), [*((kind, Gate()) for kind in KINDS), ("dense", UNGATED), ("int4", UNGATED)]
)
def test_a_row_has_the_same_bits_in_any_batch(
    kernels: Library, kind: str, gate: Gate, dtype: torch.dtype
) -> None:
    num_experts, hidden, inner = 5, 128, 64
    gate_up, down = _expert_weights(kind, num_experts, hidden, inner, dtype)
    if not gate.multiplies:
        gate_up = [_first_rows(weight, inner) for weight in gate_up]
    packed = NativeExperts(gate_up, down, gate, kernels, HugeMemory(), dtype)
    routing = Routing(num_experts=num_experts, num_chosen=2)
    x, logits = _random(1300, hidden).to(dtype), _random(1300, num_experts, seed=1)
    expected = packed.apply(x, logits, routing)
    for first, last in [*((i, i + 1) for i in range(40)), (0, 2), (3, 20), (100, 400), (7, 1300)]:
        rows = slice(first, last)
        assert torch.equal(packed.apply(x[rows], logits[rows], routing), expected[rows])


@pytest.mark.parametrize("shape", [(3, 1, 1), (4, 33, 17), (7, 37, 100), (2, 2049, 31)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_any_sizes_agree_with_the_reference(
    kernels: Library, shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    num_experts, hidden, inner = shape
    gate_up, down = _expert_weights("dense", num_experts, hidden, inner, dtype)
    packed = NativeExperts(gate_up, down, Gate(), kernels, HugeMemory())
    routing = Routing(num_experts=num_experts, num_chosen=2)
    wide = _random(40, hidden + 5).to(dtype)
    x, logits = wide[:, 3 : 3 + hidden], _random(40, num_experts, seed=1)
    total = reference.gated_experts(
        x.float(),
        *reference.route(logits, routing),
        lambda e, rows, _: rows @ _dense(gate_up[e]).T,
        lambda e, rows, _: rows @ _dense(down[e]).T,
        Gate(),
        routing,
    )
    tolerance = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 2e-2}
    if dtype == torch.bfloat16:
        tolerance["rtol"] = 2e-2
    torch.testing.assert_close(packed.apply(x, logits, routing).float(), total, **tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_number_of_threads_changes_nothing(kernels: Library, dtype: torch.dtype) -> None:
    gate_up, down = _expert_weights("dense", 8, 256, 192, dtype)
    packed = NativeExperts(gate_up, down, Gate(), kernels, HugeMemory())
    routing = Routing(num_experts=8, num_chosen=3)
    before = torch.get_num_threads()
    try:
        for num_rows in (1, 5, 200):
            x, logits = _random(num_rows, 256).to(dtype), _random(num_rows, 8, seed=1)
            torch.set_num_threads(1)
            expected = packed.apply(x, logits, routing)
            for count in (2, 3, 7):
                torch.set_num_threads(count)
                assert torch.equal(packed.apply(x, logits, routing), expected), (num_rows, count)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("num_zero_experts", [0, 3])
def test_a_recorded_program_serves_any_number_of_rows(
    kernels: Library, num_zero_experts: int
) -> None:
    num_experts = 8 - num_zero_experts
    gate_up, down = _expert_weights("dense", num_experts, 64, 48, torch.float32)
    packed = NativeExperts(gate_up, down, Gate(), kernels, HugeMemory())
    routing = Routing(
        num_experts=8, num_chosen=2, normalizes=True, num_zero_experts=num_zero_experts
    )
    program = Program(kernels, 64)
    x, logits, shared = _random(64, 64), _random(64, 8, seed=1), _random(64, 64, seed=2)
    with record(program):
        once = packed.apply(x, logits, routing, shared=shared)
        twice = packed.apply(once, logits, routing)
    for num_rows, seed in ((64, 3), (1, 4), (17, 5), (0, 6), (64, 7)):
        x.copy_(_random(64, 64, seed=seed))
        logits.copy_(_random(64, 8, seed=seed + 10))
        program.batches[0].num_rows = num_rows
        program.run(2)
        rows = slice(0, num_rows)
        alone = packed.apply(x[rows], logits[rows], routing, shared=shared[rows])
        assert torch.equal(once[rows], alone)
        assert torch.equal(twice[rows], packed.apply(alone, logits[rows], routing))


def test_threads_that_lose_their_cores_change_nothing(kernels: Library) -> None:
    """There are many more threads than cores: others take over what a thread is computing, which
    later reads a plan that has changed."""
    layers = []
    for _ in range(6):
        weights = _expert_weights("dense", 8, 128, 96, torch.float32)
        layers.append(NativeExperts(*weights, Gate(), kernels, HugeMemory()))
    routing, num_threads = Routing(num_experts=8, num_chosen=3, normalizes=True), 12
    x, logits = _random(64, 128), _random(6, 64, 8, seed=1)
    program = Program(kernels, 64)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(num_threads)
        with record(program):
            found = x
            for layer, of_layer in zip(layers, logits, strict=True):
                found = layer.apply(found, of_layer, routing)
        torch.set_num_threads(1)
        expected = x
        for layer, of_layer in zip(layers, logits, strict=True):
            expected = layer.apply(expected, of_layer, routing)
    finally:
        torch.set_num_threads(before)
    for num_rows in [64, 1, 17] * 20:
        program.batches[0].num_rows = num_rows
        program.run(num_threads)
        assert torch.equal(found[:num_rows], expected[:num_rows])


def test_experts_of_different_formats_are_not_packed_together() -> None:
    four, eight = (random_weight(32, 64, bits, 32, offsets=False) for bits in (4, 8))
    assert can_pack_experts([four, four])
    assert not can_pack_experts([four, eight])
    assert not can_pack_experts([four, torch.ones(32, 64)])
    assert not can_pack_experts([random_weight(32, 64, 4, 32, offsets=False, ordered=False)])
    of_rows = QuantizedWeight(codes=eight.codes, scales=eight.scales, activations=Int8Activations())
    assert not can_pack_experts([of_rows])


def test_rows_that_do_not_fit_are_refused(kernels: Library) -> None:
    gate_up, down = _expert_weights("dense", 4, 32, 16, torch.float32)
    packed = NativeExperts(gate_up, down, Gate(), kernels, HugeMemory())
    routing, x, logits = Routing(num_experts=4, num_chosen=2), torch.ones(3, 32), torch.ones(3, 4)
    with pytest.raises(ValueError, match=r"dense rows of torch.float32 \[\*, 32\]"):
        packed.apply(x[:, :31], logits, routing)
    with pytest.raises(ValueError, match=r"dense logits of float32 \[3, 4\]"):
        packed.apply(x, logits[:2], routing)
    with pytest.raises(ValueError, match="routing among 5 experts"):
        packed.apply(x, torch.ones(3, 5), replace(routing, num_zero_experts=1))
    with pytest.raises(ValueError, match="routing among 4 experts"):
        packed.apply(x, logits, Routing(num_experts=5, num_chosen=2))
    with pytest.raises(ValueError, match="gate_up_bias"):
        packed.apply(x, logits, routing, gate_up_bias=torch.ones(4, 16))
    with pytest.raises(ValueError, match="shared experts like the rows"):
        packed.apply(x, logits, routing, shared=torch.ones(3, 31))
    with pytest.raises(ValueError, match="gate of shared experts"):
        packed.apply(x, logits, routing, shared=x, shared_gate=torch.ones(3))
