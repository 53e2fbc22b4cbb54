"""Mamba: selective state spaces in place of attention (Gu and Dao 2023; Dao and Gu 2024).

A convolution of a few tokens precedes a recurrence, whose decay depends on the token: of each
channel and element of its state in Mamba, of each head in Mamba-2. The state of a sequence is the
last inputs of the convolution, in the dtype of activations, and that of the recurrence, in float32.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from worker_service.distributed.layout import Layout, Shard, consecutive
from worker_service.models.interface import ModelContext, WeightTarget
from worker_service.models.kv_cache_spec import LayerKV, LayerState, StateArray
from worker_service.models.layers.norms import NormSpec, RMSNorm
from worker_service.models.layers.rotary import RotarySettings
from worker_service.models.layers.vector import Vector
from worker_service.models.linear.linear import Linear, RowParallelLinear
from worker_service.models.mixers.attention import AttentionSpec
from worker_service.models.mixers.convolution import (
    CausalConvolution,
    convolution_state,
    units_of_channels,
)
from worker_service.models.native import LayerInputs, MixerPlace


@dataclass(frozen=True, kw_only=True, slots=True)
class Mamba1Spec:
    """Mamba. Implements `decoder.MixerSpec`.

    Attributes of `Mamba1` with tensors, for `LayerSpec.names`: `inputs` (channels, then their
    gate), `convolution`, `selection` (the low rank of time steps, then what each token writes to
    states, and reads), `time_step`, `time_step_bias`, `decay`, `skip`, `output`, and with weights
    of norms `time_step_norm`, `write_norm` and `read_norm`.
    """

    num_channels: int
    state_size: int
    """Elements of the state of a channel."""

    time_step_rank: int
    width: int
    """Of the convolution."""

    convolution_bias: bool = True
    bias: bool = False
    """Whether the first and the last product have biases."""

    norm: NormSpec | None = None
    """Of the parts of `selection`; None: there is none."""

    has_norm_weights: bool = True
    rotary: None = None

    def require_shards(self, layout: Layout) -> None:
        """Raise InvalidOption unless the ranks can share the channels."""
        self.channels(layout)

    def channels(self, layout: Layout) -> Shard:
        """The channels of this rank."""
        return layout.even_shard(self.num_channels, "channels of Mamba")

    def kept(self, context: ModelContext, max_model_len: int) -> tuple[LayerState, ...]:
        """See `decoder.MixerSpec`."""
        channels = self.channels(context.communicator.layout).size
        convolution = convolution_state(channels, self.width, context.dtype)
        states = units_of_channels(channels, self.state_size, torch.float32)
        return (LayerState(arrays=(convolution, states)),)

    def build(self, place: MixerPlace) -> "Mamba1":
        """See `decoder.MixerSpec`."""
        return Mamba1(self, place)


@dataclass(frozen=True, kw_only=True, slots=True)
class Mamba2Spec:
    """Mamba-2. Implements `decoder.MixerSpec`.

    Attributes of `Mamba2` with tensors, for `LayerSpec.names`: `inputs` (gate of the output, heads,
    what each token writes to states, what it reads, time steps), `convolution`, `time_step_bias`,
    `decay`, `skip`, `norm` if there is one, `output`.
    """

    num_heads: int
    head_dim: int
    num_groups: int
    """Groups of heads that write and read with the same vectors, and of elements in the norm."""

    state_size: int
    """Elements of the state of each element of a head."""

    width: int
    """Of the convolution."""

    convolution_bias: bool = True
    bias: bool = False
    """Whether the first product has a bias."""

    output_bias: bool = False
    norm: NormSpec | None
    """Of the output, by groups; None: there is only the gate."""

    gates_first: bool = True
    """Whether the gate precedes the norm."""

    time_step_limits: tuple[float, float] = (0.0, float("inf"))
    input_scale: float = 1.0
    """The factor of the part's inputs."""

    input_scales: tuple[float, float, float, float, float] = (1.0,) * 5
    """The factors of what `inputs` makes, in this order."""

    output_scale: float = 1.0
    rotary: None = None

    def require_shards(self, layout: Layout) -> None:
        """Raise InvalidOption unless the ranks can share heads and groups."""
        self.shards(layout)

    def shards(self, layout: Layout) -> tuple[Shard, Shard]:
        """The heads and groups of this rank; several ranks may have parts of one group."""
        heads = layout.even_shard(self.num_heads, "heads of Mamba")
        return heads, layout.shared_shard(self.num_groups, "groups of Mamba's heads")

    def channels(self, layout: Layout) -> list[Shard]:
        """What goes through the convolution on this rank: heads, what they write and read."""
        heads, groups = self.shards(layout)
        vectors = groups.times(self.state_size)
        return [heads.times(self.head_dim), vectors, vectors]

    def kept(self, context: ModelContext, max_model_len: int) -> tuple[LayerState, ...]:
        """See `decoder.MixerSpec`."""
        parts = self.channels(context.communicator.layout)
        channels = sum(part.size for part in parts)
        convolution = convolution_state(channels, self.width, context.dtype)
        num_heads = parts[0].size // self.head_dim
        shape = self.state_size, self.head_dim
        states = StateArray(num_units=num_heads, shape=shape, dtype=torch.float32)
        return (LayerState(arrays=(convolution, states)),)

    def build(self, place: MixerPlace) -> "Mamba2":
        """See `decoder.MixerSpec`."""
        return Mamba2(self, place)


