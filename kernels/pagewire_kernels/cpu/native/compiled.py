"""The compiled library for this processor."""

import ctypes
import logging
from functools import cache
from pathlib import Path
from typing import Any

import torch

from pagewire_kernels.cpu.native.build import LIBRARIES, SOURCES, digest

logger = logging.getLogger(__name__)


class Kernel:
    """A compiled kernel: callable with a task's address, and known by its own."""

    def __init__(self, function: Any) -> None:
        function.argtypes, function.restype = [ctypes.c_void_p], None
        self.call = function
        address = ctypes.cast(function, ctypes.c_void_p).value
        assert address is not None
        self.address: int = address


class Library:
    """The kernels of one instruction set, by name."""

    def __init__(self, path: Path, instruction_set: str) -> None:
        self.instruction_set = instruction_set
        self._library = ctypes.CDLL(str(path))
        self._library.pw_sources.restype = ctypes.c_char_p

    @property
    def sources(self) -> str:
        """The digest of the sources it was compiled from."""
        return str(self._library.pw_sources().decode())

    @cache  # noqa: B019 (one library per process)
    def kernel(self, name: str) -> Kernel:
        """The kernel `pw_<name>`."""
        return Kernel(getattr(self._library, f"pw_{name}"))


@cache
def library() -> Library | None:
    """The library for this processor, or None, with a log line saying why."""
    name = instruction_set()
    path = LIBRARIES / f"libpagewire_{name}.so"
    if name is None or not path.exists():
        logger.info("native kernels are not used: none built for this processor")
        return None
    loaded = Library(path, name)
    if SOURCES.exists() and loaded.sources != digest():
        script = SOURCES.with_name("build.py")
        logger.warning("native kernels are not used: older than their sources, run %s", script)
        return None
    logger.info("native kernels loaded instruction_set=%s", name)
    return loaded


def instruction_set() -> str | None:
    """The best of those compiled for that this processor has."""
    capability = torch.backends.cpu.get_cpu_capability()
    if capability == "AVX512":
        has_bf16 = torch.cpu._is_avx512_bf16_supported()
        return "avx512_bf16" if has_bf16 else "avx512"
    return "avx2" if capability == "AVX2" else None
