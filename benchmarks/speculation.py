"""Throughput with speculative decoding against none, in one process.

    python -m benchmarks.speculation MODEL --speculative ngram --streams 1 64

The same requests run with drafts and, by `num_speculative_tokens: 0`, without, in turns, and must
get the same tokens. A ratio is the median over pairs of turns, so that a machine whose speed drifts
affects both equally. Prompts are texts for an instruction-tuned model: to copy, to extract JSON
from, to answer, and to continue at temperature 0.8. Results of other models, such as one with
random weights, say little. For these, a grammar restricts the output of one workload to a text in
the prompt, so that it is timed as if the model copied it.
"""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer

from benchmarks.engines.in_process import InProcess
from benchmarks.machine import ForeignLoad, save
from benchmarks.tables import print_table, script_parser
from pagewire.v1.sampling_pb2 import SamplerParams
from worker_service.config import DRAFTERS
from worker_service.cpu_cores import limit_spinning
from worker_service.plan import StepResult

TEXT = (
    "The harbour master kept two clocks on his desk. One showed the hour of the town, by which"
    " the ferries left and the bakers rose; the other had stopped on the evening of the great"
    " storm, at ten minutes to nine, and nobody was allowed to wind it. Years later, when the new"
    " breakwater was built, the engineers found his notes: every wave of that night, its height"
    " and its time, written down in pencil until the paper was wet."
)
END_TOKENS = ("<|im_end|>", "<|endoftext|>", "</s>")
PEOPLE = "Ada Byron, 36, London; Alan Turing, 41, Wilmslow; Grace Hopper, 85, Arlington"


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """Requests of one kind."""

    prompts: Sequence[str]
    is_chat: bool = True
    temperature: float = 0.0
    is_bound: bool = False
    """Whether a grammar binds the output to the prompt's text, as if the model copied it."""

    def prompt(self, number: int) -> str:
        """The prompt of the request with this number."""
        text = self.prompts[number % len(self.prompts)]
        if not self.is_chat:
            return text
        return f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


WORKLOADS = {
    "copy": Workload(
        prompts=[
            f"Repeat the following text, word for word:\n\n{TEXT}",
            f"Copy this text and replace 'harbour' by 'port':\n\n{TEXT}",
            f"Write these people as a JSON list of name, age and city: {PEOPLE}",
        ]
    ),
    "bound": Workload(prompts=[f"{TEXT}\n{TEXT}"], is_chat=False, is_bound=True),
    "chat": Workload(
        prompts=[
            "What is photosynthesis? Explain it to a child.",
            "Give me five tips for a job interview.",
            "Write a Python function that reverses a linked list, and explain it.",
        ]
    ),
    "free": Workload(
        prompts=["Once upon a time, in a village by the sea,", TEXT, "In 1969, the Apollo 11"],
        is_chat=False,
        temperature=0.8,
    ),
}


@dataclass(slots=True)
class Drafted:
    """Numbers of drafts and of accepted drafts."""

    num_steps: int = 0
    num_drafts: int = 0
    num_kept: int = 0

    def add(self, result: StepResult) -> None:
        """Count a step."""
        self.num_steps += 1
        if result.num_drafts is not None and result.num_sampled is not None:
            self.num_drafts += int(result.num_drafts.sum())
            self.num_kept += int((result.num_sampled - 1).sum())


class Speculating(InProcess):
    """An engine that counts drafts."""

    def __init__(self, settings: dict[str, Any]) -> None:
        super().__init__(settings)
        self.drafted = Drafted()
        files = self.executor.assets()
        self.tokenizer = Tokenizer.from_buffer(
            b"".join(data for name, data in files if name == "tokenizer.json")
        )

    def update(self, result: StepResult) -> None:
        """Count, and give the core a step's result."""
        self.drafted.add(result)
        super().update(result)


@dataclass(slots=True)
class Run:
    """Turns of one line of the table."""

    plain_s: list[float] = field(default_factory=list)
    speculating_s: list[float] = field(default_factory=list)
    num_tokens: int = 0


