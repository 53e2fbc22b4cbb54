"""Kernels compiled for another machine, run by an emulator over this process's tensors."""

import ctypes
import gc
import struct
import subprocess
from bisect import bisect_right
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor
from torch.nn import Parameter

from pagewire_kernels.cpu.native_library import Kernel, Library

_ALIGNMENT = 64


class _Region(NamedTuple):
    address: int
    size: int
    has_pointers: bool


class EmulatedLibrary(Library):
    """A library whose kernels run one call at a time, each in a process of its own.

    Objects that are older than it are hidden from the garbage collector from then on, for it looks
    for tensors at each call and this process may have millions of objects.
    """

    def __init__(
        self, run_kernel: list[str], library: Path, memory: Path, instruction_set: str
    ) -> None:
        """run_kernel: the command that runs run_kernel.cpp as compiled for the machine. memory: a
        file for what a call refers to."""
        self.instruction_set = instruction_set
        self._command = [*run_kernel, str(library)]
        self._memory = memory
        gc.unfreeze()  # the modules of all tests are frozen
        self._older = [item for item in gc.get_objects() if _region_of(item) is not None]
        gc.freeze()

    def kernel(self, name: str) -> Kernel:  # type: ignore[override]
        """The kernel `pw_<name>`; it must run on one thread."""
        return _EmulatedKernel([*self._command, f"pw_{name}"], self._memory, self._older)


class _EmulatedKernel(Kernel):
    def __init__(self, command: list[str], memory: Path, older: list[Any]) -> None:
        """older: objects that memory may belong to and the garbage collector does not list."""
        self._command = [*command, str(memory)]
        self._memory = memory
        self._older = older
        self.call = self._run
        self.address = 0

    def _run(self, task: int) -> None:
        """Copy what the task refers to into a file, run the kernel over that, and copy it back."""
        regions = _reachable(task, chain(self._older, gc.get_objects()))
        offset = 16 + 32 * len(regions)
        header, offsets = [task, len(regions)], []
        for region in regions:
            offset += (region.address - offset) % _ALIGNMENT
            header += [region.address, region.size, offset, region.has_pointers]
            offsets.append(offset)
            offset += region.size
        with self._memory.open("wb") as file:
            file.write(struct.pack(f"{len(header)}q", *header))
            for region, offset in zip(regions, offsets, strict=True):
                file.seek(offset)
                file.write(ctypes.string_at(region.address, region.size))
        subprocess.run(self._command, check=True)
        with self._memory.open("rb") as file:
            for region, offset in zip(regions, offsets, strict=True):
                file.seek(offset)
                ctypes.memmove(region.address, file.read(region.size), region.size)


def _reachable(task: int, objects: Iterable[Any]) -> list[_Region]:
    """The memory of structures and tensors that a task points to, directly or not."""
    regions = {region.address: region for item in objects if (region := _region_of(item))}
    starts = sorted(regions)
    found: dict[int, _Region] = {}
    pending = [task]
    while pending:
        address = pending.pop()
        at = bisect_right(starts, address) - 1
        region = regions[starts[at]] if at >= 0 else None
        if region is None or address >= region.address + region.size or region.address in found:
            continue
        found[region.address] = region
        if region.has_pointers:
            count = region.size // 8
            words = ctypes.string_at(region.address, 8 * count)
            pending += struct.unpack(f"{count}q", words)
    return list(found.values())


def _region_of(value: Any) -> _Region | None:
    if issubclass(type(value), ctypes.Structure):
        return _Region(ctypes.addressof(value), ctypes.sizeof(value), True)
    if type(value) in (Tensor, Parameter) and value.device.type == "cpu":  # no FakeTensor
        storage = value.untyped_storage()
        return _Region(storage.data_ptr(), storage.nbytes(), False)
    return None
