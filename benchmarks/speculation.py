"""Decoding with speculation against decoding without, in one process.

    python -m benchmarks.speculation MODEL --speculative ngram --streams 1 64
    python -m benchmarks.speculation MODEL --workloads copy chat \\
        --vllm-python VLLM/bin/python --llama-server BUILD/bin/llama-server --gguf FILE

The same requests run with drafts and, by `num_speculative_tokens: 0`, without, in turns, and must
get the same tokens. A ratio is the median over pairs of turns, so that a machine whose speed drifts
affects both equally; the prompts are computed before, as the two differ in decoding alone. Each
turn belongs to a tenant of its own, whose history of outputs is empty at first.

The prompts (`speculation_prompts.toml`) are for a model that follows instructions: to copy or edit
a text, to extract JSON within a schema, to answer, and to continue at temperature 0.8. Results of
other models, such as one with random weights, say little. For these, a grammar restricts the output
of one workload to a text in the prompt, so that it is timed as if the model copied it. How much of
the output was copied is in the table, whatever the workload is called: the share of its tokens that
follow three tokens of the prompt as they do there. It is computed from the tokens and does not
depend on the drafter.

vLLM and llama.cpp can run the prompts with their own n-gram speculation and without, one at a time
and greedily, each to the number of tokens that our output has.
"""

import argparse
import os
import re
import sys
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer

from benchmarks.engines import llama_cpp, vllm
from benchmarks.engines.engine import Engine, Settings
from benchmarks.engines.in_process import InProcess
from benchmarks.machine import ForeignLoad, save
from benchmarks.model_shapes import SHAPES
from benchmarks.tables import print_table, script_parser
from benchmarks.workloads import Job
from pagewire.v1.sampling_pb2 import SamplerParams
from worker_service.config import DRAFTERS
from worker_service.cpu_cores import limit_spinning
from worker_service.plan import StepResult

END_TOKENS = ("<|im_end|>", "<|endoftext|>", "</s>")

NGRAM = 4
"""Tokens that occur in the prompt as well, the last of which counts as copied."""

VLLM_SPECULATION = {
    "method": "ngram",
    "num_speculative_tokens": 5,
    "prompt_lookup_max": 4,
    "prompt_lookup_min": 2,
}
LLAMA_CPP_SPECULATION = (
    *("--spec-type", "ngram-simple"),
    *("--spec-ngram-simple-size-n", "4", "--spec-ngram-simple-size-m", "8"),
)
"""At most 8 drafts that followed the last 4 tokens; its defaults are 48 and 12."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """Requests of one kind."""

    prompts: Mapping[str, str]
    """By their names in the table."""
    is_chat: bool = True
    temperature: float = 0.0
    is_bound: bool = False
    """Whether a grammar binds the output to the prompt's text, as if the model copied it."""
    json_schema: str = ""
    """The output's schema; empty: it has none."""

    @property
    def is_for_peers(self) -> bool:
        """Whether other engines can run the prompts: greedily, and without constraints."""
        return not (self.temperature or self.is_bound or self.json_schema)

    def encode(self, tokenizer: Tokenizer) -> list[list[int]]:
        """The prompts as tokens."""
        form = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n" if self.is_chat else "{}"
        return [tokenizer.encode(form.format(text)).ids for text in self.prompts.values()]


_PROMPTS = tomllib.loads(Path(__file__).with_name("speculation_prompts.toml").read_text())
_TEXTS = _PROMPTS["texts"]


def _filled(kind: str) -> dict[str, str]:
    """The prompts of a kind, with their texts."""
    return {name: prompt.format_map(_TEXTS) for name, prompt in _PROMPTS[kind].items()}


WORKLOADS = {
    "copy": Workload(prompts=_filled("copy")),
    "json": Workload(
        prompts={name: _PROMPTS["json_prompt"] + _TEXTS[name] for name in _PROMPTS["json_texts"]},
        json_schema=_PROMPTS["json_schema"],
    ),
    "bound": Workload(
        prompts={"text": "{harbour}\n{harbour}".format_map(_TEXTS)}, is_chat=False, is_bound=True
    ),
    "chat": Workload(prompts={question: question for question in _PROMPTS["chat"]}),
    "free": Workload(prompts=_filled("free"), is_chat=False, temperature=0.8),
}


