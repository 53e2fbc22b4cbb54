"""Experts on a GPU are those of the reference, and a row has the same bits in any batch."""

from itertools import product

import pytest
import torch
from torch import Tensor

from pagewire_kernels import reference
from pagewire_kernels.reference import Gate, Routing
from pagewire_kernels.slot_deltas import AddOfExperts
from pagewire_kernels.triton.experts import TritonExperts
from tests.support.gpu_kernels import DEVICE, DTYPES, MARKS, assert_agrees

pytestmark = MARKS

SHAPE = (5, 48, 40)
"""Experts, hidden size, inner size."""


GATES = (
    Gate(),
    Gate(limit=0.7, alpha=1.702, offset=1.0),
    Gate(limit=0.2, limits_active=True),
    Gate(activation="relu2", multiplies=False),
)


def _random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _weights(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    num_experts, hidden, inner = SHAPE
    gate_up = _random(num_experts, 2 * inner, hidden) * hidden**-0.5
    return gate_up.to(dtype), (_random(num_experts, hidden, inner, seed=1) * 0.2).to(dtype)


def _is_long(num_rows: int, has_all: bool, dtype: torch.dtype) -> bool:
    """Of many rows, without or with all that is optional in one type."""
    return num_rows == 200 and has_all == (dtype == torch.float32)


@pytest.mark.parametrize(
    ("num_rows", "has_all", "dtype"),
    [
        pytest.param(*case, marks=pytest.mark.long if _is_long(*case) else [])
        for case in product((1, 9, 200), (False, True), DTYPES)
    ],
)
@pytest.mark.parametrize("gate", GATES, ids=str)
def test_experts_agree_with_the_reference(
    dtype: torch.dtype, gate: Gate, num_rows: int, has_all: bool
) -> None:
    num_experts, hidden, inner = SHAPE
    gate_up, down = _weights(dtype)
    if not gate.multiplies:
        gate_up = gate_up[:, :inner].contiguous()
    routing = Routing(num_experts=num_experts, num_chosen=2, normalizes=True, scales_inputs=has_all)
    x, logits = _random(num_rows, hidden, dtype=dtype), _random(num_rows, num_experts, seed=1)
    optional = {
        "bias": _random(num_experts, seed=2),
        "gate_up_bias": _random(num_experts, gate_up.shape[1], dtype=dtype, seed=3),
        "down_bias": _random(num_experts, hidden, dtype=dtype, seed=4),
        "shared": _random(num_rows, hidden, dtype=dtype, seed=5),
        "shared_gate": _random(num_rows, 1, seed=6),
    }
    given = optional if has_all else {}
    none = torch.zeros(())
    total = reference.gated_experts(
        x,
        *reference.route(logits, routing, given.get("bias")),
        lambda e, rows, _: (
            (
                rows.float() @ gate_up[e].float().T + (given["gate_up_bias"][e] if given else none)
            ).to(dtype)
        ).float(),
        lambda e, rows, _: (
            rows.to(dtype).float() @ down[e].float().T + (given["down_bias"][e] if given else none)
        ),
        gate,
        routing,
    )
    if given:
        total = reference.add_shared(total, given["shared"], given["shared_gate"])
    experts = TritonExperts(gate_up.to(DEVICE), down.to(DEVICE), gate, batch_invariant=False)
    there = {name: tensor.to(DEVICE) for name, tensor in given.items()}
    found = experts.apply(x.to(DEVICE), logits.to(DEVICE), routing, **there)
    assert_agrees(found, total.to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [1, 200])
@pytest.mark.parametrize("adds_zero_experts", [True, False])
def test_zero_experts_agree_with_the_reference(
    dtype: torch.dtype, num_rows: int, adds_zero_experts: bool
) -> None:
    num_experts, hidden, _ = SHAPE
    gate_up, down = _weights(dtype)
    routing = Routing(
        num_experts=num_experts + 3,
        num_chosen=3,
        num_zero_experts=3,
        adds_zero_experts=adds_zero_experts,
    )
    x, logits = _random(num_rows, hidden, dtype=dtype), _random(num_rows, num_experts + 3, seed=1)
    logits[7:9, :num_experts] = -9  # all their experts are zero experts
    expected = reference.gated_experts(
        x,
        *reference.route(logits, routing),
        lambda e, rows, _: (rows.float() @ gate_up[e].float().T).to(dtype).float(),
        lambda e, rows, _: rows.to(dtype).float() @ down[e].float().T,
        Gate(),
        routing,
    )
    for is_invariant in (False, True):
        weights = gate_up.to(DEVICE), down.to(DEVICE)
        experts = TritonExperts(*weights, Gate(), batch_invariant=is_invariant)
        found = experts.apply(x.to(DEVICE), logits.to(DEVICE), routing)
        assert_agrees(found, expected.to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_alone_and_in_any_batch(dtype: torch.dtype) -> None:
    gate_up, down = (weight.to(DEVICE) for weight in _weights(dtype))
    experts = TritonExperts(gate_up, down, Gate(), batch_invariant=True)
    routing = Routing(num_experts=SHAPE[0], num_chosen=2)
    x = _random(150, SHAPE[1], dtype=dtype).to(DEVICE)
    logits = _random(150, SHAPE[0], seed=1).to(DEVICE)
    together = experts.apply(x, logits, routing)
    for part in (slice(0, 1), slice(63, 66), slice(149, 150), slice(7, 150)):
        assert torch.equal(experts.apply(x[part], logits[part], routing), together[part])


@pytest.mark.parametrize(("scales_inputs", "num_zero"), [(False, 0), (True, 0), (False, 2)])
@pytest.mark.parametrize("gate", GATES, ids=str)
def test_what_adapters_add_to_both_products_is_as_in_a_changed_weight(
    gate: Gate, scales_inputs: bool, num_zero: int
) -> None:
    num_experts, hidden, inner = SHAPE
    gate_up, down = _weights(torch.float32)
    gate_up = gate_up if gate.multiplies else gate_up[:, :inner].contiguous()
    change_first = _random(*gate_up.shape, seed=2) / 9
    change_second = _random(*down.shape, seed=3) / 9
    routing = Routing(
        num_experts=num_experts + num_zero,
        num_chosen=2,
        scales_inputs=scales_inputs,
        num_zero_experts=num_zero,
    )
    x, logits = _random(40, hidden), _random(40, num_experts + num_zero, seed=1)
    has_change = torch.arange(40) % 3 == 0

    def add(change: Tensor) -> AddOfExperts:
        def add_to(y: Tensor, rows: Tensor, expert: Tensor, of_step: Tensor) -> Tensor:
            found = torch.einsum("ni,noi->no", rows.cpu(), change[expert.cpu()])
            return y.add_((found * has_change[of_step.cpu(), None]).to(y.device))

        return add_to

    def apply(first: Tensor, second: Tensor, **additions: AddOfExperts) -> Tensor:
        experts = TritonExperts(first.to(DEVICE), second.to(DEVICE), gate, batch_invariant=True)
        return experts.apply(x.to(DEVICE), logits.to(DEVICE), routing, **additions).cpu()

    plain = apply(gate_up, down)
    changed = apply(gate_up + change_first, down + change_second)
    found = apply(gate_up, down, add_to_gate_up=add(change_first), add_to_down=add(change_second))
    assert torch.equal(found[~has_change], plain[~has_change])
    assert_agrees(found[has_change].to(DEVICE), changed[has_change])


def test_no_rows_give_no_rows() -> None:
    experts = TritonExperts(
        *(weight.to(DEVICE) for weight in _weights(torch.float32)), Gate(), batch_invariant=True
    )
    routing = Routing(num_experts=SHAPE[0], num_chosen=2)
    x, logits = torch.ones(0, SHAPE[1], device=DEVICE), torch.ones(0, SHAPE[0], device=DEVICE)
    assert experts.apply(x, logits, routing).shape == (0, SHAPE[1])


def test_what_would_be_misread_is_refused() -> None:
    gate_up, down = _weights(torch.float32)
    with pytest.raises(ValueError, match=r"down: expected shape \[5, 48, 40\], got \[5, 40, 48\]"):
        TritonExperts(gate_up, down.mT.contiguous(), Gate(), batch_invariant=True)
    experts = TritonExperts(gate_up, down, Gate(), batch_invariant=True)
    routing = Routing(num_experts=SHAPE[0], num_chosen=2)
    with pytest.raises(TypeError, match="x: expected float32"):
        experts.apply(torch.ones(2, 48).half(), torch.ones(2, 5), routing)
    with pytest.raises(ValueError, match=r"logits: expected shape \[2, 5\]"):
        experts.apply(torch.ones(2, 48), torch.ones(3, 5), routing)
