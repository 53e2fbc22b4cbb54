"""Programs: kernels that are recorded once, and run for each step's batch by one team of threads.

A step of a model on a CPU consists of a few hundred small operations. Dispatching one from Python,
and waking threads for it, takes longer than most of them do for a few rows. So the model runs once
while a program is recorded: each operation appends its kernel and task instead of running, and
returns a tensor in one of the program's buffers. Tasks read everything that differs between steps
from the program's `Batch` of the layer's cache group.
"""

import ctypes
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pagewire_kernels.batch import StepBatch
from pagewire_kernels.cpu import threads
from pagewire_kernels.cpu.native_library import Kernel, Library, NativeStruct
from pagewire_kernels.cpu.tasks import Batch, address, fields_of
from pagewire_kernels.cpu.threads import NotRecordable

_CACHE_LINE = _ALIGNMENT = 64
_SHARE_BYTES = 64
Made = TypeVar("Made")

_MAX_STEPS = 1 << 14
"""The same constant as in src/share.h."""


class Buffers:
    """Memory of intermediate tensors, which is reused when no tensor refers to it."""

    def __init__(self) -> None:
        self._free: dict[int, list[np.ndarray]] = defaultdict(list)
        self.num_bytes = 0

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return an uninitialized tensor, whose memory is reused when the tensor is deleted."""
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

    _fields_ = fields_of("kernel task item_cycles")


class ProgramTask(NativeStruct):
    """`ProgramTask` of src/program.cpp."""

    _fields_ = fields_of("steps num_steps state shares num_shares num_threads num_taken_over")


class Program:
    """A list of kernels and their tasks, for batches of up to `max_rows` rows."""

    def __init__(self, library: Library, max_rows: int, num_groups: int = 1) -> None:
        """num_groups: cache groups of the model."""
        self.max_rows = max_rows
        self.batches = [Batch(num_rows=max_rows) for _ in range(num_groups)]
        """By cache group. They differ in slots and block tables only."""
        self.buffers = Buffers()
        # Placeholders for a step's inputs while recording; no kernel reads them.
        self.token_ids = torch.empty(max_rows, dtype=torch.int64)
        self.positions = torch.empty(max_rows, dtype=torch.int64)
        self.token_types = torch.empty(max_rows, dtype=torch.int64)
        self.slot_mappings = [torch.empty(max_rows, dtype=torch.int64) for _ in self.batches]
        self.kept: dict[object, Any] = {}
        """See `kept`."""
        self.num_sampled: int | None = None
        """Maximum number of rows that sample, once the steps for them are recorded."""
        self._kernel = library.kernel("run_program")
        self._steps: list[tuple[Kernel, ctypes.Structure]] = []
        self._list = (ProgramStep * 0)()
        self._shares = torch.empty(0)
        self._program = ProgramTask()

    def append(self, kernel: Kernel, task: ctypes.Structure) -> None:
        """Append a step: a kernel with its task, which is kept alive."""
        self._steps.append((kernel, task))

    def finish(self) -> None:
        """Prepare the program to run; no step may be appended afterwards. Raises NotRecordable if
        it has too many steps."""
        if len(self._steps) > _MAX_STEPS:
            raise NotRecordable(f"{len(self._steps)} operations")
        steps = [
            ProgramStep(kernel.address, ctypes.addressof(task)) for kernel, task in self._steps
        ]
        self._list = (ProgramStep * len(steps))(*steps)
        self._program.steps = ctypes.addressof(self._list)
        self._program.num_steps = len(steps)

    def inputs_of(self, batch: StepBatch) -> StepBatch:
        """The batch with placeholders for what differs between steps."""
        groups = zip(batch.attention, self.slot_mappings, strict=True)
        return replace(
            batch,
            token_ids=self.token_ids,
            positions=self.positions,
            token_types=None if batch.token_types is None else self.token_types,
            attention=tuple(replace(metadata, slot_mapping=slots) for metadata, slots in groups),
        )

    @property
    def num_steps(self) -> int:
        """Number of kernels in the program."""
        return len(self._steps)

    @property
    def num_taken_over(self) -> int:
        """Number of items that were taken over and computed again by another thread, in all
        runs."""
        return int(self._program.num_taken_over)

    def run(self, num_threads: int, team: threads.Team = threads.run) -> None:
        """Run all steps for the batch that `batches` describe."""
        if num_threads > self._program.num_shares:
            shape = num_threads, _SHARE_BYTES
            self._shares = self.buffers.take(shape, torch.uint8).zero_()
            self._program.shares = self._shares.data_ptr()
            self._program.num_shares = num_threads
        self._program.state = self._program.num_threads = 0
        team(self._kernel, ctypes.addressof(self._program), num_threads)


class _State(threading.local):
    program: Program | None = None

    def __init__(self) -> None:
        self.batch = Batch()


_state = _State()


def recording() -> Program | None:
    """The program that this thread is recording, or None."""
    return _state.program


@contextmanager
def record(program: Program) -> Iterator[None]:
    """Append the operations of this thread to the program instead of running them.

    Raises NotRecordable for operations that are no kernels of this package.
    """
    assert _state.program is None, "a program is being recorded already"
    _state.program, threads.local.is_recording = program, True
    try:
        with _ViewsOnly():
            yield
    finally:
        _state.program, threads.local.is_recording = None, False
    program.finish()


class _ViewsOnly(TorchDispatchMode):
    """Raises NotRecordable for operations of torch other than views, since these would run while
    recording, and be missing from the program."""

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
        """Prevents torch from importing its compiler only to disable it here, which would take more
        than a second of a worker's start."""
        return False


