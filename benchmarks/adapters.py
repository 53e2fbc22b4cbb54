"""Throughput with LoRA adapters, against the same model without, and others with the same adapters.

    python -m benchmarks.adapters --shape smollm2-135m --vllm-python VLLM/bin/python
    python -m benchmarks.adapters --streams 1 --prompts 8 --llama-server BUILD/bin/llama-server

Adapters with random matrices on the seven linear layers of every layer. All prompts are sent at
once, with no adapter, one, as many as there are slots, or more; the servers take turns. vLLM is
asked in its own process, without a server, and llama.cpp's server with none or one; what does not
run is stopped.
"""

import argparse
import asyncio
import json
import re
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from benchmarks.engines import vllm
from benchmarks.engines.child import ChildEngine
from benchmarks.engines.engine import Engine, Settings
from benchmarks.engines.llama_cpp import LlamaCpp
from benchmarks.engines.pagewire import flags
from benchmarks.engines.vllm import options
from benchmarks.engines.workloads import Job
from benchmarks.measuring.machine import ForeignLoad
from benchmarks.measuring.processes import exit_on_sigterm
from benchmarks.measuring.tables import publish
from benchmarks.models.gguf_file import write_gguf_adapter
from benchmarks.models.model_shapes import Shape
from benchmarks.offline import add_common, settings_of
from pagewire_client import AsyncClient, SamplingParams
from tests.support.cluster import Cluster

PROMPT_TOKENS = 32
RANK = 16
SLOTS = 8
_OTHERS = ("vllm", "llama.cpp")
CORE_FLAGS = ("max_num_seqs", "max_num_batched_tokens")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, and write the results."""
    args = parse(arguments)
    exit_on_sigterm()
    for shape in args.shape:
        for dtype in args.dtype:
            with ExitStack() as stack:
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
                settings = replace(settings_of(args, shape, dtype), max_num_seqs=args.streams)
                _measure(args, settings, folder, stack)


def _measure(args: argparse.Namespace, settings: Settings, folder: Path, stack: ExitStack) -> None:
    names = write_adapters(settings.shape, args.adapters, folder)
    load = ForeignLoad()
    cases = {
        "none": [None],
        "1": names[:1],
        f"{SLOTS}": names[:SLOTS],
        f"{len(names)} over {SLOTS} slots": names,
    }
    plain, ours = serve(settings, {}, stack), serve(settings, _paths(names, folder), stack)
    rows = [Row("pagewire, started without adapters", "none", plain, [None])]
    rows += [Row("pagewire", case, ours, chosen) for case, chosen in cases.items()]
    if args.vllm_python is not None:
        with_adapters = replace(settings, lora_modules=_paths(names, folder), max_loras=SLOTS)
        environment = vllm.environment(args.vllm_python, settings)
        engine = ChildEngine(vllm, args.vllm_python, with_adapters, environment)
        other = Child(stack.enter_context(engine))
        rows += [Row("vllm", case, other, chosen) for case, chosen in cases.items()]
    if args.llama_server is not None:
        write_gguf_adapter(settings.shape, folder / names[0], folder / "adapter.gguf")
        with_one = replace(settings, lora_modules={names[0]: str(folder / "adapter.gguf")})
        server = Child(stack.enter_context(LlamaCpp(args.llama_server, with_one)))
        rows += [Row("llama.cpp", case, server, cases[case]) for case in ("none", "1")]
    jobs = draw_jobs(settings.shape, args)
    for row in rows:
        row.run(jobs[: args.streams])
        row.clear()
    for turn in range(args.turns):
        first = turn % len(rows)
        for row in [*rows[first:], *rows[:first]]:
            row.run(jobs)
    base = statistics.median(rows[0].tokens_per_s)
    described = [row.described(base, rows) for row in rows]
    facts = (
        f"{settings.shape.name}, {settings.dtype}{_rounded(settings)}: {len(jobs)} prompts of"
        f" {PROMPT_TOKENS} tokens, {args.tokens} tokens each, {args.streams} at a time. Adapters"
        f" of rank {RANK} on seven linear layers."
    )
    suffix = "" if settings.max_num_seqs > 1 else "_single"  # the shape's name has the rounding
    name = re.sub(r"\W", "_", f"adapters_{settings.shape.name}{suffix}_{settings.dtype}")
    publish(name, facts, COLUMNS, described, load.cores, args.results)


def _rounded(settings: Settings) -> str:
    return "" if settings.quantization is None else f", rounded to {settings.quantization}"


def _paths(names: Sequence[str], folder: Path) -> dict[str, str]:
    return {name: str(folder / name) for name in names}


COLUMNS = {
    "engine": "engine",
    "adapters": "adapters in the batch",
    "tokens_per_s": "tokens/s",
    "ratio": "÷ without",
    "times_vllm": "÷ vLLM",
    "times_llama.cpp": "÷ llama.cpp",
    "first_token_p99_ms": "first token, p99 ms",
}
"""Titles by the names in a row."""


class Served:
    """Pagewire's services."""

    def __init__(self, address: str) -> None:
        self._address = address

    def run(self, jobs: Sequence[Job]) -> tuple[float, list[float]]:
        """The time for all jobs, and that to the first token of each."""
        return asyncio.run(self._run(jobs))

    async def _run(self, jobs: Sequence[Job]) -> tuple[float, list[float]]:
        async with AsyncClient(self._address) as client:
            began = time.perf_counter()
            firsts = await asyncio.gather(*(self._generate(client, job, began) for job in jobs))
            return time.perf_counter() - began, firsts

    async def _generate(self, client: AsyncClient, job: Job, began: float) -> float:
        params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=job.num_output_tokens)
        first, num_tokens = 0.0, 0
        async with client.stream(job.prompt, params, lora=job.adapter) as stream:
            async for delta in stream:
                first = first or time.perf_counter() - began
                num_tokens += len(delta.token_ids)
        if num_tokens != job.num_output_tokens:
            raise ValueError(f"expected {job.num_output_tokens} tokens, got {num_tokens}")
        return first


