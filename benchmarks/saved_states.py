"""Cost of saved states: speed with the prefix cache and without, where nothing is ever found.

    python -m benchmarks.saved_states --shape qwen3.5-0.8b

Two `LLM`s take turns with new random prompts: one saves states at boundaries of prompts, while it
decodes and at the ends of requests; the other has `enable_prefix_caching` off. *tokens/s*: of
`--num-requests` that run together; *first token*: the time of a request for one token, alone. The
ratios are those of medians.
"""

from collections.abc import Sequence
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks.engines.engine import Settings
from benchmarks.engines.pagewire import Pagewire
from benchmarks.engines.workloads import Lengths, Workload
from benchmarks.measuring.machine import ForeignLoad
from benchmarks.measuring.processes import exit_on_sigterm
from benchmarks.measuring.tables import publish, script_parser
from benchmarks.models.model_shapes import SHAPES


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, and write the results."""
    parser = script_parser(__doc__)
    parser.add_argument("--shape", default="qwen3.5-0.8b", choices=list(SHAPES))
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--num-requests", type=int, default=16)
    parser.add_argument("--prompt-tokens", type=int, default=1100)
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--kv-cache-gib", type=int, default=3)
    parser.add_argument("--checkpoints", type=Path, default=Path("/tmp/pagewire-checkpoints"))
    args = parser.parse_args(arguments)
    about = {name: value for name, value in vars(args).items() if not isinstance(value, Path)}
    exit_on_sigterm()
    load, draw = ForeignLoad(), np.random.default_rng(0)
    shape = SHAPES[args.shape]
    settings = Settings(
        shape=shape,
        dtype=args.dtype,
        checkpoints=args.checkpoints,
        kv_cache_gib=args.kv_cache_gib,
    )
    batch, single = (
        Workload(
            name=name,
            num_requests=number,
            lengths=lambda _, size=size: Lengths(prompt=args.prompt_tokens, output=size),
        )
        for name, number, size in (
            ("batch", args.num_requests, args.output_tokens),
            ("single", 1, 1),
        )
    )
    speeds: dict[str, list[float]] = {"saved": [], "off": []}
    first: dict[str, list[float]] = {"saved": [], "off": []}
    with (
        Pagewire(settings, "saved") as saved,
        Pagewire(settings, "off", enable_prefix_caching=False) as off,
    ):
        for repeat in range(args.repeats + 1):
            for engine in (saved, off) if repeat % 2 else (off, saved):
                jobs = batch.make_jobs(draw, shape.vocab_size)
                seconds = engine.run(jobs).seconds
                alone = engine.run(single.make_jobs(draw, shape.vocab_size)).seconds
                if repeat:  # the first one warms up
                    speeds[engine.name].append(args.num_requests * args.output_tokens / seconds)
                    first[engine.name].append(alone)
    rows: list[dict[str, object]] = [
        {
            "states": name,
            "tokens/s": round(median(speeds[name]), 2),
            "first token, s": round(median(first[name]), 4),
        }
        for name in speeds
    ]
    ratios = (round(median(of["saved"]) / median(of["off"]), 3) for of in (speeds, first))
    rows.append({"states": "ratio"} | dict(zip(list(rows[0])[1:], ratios, strict=True)))
    facts = (
        f"{args.shape} in {args.dtype}, {args.num_requests} prompts of {args.prompt_tokens} tokens,"
        f" {args.output_tokens} tokens of output, medians of {args.repeats} runs in alternation."
    )
    columns = {name: name for name in rows[0]}
    publish("saved_states", facts, columns, rows, load.cores, args.results, **about)


if __name__ == "__main__":
    main()
