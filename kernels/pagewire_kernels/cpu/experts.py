"""Launchers of the kernels for mixture of experts; see src/experts.h."""

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pagewire_kernels.cpu import threads
from pagewire_kernels.cpu.adapters import ActiveRows, ExpertDeltas
from pagewire_kernels.cpu.checks import DTYPES, require
from pagewire_kernels.cpu.layers import NO_ACTIVATION, activation_of
from pagewire_kernels.cpu.linear import (
    SERIAL_PRODUCTS,
    Encoding,
    HugeMemory,
    NativeGatedWeight,
    NativeWeight,
    Pieces,
    can_pack_codes,
    encoding_of,
)
from pagewire_kernels.cpu.native_library import Library
from pagewire_kernels.cpu.program import count_address, kept, launch, new_rows
from pagewire_kernels.cpu.tasks import (
    CombineTask,
    ExpertPlan,
    ExpertsTask,
    RouteTask,
    ScatterTask,
    address,
    rows_of,
)
from pagewire_kernels.quantized_weight import QuantizedWeight
from pagewire_kernels.reference.experts import SCORINGS, Gate, Routing


def can_pack_experts(weights: Sequence[Tensor | QuantizedWeight]) -> bool:
    """Whether these weights of experts can be packed together: all dense, or all quantized in one
    format whose columns are in the order of inputs, without quantized activations."""
    quantized = [weight for weight in weights if isinstance(weight, QuantizedWeight)]
    if not quantized:
        return True
    formats = {
        (
            tuple(weight.shape),
            weight.group_size,
            weight.is_float,
            weight.table,
            weight.offsets is None,
            None if weight.units is None else weight.units.shape[1],
        )
        for weight in quantized
    }
    return (
        len(quantized) == len(weights)
        and len(formats) == 1
        and can_pack_codes(quantized[0])
        and all(weight.order is None and weight.activations is None for weight in quantized)
    )


class Plan(NamedTuple):
    """The experts of a step's rows, sorted; see src/experts.h."""

    task: ExpertPlan
    memory: tuple[np.ndarray, ...]
    """What `task` points to, which is never reused: see `kept`."""

    num_slots: int


def route(
    library: Library,
    logits: Tensor,
    routing: Routing,
    bias: Tensor | None = None,
    factors: Tensor | None = None,
) -> Plan:
    """Choose the experts of each row; see `reference.route`."""
    num_rows = logits.shape[0]
    key = num_rows, routing.num_experts, routing.num_chosen
    plan = kept(key, lambda: _new_plan(*key))
    task = RouteTask(
        num_rows=count_address(num_rows),
        **rows_of(logits=logits),
        bias=address(bias),
        factors=address(factors),
        plan=ctypes.addressof(plan.task),
        num_experts=routing.num_experts,
        num_zero_experts=routing.num_zero_experts,
        num_chosen=routing.num_chosen,
        scoring=SCORINGS.index(routing.scoring),
        normalizes=routing.normalizes,
        num_groups=routing.num_groups,
        num_chosen_groups=routing.num_chosen_groups,
        num_best=routing.num_best,
        nearness=routing.nearness,
        epsilon=routing.epsilon,
        min_sum=routing.min_sum,
        scale=routing.scale,
    )
    num_threads = threads.count_for(logits.numel() * _ROUTE_WORK)
    launch(library.kernel("route"), task, num_threads)
    return plan


