"""Launchers of src/states.cpp: layers with a state.

They raise ValueError for tensors of unsupported dtypes, shapes or strides.
"""

import ctypes

import torch
from torch import Tensor

from pagewire_kernels.batch import AttentionMetadata, StateUnits
from pagewire_kernels.cpu import threads
from pagewire_kernels.cpu.checks import DTYPES, require
from pagewire_kernels.cpu.native_library import Library
from pagewire_kernels.cpu.program import (
    batch_of,
    count_address,
    launch,
    new_rows,
    recording,
)
from pagewire_kernels.cpu.tasks import (
    Batch,
    ConvolutionTask,
    DeltaTask,
    GatedNormTask,
    Mamba1Task,
    Mamba2Task,
    RglruTask,
    address,
    describe_batch,
    rows_of,
)
from pagewire_kernels.reference.backend import LayerKernels
from pagewire_kernels.reference.states import GATES, check_convolution

MAX_STATE_SIZE = 256


class NativeStateKernels(LayerKernels):
    """Kernels of layers with a state in C++, for rows of float32 or bfloat16."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self._last: tuple[AttentionMetadata, Batch] | None = None

    def causal_convolution(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        units: StateUnits,
        metadata: AttentionMetadata,
        activation: str | None = None,
    ) -> Tensor:
        """Convolve each channel over the last tokens of its sequence."""
        (width, num_channels), num_rows = weight.shape, x.shape[0]
        check_convolution(width, activation)
        _require_rows(num_rows, x.dtype, x=(x, num_channels))
        _require_floats(weight=(weight, (width, num_channels)), bias=(bias, (num_channels,)))
        y = new_rows(num_rows, num_channels, x.dtype)
        task = ConvolutionTask(
            num_threads=torch.get_num_threads(),
            batch=self._batch_of(metadata, num_rows),
            **_units(units, x.dtype, num_channels, width - 1),
            **rows_of(x=x, y=y),
            weight=weight.data_ptr(),
            bias=address(bias),
            num_channels=num_channels,
            width=width,
            has_silu=activation is not None,
        )
        task.kept_alive = units.places
        self._run("causal_convolution", task, x.dtype, x.numel())
        return y

    def mamba1_scan(
        self,
        x: Tensor,
        dt: Tensor,
        b: Tensor,
        c: Tensor,
        gate: Tensor | None,
        a: Tensor,
        d: Tensor,
        dt_bias: Tensor,
        units: StateUnits,
        metadata: AttentionMetadata,
    ) -> Tensor:
        """Selective state space with a decay for each channel and element."""
        (state_size, num_channels), num_rows = a.shape, x.shape[0]
        require(state_size <= MAX_STATE_SIZE, f"states of at most {MAX_STATE_SIZE} elements")
        channels, states = (num_channels,), (state_size,)
        _require_rows(
            num_rows,
            x.dtype,
            x=(x, num_channels),
            dt=(dt, num_channels),
            gate=(gate, num_channels),
            b=(b, state_size),
            c=(c, state_size),
        )
        _require_floats(a=(a, states + channels), d=(d, channels), dt_bias=(dt_bias, channels))
        y = new_rows(num_rows, num_channels, x.dtype)
        task = Mamba1Task(
            num_threads=torch.get_num_threads(),
            batch=self._batch_of(metadata, num_rows),
            **_units(units, torch.float32, num_channels, state_size),
            **rows_of(x=x, dt=dt, b=b, c=c, gate=gate, y=y),
            a=a.data_ptr(),
            d=d.data_ptr(),
            dt_bias=dt_bias.data_ptr(),
            num_channels=num_channels,
            state_size=state_size,
        )
        task.kept_alive = units.places
        self._run("mamba1_scan", task, x.dtype, x.numel() * state_size)
        return y

    def mamba2_scan(
        self,
        x: Tensor,
        dt: Tensor,
        b: Tensor,
        c: Tensor,
        gate: Tensor | None,
        a: Tensor,
        d: Tensor,
        dt_bias: Tensor,
        units: StateUnits,
        metadata: AttentionMetadata,
        *,
        dt_limits: tuple[float, float] = (0.0, float("inf")),
    ) -> Tensor:
        """Selective state space with a decay for each head."""
        (num_rows, num_heads, head_dim), (num_groups, state_size) = x.shape, b.shape[1:]
        require(state_size <= MAX_STATE_SIZE, f"states of at most {MAX_STATE_SIZE} elements")
        require(num_heads % num_groups == 0, "a multiple of the groups as heads")
        require(len(units.places) == num_heads, "a unit of state for each head")
        _require_rows(
            num_rows,
            x.dtype,
            x=(x, num_heads, head_dim),
            dt=(dt, num_heads),
            b=(b, num_groups, state_size),
            c=(c, num_groups, state_size),
            gate=(gate, num_heads, head_dim),
        )
        _require_floats(a=(a, (num_heads,)), d=(d, (num_heads,)), dt_bias=(dt_bias, (num_heads,)))
        y = new_rows(num_rows, num_heads * head_dim, x.dtype).unflatten(1, (num_heads, head_dim))
        task = Mamba2Task(
            num_threads=torch.get_num_threads(),
            batch=self._batch_of(metadata, num_rows),
            **_units(units, torch.float32, num_heads * head_dim, state_size),
            **rows_of(x=x, dt=dt, b=b, c=c, gate=gate, y=y),
            x_head_stride=x.stride(1),
            b_group_stride=b.stride(1),
            c_group_stride=c.stride(1),
            gate_head_stride=0 if gate is None else gate.stride(1),
            y_head_stride=y.stride(1),
            a=a.data_ptr(),
            d=d.data_ptr(),
            dt_bias=dt_bias.data_ptr(),
            num_heads=num_heads,
            heads_per_group=num_heads // num_groups,
            head_dim=head_dim,
            state_size=state_size,
            min_dt=dt_limits[0],
            max_dt=dt_limits[1],
        )
        task.kept_alive = units.places
        self._run("mamba2_scan", task, x.dtype, x.numel() * state_size)
        return y

    def gated_delta_rule(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        decay: Tensor,
        beta: Tensor,
        a_log: Tensor,
        dt_bias: Tensor,
        units: StateUnits,
        metadata: AttentionMetadata,
        *,
        beta_scale: float = 1.0,
        decay_bound: float = 0.0,
    ) -> Tensor:
        """Delta rule with a decay of each head, or of each element of its keys."""
        (num_rows, num_heads, value_dim), (num_key_heads, key_dim) = value.shape, key.shape[1:]
        width = decay.shape[2]
        require(key_dim <= MAX_STATE_SIZE, f"keys of at most {MAX_STATE_SIZE} elements")
        require(num_heads % num_key_heads == 0, "a multiple of the heads of keys as heads")
        require(width in (1, key_dim), "a decay of each head, or of each element of its keys")
        require(len(units.places) == num_heads, "a unit of state for each head")
        _require_rows(
            num_rows,
            value.dtype,
            query=(query, num_key_heads, key_dim),
            key=(key, num_key_heads, key_dim),
            value=(value, num_heads, value_dim),
            decay=(decay, num_heads, width),
            beta=(beta, num_heads),
        )
        _require_floats(a_log=(a_log, (num_heads,)), dt_bias=(dt_bias, (num_heads, width)))
        shape = num_heads, value_dim
        y = new_rows(num_rows, num_heads * value_dim, value.dtype).unflatten(1, shape)
        task = DeltaTask(
            num_threads=torch.get_num_threads(),
            batch=self._batch_of(metadata, num_rows),
            **_units(units, torch.float32, num_heads * value_dim, key_dim),
            **rows_of(query=query, key=key, value=value, decay=decay, beta=beta, y=y),
            query_head_stride=query.stride(1),
            key_head_stride=key.stride(1),
            value_head_stride=value.stride(1),
            decay_head_stride=decay.stride(1),
            y_head_stride=y.stride(1),
            a_log=a_log.data_ptr(),
            dt_bias=dt_bias.data_ptr(),
            num_heads=num_heads,
            heads_per_key=num_heads // num_key_heads,
            key_dim=key_dim,
            value_dim=value_dim,
            decay_width=width,
            beta_scale=beta_scale,
            decay_bound=decay_bound,
        )
        task.kept_alive = units.places
        self._run("gated_delta_rule", task, value.dtype, value.numel() * key_dim)
        return y

    def rglru_scan(
        self,
        x: Tensor,
        input_gate: Tensor,
        decay_gate: Tensor,
        input_bias: Tensor,
        decay_bias: Tensor,
        rate: Tensor,
        units: StateUnits,
        metadata: AttentionMetadata,
    ) -> Tensor:
        """Real-gated linear recurrent unit."""
        num_rows, num_channels = x.shape
        rows = {"x": x, "input_gate": input_gate, "decay_gate": decay_gate}
        columns = {"input_bias": input_bias, "decay_bias": decay_bias, "rate": rate}
        _require_rows(num_rows, x.dtype, **{name: (r, num_channels) for name, r in rows.items()})
        _require_floats(**{name: (column, (num_channels,)) for name, column in columns.items()})
        y = new_rows(num_rows, num_channels, x.dtype)
        task = RglruTask(
            num_threads=torch.get_num_threads(),
            batch=self._batch_of(metadata, num_rows),
            **_units(units, torch.float32, num_channels, 1),
            **rows_of(**rows, y=y),
            **{name: column.data_ptr() for name, column in columns.items()},
            num_channels=num_channels,
        )
        task.kept_alive = units.places
        self._run("rglru_scan", task, x.dtype, 8 * x.numel())
        return y

    def gated_rms_norm(
        self,
        x: Tensor,
        gate: Tensor,
        weight: Tensor,
        eps: float,
        *,
        gates_first: bool,
        activation: str = "silu",
    ) -> Tensor:
        """RMS norm of groups of elements, and a gate."""
        num_rows, num_groups, size = x.shape
        require(activation in GATES, f"an activation of gates among {', '.join(GATES)}")
        has_float_weight = weight.dtype == torch.float32
        shape = (num_groups, size)
        _require_rows(num_rows, x.dtype, x=(x, *shape), gate=(gate, *shape))
        require(
            weight.dtype in (torch.float32, x.dtype)
            and weight.shape in (shape, (size,))
            and weight.is_contiguous(),
            "a dense weight of a group's size or of all groups', of the rows' dtype or float32",
        )
        y = new_rows(num_rows, num_groups * size, x.dtype).unflatten(1, (num_groups, size))
        task = GatedNormTask(
            num_rows=count_address(num_rows),
            **rows_of(x=x, gate=gate, y=y),
            x_group_stride=x.stride(1),
            gate_group_stride=gate.stride(1),
            y_group_stride=y.stride(1),
            weight=weight.data_ptr(),
            weight_group_stride=size if weight.ndim == 2 else 0,
            has_float_weight=has_float_weight,
            num_groups=num_groups,
            group_size=size,
            gates_first=gates_first,
            has_sigmoid=activation == "sigmoid",
            eps=eps,
        )
        self._run("gated_rms_norm", task, x.dtype, x.numel())
        return y

    def _run(self, name: str, task: ctypes.Structure, dtype: torch.dtype, work: int) -> None:
        launch(self._library.kernel(f"{name}_{DTYPES[dtype]}"), task, threads.count_for(work))

    def _batch_of(self, metadata: AttentionMetadata, num_rows: int) -> int:
        """Address of the batch of the recorded program, or of one that is described once per
        step."""
        if recording() is not None:
            batch = batch_of(num_rows, slot_mapping=metadata.slot_mapping)
        elif self._last is not None and self._last[0] is metadata:
            batch = self._last[1]
        else:
            batch = Batch()
            describe_batch(batch, num_rows, metadata)
            self._last = metadata, batch
        return ctypes.addressof(batch)


def _require_rows(
    num_rows: int, dtype: torch.dtype, **rows: tuple[Tensor | None, *tuple[int, ...]]
) -> None:
    """rows: each with the shape of a row."""
    require(dtype in DTYPES, "rows of float32 or bfloat16")
    for name, (tensor, *shape) in rows.items():
        require(
            tensor is None
            or (
                tensor.dtype == dtype
                and tensor.shape == (num_rows, *shape)
                and tensor.stride(-1) == 1
            ),
            f"{name} of shape {[num_rows, *shape]} in {dtype} with a dense last axis",
        )


def _require_floats(**tensors: tuple[Tensor | None, tuple[int, ...]]) -> None:
    for name, (tensor, shape) in tensors.items():
        require(
            tensor is None
            or (tensor.dtype == torch.float32 and tensor.shape == shape and tensor.is_contiguous()),
            f"a dense float32 {name} of shape {list(shape)}",
        )


def _units(units: StateUnits, dtype: torch.dtype, num_channels: int, height: int) -> dict[str, int]:
    """The fields of a task for units of [height, num_channels / num_units]."""
    pages, places = units
    require(pages.dtype == dtype and pages.stride(1) == 1, f"dense pages in {dtype}")
    require(places.dtype == torch.int64 and places.is_contiguous(), "dense int64 places of units")
    num_units = len(places)
    require(
        places.shape == (num_units, 2) and num_channels % num_units == 0,
        "a column and a first element of each unit, which divide the channels",
    )
    size = num_channels // num_units * height
    numbers = places.numpy()  # a recorded program has no operations of torch
    require(
        numbers.min() >= 0 and numbers[:, 1].max() + size <= pages.shape[1],
        f"units of {size} elements within pages of {pages.shape[1]}",
    )
    return {
        "pages": pages.data_ptr(),
        "page_stride": pages.stride(0),
        "places": places.data_ptr(),
        "num_units": num_units,
    }
