"""Layers with a state over random rows, for tests of their kernels.

Results of transformers are imported where they are computed: it takes seconds, and kernels of a
GPU are compared with ours.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from pagewire_kernels.batch import AttentionMetadata
from pagewire_kernels.reference.backend import LayerKernels
from tests.support.paged_states import PagedStates


def random(*shape: int, seed: int = 0) -> Tensor:
    """Numbers of a normal distribution."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def in_wider_rows(rows: Tensor) -> Tensor:
    """The same rows at a larger distance."""
    shape = len(rows), rows[0].numel() + 24
    wide = rows.new_full(shape, torch.nan)
    wide[:, 8:-16] = rows.flatten(1)
    return wide[:, 8:-16].view(rows.shape)


class Layer(ABC):
    """The rows of three sequences, of 40 tokens each, and the operation of a layer over them."""

    num_seqs, length = 3, 40

    def __init__(self, dtype: torch.dtype, units: tuple[int, int], **rows: Tensor) -> None:
        """units: their number and size; rows: [num_seqs * length, ...]."""
        self.dtype, self._units = dtype, units
        self.rows = {name: tensor.to(dtype) for name, tensor in rows.items()}
        self.units_dtype = torch.float32

    def states(self, device: torch.device | None = None) -> PagedStates:
        """Pages before the first token."""
        return PagedStates(self.num_seqs, *self._units, dtype=self.units_dtype, device=device)

    def run(
        self,
        kernels: LayerKernels,
        states: PagedStates,
        ranges: Sequence[tuple[int, int, int]],
        saves: Sequence[tuple[int, int]] = (),
    ) -> Tensor:
        """Compute rows of sequences, each from a position up to an end, and save some states."""
        chosen = torch.cat(
            [torch.arange(first, end) + seq * self.length for seq, first, end in ranges]
        )
        device = states.pages.device
        rows = {
            name: in_wider_rows(tensor[chosen].to(device)) for name, tensor in self.rows.items()
        }
        return self.apply(kernels, states, states.metadata(ranges, saves), rows)

    @abstractmethod
    def apply(
        self,
        kernels: LayerKernels,
        states: PagedStates,
        metadata: AttentionMetadata,
        rows: dict[str, Tensor],
    ) -> Tensor:
        """The operation."""

    @abstractmethod
    def expected(self) -> Tensor:
        """Results of all rows in float32, of another implementation."""

    def sequences(self, name: str) -> Tensor:
        """Rows by sequence, [num_seqs, length, ...]."""
        return self.rows[name].float().unflatten(0, (self.num_seqs, self.length))