class NativeExperts:
    """The experts of a layer, packed for the C++ kernels. A row has the same bits in any
    batch."""

    def __init__(
        self,
        gate_up: Sequence[Tensor | QuantizedWeight],
        down: Sequence[Tensor | QuantizedWeight],
        gate: Gate,
        library: Library,
        memory: HugeMemory,
        dtype: torch.dtype | None = None,
        *,
        consume: bool = False,
    ) -> None:
        """Pack the weights of all experts.

        gate_up: of each expert gate, then up, [2 * inner_size, hidden_size], or if the gate does
        not multiply, up alone, [inner_size, hidden_size]; down: [hidden_size, inner_size]; all of
        one kind (`can_pack_experts`); the others as for `NativeWeight`.
        """
        require(can_pack_experts(gate_up) and can_pack_experts(down), "experts of one format")
        require(len(gate_up) == len(down), "as many weights of one kind as of the other")
        self._gate, self._library, self._num_experts = gate, library, len(down)
        pieces = Pieces(memory, len(gate_up)), Pieces(memory, len(down))
        options: list[dict[str, Any]] = [
            {"consume": consume, "encoding": _encoding_of(weights)} for weights in (gate_up, down)
        ]
        self._gate_up: Sequence[NativeWeight] | Sequence[NativeGatedWeight]
        if gate.multiplies:
            self._gate_up = [
                NativeGatedWeight(weight, gate.activation, library, pieces[0], dtype, **options[0])
                for weight in gate_up
            ]
        else:
            self._gate_up = [
                NativeWeight(weight, library, pieces[0], dtype, **options[0]) for weight in gate_up
            ]
        self._down = [
            NativeWeight(weight, library, pieces[1], dtype, **options[1]) for weight in down
        ]
        self._expert_bytes = pieces[0].piece_bytes, pieces[1].piece_bytes
        self.dtype = self._down[0].dtype
        self.hidden_size, self.inner_size = self._down[0].out_features, self._down[0].in_features

    def apply(
        self,
        x: Tensor,
        logits: Tensor,
        routing: Routing,
        *,
        bias: Tensor | None = None,
        factors: Tensor | None = None,
        gate_up_bias: Tensor | None = None,
        down_bias: Tensor | None = None,
        shared: Tensor | None = None,
        shared_gate: Tensor | None = None,
        gate_up_deltas: ExpertDeltas | None = None,
        down_deltas: ExpertDeltas | None = None,
    ) -> Tensor:
        """The weighted sum of the outputs of each row's experts, and of shared experts.

        x: [num_rows, hidden_size]; logits: float32 [num_rows, num_experts]; bias, factors:
        float32 [num_experts], as in `reference.route`; gate_up_bias: [num_experts, rows of
        gate_up];
        down_bias: [num_experts, hidden_size]; shared: as x, the output of shared experts;
        shared_gate: float32 [num_rows, 1], as in `reference.add_shared`; gate_up_deltas,
        down_deltas: what adapters add to the products. Returns as x.
        """
        self._check(x, logits, routing, bias, factors)
        for name, found, size in (
            ("gate_up_bias", gate_up_bias, self._gate_up[0].out_features),
            ("down_bias", down_bias, self.hidden_size),
        ):
            shape = (self._num_experts, size)
            require(found is None or _is_dense(found, shape, self.dtype), f"a {name} of {shape}")
        plan = route(self._library, logits, routing, bias, factors)
        inner = new_rows(plan.num_slots, self.inner_size, self.dtype)
        rows = self._scatter(x, plan, routing) if routing.scales_inputs else x
        self._multiply(
            self._gate_up, rows, plan, gate_up_bias, inner, gate_up_deltas, gathers=rows is x
        )
        output = new_rows(plan.num_slots, self.hidden_size, torch.float32)
        self._multiply(self._down, inner, plan, down_bias, output, down_deltas)
        return self._combine(output, plan, routing, x, shared, shared_gate)

    def make_deltas(
        self, weight: int, rows: ActiveRows, max_slots: int, num_modules: int, max_rank: int
    ) -> ExpertDeltas:
        """Make slots for what adapters add to the products with the weights of gate and up, 0, or
        of down, 1. num_modules: the most parts of an adapter for one expert; the others as for
        `NativeWeight.make_deltas`."""
        first_sizes = [self.inner_size] * (1 + self._gate.multiplies)
        sizes = (first_sizes, [self.hidden_size])[weight]
        limits = max_slots, num_modules, max_rank
        return ExpertDeltas(sizes, rows, *limits, self._library, self.dtype, self._num_experts)

    def _check(
        self, x: Tensor, logits: Tensor, routing: Routing, *of_experts: Tensor | None
    ) -> None:
        num_experts = self._num_experts + routing.num_zero_experts
        require(
            x.dtype == self.dtype and x.shape[1] == self.hidden_size and x.stride(1) == 1,
            f"dense rows of {self.dtype} [*, {self.hidden_size}]",
        )
        require(
            logits.dtype == torch.float32
            and logits.shape == (x.shape[0], num_experts)
            and logits.stride(1) == 1,
            f"dense logits of float32 [{x.shape[0]}, {num_experts}]",
        )
        require(routing.num_experts == num_experts, f"routing among {num_experts} experts")
        for numbers in of_experts:
            require(
                numbers is None or _is_dense(numbers, (num_experts,), torch.float32),
                f"dense numbers of experts of float32 [{num_experts}]",
            )

    def _multiply(
        self,
        weights: Sequence[NativeWeight] | Sequence[NativeGatedWeight],
        x: Tensor,
        plan: Plan,
        bias: Tensor | None,
        y: Tensor,
        deltas: ExpertDeltas | None,
        *,
        gathers: bool = False,
    ) -> None:
        """gathers: whether x has the rows of a step, and not those of slots."""
        plan_address = ctypes.addressof(plan.task)
        added: dict[str, int] = {}
        if deltas is not None:
            inner = deltas.multiply_slots(x, plan_address, plan.num_slots, gathers=gathers)
            added = deltas.fields(inner)
        first, part = weights[0], int(weights is self._down)
        is_gated = isinstance(first, NativeGatedWeight)
        num_products = plan.num_slots * first.in_features * first.out_features
        task = ExpertsTask(
            num_threads=threads.count_for(num_products, SERIAL_PRODUCTS),
            **rows_of(x=x, y=y),
            weight=first.address,
            bias=address(bias),
            in_features=first.in_features,
            out_features=first.out_features,
            **({"activation": NO_ACTIVATION} if part else activation_of(self._gate)),
            **first.quantization,
            expert_bytes=self._expert_bytes[part],
            plan=plan_address,
            gathers=gathers,
            num_experts=self._num_experts,
            **added,
        )
        name = f"{'gated_experts' if is_gated else 'experts'}_{DTYPES[self.dtype]}{first.suffix}"
        launch(self._library.kernel(name), task, task.num_threads)

    def _scatter(self, x: Tensor, plan: Plan, routing: Routing) -> Tensor:
        """The rows of slots, multiplied by their weights: [num_slots, hidden_size]."""
        y = new_rows(plan.num_slots, self.hidden_size, self.dtype)
        task = ScatterTask(
            num_rows=count_address(x.shape[0]),
            **rows_of(x=x, y=y),
            plan=ctypes.addressof(plan.task),
            num_chosen=routing.num_chosen,
            size=self.hidden_size,
        )
        kernel = self._library.kernel(f"scatter_{DTYPES[self.dtype]}")
        launch(kernel, task, threads.count_for(y.numel()))
        return y

    def _combine(
        self,
        output: Tensor,
        plan: Plan,
        routing: Routing,
        x: Tensor,
        shared: Tensor | None,
        shared_gate: Tensor | None,
    ) -> Tensor:
        num_rows = x.shape[0]
        y = new_rows(num_rows, self.hidden_size, self.dtype)
        zero = x if routing.num_zero_experts and routing.adds_zero_experts else None
        require(
            shared is None
            or (shared.dtype == y.dtype and shared.shape == y.shape and shared.stride(1) == 1),
            "an output of shared experts like the rows",
        )
        require(
            shared_gate is None
            or (shared_gate.dtype == torch.float32 and shared_gate.shape == (num_rows, 1)),
            "a gate of shared experts of float32 [num_rows, 1]",
        )
        task = CombineTask(
            num_rows=count_address(num_rows),
            **rows_of(x=output, shared=shared, gate=shared_gate, zero=zero, y=y),
            plan=ctypes.addressof(plan.task),
            num_chosen=routing.num_chosen,
            size=self.hidden_size,
            is_weighted=not routing.scales_inputs,
        )
        kernel = self._library.kernel(f"combine_{DTYPES[self.dtype]}")
        launch(kernel, task, threads.count_for(output.numel()))
        return y


_ROUTE_WORK = 16
"""The time for the choice of an expert's logit, compared with that for a sum of two numbers."""


def _encoding_of(weights: Sequence[Tensor | QuantizedWeight]) -> Encoding | None:
    quantized = [weight for weight in weights if isinstance(weight, QuantizedWeight)]
    return encoding_of(quantized) if quantized else None


def _is_dense(tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
    return tensor.dtype == dtype and tensor.shape == shape and tensor.is_contiguous()


def _new_plan(max_rows: int, num_experts: int, num_chosen: int) -> Plan:
    sizes = {
        "active": num_experts,
        "starts": num_experts + 1,
        "rows": max_rows * num_chosen,
        "slots": max_rows * num_chosen,
    }
    arrays = {name: np.zeros(size, np.int32) for name, size in sizes.items()}
    arrays["weights"] = np.zeros(max_rows * num_chosen, np.float32)
    task = ExpertPlan(**{name: array.ctypes.data for name, array in arrays.items()})
    return Plan(task, tuple(arrays.values()), max_rows * num_chosen)
