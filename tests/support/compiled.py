"""What tests compile, kept in `build/tests` for later runs of the same sources."""

import fcntl
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

COMPILED = Path(__file__).parents[2] / "build/tests"


def compiled_once(name: str, made_from: str, make: Callable[[Path], object]) -> Path:
    """The file that `make` writes to a path: an earlier one of this name if it was made from the
    same, otherwise a new one in its place. Processes that need it at the same time wait for one.

    made_from: all that the file depends on, such as sources, options and the compiler's version.
    """
    COMPILED.mkdir(parents=True, exist_ok=True)
    path = COMPILED / f"{name}-{sha256(made_from.encode()).hexdigest()[:16]}"
    with (COMPILED / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            unfinished = COMPILED / f"{name}.unfinished"
            make(unfinished)
            for other in COMPILED.glob(f"{name}-*"):
                other.unlink()
            unfinished.replace(path)
    return path