class Convolution(Layer):
    def __init__(
        self, dtype: torch.dtype, width: int = 4, channels: int = 200, num_units: int = 1,
        activation: str | None = "silu", bias: bool = True,
    ) -> None:  # fmt: skip
        size = (width - 1) * channels // num_units
        super().__init__(dtype, (num_units, size), x=random(120, channels))
        self.units_dtype = dtype
        self.weight, self.activation = random(width, channels, seed=1), activation
        self.bias = random(channels, seed=2) if bias else None

    def apply(self, kernels: Any, states: Any, metadata: Any, rows: Any) -> Tensor:
        x = rows["x"]
        bias = None if self.bias is None else self.bias.to(x.device)
        weight = self.weight.to(x.device)
        return kernels.causal_convolution(x, weight, bias, states.units, metadata, self.activation)

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
        gate = {"gate": random(120, channels, seed=5)} if has_gate else {}
        super().__init__(
            dtype,
            (num_units, state_size * channels // num_units),
            x=random(120, channels),
            dt=random(120, channels, seed=1) * 3,
            b=random(120, state_size, seed=2),
            c=random(120, state_size, seed=3),
            **gate,
        )
        self.a = -torch.exp(random(state_size, channels, seed=4))
        self.d, self.dt_bias = random(channels, seed=6), random(channels, seed=7)

    def apply(self, kernels: Any, states: Any, metadata: Any, rows: Any) -> Tensor:
        x, dt, b, c, gate = (rows.get(name) for name in ("x", "dt", "b", "c", "gate"))
        columns = [column.to(x.device) for column in (self.a, self.d, self.dt_bias)]
        return kernels.mamba1_scan(x, dt, b, c, gate, *columns, states.units, metadata)

    def expected(self) -> Tensor:
        from transformers.models.mamba import modeling_mamba as mamba1

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
        gate = {"gate": random(120, num_heads, head_dim, seed=7)} if has_gate else {}
        super().__init__(
            dtype,
            (num_heads, head_dim * state_size),
            x=random(120, num_heads, head_dim),
            dt=random(120, num_heads, seed=1) * 3,
            b=random(120, num_groups, state_size, seed=2),
            c=random(120, num_groups, state_size, seed=3),
            **gate,
        )
        self.columns = [
            -torch.exp(random(num_heads, seed=4)),
            random(num_heads, seed=5),
            random(num_heads, seed=6),
        ]
        self.dt_limits = dt_limits

    def apply(self, kernels: Any, states: Any, metadata: Any, rows: Any) -> Tensor:
        x, dt, b, c, gate = (rows.get(name) for name in ("x", "dt", "b", "c", "gate"))
        columns = [column.to(x.device) for column in self.columns]
        limits = self.dt_limits
        y = kernels.mamba2_scan(
            x, dt, b, c, gate, *columns, states.units, metadata, dt_limits=limits
        )
        return y.flatten(1)

    def expected(self) -> Tensor:
        from transformers.models.granitemoehybrid import modeling_granitemoehybrid as mamba2

        x, dt, b, c = (self.sequences(name) for name in ("x", "dt", "b", "c"))
        a, d, dt_bias = self.columns
        y = mamba2.mamba2_chunk_scan(
            x, dt, a, b, c, 16, D=d, dt_bias=dt_bias, dt_softplus=True, dt_limit=self.dt_limits
        )
        y = y.view_as(x) * functional.silu(self.sequences("gate")) if "gate" in self.rows else y
        return y.flatten(2).flatten(0, 1)


class DeltaRule(Layer):
    def __init__(
        self, dtype: torch.dtype, num_key_heads: int = 2, num_heads: int = 4, key_dim: int = 128,
        value_dim: int = 128, by_element: bool = False, beta_scale: float = 1.0,
        decay_bound: float = 0.0,
    ) -> None:  # fmt: skip
        width = key_dim if by_element else 1
        super().__init__(
            dtype,
            (num_heads, key_dim * value_dim),
            x=random(120, num_heads, value_dim),
            query=random(120, num_key_heads, key_dim, seed=1),
            key=random(120, num_key_heads, key_dim, seed=2),
            decay=random(120, num_heads, width, seed=3) * 3,
            beta=random(120, num_heads, seed=4) * 3,
        )
        self.a_log, self.dt_bias = random(num_heads, seed=5), random(num_heads, width, seed=6)
        self.options = {"beta_scale": beta_scale, "decay_bound": decay_bound}

    def apply(self, kernels: Any, states: Any, metadata: Any, rows: Any) -> Tensor:
        parts = (rows[name] for name in ("query", "key", "x", "decay", "beta"))
        columns = [column.to(states.pages.device) for column in (self.a_log, self.dt_bias)]
        y = kernels.gated_delta_rule(*parts, *columns, states.units, metadata, **self.options)
        return y.flatten(1)

    def expected(self) -> Tensor:
        from transformers.models.kimi_linear import modeling_kimi_linear as kimi
        from transformers.models.qwen3_next import modeling_qwen3_next as delta_nets

        query, key, value, beta = (self.sequences(name) for name in ("query", "key", "x", "beta"))
        time, rate = self.sequences("decay") + self.dt_bias, self.a_log.exp()[:, None]
        decay, gates = (
            -rate * functional.softplus(time),
            self.options["beta_scale"] * beta.sigmoid(),
        )
        if self.options["decay_bound"] < 0:  # as Bailing hybrid's forget gate
            decay = self.options["decay_bound"] * (rate * time).sigmoid()
        if decay.shape[-1] == 1:
            rule, decay = delta_nets.torch_recurrent_gated_delta_rule, decay[..., 0]
        else:
            rule = kimi.recurrent_kimi_delta_attention
        y, _ = rule(
            query, key, value, g=decay, beta=gates, initial_state=None, output_final_state=False,
            use_qk_l2norm_in_kernel=True,
        )  # fmt: skip
        return y.flatten(2).flatten(0, 1)


class Rglru(Layer):
    def __init__(self, dtype: torch.dtype, channels: int = 96, num_units: int = 1) -> None:
        names = ("x", "input_gate", "decay_gate")
        rows = {name: random(120, channels, seed=seed) * 2 for seed, name in enumerate(names)}
        super().__init__(dtype, (num_units, channels // num_units), **rows)
        self.biases = [random(channels, seed=4), random(channels, seed=5)]
        self.rate = -8 * functional.softplus(random(channels, seed=6) - 2)

    def apply(self, kernels: Any, states: Any, metadata: Any, rows: Any) -> Tensor:
        parts = (rows[name] for name in ("x", "input_gate", "decay_gate"))
        columns = [column.to(states.pages.device) for column in (*self.biases, self.rate)]
        return kernels.rglru_scan(*parts, *columns, states.units, metadata)

    def expected(self) -> Tensor:
        from transformers.models.recurrent_gemma import modeling_recurrent_gemma as recurrent_gemma

        x, input_gate, decay_gate = map(self.sequences, ("x", "input_gate", "decay_gate"))
        log_decay = self.rate * (decay_gate + self.biases[1]).sigmoid()
        inputs = x * (input_gate + self.biases[0]).sigmoid()
        reset = torch.arange(self.length)[None, :, None] == 0
        factor = torch.where(reset, 1, torch.sqrt(1 - torch.exp(2 * log_decay)))
        scan = recurrent_gemma.RecurrentGemmaRglru._rnn_scan
        y, _ = scan(None, inputs * factor, log_decay.exp(), reset, None)
        return y.flatten(0, 1)


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
    "rg-lru": Rglru,
    "rg-lru in units": lambda dtype: Rglru(dtype, 7 * 40, num_units=7),
    "delta rule": DeltaRule,
    "delta rule of odd heads": lambda dtype: DeltaRule(dtype, 3, 3, 20, 72),
    "delta rule of small heads": lambda dtype: DeltaRule(dtype, 1, 3, 16, 12),
    "delta rule by element": lambda dtype: DeltaRule(dtype, 2, 2, 20, 24, by_element=True),
    "delta rule with bounded decays": lambda dtype: DeltaRule(
        dtype, 2, 2, 20, 24, by_element=True, decay_bound=-5.0
    ),
    "delta rule of heads with bounded decays": lambda dtype: DeltaRule(dtype, decay_bound=-1.5),
    "delta rule with negative eigenvalues": lambda dtype: DeltaRule(dtype, beta_scale=2.0),
    "mamba2 with limits": lambda dtype: Mamba2(dtype, dt_limits=(0.3, 1.5)),
}

LIKE_OTHERS = {f"convolution of {width}" for width in (2, 4, 5, 6, 7)}
LIKE_OTHERS |= {"linear convolution", "mamba2 with limits", "delta rule with negative eigenvalues"}
"""Layers that differ from others in their numbers, not in how they keep a state."""

ALL = [(seq, 0, 40) for seq in range(3)]
"""All rows of all sequences."""


def check_saves(layer: Layer, kernels: LayerKernels, device: torch.device | None = None) -> None:
    """Assert that states that are saved within a step are those that sequences pass through: they
    change no result, and each continues with the same bits."""
    plain, states = layer.states(device), layer.states(device)
    steps = [[(0, 0, 2), (1, 0, 1), (2, 0, 7)], [(0, 2, 11), (1, 1, 5)]]
    saves = [[(0, 1), (2, 3), (2, 7)], [(0, 3), (0, 4), (0, 11), (1, 3)]]
    for ranges, saved in zip(steps, saves, strict=True):
        expected = layer.run(kernels, plain, ranges)
        assert torch.equal(layer.run(kernels, states, ranges, saved), expected)
        for number, (seq, position) in enumerate(saved):
            other = layer.states(device)
            layer.run(kernels, other, [(seq, 0, position)])
            expected = layer.run(kernels, other, [(seq, position, position + 5)])
            states.tables[seq], table = states.saved[number], states.tables[seq].clone()
            assert torch.equal(
                layer.run(kernels, states, [(seq, position, position + 5)]), expected
            )
            states.tables[seq] = table
    absent, ranges = layer.states(device), [(0, 0, 3), (1, 0, 5)]
    absent.saved.fill_(-1)
    expected = layer.run(kernels, layer.states(device), ranges)
    assert torch.equal(layer.run(kernels, absent, ranges, [(1, 2), (0, 3)]), expected)
