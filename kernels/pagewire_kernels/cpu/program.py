"""Kernels recorded once, and run for each step's batch by one team of threads.

A model's step on a CPU is some hundred small operations. Dispatching one from Python, and waking
threads for it, costs more than most of them take for a few rows. So the model runs once while a
program is being recorded: each operation then appends its kernel and task instead of running, and
returns a tensor over one of the program's buffers. Tasks read everything that differs from step to
step from the program's `Batch`.
"""

import ctypes
import threading
import weakref
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pagewire_kernels.cpu import threads
from pagewire_kernels.cpu.native_library import Kernel, Library, NativeStruct
from pagewire_kernels.cpu.tasks import Batch, address, int64s
from pagewire_kernels.cpu.threads import NotRecordable

_CACHE_LINE = _ALIGNMENT = 64
_SHARE_BYTES = 64
_MAX_STEPS = 1 << 14
"""The same constant as in src/share.h."""


class Buffers:
    """Memory for intermediate tensors, reused when no tensor refers to it."""

    def __init__(self) -> None:
        self._free: dict[int, list[np.ndarray]] = defaultdict(list)
        self.num_bytes = 0

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """An uninitialised tensor; its memory is reused once the tensor is gone."""
        num_bytes = int(np.prod(shape)) * dtype.itemsize
        free = self._free[num_bytes]
        memory = free.pop() if free else self._allocate(num_bytes)
        view = memory[:]  # lives as long as the tensors over it
        weakref.finalize(view, free.append, memory)
        return torch.from_numpy(view).view(dtype).view(shape)

    def _allocate(self, num_bytes: int) -> np.ndarray:
        memory = np.empty(num_bytes + _ALIGNMENT, np.uint8)
        self.num_bytes += memory.nbytes
        start = -memory.ctypes.data % _ALIGNMENT
        return memory[start : start + num_bytes]


class ProgramStep(NativeStruct):
    """`ProgramStep` of src/program.cpp."""

    _fields_ = int64s("kernel task item_cycles")


class ProgramTask(NativeStruct):
    """`ProgramTask` of src/program.cpp."""

    _fields_ = int64s("steps num_steps state shares num_shares num_threads num_taken_over")


class Program:
    """A list of kernels with their tasks, over batches of up to `max_rows` rows."""

    def __init__(self, library: Library, max_rows: int) -> None:
        self.max_rows = max_rows
        self.batch = Batch(num_rows=max_rows)
        self.buffers = Buffers()
        # Placeholders of a step's inputs while recording; no kernel reads them.
        self.token_ids = torch.empty(max_rows, dtype=torch.int64)
        self.positions = torch.empty(max_rows, dtype=torch.int64)
        self.slot_mapping = torch.empty(max_rows, dtype=torch.int64)
        self.num_sampled: int | None = None
        """Number of rows of what is recorded after `begin_sampled`; None before."""
        self._kernel = library.kernel("run_program")
        self._steps: list[tuple[Kernel, ctypes.Structure]] = []
        self._list = (ProgramStep * 0)()
        self._shares = torch.empty(0)
        self._program = ProgramTask()

    def begin_sampled(self, num_sampled: int) -> None:
        """Record for the rows that are sampled from, at most `num_sampled`, from now on."""
        self.num_sampled = num_sampled

    def append(self, kernel: Kernel, task: ctypes.Structure) -> None:
        """Append a step: a kernel with its task, which is kept alive."""
        self._steps.append((kernel, task))

    def finish(self) -> None:
        """Make the program ready to run; no step may be appended afterwards."""
        if len(self._steps) > _MAX_STEPS:
            raise NotRecordable(f"{len(self._steps)} operations")
        steps = [
            ProgramStep(kernel.address, ctypes.addressof(task)) for kernel, task in self._steps
        ]
        self._list = (ProgramStep * len(steps))(*steps)
        self._program.steps = ctypes.addressof(self._list)
        self._program.num_steps = len(steps)

    @property
    def num_steps(self) -> int:
        """Kernels in the program."""
        return len(self._steps)

    @property
    def num_taken_over(self) -> int:
        """Number of items that a second thread computed again, in all runs."""
        return int(self._program.num_taken_over)

    def run(self, num_threads: int, team: threads.Team = threads.run) -> None:
        """Run all steps over what `batch` describes."""
        if num_threads > self._program.num_shares:
            self._make_shares(num_threads)
        self._program.state = self._program.num_threads = 0
        team(self._kernel, ctypes.addressof(self._program), num_threads)

    def _make_shares(self, num_threads: int) -> None:
        self._shares = self.buffers.take((num_threads, _SHARE_BYTES), torch.uint8).zero_()
        self._program.shares = self._shares.data_ptr()
        self._program.num_shares = num_threads