def count_address(num_rows: int) -> int:
    """Address of the number of rows: of the batch, or of the rows that sample.

    Raises NotRecordable if a program is being recorded and `num_rows` is neither.
    """
    program = _state.program
    if program is not None and program.num_sampled is not None:
        if num_rows != program.num_sampled:
            raise NotRecordable(f"{num_rows} rows, not those that are sampled from")
        return ctypes.addressof(program.batches[0]) + Batch.num_sampled.offset
    return ctypes.addressof(batch_of(num_rows)) + Batch.num_rows.offset


def launch(kernel: Kernel, task: ctypes.Structure, num_threads: int) -> None:
    """Run the kernel now, or append it to the program that is being recorded."""
    if _state.program is None:
        threads.run(kernel, ctypes.addressof(task), num_threads)
    else:
        _state.program.append(kernel, task)


def new_rows(num_rows: int, size: int, dtype: torch.dtype) -> Tensor:
    """Return an uninitialized tensor [num_rows, size].

    Rows are an odd number of cache lines apart: matrix products read a dozen rows at once, and rows
    at distances of a power of two would evict each other from the first-level cache.
    """
    num_lines = -(-size * dtype.itemsize // _CACHE_LINE) | 1
    return new_tensor((num_rows, num_lines * _CACHE_LINE // dtype.itemsize), dtype)[:, :size]


def new_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return an uninitialized tensor, from the buffers of the program that is being recorded, if
    any."""
    if _state.program is None:
        return torch.empty(shape, dtype=dtype)
    return _state.program.buffers.take(shape, dtype)


def kept(key: object, make: Callable[[], Made]) -> Made:
    """What `make` returns: for each key, once for all operations of the program that is being
    recorded, and as long as it lives; or a new one for a single launch.

    It is for memory which a thread that lost its core may read at any later step, so that it must
    not be reused for anything else.
    """
    if _state.program is None:
        return make()
    if key not in _state.program.kept:
        _state.program.kept[key] = make()
    found: Made = _state.program.kept[key]
    return found


def batch_with(indices: Tensor) -> tuple[Batch, str]:
    """The batch that a task reads, as by `batch_of`, and the name of its field that holds the
    indices, int64 [num_rows]: token ids, positions or token types."""
    name = "token_ids"
    if (program := _state.program) is not None:
        columns = ("token_ids", "positions", "token_types")
        addresses = {getattr(program, column).data_ptr(): column for column in columns}
        name = addresses.get(indices.data_ptr(), name)
    return batch_of(indices.shape[0], **{name: indices}), name


def batch_of(
    num_rows: int,
    *,
    token_ids: Tensor | None = None,
    positions: Tensor | None = None,
    token_types: Tensor | None = None,
    slot_mapping: Tensor | None = None,
) -> Batch:
    """The batch that a task reads: that of the recorded program, or one for a single launch.

    Raises NotRecordable if a program is being recorded and the arguments are not its own.
    """
    program = _state.program
    if program is None:
        batch = _state.batch
        batch.num_rows = num_rows
        batch.token_ids = address(token_ids)
        batch.positions = address(positions)
        batch.token_types = address(token_types)
        batch.slot_mapping = address(slot_mapping)
        return batch
    expected = (
        (token_ids, [program.token_ids]),
        (positions, [program.positions]),
        (token_types, [program.token_types]),
    )
    group = 0
    for given, own in (*expected, (slot_mapping, program.slot_mappings)):
        if given is not None:
            addresses = [column.data_ptr() for column in own]
            if given.data_ptr() not in addresses:
                raise NotRecordable("tokens, positions or slots that are not the step's own")
            group = addresses.index(given.data_ptr())
    if num_rows != program.max_rows:
        raise NotRecordable(f"{num_rows} rows, not the step's own")
    return program.batches[group]
