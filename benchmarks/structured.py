"""Cost of structured output: masks by themselves, and a whole worker's tokens per second.

    python -m benchmarks.structured --batch-size 32 --vocab-size 128256

*Masks*: a batch of sequences, all with the same constraint, takes one random allowed token after
the other; reported are the milliseconds of a step in which all masks are computed, and of applying
them to a batch of logits. The vocabulary is made up: bytes, punctuation as JSON has it,
and words of random letters. *Throughput*: the embedded model, with core and worker in this process,
all rows constrained against none, by turns; the same numbers of tokens, since nothing ends them.
"""

import argparse
import statistics
import time
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.engines.in_process import InProcess
from pagewire.v1.sampling_pb2 import Constraint as ConstraintMessage
from pagewire.v1.sampling_pb2 import SamplerParams
from worker_service.sampling.logit_edits import apply_masks
from worker_service.sampling_params import Constraint, ConstraintKind
from worker_service.structured.grammars import Grammars
from worker_service.structured.masks import ConstrainedRow, MaskedRows, TokenMasks

PERSON = (
    '{"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"},'
    ' "tags": {"type": "array", "items": {"type": "string", "maxLength": 30}}},'
    ' "required": ["name", "age", "tags"], "additionalProperties": false}'
)
CONSTRAINTS = {
    "any JSON object": (ConstraintKind.JSON_SCHEMA, '{"type": "object"}'),
    "a schema": (ConstraintKind.JSON_SCHEMA, PERSON),
    "a regex": (ConstraintKind.REGEX, "[a-z ,.]{0,10000}"),
    "a grammar": (ConstraintKind.GRAMMAR, 'start: "(" start ")" | start "+" start | /[0-9]+/'),
}
PUNCTUATION = ('{"', '":', '": "', '",', '"}', ' "', '["', "],", '"]', "\n  ", ': "', '", "')
WORD_SHARE_WITH_SPACE = 0.5
UNBOUNDED = r"[ -~\n]*"
"""Nearly all texts: outputs go on as long as free ones."""


def made_up_texts(size: int) -> list[bytes]:
    """A vocabulary of this size."""
    draw = np.random.default_rng(0)
    texts = dict.fromkeys(
        [bytes([byte]) for byte in range(256)] + [p.encode() for p in PUNCTUATION]
    )
    while len(texts) < size:
        letters = draw.integers(97, 123, 2 + min(10, int(draw.exponential(4)))).astype(np.uint8)
        space = b" " if draw.random() < WORD_SHARE_WITH_SPACE else b""
        texts[space + letters.tobytes()] = None
    return list(texts)[:size]


def time_masks(
    grammars: Grammars, kind: ConstraintKind, text: str, batch_size: int, num_steps: int
) -> tuple[list[float], list[float]]:
    """Milliseconds of each step: to compute the masks, and to apply them."""
    nothing = np.empty(0, np.int32)
    constraint = Constraint(kind=kind, texts=(text,), end_token_ids=nothing, last_token_ids=nothing)
    masks = TokenMasks(grammars)
    draw = np.random.default_rng(1)
    outputs: list[list[int]] = [[] for _ in range(batch_size)]
    for slot in range(batch_size):
        masks.add(slot, constraint, 0, None)
    logits = torch.zeros(batch_size, grammars.vocab_size)
    computing, applying = [], []
    for _ in range(num_steps):
        rows = [ConstrainedRow(i, i, np.array(each, np.int32)) for i, each in enumerate(outputs)]
        began = time.perf_counter()
        masked = masks.compute(rows)
        computed = time.perf_counter()
        apply_masks(logits, masked)
        computing.append((computed - began) * 1e3)
        applying.append((time.perf_counter() - computed) * 1e3)
        for output, token in zip(outputs, _draw_allowed(masked, draw), strict=True):
            output.append(token)
    return computing[1:], applying[1:]  # the first step compiles


def _draw_allowed(masked: MaskedRows, draw: np.random.Generator) -> list[int]:
    bits = np.unpackbits(masked.bitmask.view(np.uint8), axis=1, bitorder="little")
    allowed = [np.flatnonzero(row) for row in bits]
    return [int(draw.choice(tokens)) if len(tokens) else 0 for tokens in allowed]


def time_worker(batch_size: int, num_tokens: int, repeats: int) -> tuple[list[float], list[float]]:
    """Tokens per second without constraints and with, by turns."""
    engine = InProcess(
        {
            "model": "embedded",
            "dtype": "float32",
            "device": "cpu",
            "threads": None,
            "max_model_len": None,
            "max_num_seqs": batch_size,
            "max_num_batched_tokens": 2048,
            "kv_cache_gib": 1,
        }
    )
    constraint = ConstraintMessage(regex=UNBOUNDED)
    kinds: list[dict[str, Any]] = [{}, {"constraint": constraint}]
    speeds: tuple[list[float], list[float]] = ([], [])
    for turn in range(repeats + 1):
        for kind, found in zip(kinds, speeds, strict=True):
            prompts = [[10 + turn, 20 + index, 30 + len(kind)] for index in range(batch_size)]
            began = time.perf_counter()
            sampling = SamplerParams(top_p=1.0, repetition_penalty=1.0, **kind)
            engine.generate(prompts, [num_tokens] * batch_size, sampling)
            if turn:  # the first one warms up
                found.append(batch_size * num_tokens / (time.perf_counter() - began))
    return speeds


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--vocab-size", type=int, default=128_256)
    parser.add_argument("--num-steps", type=int, default=100)
    parser.add_argument("--num-tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    console = Console()
    began = time.perf_counter()
    grammars = Grammars(made_up_texts(args.vocab_size))
    console.print(
        f"vocabulary of {args.vocab_size}: {time.perf_counter() - began:.2f} s to take in"
    )
    table = Table("constraint", "masks: median ms", "p99 ms", "applied: median ms")
    for name, (kind, text) in CONSTRAINTS.items():
        computing, applying = time_masks(grammars, kind, text, args.batch_size, args.num_steps)
        p99 = np.percentile(computing, 99)
        medians = (statistics.median(computing), statistics.median(applying))
        table.add_row(name, f"{medians[0]:.2f}", f"{p99:.2f}", f"{medians[1]:.2f}")
    console.print(table)
    free, bound = time_worker(args.batch_size, args.num_tokens, args.repeats)
    ratios = sorted(ours / theirs for ours, theirs in zip(bound, free, strict=True))
    console.print(
        f"embedded model, batch {args.batch_size}: {statistics.median(free):.0f} tokens/s free, "
        f"{statistics.median(bound):.0f} constrained; ratio {statistics.median(ratios):.3f} "
        f"({ratios[0]:.3f} to {ratios[-1]:.3f})"
    )


if __name__ == "__main__":
    main()