class Child:
    """An engine in its own process, which runs all jobs at once."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        engine.pause()

    def run(self, jobs: Sequence[Job]) -> tuple[float, list[float]]:
        """As `Served.run`, without times to first tokens."""
        self._engine.resume()
        outputs = self._engine.run([*jobs])
        self._engine.pause()
        return outputs.seconds, []


@dataclass(slots=True)
class Row:
    """An engine with some adapters, and its measurements."""

    engine: str
    case: str
    runs: Served | Child
    adapters: Sequence[str | None]
    tokens_per_s: list[float] = field(default_factory=list)
    first_s: list[float] = field(default_factory=list)

    def run(self, jobs: Sequence[Job]) -> None:
        """Run the jobs, with the adapters in turns."""
        chosen = [
            replace(job, adapter=self.adapters[i % len(self.adapters)])
            for i, job in enumerate(jobs)
        ]
        seconds, firsts = self.runs.run(chosen)
        self.tokens_per_s.append(sum(job.num_output_tokens for job in jobs) / seconds)
        self.first_s += firsts
        print(f"{self.engine:36} {self.case:20} {self.tokens_per_s[-1]:8.0f} tokens/s", flush=True)

    def clear(self) -> None:
        """Forget what was measured."""
        self.tokens_per_s, self.first_s = [], []

    def described(self, base: float, rows: "Sequence[Row]") -> dict[str, Any]:
        """The row of the table. base: tokens per second without adapters; rows: all of it."""
        found = statistics.median(self.tokens_per_s)
        described = {
            "engine": self.engine,
            "adapters": self.case,
            "tokens_per_s": found,
            "ratio": round(found / base, 3),
            "runs": self.tokens_per_s,
        }
        for other in rows:
            if other.engine in _OTHERS and self.engine not in _OTHERS and other.case == self.case:
                times = found / statistics.median(other.tokens_per_s)
                described[f"times_{other.engine}"] = round(times, 2)
        if self.first_s:
            described["first_token_p99_ms"] = round(1e3 * float(np.quantile(self.first_s, 0.99)))
        return described


def serve(settings: Settings, adapters: dict[str, str], stack: ExitStack) -> Served:
    """Start Pagewire's services."""
    chosen = flags(settings)
    core_flags = options({name: chosen.pop(name) for name in CORE_FLAGS})
    worker_flags = options(chosen)
    if adapters:
        worker_flags += ["--enable-lora", "--max-loras", str(SLOTS), "--max-lora-rank", str(RANK)]
        for name, path in adapters.items():
            worker_flags += ["--lora-modules", f"{name}={path}"]
    cluster = Cluster(
        Path(stack.enter_context(tempfile.TemporaryDirectory())),
        model=settings.model(),
        worker_flags=worker_flags,
        core_flags=core_flags,
    )
    stack.enter_context(cluster).start()
    return Served(cluster.frontend_address())


def draw_jobs(shape: Shape, args: argparse.Namespace) -> list[Job]:
    """Prompts that share no prefix."""
    draw = np.random.default_rng(0)
    prompts = draw.integers(10, shape.vocab_size, (args.prompts, PROMPT_TOKENS)).tolist()
    return [Job(prompt=prompt, num_output_tokens=args.tokens) for prompt in prompts]


def write_adapters(shape: Shape, count: int, folder: Path) -> list[str]:
    """Write adapters for a shape of Llama's kind into folders of `folder`; returns their names."""
    hidden, inner = shape.hidden_size, shape.intermediate_size
    heads, kv_heads = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    sizes = {
        "self_attn.q_proj": (heads, hidden),
        "self_attn.k_proj": (kv_heads, hidden),
        "self_attn.v_proj": (kv_heads, hidden),
        "self_attn.o_proj": (hidden, heads),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    names = [f"adapter-{i}" for i in range(count)]
    for i, name in enumerate(names):
        generator, tensors = torch.Generator().manual_seed(i), {}
        for layer in range(shape.num_layers):
            for module, (outputs, inputs) in sizes.items():
                start = f"base_model.model.model.layers.{layer}.{module}.lora"
                for part, size in (("A", (RANK, inputs)), ("B", (outputs, RANK))):
                    matrix = torch.randn(size, generator=generator) * size[1] ** -0.5
                    tensors[f"{start}_{part}.weight"] = matrix.bfloat16()
        (folder / name).mkdir()
        save_file(tensors, folder / name / "adapter_model.safetensors")
        targets = [module.rpartition(".")[2] for module in sizes]
        settings = {"peft_type": "LORA", "r": RANK, "lora_alpha": 2, "target_modules": targets}
        (folder / name / "adapter_config.json").write_text(json.dumps(settings))
    return names


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_common(parser)
    parser.add_argument("--adapters", type=int, default=32, help="at least the slots")
    parser.add_argument("--streams", type=int, default=16, help="requests at a time")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64, help="of an answer")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--llama-server", type=Path, help="llama.cpp's server")
    parser.set_defaults(shape=["smollm2-135m"])
    args = parser.parse_args(arguments)
    if args.llama_server is not None and args.quantization is not None:
        parser.error("--llama-server: expected no --quantization, which it does not have")
    if args.adapters < SLOTS:
        parser.error(f"--adapters: expected at least {SLOTS}, got {args.adapters}")
    return args


if __name__ == "__main__":
    main()