class _State(threading.local):
    program: Program | None = None

    def __init__(self) -> None:
        self.batch = Batch()


_state = _State()


def recording() -> Program | None:
    """The program that this thread records; None if it records none."""
    return _state.program


@contextmanager
def record(program: Program) -> Iterator[None]:
    """Append this thread's operations to the program instead of running them."""
    assert _state.program is None, "a program is being recorded already"
    _state.program, threads.local.is_recording = program, True
    try:
        with _ViewsOnly():
            yield
    finally:
        _state.program, threads.local.is_recording = None, False
    program.finish()


class _ViewsOnly(TorchDispatchMode):
    """Refuses operations that torch would compute now, and that the program would lack."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if not func.is_view:
            raise NotRecordable(f"the operation {func}")
        return func(*args, **(kwargs or {}))

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """torch would keep its compiler away from here, and import all of it to do so: a second
        and more of a worker's start, though nothing is compiled."""
        return False


def count_address(num_rows: int) -> int:
    """Address of the number of rows: all of the batch, or those that are sampled from."""
    program = _state.program
    if program is not None and program.num_sampled is not None:
        if num_rows != program.num_sampled:
            raise NotRecordable(f"{num_rows} rows, not those that are sampled from")
        return ctypes.addressof(program.batch) + Batch.num_sampled.offset
    return ctypes.addressof(batch_of(num_rows)) + Batch.num_rows.offset


def launch(kernel: Kernel, task: ctypes.Structure, num_threads: int) -> None:
    """Run the kernel with a task of its own now, or append it to the program being recorded."""
    if _state.program is None:
        threads.run(kernel, ctypes.addressof(task), num_threads)
    else:
        _state.program.append(kernel, task)


def new_rows(num_rows: int, size: int, dtype: torch.dtype) -> Tensor:
    """Uninitialised [num_rows, size] for kernels to write.

    Rows begin an odd number of cache lines apart. Products read a dozen at once, and those a power
    of two apart, as they often are without, would drive each other out of the first-level cache.
    """
    num_lines = -(-size * dtype.itemsize // _CACHE_LINE) | 1
    return new_tensor((num_rows, num_lines * _CACHE_LINE // dtype.itemsize), dtype)[:, :size]


def new_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Uninitialised memory: of the program being recorded, or a tensor of its own."""
    if _state.program is None:
        return torch.empty(shape, dtype=dtype)
    return _state.program.buffers.take(shape, dtype)


def batch_of(
    num_rows: int,
    *,
    token_ids: Tensor | None = None,
    positions: Tensor | None = None,
    slot_mapping: Tensor | None = None,
) -> Batch:
    """The batch that a task reads: the recorded program's, or one for a single launch."""
    program = _state.program
    if program is None:
        batch = _state.batch
        batch.num_rows = num_rows
        batch.token_ids = address(token_ids)
        batch.positions = address(positions)
        batch.slot_mapping = address(slot_mapping)
        return batch
    expected = (
        (token_ids, program.token_ids),
        (positions, program.positions),
        (slot_mapping, program.slot_mapping),
    )
    for given, own in expected:
        if given is not None and given.data_ptr() != own.data_ptr():
            raise NotRecordable("tokens, positions or slots that are not the step's own")
    if num_rows != program.max_rows:
        raise NotRecordable(f"{num_rows} rows, not the step's own")
    return program.batch