def measure(
    engine: Speculating, workload: Workload, num_streams: int, args: argparse.Namespace
) -> dict[str, object]:
    """One line: the same requests in turns, after a turn of each that does not count."""
    tokenizer = engine.tokenizer
    numbers = range(max(num_streams, len(workload.prompts)))
    prompts = [tokenizer.encode(workload.prompt(number)).ids for number in numbers]
    batches = [prompts[first : first + num_streams] for first in numbers[::num_streams]]
    ends = {tokenizer.token_to_id(name) for name in END_TOKENS}
    sampling = SamplerParams(
        temperature=workload.temperature, top_p=1.0, repetition_penalty=1.0, seed=1
    )
    if workload.is_bound:
        ends_column = np.array(sorted(ends - {None}), "<i4").tobytes()
        # A grammar of tokens, not of characters, which random weights would tokenize differently.
        copied = tokenizer.encode(workload.prompts[0]).ids[: args.tokens]
        sampling.constraint.grammar = "start: " + " ".join(f"<[{token}]>" for token in copied)
        sampling.constraint.end_token_ids = ends_column
    run = Run()
    outputs: list[list[list[int]]] = []
    for turn in range(1 + args.turns):
        for drafts in (0, None):
            engine.drafted = Drafted()
            began = time.perf_counter()
            output: list[list[int]] = []
            for batch in batches:
                output += engine.generate(
                    batch,
                    [args.tokens] * len(batch),
                    sampling,
                    num_speculative_tokens=drafts,
                    stop_token_ids=frozenset(ends - {None}),
                )
            seconds = time.perf_counter() - began
            outputs.append(output)
            if turn:
                (run.plain_s if drafts == 0 else run.speculating_s).append(seconds)
    assert all(output == outputs[0] for output in outputs), "drafts have changed tokens"
    run.num_tokens = sum(map(len, outputs[0]))
    return _row(run, engine.drafted) | {"streams": num_streams}


def _row(run: Run, drafted: Drafted) -> dict[str, object]:
    pairs = zip(run.plain_s, run.speculating_s, strict=True)
    return {
        "tokens": run.num_tokens,
        "plain_tokens_per_s": round(run.num_tokens / median(run.plain_s), 1),
        "tokens_per_s": round(run.num_tokens / median(run.speculating_s), 1),
        "ratio": round(median(plain / speculating for plain, speculating in pairs), 3),
        "drafts": drafted.num_drafts,
        "accepted": round(drafted.num_kept / max(1, drafted.num_drafts), 3),
        "tokens_per_step": round(run.num_tokens / drafted.num_steps, 2),
    }


COLUMNS = {
    "workload": "workload",
    "streams": "streams",
    "tokens": "tokens",
    "plain_tokens_per_s": "tokens/s without",
    "tokens_per_s": "with",
    "ratio": "ratio",
    "drafts": "drafts",
    "accepted": "accepted",
    "tokens_per_step": "tokens/step",
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, and write the results."""
    parser = script_parser(__doc__)
    parser.add_argument("model", help="checkpoint directory, GGUF file or `embedded`")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--quantization")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--speculative", choices=DRAFTERS, default="ngram")
    parser.add_argument("--speculative-model")
    parser.add_argument("--num-speculative-tokens", type=int)
    parser.add_argument("--max-speculative-seqs", type=int, default=64)
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--streams", type=int, nargs="+", default=[1])
    parser.add_argument("--tokens", type=int, default=256, help="maximum per output")
    parser.add_argument("--turns", type=int, default=5)
    args = parser.parse_args(arguments)
    runner = {
        name: getattr(args, name)
        for name in ("speculative", "speculative_model", "num_speculative_tokens")
    }
    engine = Speculating(
        {
            "model": args.model,
            "dtype": args.dtype,
            "quantization": args.quantization,
            "device": "cpu",
            "threads": args.threads,
            "max_model_len": None,
            "max_num_seqs": max(args.streams),
            "max_num_batched_tokens": 2048,
            "kv_cache_gib": 1,
            "runner": runner,
            "scheduler": {"max_speculative_seqs": args.max_speculative_seqs},
        }
    )
    load = ForeignLoad()
    rows = [
        {"workload": name} | measure(engine, WORKLOADS[name], num_streams, args)
        for num_streams in args.streams
        for name in args.workloads
    ]
    print_table(rows, f"{args.speculative} against no speculation", COLUMNS)
    figures = {
        "model": args.model,
        "dtype": args.dtype,
        "quantization": args.quantization,
        **runner,
        "rows": rows,
    }
    save(f"speculation_{args.speculative}", figures, load.cores, args.results)


if __name__ == "__main__":
    environment = dict(os.environ)
    limit_spinning(environment)
    if environment != os.environ:  # OpenMP has read it by now
        command = [sys.executable, "-m", "benchmarks.speculation", *sys.argv[1:]]
        os.execve(sys.executable, command, environment)
    main()
