"""Kernels compiled for another machine, run by an emulator over this process's tensors."""

import ctypes
import gc
import struct
import subprocess
from bisect import bisect_right
from pathlib import Path
from typing import NamedTuple

from torch import Tensor
from torch.nn import Parameter

from pagewire_kernels.cpu.native_library import Kernel, Library

_ALIGNMENT = 64


class _Region(NamedTuple):
    address: int
    size: int
    has_pointers: bool


class EmulatedLibrary(Library):
    """A library whose kernels run one call at a time, each in a process of its own."""

    def __init__(self, run_kernel: list[str], library: Path, instruction_set: str) -> None:
        """run_kernel: the command that runs run_kernel.cpp as compiled for the machine."""
        self.instruction_set = instruction_set
        self._command = [*run_kernel, str(library)]
        self._memory = library.with_suffix(".memory")

    def kernel(self, name: str) -> Kernel:  # type: ignore[override]
        """The kernel `pw_<name>`; it must run on one thread."""
        return _EmulatedKernel([*self._command, f"pw_{name}", str(self._memory)], self._memory)


class _EmulatedKernel(Kernel):
    def __init__(self, command: list[str], memory: Path) -> None:
        self._command = command
        self._memory = memory
        self.call = self._run
        self.address = 0

    def _run(self, task: int) -> None:
        """Copy what the task refers to into a file, run the kernel over that, and copy it back."""
        regions = _reachable(task)
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


def _reachable(task: int) -> list[_Region]:
    """The memory of live structures and tensors that a task points to, directly or not."""
    regions = _live_regions()
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


def _live_regions() -> dict[int, _Region]:
    regions = {}
    gc.unfreeze()  # objects that a frontend in this process froze would not be among these
    for each in gc.get_objects():
        if issubclass(type(each), ctypes.Structure):
            region = _Region(ctypes.addressof(each), ctypes.sizeof(each), True)
        elif type(each) in (Tensor, Parameter) and each.device.type == "cpu":  # no FakeTensor
            storage = each.untyped_storage()
            region = _Region(storage.data_ptr(), storage.nbytes(), False)
        else:
            continue
        regions[region.address] = region
    return regions
