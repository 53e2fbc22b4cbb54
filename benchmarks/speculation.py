"""Decoding with speculation against decoding without, in one process.

    python -m benchmarks.speculation MODEL --speculative ngram --streams 1 64

The same requests run with drafts and, by `num_speculative_tokens: 0`, without, in turns, and must
get the same tokens. A ratio is the median over pairs of turns, so that a machine whose speed drifts
affects both equally; the prompts are computed before, as the two differ in decoding alone. Each
turn belongs to a tenant of its own, whose history of outputs is empty at first.

The prompts (`speculation_prompts.toml`) are for a model that follows instructions: to copy or edit
a text, to extract JSON within a schema, to answer, and to continue at temperature 0.8. Results of
other models, such as one with random weights, say little. How much of the output was copied is in
the table: the share of its tokens that follow three tokens of the prompt as they do there. It is
computed from the tokens and does not depend on the drafter.
"""

import argparse
import os
import re
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer

from benchmarks.engines.in_process import InProcess
from benchmarks.measuring.machine import ForeignLoad
from benchmarks.measuring.tables import publish, script_parser
from benchmarks.models.draft_heads import head_config, head_tensors, write_head
from pagewire.v1.sampling_pb2 import SamplerParams
from worker_service.config import DRAFTERS
from worker_service.cpu_cores import limit_spinning
from worker_service.loader.files.config import read_config
from worker_service.loader.files.places import resolve_model
from worker_service.plan import StepResult

END_TOKENS = ("<|im_end|>", "<|endoftext|>", "</s>")

NGRAM = 4
"""Tokens that occur in the prompt as well, the last of which counts as copied."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """Requests of one kind."""

    prompts: Sequence[str]
    is_chat: bool = True
    temperature: float = 0.0
    json_schema: str = ""
    """The output's schema; empty: it has none."""

    def encode(self, tokenizer: Tokenizer) -> list[list[int]]:
        """The prompts as tokens."""
        form = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n" if self.is_chat else "{}"
        return [tokenizer.encode(form.format(text)).ids for text in self.prompts]

    def sampling(self, ends: set[int]) -> SamplerParams:
        """The parameters of all requests; `ends`: tokens at which a JSON text may end."""
        params = SamplerParams(
            temperature=self.temperature, top_p=1.0, repetition_penalty=1.0, seed=1
        )
        if self.json_schema:
            params.constraint.json_schema = self.json_schema
            params.constraint.end_token_ids = np.array(sorted(ends), "<i4").tobytes()
        return params


_PROMPTS = tomllib.loads(Path(__file__).with_name("speculation_prompts.toml").read_text())
_TEXTS: Mapping[str, str] = _PROMPTS["texts"]


def _filled(kind: str) -> list[str]:
    """The prompts of a kind, with their texts."""
    return [prompt.format_map(_TEXTS) for prompt in _PROMPTS[kind].values()]


WORKLOADS = {
    "copy": Workload(prompts=_filled("copy")),
    "json": Workload(
        prompts=[_PROMPTS["json_prompt"] + _TEXTS[name] for name in _PROMPTS["json_texts"]],
        json_schema=_PROMPTS["json_schema"],
    ),
    "chat": Workload(prompts=_PROMPTS["chat"]),
    "free": Workload(prompts=_filled("free"), is_chat=False, temperature=0.8),
}


def copied(prompt: list[int], output: list[int]) -> int:
    """The number of output tokens that end an n-gram that the prompt contains."""
    of_prompt = set(_ngrams(prompt))
    context = prompt[1 - NGRAM :]
    return sum(ngram in of_prompt for ngram in _ngrams(context + output))


def _ngrams(tokens: list[int]) -> Iterator[tuple[int, ...]]:
    return zip(*(tokens[start:] for start in range(NGRAM)), strict=False)


