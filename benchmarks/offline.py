"""Throughput of whole workloads, Pagewire through its services against other engines.

    python -m benchmarks.offline --shape llama-160m --dtype bfloat16 \
        --vllm-python VLLM/bin/python --llama-server BUILD/bin/llama-server

All engines load the same checkpoint, with random weights, and run the same jobs. They take turns,
workload by workload and repeat by repeat, and medians are compared, so that a machine whose speed
drifts affects all equally; engines that are not running are stopped. An engine that is far behind
the fastest runs less often (`--slow-factor`, `--slow-repeats`). Results are written to
`benchmarks/results/`.
"""

import argparse
import os
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.engines import transformers_static
from benchmarks.engines.choice import DEFAULT_NAMES, NAMES, Programs, start_all
from benchmarks.engines.comparison import (
    PAGEWIRE,
    agreements,
    all_runs,
    ceilings_range,
    columns_of,
    compare,
    facts_of,
)
from benchmarks.engines.engine import Engine, Settings
from benchmarks.engines.interleaved_runs import (
    MOST_REPEATS,
    CeilingGauge,
    Patience,
    Results,
    Run,
    run_in_turns,
)
from benchmarks.engines.roofline import floor_seconds
from benchmarks.engines.workloads import FOUR, WORKLOADS, Workload
from benchmarks.measuring.ceilings import Ceilings, CeilingsProcess
from benchmarks.measuring.machine import RESULTS, ForeignLoad
from benchmarks.measuring.processes import exit_on_sigterm
from benchmarks.measuring.tables import publish
from benchmarks.models.model_shapes import BYTES_PER_VALUE, SHAPES
from benchmarks.models.quantized_layers import BITS_PER_WEIGHT, CONFIGS


def run(
    settings: Settings,
    programs: Programs,
    names: Sequence[str],
    workloads: Sequence[Workload],
    patience: Patience,
    *,
    one_at_a_time: bool = False,
    measures_ceilings: bool = True,
) -> dict[str, Any]:
    """Run all engines with one shape and dtype.

    one_at_a_time: start each engine after the previous one has ended, for devices whose memory does
    not hold them together; measures_ceilings: without it, no share of the floor is reported.
    """
    scale = settings.shape.scale if settings.device == "cpu" else 1.0
    results, agreed = Results(), None
    absent: dict[str, str] = {}
    abouts: dict[str, Any] = {}
    for together in [[name] for name in names] if one_at_a_time else [names]:
        with ExitStack() as stack:
            engines, missing = start_all(together, settings, programs, stack)
            absent |= missing
            if not engines:
                continue
            gauge = None
            if measures_ceilings:
                measuring = CeilingsProcess(settings.dtype, settings.device, settings.threads)
                gauge = CeilingGauge(PAGEWIRE, stack.enter_context(measuring).measure)
            found = run_in_turns(
                engines, workloads, settings.shape, scale, patience, gauge, _print_run
            )
            results.add(found)
            agreed = _agreed(engines, settings)
            abouts |= {engine.name: asdict(engine.about) for engine in engines}
    floors = {w.name: partial(_floor, w, settings, scale) for w in workloads}
    return {
        "shape": settings.shape.name,
        "dtype": settings.dtype,
        "device": settings.device,
        "http": settings.http,
        "patience": asdict(patience),
        "ceilings": ceilings_range(results),
        "engines": abouts,
        "absent": absent,
        "rows": compare(results, floors),
        "greedy_tokens_equal_transformers": agreed,
        "runs": all_runs(results),
    }


def _print_run(workload: str, engine: str, run: Run) -> None:
    print(
        f"{workload:>10} {engine:22} {run.tokens_per_s:9.1f} tokens/s {run.seconds:7.2f} s"
        f"   others {run.foreign_cores:.2f} cores",
        flush=True,
    )


def _floor(workload: Workload, settings: Settings, scale: float, ceilings: Ceilings) -> float:
    jobs = workload.make_jobs(np.random.default_rng(0), settings.shape.vocab_size, scale)
    budget = settings.max_num_batched_tokens
    return floor_seconds(jobs, settings.shape, settings.dtype, ceilings, budget)


def _agreed(engines: Sequence[Engine], settings: Settings) -> dict[str, dict[str, int]] | None:
    """Agreement in float32, if `transformers` is among the engines."""
    reference = [engine for engine in engines if engine.name == transformers_static.NAME]
    if settings.dtype != "float32" or not reference:
        return None
    return agreements(engines, reference[0], settings.shape.vocab_size)