def _negative_exp(x: Tensor) -> Tensor:
    return -torch.exp(x)


class Decay(nn.Module):
    """How fast states decay: a function of a checkpoint's tensor. Implements `linear.Packable`."""

    weight: Tensor | None
    """As the checkpoint stores it; None once `numbers` are computed."""

    def __init__(
        self,
        channels: Shard,
        context: ModelContext,
        *state_size: int,
        function: Callable[[Tensor], Tensor] = _negative_exp,
    ) -> None:
        """channels: heads or channels of this rank; state_size: elements of their states, if these
        decay each in its way."""
        super().__init__()
        shape = channels.size, *state_size
        self.weight = torch.empty(shape, dtype=torch.float32, device=context.device)
        self.numbers = torch.empty_like(self.weight.mT.contiguous() if state_size else self.weight)
        """float32 [*state_size, channels]."""
        self._channels, self._function = channels, function

    def targets(self, *names: str, transposed: bool = False) -> Iterator[WeightTarget]:
        """Destination of the tensor with this name."""
        assert self.weight is not None
        (name,) = names
        yield WeightTarget(name, self.weight, shard=self._channels)

    def pack(self) -> None:
        """Compute the numbers, unless they are computed already."""
        if self.weight is not None:
            decays = self._function(self.weight)
            self.numbers.copy_(decays.mT if decays.ndim == 2 else decays)
            self.weight = None


