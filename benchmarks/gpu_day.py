"""A short time on a GPU machine, in stages of at most eight minutes.

    python -m benchmarks.gpu_day --stage 1 [--output results] [--dry-run]

| stage | what it does |
| --- | --- |
| 1 | `make test-gpu`; the racecheck of compute-sanitizer on sampling and copies of blocks |
| 2 | each kernel against the device's ceilings; the fastest tiles of attention |
| 3 | Qwen3-0.6B, scheduler core and worker in one process |
| 4 | the same through the three services |
| 5 | comparison with vLLM and nano-vllm |
| 6 | Qwen3-8B, one stream and batches |
| 7 | exact recovery: workers and frontends are killed under load, KV is swapped |
| 8 | fp8 KV, quantized weights, and what `--batch-invariant` costs |
| 9 | LoRA adapters: none, one, and several in a batch, beside vLLM with the same ones |
| 10 | layers with a state: Qwen3.5 0.8B and LFM2 350M, beside vLLM |
| 11 | speculation with n-grams, a draft model and a random head, against the same without |
| 12 | experts, beside vLLM; vectors of texts, beside `transformers` |

A stage consists of parts, each a process with a time limit of its own. Its output and its results
are in the output folder when it ends, and `summary.json` says how each part ended. With
`--dry-run` the same parts run on a CPU with a tiny model, and Triton's kernels in its interpreter.
"""

import argparse
import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
STAGE_S = 480.0
_LEAST_S = 20.0
"""A part is started only if this much time is left."""
_ROOMY_GIB = 120
"""With less memory, compared engines run one after the other."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A part of a stage; `gpu_day.toml` explains the fields."""

    name: str
    limit_s: float
    command: str
    dry: str | None = None
    under: str = ""


class _Texts(dict[str, str]):
    """Texts by their names; other names are left to be filled in later."""

    def __missing__(self, name: str) -> str:
        return f"{{{name}}}"


def _stages() -> dict[int, list[Part]]:
    """The parts in `gpu_day.toml`, by stage."""
    data = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
    texts = _Texts(data["texts"])
    stages: dict[int, list[Part]] = {}
    for entry in data["parts"]:
        for name in ("command", "dry"):
            if name in entry:
                entry[name] = entry[name].format_map(texts)
        stages.setdefault(entry.pop("stage"), []).append(Part(**entry))
    return stages


STAGES = _stages()


@dataclass(frozen=True, kw_only=True, slots=True)
class Day:
    """The folders and peers with which stages run."""

    output: Path
    is_dry: bool
    memory_gib: float = 0.0
    checkpoints: Path
    vllm_python: Path | None = None
    nano_vllm_python: Path | None = None

    def words(self, part: Part) -> list[str]:
        """A part's command line."""
        vllm = f"--vllm-python {self.vllm_python}" if self.vllm_python else ""
        nano = f"--nano-vllm-python {self.nano_vllm_python}" if self.nano_vllm_python else ""
        command = part.command.format(
            output=self.output,
            checkpoints=self.checkpoints,
            vllm=vllm,
            peers=f"{vllm} {nano} --checkpoints {self.checkpoints}",
            fit="" if self.memory_gib >= _ROOMY_GIB else "--one-at-a-time",
        )
        words = [sys.executable, "-m", *shlex.split(command)]
        if self.is_dry:
            return words + shlex.split(part.dry or "")
        return shlex.split(part.under) + words


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How a part ended."""

    part: str
    code: int | None
    """Exit code; None if the part did not begin or was killed at its limit."""
    seconds: float
    why: str = ""
    """Why there is no exit code."""


def run_parts(parts: Sequence[Part], day: Day) -> list[Outcome]:
    """Run parts in order, even after one has failed; `summary.json` is written after each."""
    day.output.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    outcomes: list[Outcome] = []
    for part in parts:
        if day.is_dry and part.dry is None:
            continue
        remaining_s = STAGE_S - (time.monotonic() - began)
        if remaining_s < _LEAST_S:
            outcomes.append(Outcome(part=part.name, code=None, seconds=0, why="no time is left"))
        else:
            # In Triton's interpreter, on a CPU that others use, a part takes any time.
            limit_s = remaining_s if day.is_dry else min(part.limit_s, remaining_s)
            outcomes.append(_run(part, day, limit_s))
        print(outcomes[-1], flush=True)
        summary = json.dumps([asdict(outcome) for outcome in outcomes], indent=2)
        (day.output / "summary.json").write_text(summary + "\n")
    return outcomes


def _run(part: Part, day: Day, limit_s: float) -> Outcome:
    """Run a part as a process; at its time limit, end its whole process group."""
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    if day.is_dry:
        environment["TRITON_INTERPRET"] = "1"
    began = time.monotonic()
    with (day.output / f"{part.name}.log").open("wb") as log:
        try:
            process = subprocess.Popen(
                day.words(part),
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except FileNotFoundError as error:
            return Outcome(part=part.name, code=None, seconds=0, why=f"{error.filename} is absent")
        code, why = None, f"ended after {limit_s:.0f} s"
        try:
            code, why = process.wait(limit_s), ""
        except subprocess.TimeoutExpired:
            _end(process)
    return Outcome(part=part.name, code=code, seconds=round(time.monotonic() - began, 1), why=why)


def _end(process: subprocess.Popen[bytes], grace_s: float = 10.0) -> None:
    """Send SIGTERM to a process group, so that it can end its children, and later SIGKILL."""
    os.killpg(process.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(grace_s)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a stage; ends with 1 if a part failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stage", type=int, required=True, choices=STAGES)
    parser.add_argument("--output", type=Path, default=Path(os.environ.get("OUT", "build/gpu-day")))
    parser.add_argument("--checkpoints", type=Path, default=Path("/tmp/pagewire-checkpoints"))
    parser.add_argument("--vllm-python", type=Path, help="the Python that has vLLM")
    parser.add_argument("--nano-vllm-python", type=Path, help="the Python that has nano-vllm")
    parser.add_argument("--dry-run", action="store_true", help="on this CPU, with a tiny model")
    args = parser.parse_args(arguments)
    memory_gib = 0.0
    if not args.dry_run:
        import torch

        memory_gib = torch.cuda.get_device_properties(0).total_memory / 2**30
    day = Day(
        output=(args.output / f"stage-{args.stage}").absolute(),
        is_dry=args.dry_run,
        memory_gib=memory_gib,
        checkpoints=args.checkpoints,
        vllm_python=args.vllm_python,
        nano_vllm_python=args.nano_vllm_python,
    )
    outcomes = run_parts(STAGES[args.stage], day)
    sys.exit(any(outcome.code != 0 for outcome in outcomes))


if __name__ == "__main__":
    main()
