"""The compiled kernels of every instruction set that this processor has."""

from pagewire_kernels.cpu.build import library_path
from pagewire_kernels.cpu.native_library import Library, instruction_sets


def native_libraries() -> list[Library]:
    """The narrowest instruction set first; none if nothing was compiled for this processor."""
    paths = {name: library_path(name) for name in instruction_sets()[::-1]}
    return [Library(path, name) for name, path in paths.items() if path.exists()]