class Mamba1(nn.Module):
    """See `Mamba1Spec`. Each rank has some channels."""

    def __init__(self, spec: Mamba1Spec, place: MixerPlace) -> None:
        super().__init__()
        context, kernels = place.context, place.kernels.layers
        s, channels = spec, spec.channels(context.communicator.layout)
        self.inputs = Linear(
            Shard.full(place.inputs),
            consecutive([channels] * 2),
            bias=s.bias,
            context=context,
            sources=[0] * 2,
        )
        self.convolution = CausalConvolution(
            [channels],
            s.width,
            bias=s.convolution_bias,
            context=context,
            kernels=kernels,
            activation="silu",
        )
        self._parts = s.time_step_rank, s.state_size, s.state_size
        self.selection = RowParallelLinear(channels, sum(self._parts), bias=False, context=context)
        self.time_step_norm, self.write_norm, self.read_norm = (
            None if s.norm is None else RMSNorm(part, s.norm.eps, context, kernels)
            for part in self._parts
        )
        for norm in (self.time_step_norm, self.write_norm, self.read_norm):
            if norm is not None and not s.has_norm_weights:
                norm.weight.fill_(1.0)
        rank = Shard.full(s.time_step_rank)
        self.time_step = Linear(rank, [channels], bias=False, context=context)
        self.time_step_bias, self.skip = Vector(channels, context), Vector(channels, context)
        self.decay = Decay(channels, context, s.state_size)
        self.output = RowParallelLinear(channels, place.size, bias=s.bias, context=context)
        self._kernels = kernels

    def forward(self, x: Tensor, inputs: LayerInputs) -> Tensor:
        """x: [num_tokens, inputs]; returns [num_tokens, size]."""
        units, states = inputs.states
        x, gate = self.inputs(x).chunk(2, dim=1)
        x = self.convolution(x, units, inputs.metadata)
        selected = self.selection(x).split_with_sizes(self._parts, 1)
        norms = self.time_step_norm, self.write_norm, self.read_norm
        dt, b, c = (
            part if norm is None else norm(part) for part, norm in zip(selected, norms, strict=True)
        )
        y = self._kernels.mamba1_scan(
            x,
            self.time_step(dt),
            b,
            c,
            gate,
            self.decay.numbers,
            self.skip.numbers,
            self.time_step_bias.numbers,
            states,
            inputs.metadata,
        )
        return self.output(y)


