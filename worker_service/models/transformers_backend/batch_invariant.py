"""Layers and torch functions of a `transformers` model, replaced to be batch-invariant.

On CPUs `linear` chooses its kernel by the number of rows, and `silu`, `sigmoid` and `gelu` compute
the remainder of their vector loops by another formula (see `pagewire_kernels.reference.layers`).
Linear modules and experts are replaced by packed ones; `InvariantOps` replaces the functions that a
model calls, such as a router's product. On GPUs only linear layers are replaced.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from pagewire_kernels.reference import activate
from worker_service.models.linear import PackedWeight, can_pack, pack


def pack_model(model: nn.Module) -> None:
    """Replace linear layers and experts by packed ones, where this machine has them.

    Only modules of exactly torch's `Linear` are replaced: a subclass may compute something else.
    """
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            replacement = _packed(child)
            if replacement is not None:
                setattr(module, name, replacement)


def _packed(module: nn.Module) -> nn.Module | None:
    if type(module) is nn.Linear and can_pack(module.weight.dtype, module.weight.device):
        return PackedLinear(module)
    if _is_experts(module):
        weight = module.down_proj
        assert isinstance(weight, Tensor)
        if can_pack(weight.dtype, weight.device):
            return PackedExperts(module)
    return None


def _is_experts(module: nn.Module) -> bool:
    """Whether the module follows `transformers`' convention for gated experts."""
    gated = getattr(module, "has_gate", False) and not getattr(
        module, "has_post_expert_norm", False
    )
    return bool(gated) and hasattr(module, "gate_up_proj") and hasattr(module, "down_proj")


class PackedLinear(nn.Module):
    """An `nn.Linear` whose weight is packed.

    Its `weight` has shape and dtype, for code that reads them, but no content.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self._packed = pack(linear.weight.detach())
        self.weight = nn.Parameter(
            torch.empty_like(linear.weight, device="meta"), requires_grad=False
        )
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, self.in_features)
        return self._packed.apply(rows, self.bias).view(*x.shape[:-1], self.out_features)


class PackedExperts(nn.Module):
    """A mixture's experts, each with its own packed weights.

    A token's result is the sum over its experts in order of their numbers, so it does not depend on
    which other tokens chose them.
    """

    def __init__(self, experts: Any) -> None:
        super().__init__()
        self._apply_gate = experts._apply_gate  # keeps the module, and what its gate needs, alive
        transposed = experts.is_transposed
        self._gate_up = _pack_each(experts.gate_up_proj, transposed)
        self._down = _pack_each(experts.down_proj, transposed)
        has_bias = experts.has_bias
        self._gate_up_bias = experts.gate_up_proj_bias.detach() if has_bias else None
        self._down_bias = experts.down_proj_bias.detach() if has_bias else None
        experts.gate_up_proj = experts.down_proj = None

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """hidden_states: [num_tokens, hidden_size]; the others: [num_tokens, top_k]."""
        output = torch.zeros_like(hidden_states)
        for expert in torch.unique(top_k_index).tolist():
            if expert >= len(self._down):  # some routers mark an unused choice so
                continue
            token, place = torch.where(top_k_index == expert)
            up_bias = self._gate_up_bias[expert] if self._gate_up_bias is not None else None
            down_bias = self._down_bias[expert] if self._down_bias is not None else None
            inner = self._apply_gate(self._gate_up[expert].apply(hidden_states[token], up_bias))
            result = self._down[expert].apply(inner, down_bias)
            weighted = result * top_k_weights[token, place, None]
            output.index_add_(0, token, weighted.to(output.dtype))
        return output


def _pack_each(weights: Tensor, transposed: bool) -> list[PackedWeight]:
    """weights: [num_experts, out_features, in_features], or the last two swapped."""
    weights = weights.detach()
    return [pack(weight.t() if transposed else weight) for weight in weights]


class InvariantOps(TorchFunctionMode):
    """Within it, these functions compute each row in one order, whatever the other rows are."""

    def __init__(self, device_type: str) -> None:
        super().__init__()
        self._packed: dict[Tensor, PackedWeight] = {}  # by the parameter itself
        self._functions: dict[Any, Callable[..., Tensor]] = {nn.functional.linear: _triton_linear}
        if device_type == "cpu":
            self._functions = {
                nn.functional.linear: self._packed_linear,
                nn.functional.silu: _silu,
                nn.functional.gelu: _gelu,
                torch.sigmoid: _sigmoid,
                Tensor.sigmoid: _sigmoid,
            }

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return self._functions.get(func, func)(*args, **(kwargs or {}))

    def _packed_linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Packed if the weight is a parameter; that of a view could not be kept."""
        packable = isinstance(weight, nn.Parameter) and can_pack(weight.dtype, weight.device)
        if not packable or input.dtype != weight.dtype:
            return nn.functional.linear(input, weight, bias)
        if weight not in self._packed:
            self._packed[weight] = pack(weight.detach())
        rows = input.reshape(-1, weight.shape[1])
        output = self._packed[weight].apply(rows, bias)
        return output.view(*input.shape[:-1], weight.shape[0])


def _triton_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    from pagewire_kernels.triton import linear  # triton is loaded only where it is used

    rows = linear(input.reshape(-1, weight.shape[1]), weight, bias)
    return rows.view(*input.shape[:-1], weight.shape[0])


def _silu(input: Tensor, inplace: bool = False) -> Tensor:
    return activate(input, "silu")


def _gelu(input: Tensor, approximate: str = "none") -> Tensor:
    return activate(input, "gelu_tanh" if approximate == "tanh" else "gelu")


def _sigmoid(input: Tensor) -> Tensor:
    wide = input.float()
    return torch.exp(-wide).add_(1).reciprocal_().to(input.dtype)
