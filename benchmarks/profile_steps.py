"""Profile of decode steps and mixed steps: idle time of the device, and time by operation.

    python -m benchmarks.profile_steps --device cuda --shape qwen3-0.6b

Scheduler core and worker run in this process. *Decode* steps have a row for each of `--sequences`;
*mixed* steps also have a chunk of a prompt. The idle share is the part of the time from the first
to the last operation during which the device runs none; the steps in which the profiler starts are
not counted. Traces for https://ui.perfetto.dev are written next to the results.
"""

import argparse
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.engines.engine import Settings
from benchmarks.engines.in_process import InProcess, described
from benchmarks.machine import ForeignLoad, save
from benchmarks.model_shapes import SHAPES
from benchmarks.synthetic_tokenizer import FIRST_WORD_ID
from benchmarks.tables import script_parser

_MOST_OPERATIONS = 15
"""Maximum number of operations in a table, those that take longest."""

_STARTING_STEPS = 2
"""Steps in which the profiler starts, before those that are profiled."""

_SLACK = 16
"""Output tokens of a sequence beyond one for each step, for steps in flight."""

_MOST_PROMPT_TOKENS = 16384
"""Prompt tokens of a step before the profiled ones: all sequences are soon decoding."""


def idle_share(intervals: Iterable[tuple[float, float]]) -> float:
    """Share of the time from the first start to the last end that no interval covers."""
    ordered = sorted(intervals)
    if not ordered:
        raise ValueError("no operation was profiled")
    first, busy, end = ordered[0][0], 0.0, ordered[0][0]
    for begin, until in ordered:
        busy += max(0.0, until - max(begin, end))
        end = max(end, until)
    return 1 - busy / (end - first) if end > first else 0.0


class Steps:
    """Steps of decoding sequences, to which prompts can be added."""

    def __init__(self, args: argparse.Namespace) -> None:
        num_prompt_tokens = args.sequences * args.context
        budget = min(num_prompt_tokens, _MOST_PROMPT_TOKENS)
        num_profiled = args.decode_steps + args.mixed_steps + 2 * _STARTING_STEPS
        self.num_output_tokens = -(-num_prompt_tokens // budget) + num_profiled + _SLACK
        settings = Settings(
            shape=SHAPES[args.shape],
            dtype=args.dtype,
            checkpoints=args.checkpoints,
            device=args.device,
            max_model_len=max(args.context, args.chunk) + self.num_output_tokens,
            max_num_seqs=args.sequences + args.mixed_steps + _STARTING_STEPS,
            max_num_batched_tokens=args.sequences + max(args.chunk, budget),
            kv_cache_gib=args.kv_cache_gib,
            attention_backend=args.attention_backend,
        )
        self._engine = InProcess(described(settings))
        self._on_gpu = args.device == "cuda"
        self._vocab_size = settings.shape.vocab_size
        self._draw = np.random.default_rng(0)
        self.outputs: dict[int, list[int]] = {}

    def submit(self, count: int, prompt_len: int, num_tokens: int) -> None:
        """Queue requests of random tokens."""
        for _ in range(count):
            prompt = self._draw.integers(FIRST_WORD_ID, self._vocab_size, prompt_len).tolist()
            self.outputs[self._engine.submit(prompt, num_tokens)] = []

    def advance(self) -> bool:
        """Compute a step; False if nothing was left to do."""
        return self._engine.advance(self.outputs)

    def profiled(
        self, num_steps: int, trace: Path, before_each: Callable[[], None] = lambda: None
    ) -> dict[str, Any]:
        """Figures of the next steps that are launched; `before_each` is called before each one."""
        kind = DeviceType.CUDA if self._on_gpu else DeviceType.CPU
        activity = ProfilerActivity.CUDA if self._on_gpu else ProfilerActivity.CPU
        found = profile(activities=[activity])
        found.prepare_trace()
        self._launch(_STARTING_STEPS, before_each)
        found.start_trace()
        num_steps, num_rows = self._launch(num_steps, before_each)
        found.stop_trace()
        found.export_chrome_trace(str(trace))
        events = [event for event in found.events() if event.device_type == kind]
        times: Counter[str] = Counter()
        for event in events:
            times[event.name] += event.time_range.elapsed_us()
        spans = [(event.time_range.start, event.time_range.end) for event in events]
        whole_us = max(end for _, end in spans) - min(begin for begin, _ in spans)
        return {
            "steps": num_steps,
            "rows": round(num_rows / num_steps, 2),
            "us_per_step": round(whole_us / num_steps, 1),
            "operations_per_step": round(len(events) / num_steps, 1),
            "idle_share": round(idle_share(spans), 4),
            "us_per_step_by_operation": {
                name: round(us / num_steps, 1) for name, us in times.most_common(_MOST_OPERATIONS)
            },
        }

    def _launch(self, num_steps: int, before_each: Callable[[], None]) -> tuple[int, int]:
        """Launch steps, one for each that is collected, and wait for the device. Returns the number
        of steps launched, `num_steps` unless more or fewer are in flight than before, and of rows.
        """
        first_step, first_row = self._engine.num_steps, self._engine.num_rows
        for _ in range(num_steps):
            before_each()
            self.advance()
        if self._on_gpu:
            torch.cuda.synchronize()
        num_launched = self._engine.num_steps - first_step
        if num_launched == 0:
            raise RuntimeError("all sequences have ended: they need more output tokens")
        return num_launched, self._engine.num_rows - first_row


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Profile both kinds of steps, after a first run that compiles kernels."""
    steps, figures = Steps(args), {}
    for _ in range(2):
        steps.submit(args.sequences, args.context, steps.num_output_tokens)
        while not all(steps.outputs.values()):
            steps.advance()
        trace = args.results / "profile_decode.json.gz"
        figures["decode"] = steps.profiled(args.decode_steps, trace)
        trace = args.results / "profile_mixed.json.gz"
        figures["mixed"] = steps.profiled(
            args.mixed_steps, trace, lambda: steps.submit(1, args.chunk, 1)
        )
        while steps.advance():
            pass
        steps.outputs.clear()
    return figures


def main(arguments: Sequence[str] | None = None) -> None:
    """Profile, print, and write the results."""
    parser = script_parser(__doc__)
    parser.add_argument("--shape", default="qwen3-0.6b", choices=list(SHAPES))
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--attention-backend")
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--context", type=int, default=512, help="tokens of each prompt")
    parser.add_argument("--chunk", type=int, default=512, help="of a prompt, in a mixed step")
    parser.add_argument("--decode-steps", type=int, default=20)
    parser.add_argument("--mixed-steps", type=int, default=5)
    parser.add_argument("--kv-cache-gib", type=int, default=24)
    parser.add_argument(
        "--checkpoints", type=Path, default=Path(tempfile.gettempdir()) / "pagewire-checkpoints"
    )
    args = parser.parse_args(arguments)
    args.results.mkdir(parents=True, exist_ok=True)
    foreign = ForeignLoad()
    figures = run(args)
    for kind, found in figures.items():
        print(
            f"{kind}: {found['rows']:g} rows, {found['us_per_step']} µs a step,"
            f" idle {found['idle_share']:.1%}"
        )
        for name, us in found["us_per_step_by_operation"].items():
            print(f"    {us:10.1f} µs  {name[:100]}")
    about = {"shape": args.shape, "dtype": args.dtype, "sequences": args.sequences}
    about |= {"context": args.context, "chunk": args.chunk}
    save("profile_steps", about | figures, foreign.cores, args.results)


if __name__ == "__main__":
    main()
