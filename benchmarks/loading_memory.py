"""Memory that loading a model takes at its peak, against the bytes of its packed weights.

    python -m benchmarks.loading_memory --shape qwen3-0.6b

Checkpoints in all formats of `benchmarks.checkpoints`, and dense ones rounded with
`--quantization`, are each loaded in a process of its own. The peak is what that process grew by,
after it had loaded a tiny model and so imported what loading needs. It does not include memory for
KV, which a worker allocates later.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.checkpoints import checkpoint
from benchmarks.machine import ForeignLoad, save
from benchmarks.model_shapes import SHAPES
from benchmarks.quantized_layers import CONFIGS
from benchmarks.tables import print_table, script_parser
from worker_service.config import ModelConfig
from worker_service.loader import load_model

COLUMNS = {
    "shape": "model",
    "weights": "weights",
    "packed_mib": "packed, MiB",
    "peak_mib": "peak while loading, MiB",
    "ratio": "peak ÷ packed",
}
"""Titles by the names in a row."""

CASES: Mapping[str, Mapping[str, str]] = {
    "dense": {},
    **{name: {"quantization": name} for name in ("int8", "int4", "fp8")},
    **{name: {} for name in CONFIGS},
}
"""Options of `ModelConfig` by the names of formats."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Loaded:
    """Result of one load."""

    packed_bytes: int
    """Bytes of the weights as they are multiplied by."""
    peak_bytes: int
    """The most that the process held, less what it held before."""


def measure(warm_up: Path, path: Path, options: Mapping[str, str]) -> Loaded:
    """Load the checkpoint at `path` in bfloat16 in a new process, after that at `warm_up`."""
    arguments = ["--child", str(warm_up), str(path), json.dumps(dict(options))]
    entries = [entry for entry in sys.path if entry]
    program = (
        f"import sys; sys.path = {entries!r}; from benchmarks.loading_memory import main; main()"
    )
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


def _row(shape: str, weights: str, warm_up: Path, checkpoints: Path) -> dict[str, object]:
    wanted = SHAPES[shape].quantized(weights if weights in CONFIGS else None)
    loaded = measure(warm_up, checkpoint(wanted, "bfloat16", checkpoints), CASES[weights])
    return {
        "shape": shape,
        "weights": weights,
        "packed_mib": round(loaded.packed_bytes / 2**20, 1),
        "peak_mib": round(loaded.peak_bytes / 2**20, 1),
        "ratio": round(loaded.peak_bytes / loaded.packed_bytes, 3),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, and write the results."""
    parser = script_parser(__doc__)
    parser.add_argument("--shape", nargs="+", default=["qwen3-0.6b"], choices=list(SHAPES))
    parser.add_argument("--weights", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument(
        "--checkpoints", type=Path, default=Path(tempfile.gettempdir()) / "pagewire-checkpoints"
    )
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.child:
        _load(*args.child)
        return
    load = ForeignLoad()
    warm_up = checkpoint(SHAPES["tiny"], "float32", args.checkpoints)
    rows = [
        _row(shape, weights, warm_up, args.checkpoints)
        for shape in args.shape
        for weights in args.weights
    ]
    print_table(rows, "memory while loading", COLUMNS)
    save("loading_memory", {"rows": rows}, load.cores, args.results)


if __name__ == "__main__":
    main()
