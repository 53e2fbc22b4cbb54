"""Loading the compiled library for this processor."""

import ctypes
import logging
import platform
from functools import cache
from pathlib import Path
from typing import Any

import torch

from pagewire_kernels.cpu.build import INSTRUCTION_SETS, SOURCES, digest, library_path

logger = logging.getLogger(__name__)


class NativeStruct(ctypes.Structure):
    """A C structure that kernels read; it has the same name in the C++ sources.

    Its size is compared with the compiled one when a library is loaded: a field that only one side
    has would corrupt memory silently.
    """


class Kernel:
    """A compiled kernel: `call` takes the address of a task; `address` is that of the kernel."""

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
        """The digest of the sources from which it was compiled."""
        return str(self._library.pw_sources().decode())

    @cache  # noqa: B019 (one library per process)
    def kernel(self, name: str) -> Kernel:
        """The kernel `pw_<name>`."""
        return Kernel(getattr(self._library, f"pw_{name}"))

    def check_structs(self) -> None:
        """Raise RuntimeError if the size of a structure differs between Python and the library."""
        for struct in NativeStruct.__subclasses__():
            size_of = getattr(self._library, f"pw_size_of_{struct.__name__}")
            size_of.restype = ctypes.c_int64
            if size_of() != ctypes.sizeof(struct):
                raise RuntimeError(
                    f"struct {struct.__name__} has {ctypes.sizeof(struct)} bytes in Python, but "
                    f"{size_of()} in the compiled {self.instruction_set} kernels: rebuild them"
                )


@cache
def library() -> Library | None:
    """Load the best library for this processor; None, with a warning, if there is none.

    Raises RuntimeError if its structures differ from those of this version of the package.
    """
    sets = instruction_sets()
    name = next((set for set in sets if library_path(set).exists()), None)
    if name is None:
        logger.warning(
            "compiled CPU kernels not found, torch's are many times slower "
            "instruction_sets=%s directory=%s",
            ",".join(sets) or "none",
            library_path("").parent,
        )
        return None
    loaded = Library(library_path(name), name)
    if SOURCES.exists() and loaded.sources != digest():
        script = SOURCES.with_name("build.py")
        logger.warning(
            "compiled CPU kernels are older than their sources, not used: run %s", script
        )
        return None
    loaded.check_structs()
    if name != sets[0]:
        logger.warning("CPU kernels were not built for %s, using those for %s", sets[0], name)
    logger.info("native kernels loaded instruction_set=%s", name)
    return loaded


def instruction_sets() -> list[str]:
    """The instruction sets of `build.py` that this processor supports, best first."""
    if platform.machine() == "aarch64":  # every such processor has NEON
        return list(INSTRUCTION_SETS)
    capability = torch.backends.cpu.get_cpu_capability()
    widest = {"AVX2": "avx2", "AVX512": "avx512"}.get(capability)
    has_more = (torch.cpu._is_vnni_supported, torch.cpu._is_avx512_bf16_supported)
    if widest == "avx512" and all(has_feature() for has_feature in has_more):
        # `_init_amx` requests permission to use tiles from the system. Processors with tiles
        # multiply both bfloat16 and int8.
        has_tiles = torch.cpu._is_amx_tile_supported() and torch.cpu._init_amx()
        widest = "amx" if has_tiles else "avx512_bf16"
    names = list(INSTRUCTION_SETS)
    return names[: names.index(widest) + 1][::-1] if widest is not None else []