def result_name(shape: str, dtype: str, device: str, *, http: bool = False) -> str:
    """The result file's name less its ending."""
    plain = shape.replace("-", "_").replace(".", "_")
    ends = ("" if device == "cpu" else f"_{device}") + ("_http" if http else "")
    return f"offline_{plain}_{dtype}{ends}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run each shape in each dtype; print, and write the results."""
    args = parse(arguments)
    exit_on_sigterm()
    programs = Programs(
        vllm_python=args.vllm_python,
        nano_vllm_python=args.nano_vllm_python,
        llama_server=args.llama_server,
    )
    patience = patience_of(args)
    workloads = [WORKLOADS[name] for name in args.workloads]
    for shape in args.shape:
        for dtype in args.dtype:
            load = ForeignLoad()
            content = run(
                replace(settings_of(args, shape, dtype), http=args.http),
                programs,
                args.engines,
                workloads,
                patience,
                one_at_a_time=args.one_at_a_time,
                measures_ceilings=not args.no_ceilings,
            )
            name = args.name or result_name(content["shape"], dtype, args.device, http=args.http)
            rows = content.pop("rows")
            facts, columns = facts_of(content, rows), columns_of(rows)
            publish(name, facts, columns, rows, load.cores, args.results, **content)


def patience_of(args: argparse.Namespace) -> Patience:
    """The number of turns of each engine by the flags."""
    return Patience(
        repeats=args.repeats,
        slow_repeats=args.slow_repeats,
        slow_factor=args.slow_factor,
        least_s=args.least_seconds,
        most_repeats=max(MOST_REPEATS, args.repeats),
    )


def settings_of(args: argparse.Namespace, shape: str, dtype: str) -> Settings:
    """The settings by the flags of `add_common`."""
    if args.logs is not None:
        args.logs.mkdir(parents=True, exist_ok=True)
    return Settings(
        shape=SHAPES[shape].quantized(args.weights or args.quantization),
        dtype=dtype,
        checkpoints=args.checkpoints,
        device=args.device,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        kv_cache_gib=args.kv_cache_gib,
        **{name: getattr(args, name) for name in Settings.FLAGS},
        threads=args.threads,
        model_path=args.model,
        logs=args.logs,
    )


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_common(parser)
    parser.add_argument("--workloads", nargs="+", default=list(FOUR), choices=list(WORKLOADS))
    parser.add_argument("--engines", nargs="+", default=list(DEFAULT_NAMES), choices=list(NAMES))
    parser.add_argument("--http", action="store_true", help="Pagewire and vLLM as HTTP servers")
    parser.add_argument("--one-at-a-time", action="store_true", help="if memory is scarce")
    parser.add_argument("--no-ceilings", action="store_true", help="no share of the floor")
    parser.add_argument("--name", help="the result file's, without its ending")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--least-seconds", type=float, default=10.0, help="short workloads take more turns"
    )
    parser.add_argument("--slow-repeats", type=int, default=1, help="of engines far behind")
    parser.add_argument("--slow-factor", type=float, default=1.5, help="how far: times as long")
    parser.add_argument("--nano-vllm-python", type=Path, help="the Python that has nano-vllm")
    parser.add_argument("--llama-server", type=Path, help="llama.cpp's server")
    args = parser.parse_args(arguments)
    if args.weights and args.quantization:
        parser.error("--quantization is for dense checkpoints, without --weights")
    if args.weights not in (None, *CONFIGS) and args.model is None:
        parser.error(f"--weights {args.weights} needs --model: such a checkpoint is not written")
    return args


def add_common(parser: argparse.ArgumentParser) -> None:
    """Flags that benchmarks of whole engines share."""
    parser.add_argument("--shape", nargs="+", default=["llama-160m"], choices=list(SHAPES))
    parser.add_argument("--dtype", nargs="+", default=["bfloat16"], choices=list(BYTES_PER_VALUE))
    parser.add_argument(
        "--weights",
        choices=list(BITS_PER_WEIGHT),
        help=f"quantized weights, written as {', '.join(CONFIGS)}; default: dense",
    )
    parser.add_argument("--model", help="a checkpoint or GGUF file of --shape and --weights")
    parser.add_argument("--quantization", choices=["int4", "int8"], help="Pagewire's")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--vllm-python", type=Path, help="the Python that has vLLM")
    parser.add_argument(
        "--checkpoints",
        type=Path,
        default=Path(tempfile.gettempdir()) / "pagewire-checkpoints",
        help="folder where checkpoints are made and kept",
    )
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--kv-cache-gib", type=int, default=3, help="memory for KV, each engine")
    parser.add_argument("--kv-cache-dtype", default="auto", help="Pagewire's")
    parser.add_argument("--attention-backend", help="Pagewire's")
    parser.add_argument("--batch-invariant", action="store_true", help="Pagewire's")
    parser.add_argument("--max-num-seqs", type=int, default=64)
    parser.add_argument("--max-num-batched-tokens", type=int, default=2048)
    parser.add_argument("--logs", type=Path, help="folder for what the engines say")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for the JSON files")


if __name__ == "__main__":
    main()