class Speculating(InProcess):
    """An engine that counts steps, drafts and accepted drafts."""

    def __init__(self, settings: dict[str, Any]) -> None:
        super().__init__(settings)
        self.counts = np.zeros(3, int)
        chunks = [data for name, data in self.executor.assets() if name == "tokenizer.json"]
        self.tokenizer = Tokenizer.from_buffer(b"".join(chunks))

    def update(self, result: StepResult) -> None:
        """Count, and give the core a step's result."""
        self.counts[0] += 1
        if result.num_drafts is not None and result.num_sampled is not None:
            self.counts[1:] += result.num_drafts.sum(), (result.num_sampled - 1).sum()
        super().update(result)


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One batch of requests in one turn."""

    outputs: list[list[int]]
    seconds: float
    counts: np.ndarray
    """Steps, drafts, accepted drafts."""


def measure(
    engine: Speculating, workload: Workload, num_streams: int, args: argparse.Namespace
) -> dict[str, object]:
    """A line of the table."""
    encoded = workload.encode(engine.tokenizer)
    count = max(num_streams, len(encoded))
    prompts = [encoded[number % len(encoded)] for number in range(count)]
    batches = [
        prompts[first : first + num_streams] for first in range(0, len(prompts), num_streams)
    ]
    ends = {engine.tokenizer.token_to_id(name) for name in END_TOKENS} - {None}
    sampling = workload.sampling(ends)

    def run(batch: list[list[int]], drafts: int | None, tenant: str) -> Run:
        fields: dict[str, Any] = {
            "num_speculative_tokens": drafts,
            "stop_token_ids": frozenset(ends),
            "tenant": tenant,
        }
        engine.generate(batch, [1] * len(batch), sampling, **fields)
        engine.counts = np.zeros(3, int)
        began = time.perf_counter()
        outputs = engine.generate(batch, [args.tokens] * len(batch), sampling, **fields)
        return Run(outputs=outputs, seconds=time.perf_counter() - began, counts=engine.counts)

    pairs: list[list[tuple[Run, Run]]] = [[] for _ in batches]
    for turn in range(1 + args.turns):  # the first one does not count
        for batch, turns in zip(batches, pairs, strict=True):
            turns.append((run(batch, 0, f"plain {turn}"), run(batch, None, f"drafts {turn}")))
    for turns in pairs:
        expected = turns[0][0].outputs
        assert all(run.outputs == expected for pair in turns for run in pair), (
            "drafts change tokens"
        )
    counted = [turns[1:] for turns in pairs]
    row = {"streams": num_streams} | _row(batches, counted)
    if num_streams == 1:
        by_batch = zip(batches, counted, strict=True)
        ratios = [_row([batch], [turns])["ratio"] for batch, turns in by_batch]
        row["prompt"] = f"{min(ratios)} to {max(ratios)}"
    return row


def _row(batches: list[list[list[int]]], pairs: list[list[tuple[Run, Run]]]) -> dict[str, Any]:
    """A line of these batches. pairs: by batch and turn, without drafts and with."""
    turns = list(zip(*pairs, strict=True))
    plain_s, seconds = (
        [sum(pair[which].seconds for pair in turn) for turn in turns] for which in (0, 1)
    )
    last = [with_drafts for _, with_drafts in turns[-1]]
    num_steps, num_drafts, num_accepted = map(int, sum(run.counts for run in last))
    texts = [
        (prompt, output)
        for batch, run in zip(batches, last, strict=True)
        for prompt, output in zip(batch, run.outputs, strict=True)
    ]
    num_tokens = sum(len(output) for _, output in texts)
    ratios = [plain / speculating for plain, speculating in zip(plain_s, seconds, strict=True)]
    return {
        "tokens": num_tokens,
        "copied": round(sum(copied(*text) for text in texts) / num_tokens, 2),
        "plain_tokens_per_s": round(num_tokens / median(plain_s), 1),
        "tokens_per_s": round(num_tokens / median(seconds), 1),
        "ratio": round(median(ratios), 3),
        "drafts": num_drafts,
        "accepted": round(num_accepted / max(1, num_drafts), 3),
        "tokens_per_step": round(num_tokens / num_steps, 2),
    }


COLUMNS = {
    "workload": "workload",
    "prompt": "by prompt",
    "streams": "streams",
    "tokens": "tokens",
    "copied": "copied",
    "plain_tokens_per_s": "tokens/s without",
    "tokens_per_s": "with",
    "ratio": "ratio",
    "drafts": "drafts",
    "accepted": "accepted",
    "tokens_per_step": "tokens/step",
}
"""Titles by the names in a row."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, and write the results."""
    parser = script_parser(__doc__)
    parser.add_argument("model", help="checkpoint directory, GGUF file or `embedded`")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--quantization")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--speculative", choices=DRAFTERS, default="ngram")
    parser.add_argument("--speculative-model", help="`random`: a head with random weights")
    parser.add_argument("--num-speculative-tokens", type=int)
    parser.add_argument("--max-speculative-seqs", type=int, default=64)
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--streams", type=int, nargs="+", default=[1])
    parser.add_argument("--tokens", type=int, default=256, help="maximum per output")
    parser.add_argument("--turns", type=int, default=5)
    args = parser.parse_args(arguments)
    if args.speculative_model == "random":
        with tempfile.TemporaryDirectory(prefix="pagewire-head-") as folder:
            config = head_config(read_config(resolve_model(args.model)))
            args.speculative_model = str(write_head(Path(folder), head_tensors(config), config))
            _run(args)
    else:
        _run(args)


def _run(args: argparse.Namespace) -> None:
    runner = ("speculative", "speculative_model", "num_speculative_tokens")
    engine = Speculating(
        {
            "model": args.model,
            "dtype": args.dtype,
            "quantization": args.quantization,
            "device": args.device,
            "batch_invariant": args.device == "cuda",
            "threads": args.threads,
            "max_model_len": None,
            "max_num_seqs": max(args.streams),
            "max_num_batched_tokens": 2048,
            "kv_cache_gib": 1,
            "runner": {name: getattr(args, name) for name in runner},
            "scheduler": {"max_speculative_seqs": args.max_speculative_seqs},
        }
    )
    load = ForeignLoad()
    rows = [
        {"workload": kind} | measure(engine, WORKLOADS[kind], num_streams, args)
        for num_streams in args.streams
        for kind in args.workloads
    ]
    weights = args.quantization or args.dtype
    facts = (
        f"{Path(args.model).name}, {weights}, `--speculative {args.speculative}`; at most "
        f"{args.tokens} tokens per output, medians of {args.turns} pairs of turns."
    )
    name = f"speculation_{Path(args.model).stem}_{weights}_{args.speculative}".lower()
    publish(re.sub(r"\W", "_", name), facts, COLUMNS, rows, load.cores, args.results)


if __name__ == "__main__":
    environment = dict(os.environ)
    limit_spinning(environment)
    if environment != os.environ:  # OpenMP has read it by now
        command = [sys.executable, "-m", "benchmarks.speculation", *sys.argv[1:]]
        os.execve(sys.executable, command, environment)
    main()
