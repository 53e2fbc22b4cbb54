"""The compiled kernels of every instruction set that this processor has."""

from pagewire_kernels.cpu.native.build import INSTRUCTION_SETS, LIBRARIES
from pagewire_kernels.cpu.native.compiled import Library, instruction_set


def native_libraries() -> list[Library]:
    """The poorest instruction set first; none where nothing was compiled for this processor."""
    names = list(INSTRUCTION_SETS)
    best = instruction_set()
    runnable = [] if best is None else names[: names.index(best) + 1]
    paths = {name: LIBRARIES / f"libpagewire_{name}.so" for name in runnable}
    return [Library(path, name) for name, path in paths.items() if path.exists()]
