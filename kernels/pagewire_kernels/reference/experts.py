"""Mixture of experts in plain torch: the choice of experts, and the gated experts themselves."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pagewire_kernels.reference.layers import ACTIVATIONS, act_and_mul, activate

SCORINGS = ("softmax", "sigmoid", "softmax_of_chosen", "sigmoid_of_chosen", "sparsemixer")
"""How logits become scores, which are compared, and weights: over all experts, of each expert
alone, or of the chosen experts, whose logits are compared. By SparseMixer (Liu et al. 2024), the
weight of an expert is its softmax among those with lower logits that are near; see
`Routing.nearness`."""

MAX_EXPERTS = 1024
MAX_CHOSEN = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Routing:
    """How the experts of a row are chosen and weighted. Impossible numbers raise ValueError."""

    num_experts: int
    num_chosen: int
    """Experts of a row."""

    scoring: str = "softmax"
    """One of `SCORINGS`."""

    normalizes: bool = False
    """Whether weights are divided by their sum."""

    epsilon: float = 0.0
    """Added to the sum of weights."""

    min_sum: float = 0.0
    """Smaller sums of weights count as this."""

    scale: float = 1.0
    """Factor of the weights."""

    nearness: float = 0.0
    """SparseMixer: the largest distance of a near logit, relative to the larger of its magnitude
    and the expert's logit."""

    scales_inputs: bool = False
    """Whether weights multiply the rows that experts get, instead of their outputs (Llama 4)."""

    num_zero_experts: int = 0
    """Experts that have no weights and return their inputs, the last ones (zero-computation
    experts, Meituan LongCat Team 2025)."""

    adds_zero_experts: bool = True
    """Whether their outputs are part of the sum: of several ranks, one adds them."""

    num_groups: int = 1
    """Groups of consecutive experts; only those of the best groups can be chosen."""

    num_chosen_groups: int = 1
    num_best: int = 1
    """The best experts of a group, 1 or 2, whose scores add up to that of the group."""

    def __post_init__(self) -> None:
        if self.scoring not in SCORINGS:
            raise ValueError(f"scoring: expected one of {', '.join(SCORINGS)}, got {self.scoring}")
        limits = {
            "num_experts": (1, MAX_EXPERTS),
            "num_chosen": (1, min(self.num_experts, MAX_CHOSEN)),
            "num_zero_experts": (0, 0 if self.scales_inputs else self.num_experts - 1),
            "num_groups": (1, self.num_experts),
            "num_chosen_groups": (1, self.num_groups),
            "num_best": (1, 2),
        }
        for name, (low, high) in limits.items():
            if not low <= getattr(self, name) <= high:
                got = getattr(self, name)
                raise ValueError(f"{name}: expected {low} to {high}, got {got}")
        if self.num_experts % self.num_groups:
            raise ValueError(
                f"num_groups: expected a divisor of {self.num_experts} experts, got"
                f" {self.num_groups}"
            )
        available = self.num_experts // self.num_groups * self.num_chosen_groups
        if available < self.num_chosen:
            raise ValueError(
                f"num_chosen_groups: expected groups with at least {self.num_chosen} experts, got"
                f" {self.num_chosen_groups} groups with {available}"
            )

    @property
    def num_with_weights(self) -> int:
        """Experts that are not zero experts."""
        return self.num_experts - self.num_zero_experts


@dataclass(frozen=True, kw_only=True, slots=True)
class Gate:
    """An activation, most with a gate: activation(gate) * up, or with a limit
    (up + offset) * gate * sigmoid(alpha * gate), after gate was limited from above, and up from
    both sides (gpt-oss)."""

    activation: str = "silu"
    """One of `ACTIVATIONS`; `silu` if there is a limit."""

    limit: float | None = None
    limits_active: bool = False
    """Whether the activation of the gate is limited instead of the gate (Step 3.5)."""

    alpha: float = 1.0
    offset: float = 0.0
    multiplies: bool = True
    """Whether there is a gate, which multiplies up; otherwise the activation is that of up."""

    def __post_init__(self) -> None:
        if self.activation not in ACTIVATIONS:
            expected = ", ".join(ACTIVATIONS)
            raise ValueError(f"activation: expected one of {expected}, got {self.activation}")
        if self.limit is not None and self.activation != "silu":
            raise ValueError(f"activation: expected silu with a limit, got {self.activation}")
        if self.limit is not None and not self.multiplies:
            raise ValueError(f"limit: expected none without a gate, got {self.limit}")

    def apply(self, gate_up: Tensor) -> Tensor:
        """gate_up: [num_rows, 2 * size], gate, then up, or up alone. Returns [num_rows, size]."""
        if not self.multiplies:
            return activate(gate_up, self.activation)
        if self.limit is None:
            return act_and_mul(gate_up, self.activation)
        gate, up = gate_up.float().chunk(2, dim=-1)
        gate_limit, active_limit = self.limits
        gate, up = gate.clamp(max=gate_limit), up.clamp(-self.limit, self.limit)
        active = (gate / torch.exp(-gate * self.alpha).add_(1)).clamp_(max=active_limit)
        return ((up + self.offset) * active).to(gate_up.dtype)

    @property
    def limits(self) -> tuple[float, float]:
        """Of a gate and of its activation, at least one of which is infinite."""
        limit = math.inf if self.limit is None else self.limit
        return (math.inf, limit) if self.limits_active else (limit, math.inf)