class Mamba2(nn.Module):
    """See `Mamba2Spec`. Each rank has some groups of heads, or a part of one."""

    def __init__(self, spec: Mamba2Spec, place: MixerPlace) -> None:
        super().__init__()
        context, kernels = place.context, place.kernels.layers
        s, layout = spec, context.communicator.layout
        heads, groups = s.shards(layout)
        channels = s.channels(layout)
        inner = channels[0]
        rows, parts = Shard.full(place.inputs), consecutive([inner, *channels, heads])
        self.inputs = Linear(rows, parts, bias=s.bias, context=context, sources=[0] * 5)
        self.convolution = CausalConvolution(
            consecutive(channels),
            s.width,
            bias=s.convolution_bias,
            context=context,
            kernels=kernels,
            activation="silu",
        )
        self.time_step_bias, self.skip = Vector(heads, context), Vector(heads, context)
        self.decay = Decay(heads, context)
        self.norm = None if s.norm is None else Vector(inner, context)
        self.output = RowParallelLinear(inner, place.size, bias=s.output_bias, context=context)
        self._spec, self._kernels = s, kernels
        self._sizes = [part.size for part in parts]
        self._groups, self._communicator = groups, context.communicator
        self._shares_group = layout.tensor_parallel_size > s.num_groups

    def forward(self, x: Tensor, inputs: LayerInputs) -> Tensor:
        """x: [num_tokens, inputs]; returns [num_tokens, size]."""
        s, kernels, (units, states) = self._spec, self._kernels, inputs.states
        if s.input_scale != 1.0:
            x = kernels.scale(kernels.copy(x), s.input_scale)
        rows = self.inputs(x)
        for part, scale in zip(rows.split_with_sizes(self._sizes, 1), s.input_scales, strict=True):
            if scale != 1.0:
                kernels.scale(part, scale)
        inner, *others, heads = self._sizes
        gate, convolved, dt = rows.split_with_sizes([inner, sum(others), heads], 1)
        convolved = self.convolution(convolved, units, inputs.metadata)
        x, b, c = convolved.split_with_sizes(others, 1)
        y = kernels.mamba2_scan(
            x.unflatten(1, (heads, s.head_dim)),
            dt,
            b.unflatten(1, (self._groups.size, s.state_size)),
            c.unflatten(1, (self._groups.size, s.state_size)),
            gate.unflatten(1, (heads, s.head_dim)) if s.norm is None else None,
            self.decay.numbers,
            self.skip.numbers,
            self.time_step_bias.numbers,
            states,
            inputs.metadata,
            dt_limits=s.time_step_limits,
        )
        if self.norm is not None and self._shares_group:
            y = self._norm_part(y.flatten(1), gate)
        elif s.norm is not None and self.norm is not None:
            shape = self._groups.size, inner // self._groups.size
            y = kernels.gated_rms_norm(
                y.view(-1, *shape),
                gate.unflatten(1, shape),
                self.norm.numbers.view(shape),
                s.norm.eps,
                gates_first=s.gates_first,
            )
        output: Tensor = self.output(y.flatten(1))
        return output if s.output_scale == 1.0 else kernels.scale(output, s.output_scale)

    def _norm_part(self, y: Tensor, gate: Tensor) -> Tensor:
        """As `gated_rms_norm`, of a part of a group, [num_tokens, channels of this rank]: the sums
        of squares are added over the ranks, in their order on CPUs."""
        s, norm = self._spec, self.norm
        assert s.norm is not None
        assert norm is not None
        wide, gates = y.float(), gate.float()
        gates = gates / torch.exp(-gates).add_(1)
        if s.gates_first:
            wide = wide * gates
        group = self._groups.start
        squares = wide.new_zeros(len(wide), s.num_groups)
        squares[:, group] = wide.square().sum(1)
        total = self._communicator.sum(squares)[:, group, None]
        mean = total * s.num_groups / (s.num_heads * s.head_dim)
        normed = wide / (mean + s.norm.eps).sqrt() * norm.numbers
        return (normed if s.gates_first else normed * gates).to(y.dtype)


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelMixerSpec:
    """Attention and Mamba-2 side by side, whose outputs are added. Implements `decoder.MixerSpec`.

    Attributes of `ParallelMixer` with tensors, for `LayerSpec.names`: those of `attention` and of
    `mamba`.
    """

    attention: AttentionSpec
    mamba: Mamba2Spec
    input_scale: float = 1.0
    """The factor of the inputs of attention."""

    output_scale: float = 1.0
    """The factor of its outputs."""

    @property
    def rotary(self) -> RotarySettings | None:
        """Of attention."""
        return self.attention.rotary

    def require_shards(self, layout: Layout) -> None:
        """Raise InvalidOption unless the ranks can share both parts."""
        self.attention.require_shards(layout)
        self.mamba.require_shards(layout)

    def kept(self, context: ModelContext, max_model_len: int) -> tuple[LayerKV | LayerState, ...]:
        """See `decoder.MixerSpec`."""
        parts = self.attention, self.mamba
        return tuple(kept for part in parts for kept in part.kept(context, max_model_len))

    def build(self, place: MixerPlace) -> "ParallelMixer":
        """See `decoder.MixerSpec`."""
        return ParallelMixer(self, place)


class ParallelMixer(nn.Module):
    """See `ParallelMixerSpec`."""

    def __init__(self, spec: ParallelMixerSpec, place: MixerPlace) -> None:
        super().__init__()
        self.attention = spec.attention.build(place)
        self.mamba = spec.mamba.build(place)
        self.paged = self.attention.paged
        self._spec, self._kernels = spec, place.kernels.layers

    def forward(self, x: Tensor, inputs: LayerInputs) -> Tensor:
        """x: [num_tokens, inputs]; returns [num_tokens, size]."""
        (of_mamba,) = inputs.further
        y = self.mamba(x, of_mamba)
        attended = self.attention(self._scaled(x), inputs)
        if self._spec.output_scale != 1.0:
            attended = self._kernels.scale(attended, self._spec.output_scale)
        return self._kernels.add(y, attended)

    def write_kv(self, x: Tensor, inputs: LayerInputs) -> Tensor:
        """Write the keys and values of rows to the layer's caches. Returns their queries."""
        return self.attention.write_kv(self._scaled(x), inputs)

    def _scaled(self, x: Tensor) -> Tensor:
        scale = self._spec.input_scale
        return x if scale == 1.0 else self._kernels.scale(self._kernels.copy(x), scale)
