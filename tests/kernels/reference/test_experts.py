"""The choice of experts in plain torch."""

from typing import Any

import pytest
import torch

from pagewire_kernels.reference import Gate, Routing, gated_experts, route


@pytest.mark.parametrize(
    ("faulty", "message"),
    [
        ({"scoring": "tanh"}, "scoring: expected one of softmax, sigmoid"),
        ({"num_experts": 1025}, "num_experts: expected 1 to 1024, got 1025"),
        ({"num_chosen": 9}, "num_chosen: expected 1 to 8, got 9"),
        ({"num_groups": 3}, "num_groups: expected a divisor of 8 experts, got 3"),
        ({"num_groups": 4, "num_chosen_groups": 5}, "num_chosen_groups: expected 1 to 4, got 5"),
        ({"num_groups": 8}, "num_chosen_groups: expected groups with at least 2 experts, got 1"),
        ({"num_best": 3}, "num_best: expected 1 to 2, got 3"),
        ({"num_zero_experts": 8}, "num_zero_experts: expected 0 to 7, got 8"),
        (
            {"num_zero_experts": 1, "scales_inputs": True},
            "num_zero_experts: expected 0 to 0, got 1",
        ),
    ],
)
def test_impossible_numbers_are_refused(faulty: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Routing(**{"num_experts": 8, "num_chosen": 2, **faulty})


def test_unknown_activations_are_refused() -> None:
    with pytest.raises(ValueError, match="activation: expected one of silu"):
        Gate(activation="swish")
    with pytest.raises(ValueError, match="activation: expected silu with a limit, got gelu"):
        Gate(activation="gelu", limit=7.0)
    with pytest.raises(ValueError, match="limit: expected none without a gate, got 7"):
        Gate(limit=7.0, multiplies=False)


def test_the_bias_decides_the_choice_but_not_the_weights() -> None:
    routing = Routing(num_experts=4, num_chosen=2, scoring="sigmoid")
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    chosen, weights = route(logits, routing, torch.tensor([0.0, -5.0, 0.0, 5.0]))
    assert chosen.tolist() == [[0, 3]]
    torch.testing.assert_close(weights, logits[:, [0, 3]].sigmoid())


def test_sparsemixer_weighs_experts_among_near_ones_with_lower_logits() -> None:
    routing = Routing(num_experts=5, num_chosen=2, scoring="sparsemixer", nearness=0.25)
    # Of the distances from 4, those to 3.5 and 3.2 are near, that to -4 is twice its magnitude;
    # from 3.5, those to 3.2 and 2.9.
    chosen, weights = route(torch.tensor([[3.2, 3.5, -4.0, 4.0, 2.9]]), routing)
    assert chosen.tolist() == [[1, 3]]
    second = torch.tensor([3.5, 3.2, 2.9]).softmax(0)[0]
    first = torch.tensor([4.0, 3.5, 3.2]).softmax(0)[0]
    torch.testing.assert_close(weights, torch.stack([second, first])[None])


def test_of_equal_logits_sparsemixer_weighs_the_first_among_all() -> None:
    routing = Routing(num_experts=3, num_chosen=2, scoring="sparsemixer", nearness=0.1)
    chosen, weights = route(torch.tensor([[1.0, 1.0, 1.0]]), routing)
    assert chosen.tolist() == [[0, 1]]
    torch.testing.assert_close(weights, torch.tensor([[1 / 3, 1 / 2]]))


def test_only_experts_of_the_best_groups_are_chosen() -> None:
    logits = torch.tensor([[3.0, -9.0, 2.0, 2.0, 2.5, -8.0]])
    routing = {"num_experts": 6, "num_chosen": 2, "num_groups": 3, "num_chosen_groups": 1}
    best = Routing(**routing, num_best=1, scoring="softmax_of_chosen")
    assert route(logits, best)[0].tolist() == [[0, 1]]
    pairs = Routing(**routing, num_best=2, scoring="softmax_of_chosen")
    assert route(logits, pairs)[0].tolist() == [[2, 3]]


@pytest.mark.parametrize("adds_zero_experts", [True, False])
def test_zero_experts_return_their_inputs(adds_zero_experts: bool) -> None:
    routing = Routing(
        num_experts=4, num_chosen=2, num_zero_experts=2, adds_zero_experts=adds_zero_experts
    )
    x, weights = torch.tensor([[3.0, 5.0], [7.0, 11.0]]), torch.tensor([[0.5, 0.25], [2.0, 1.0]])
    chosen = torch.tensor([[1, 2], [2, 3]])

    def double(expert: int, rows: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        assert expert == 1
        return 2 * rows

    gate = Gate(activation="relu", multiplies=False)
    found = gated_experts(x, chosen, weights, double, double, gate, routing)
    of_zero = torch.tensor([[0.25], [3.0]]) * adds_zero_experts
    assert torch.equal(found, torch.tensor([[2.0], [0.0]]) * x + of_zero * x)