def route(
    logits: Tensor,
    routing: Routing,
    bias: Tensor | None = None,
    factors: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Choose the experts of each row, and weight them.

    logits: float32 [num_rows, num_experts]; bias: float32 [num_experts], which is added to scores
    for the choice alone; factors: of the weights of experts, float32 [num_experts]. Returns the
    experts in ascending order, int64 [num_rows, num_chosen], and their weights, float32. Of equal
    scores, the expert with the lowest index is chosen.
    """
    scores = {
        "softmax": lambda: logits.softmax(dim=-1),
        "sigmoid": lambda: _sigmoid(logits, routing),
    }.get(routing.scoring, lambda: logits)()
    compared = scores if bias is None else scores + bias
    compared = torch.where(compared.isnan(), -torch.inf, compared)
    if routing.num_chosen_groups < routing.num_groups:
        groups = compared.unflatten(1, (routing.num_groups, -1))
        num_best = min(routing.num_best, groups.shape[2])
        of_groups = groups.topk(num_best, dim=2).values.sum(dim=2)
        of_groups = torch.where(of_groups.isnan(), -torch.inf, of_groups)
        kept = torch.zeros_like(of_groups, dtype=torch.bool)
        kept.scatter_(1, _best(of_groups, routing.num_chosen_groups), True)
        compared = groups.masked_fill(~kept.unsqueeze(2), -torch.inf).flatten(1)
    chosen = _best(compared, routing.num_chosen).sort(dim=1).values
    weights = scores.gather(1, chosen)
    if routing.scoring == "softmax_of_chosen":
        weights = weights.softmax(dim=1)
    elif routing.scoring == "sigmoid_of_chosen":
        weights = _sigmoid(weights, routing)
    elif routing.scoring == "sparsemixer":
        weights = _sparsemixer(logits, chosen, routing.nearness)
    if routing.normalizes:
        total = weights.sum(dim=1, keepdim=True) + routing.epsilon
        weights = weights / total.clamp(min=routing.min_sum)
    weights = weights * routing.scale
    return chosen, weights if factors is None else weights * factors[chosen]


def _sigmoid(logits: Tensor, routing: Routing) -> Tensor:
    """Above 0 where weights are divided by their sum, which must not be 0; as in C++."""
    if routing.normalizes:
        logits = logits.clamp(min=-87.0)
    return 1 / (1 + torch.exp(-logits))


def _sparsemixer(logits: Tensor, chosen: Tensor, nearness: float) -> Tensor:
    """The weights of the chosen experts, [num_rows, num_chosen]; see `SCORINGS`."""
    others, own = logits.unsqueeze(1), logits.gather(1, chosen).unsqueeze(2)
    is_earlier = torch.arange(logits.shape[1], device=logits.device) < chosen.unsqueeze(2)
    is_higher = (others > own) | ((others == own) & is_earlier)
    is_far = (own - others) / others.abs().maximum(own) > nearness
    among = others.masked_fill(is_higher | is_far, -torch.inf)
    return among.softmax(dim=2).gather(2, chosen.unsqueeze(2)).squeeze(2)


def _best(scores: Tensor, count: int) -> Tensor:
    """Indices of the largest numbers of each row, the lowest among equals."""
    return scores.sort(dim=1, descending=True, stable=True).indices[:, :count]


Product = Callable[[int, Tensor, Tensor], Tensor]
"""The product of inputs with the weight of one expert, given its index, and the rows, int64 [n],
that the inputs are of."""


def gated_experts(
    x: Tensor,
    chosen: Tensor,
    weights: Tensor,
    gate_up: Product,
    down: Product,
    gate: Gate,
    routing: Routing,
) -> Tensor:
    """The weighted sum of the outputs of each row's experts, in ascending order of experts, so that
    a row has the same bits in any batch if the products have.

    x: [num_rows, hidden_size]; chosen, weights: as `route` returns them; gate_up: returns gate,
    then up; down: returns [*, hidden_size]. Returns float32 [num_rows, hidden_size].
    """
    total = torch.zeros_like(x, dtype=torch.float32)
    for expert in chosen.unique().tolist():
        rows, places = torch.where(chosen == expert)
        inputs, weight = x[rows], weights[rows, places, None]
        if expert >= routing.num_with_weights:
            if routing.adds_zero_experts:
                total[rows] += inputs.float() * weight
            continue
        if routing.scales_inputs:
            inputs, weight = (inputs.float() * weight).to(x.dtype), torch.ones_like(weight)
        output = down(expert, gate.apply(gate_up(expert, inputs, rows)), rows).float()
        total[rows] += output * weight
    return total


def add_shared(total: Tensor, shared: Tensor, gate: Tensor | None = None) -> Tensor:
    """Add the output of shared experts to that of the chosen ones.

    total: float32 [num_rows, size]; shared: [num_rows, size]; gate: logits, float32 [num_rows, 1],
    with whose sigmoid shared rows are multiplied. Returns float32 [num_rows, size].
    """
    if gate is None:
        return total + shared.float()
    return total + shared.float() / (1 + torch.exp(-gate))
