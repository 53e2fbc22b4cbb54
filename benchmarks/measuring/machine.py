"""The machine on which figures are measured, its other load, and the files of results."""

import json
import os
import platform
import time
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path

import psutil

RESULTS = Path(__file__).parents[1] / "results"
VECTOR_EXTENSIONS = {
    "avx2": "AVX2",
    "avx512f": "AVX-512",
    "avx512_vnni": "AVX512-VNNI",
    "avx512_bf16": "AVX512-BF16",
    "amx_bf16": "AMX",
}
"""Extensions that determine how fast a processor multiplies matrices, by their names in
`/proc/cpuinfo`, the widest last."""

PACKAGES = ("protobuf", "grpcio", "torch", "transformers")


def describe() -> dict[str, object]:
    """The properties of the machine and the versions that affect figures, without its name."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "vector_extensions": _vector_extensions(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
        "python": platform.python_version(),
        **{package: _version(package) for package in PACKAGES},
    }


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _vector_extensions() -> list[str]:
    """The processor's extensions that determine how fast it multiplies matrices."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("flags"):
            return [flag for flag in VECTOR_EXTENSIONS if flag in line.split()]
    return []


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


class ForeignLoad:
    """The number of cores that processes other than this one and its children kept busy.

    Time that the hypervisor gave to other machines is included.
    """

    def __init__(self, own_seconds: Callable[[], float] | None = None) -> None:
        """`own_seconds`: processor time so far of the processes that are not foreign; None for this
        process and its children."""
        self._own_seconds = own_seconds or _own_seconds
        self._wall = time.monotonic()
        self._busy = _busy_seconds()
        self._own = self._own_seconds()

    @property
    def cores(self) -> float:
        """Mean number of cores since construction. Children count while they run and once they have
        been waited for; so read it while servers run, whose own children are never waited for."""
        foreign = _busy_seconds() - self._busy - (self._own_seconds() - self._own)
        return round(max(0.0, foreign) / max(1e-9, time.monotonic() - self._wall), 2)


def _busy_seconds() -> float:
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - times.iowait - times.guest - times.guest_nice)


def _own_seconds() -> float:
    own = os.times()
    total = own.user + own.system + own.children_user + own.children_system
    for child in psutil.Process().children(recursive=True):
        try:
            total += sum(child.cpu_times()[:2])
        except psutil.NoSuchProcess:
            continue
    return total


def save(
    name: str, figures: Mapping[str, object], foreign_cores: float, folder: Path = RESULTS
) -> None:
    """Write figures to `folder` as NAME.json, with the machine and its `ForeignLoad`; print the
    path."""
    content = {"machine": describe(), "foreign_cores": foreign_cores, **figures}
    folder.mkdir(exist_ok=True, parents=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps(content, indent=2) + "\n")
    print(f"written to {path}")
