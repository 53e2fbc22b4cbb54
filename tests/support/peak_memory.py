"""Memory that loading a model takes at its peak, against the bytes of its packed weights."""

import json
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from worker_service.config import ModelConfig
from worker_service.loader import load_model


@dataclass(frozen=True, kw_only=True, slots=True)
class Loaded:
    """Result of one load."""

    packed_bytes: int
    """Bytes of the weights as they are multiplied by."""
    peak_bytes: int
    """The most that the process held, less what it held before."""


def measure(warm_up: Path, path: Path, options: Mapping[str, str]) -> Loaded:
    """Load the checkpoint at `path` in bfloat16 in a new process, after that at `warm_up`, which
    imports what loading needs. Memory for KV, which a worker allocates later, does not count."""
    entries = [entry for entry in sys.path if entry]
    program = (
        f"import sys; sys.path = {entries!r}; from tests.support.peak_memory import _load;"
        " _load(*sys.argv[1:])"
    )
    arguments = [str(warm_up), str(path), json.dumps(dict(options))]
    run = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=False
    )
    if run.returncode != 0:
        raise RuntimeError(f"loading {path} failed: {run.stderr}")
    return Loaded(**json.loads(run.stdout.splitlines()[-1]))


def _load(warm_up: str, path: str, options: str) -> None:
    """Print what a load took, as JSON."""
    torch.set_num_threads(1)
    load_model(ModelConfig(model=warm_up, device="cpu", dtype="bfloat16"))
    before = _status_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
    config = ModelConfig(model=path, device="cpu", dtype="bfloat16", **json.loads(options))
    loaded = load_model(config)
    peak_bytes = _status_bytes("VmHWM") - before
    assert isinstance(loaded.model, torch.nn.Module)
    print(json.dumps({"packed_bytes": _packed_bytes(loaded.model), "peak_bytes": peak_bytes}))


def _status_bytes(name: str) -> int:
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def _packed_bytes(model: torch.nn.Module) -> int:
    found: dict[int, int] = {}
    for module in model.modules():
        for value in [*vars(module).values(), *module.parameters(recurse=False)]:
            if isinstance(value, torch.Tensor):
                found[value.data_ptr()] = value.nbytes
            elif hasattr(value, "num_bytes"):
                found[value.address] = value.num_bytes
    return sum(found.values())