def copied(prompt: list[int], output: list[int]) -> int:
    """The number of output tokens that end an n-gram that the prompt contains."""
    known = set(_ngrams(prompt))
    context = prompt[1 - NGRAM :]
    return sum(ngram in known for ngram in _ngrams(context + output))


def _ngrams(tokens: list[int]) -> Iterator[tuple[int, ...]]:
    return zip(*(tokens[start:] for start in range(NGRAM)), strict=False)


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One batch of requests in one turn."""

    outputs: list[list[int]]
    seconds: float
    drafted: Drafted


def measure(
    engine: Speculating, workload: Workload, num_streams: int, args: argparse.Namespace
) -> tuple[list[dict[str, object]], list[Job]]:
    """Lines of the table: of all requests, and of each one if they run one at a time; and the same
    requests for other engines."""
    own = workload.encode(engine.tokenizer)
    prompts = [own[number % len(own)] for number in range(max(num_streams, len(own)))]
    batches = [
        prompts[first : first + num_streams] for first in range(0, len(prompts), num_streams)
    ]
    ends = {engine.tokenizer.token_to_id(name) for name in END_TOKENS} - {None}
    sampling = SamplerParams(
        temperature=workload.temperature, top_p=1.0, repetition_penalty=1.0, seed=1
    )
    constraint = sampling.constraint
    if workload.json_schema:
        constraint.json_schema = workload.json_schema
    elif workload.is_bound:
        # A grammar of tokens, not of characters, which random weights would tokenize differently.
        text = own[0][: args.tokens]
        constraint.grammar = "start: " + " ".join(f"<[{token}]>" for token in text)
    if constraint.WhichOneof("kind"):
        constraint.end_token_ids = np.array(sorted(ends), "<i4").tobytes()

    def run(batch: list[list[int]], drafts: int | None, tenant: str) -> Run:
        fields: dict[str, Any] = {
            "num_speculative_tokens": drafts,
            "stop_token_ids": frozenset(ends),
            "tenant": tenant,
        }
        engine.generate(batch, [1] * len(batch), sampling, **fields)
        engine.drafted = Drafted()
        began = time.perf_counter()
        outputs = engine.generate(batch, [args.tokens] * len(batch), sampling, **fields)
        return Run(outputs=outputs, seconds=time.perf_counter() - began, drafted=engine.drafted)

    pairs: list[list[tuple[Run, Run]]] = [[] for _ in batches]
    for turn in range(1 + args.turns):  # the first one does not count
        for batch, turns in zip(batches, pairs, strict=True):
            turns.append((run(batch, 0, f"plain {turn}"), run(batch, None, f"drafts {turn}")))
    for found in pairs:
        expected = found[0][0].outputs
        assert all(run.outputs == expected for pair in found for run in pair), (
            "drafts change tokens"
        )
    lines = [_row(batches, [found[1:] for found in pairs])]
    if num_streams == 1:
        each = zip(workload.prompts, batches, pairs, strict=True)
        lines += [{"prompt": name} | _row([batch], [found[1:]]) for name, batch, found in each]
    outputs = [output for found in pairs for output in found[0][0].outputs]
    jobs = [
        Job(prompt=prompt, num_output_tokens=len(output))
        for prompt, output in zip(prompts, outputs, strict=True)
    ]
    return [{"streams": num_streams} | line for line in lines], jobs


def _row(batches: list[list[list[int]]], pairs: list[list[tuple[Run, Run]]]) -> dict[str, object]:
    """A line of these batches. pairs: by batch and turn, without drafts and with."""
    turns = list(zip(*pairs, strict=True))
    plain_s, seconds = (
        [sum(pair[which].seconds for pair in turn) for turn in turns] for which in (0, 1)
    )
    last = [with_drafts for _, with_drafts in turns[-1]]
    num_drafts, num_kept, num_steps = (
        sum(getattr(run.drafted, name) for run in last)
        for name in ("num_drafts", "num_kept", "num_steps")
    )
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
        "accepted": round(num_kept / max(1, num_drafts), 3),
        "tokens_per_step": round(num_tokens / num_steps, 2),
    }


def peers(args: argparse.Namespace, jobs: Mapping[str, list[Job]]) -> list[dict[str, object]]:
    """Lines of the given engines with their own speculation and without, by workload."""
    settings = Settings(
        shape=SHAPES["llama-160m"],
        model_path=args.model,
        dtype=args.dtype,
        checkpoints=Path(),
        max_num_seqs=1,
        kv_cache_gib=1,
        threads=args.threads,
    )
    lines = []
    with ExitStack() as stack:
        started: dict[str, list[Engine]] = {}
        if (python := args.vllm_python) is not None:
            started[vllm.NAME] = [
                vllm.engine(python.absolute(), settings, speculative_config=config)
                for config in (None, VLLM_SPECULATION)
            ]
        if (server := args.llama_server) is not None:
            started[llama_cpp.NAME] = [
                llama_cpp.LlamaCpp(server, settings, args.gguf or Path(args.model), speculation)
                for speculation in ((), LLAMA_CPP_SPECULATION)
            ]
        for name, pair in started.items():
            for engine in pair:
                stack.enter_context(engine)
                engine.pause()
            lines += [
                {"engine": name, "workload": workload} | _peer_row(pair, some, args.turns)
                for workload, some in jobs.items()
            ]
    return lines


def _peer_row(pair: list[Engine], jobs: list[Job], num_turns: int) -> dict[str, object]:
    """A line of one engine. pair: without speculation and with."""
    seconds: list[list[float]] = [[], []]
    outputs: list[list[list[int]]] = [[], []]
    for _ in range(1 + num_turns):
        for which, engine in enumerate(pair):
            engine.resume()
            found = [engine.run([job]) for job in jobs]
            engine.pause()
            seconds[which].append(sum(each.seconds for each in found))
            outputs[which] = [each.token_ids[0] for each in found]
    plain_s, speculating_s = (each[1:] for each in seconds)
    num_tokens = sum(job.num_output_tokens for job in jobs)
    return {
        "tokens": num_tokens,
        "plain_tokens_per_s": round(num_tokens / median(plain_s), 1),
        "tokens_per_s": round(num_tokens / median(speculating_s), 1),
        "ratio": round(median(np.divide(plain_s, speculating_s).tolist()), 3),
        "same": f"{sum(map(list.__eq__, *outputs))} of {len(jobs)}",
    }


COLUMNS = {
    "engine": "engine",
    "workload": "workload",
    "prompt": "prompt",
    "streams": "streams",
    "tokens": "tokens",
    "copied": "copied",
    "plain_tokens_per_s": "tokens/s without",
    "tokens_per_s": "with",
    "ratio": "ratio",
    "drafts": "drafts",
    "accepted": "accepted",
    "tokens_per_step": "tokens/step",
    "same": "same output",
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
    parser.add_argument("--vllm-python", type=Path, help="the Python that has vLLM")
    parser.add_argument("--llama-server", type=Path, help="llama.cpp's server")
    parser.add_argument("--gguf", type=Path, help="MODEL for llama.cpp; default: MODEL")
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
    rows: list[dict[str, object]] = []
    greedy: dict[str, list[Job]] = {}
    weights = args.quantization or args.dtype
    name = f"speculation_{Path(args.model).stem}_{weights}_{args.speculative}".lower()
    figures = {
        "model": Path(args.model).name,
        "dtype": args.dtype,
        "quantization": args.quantization,
        **runner,
        "tokens": args.tokens,
        "turns": args.turns,
        "rows": rows,
    }
    for num_streams in args.streams:
        for kind in args.workloads:
            lines, jobs = measure(engine, WORKLOADS[kind], num_streams, args)
            rows += [{"engine": "pagewire", "workload": kind} | line for line in lines]
            if WORKLOADS[kind].is_for_peers:
                greedy[kind] = jobs
            # An interrupted run leaves the workloads that it has finished.
            save(re.sub(r"\W", "_", name), figures, load.cores, args.results)
    rows += peers(args, greedy)
    print_table(rows, f"{args.speculative} against no speculation", COLUMNS)
    save(re.sub(r"\W", "_", name), figures, load.cores, args.results)


if __name__ == "__main__":
    environment = dict(os.environ)
    limit_spinning(environment)
    if environment != os.environ:  # OpenMP has read it by now
        command = [sys.executable, "-m", "benchmarks.speculation", *sys.argv[1:]]
        os.execve(sys.executable, command, environment)
    main()
