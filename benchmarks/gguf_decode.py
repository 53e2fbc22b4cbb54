"""Decoding from a GGUF file, in process, against llama.cpp on the same file.

    python -m benchmarks.gguf_decode model.gguf --llama-batched-bench llama-batched-bench

Both decode the same numbers of sequences of the same lengths with the same number of threads, in
turns, without sampling. `llama-batched-bench` is one of llama.cpp's tools; without it, only
Pagewire is measured.
"""

import argparse
import re
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.tables import print_table
from pagewire_kernels.batch import AttentionMetadata
from worker_service.config import ModelConfig
from worker_service.loader import LoadedModel, load_model

NUM_SEQUENCES = (1, 4, 16, 32)
PROMPT, STEPS = 32, 64
TURNS = 3


def _ours(loaded: LoadedModel, num_sequences: int) -> float:
    """Tokens per second of decode steps after a context of `PROMPT` tokens of zeros."""
    spec, size = loaded.model.kv_cache_spec, loaded.block_size
    width = -(-(PROMPT + STEPS) // size)
    blocks = torch.arange(num_sequences * width).view(num_sequences, width)
    shape = (blocks.numel(), *spec.block_shape(size))
    kv_cache = torch.zeros(shape, dtype=spec.dtype)
    rows = torch.arange(num_sequences)
    began = time.perf_counter()
    for position in range(PROMPT, PROMPT + STEPS):
        metadata = AttentionMetadata(
            query_start=torch.arange(num_sequences + 1, dtype=torch.int32),
            context_lens=torch.full((num_sequences,), position + 1, dtype=torch.int32),
            block_tables=blocks.int(),
            slot_mapping=blocks[:, position // size] * size + position % size,
            max_query_len=1,
            max_context_len=position + 1,
        )
        positions = torch.full((num_sequences,), position)
        model = loaded.model
        computed = model.forward_to_logits(  # type: ignore[attr-defined]
            rows + 100, positions, kv_cache, metadata, rows
        )
        if computed.head is None:
            model.compute_logits(computed.hidden)
    return num_sequences * STEPS / (time.perf_counter() - began)


def _llama_cpp(program: Path, model: Path, num_sequences: int, num_threads: int) -> float:
    """Tokens per second of the same steps by llama.cpp, as its program prints them."""
    command = [program, "-m", model, "-t", num_threads, "-c", 8192, "-b", 2048, "-ub", 512]
    command += ["-npp", PROMPT, "-ntg", STEPS, "-npl", num_sequences]
    output = subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, check=True
    ).stdout
    (row,) = re.findall(rf"^\|\s*{PROMPT} \|\s*{STEPS} \|.*$", output, re.MULTILINE)
    return float(row.split("|")[8])


@torch.inference_mode()
def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table: tokens per second by number of sequences, the best of some turns."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", type=Path)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--llama-batched-bench", type=Path)
    args = parser.parse_args(arguments)
    config = ModelConfig(model=str(args.model), dtype=args.dtype, threads=args.threads)
    loaded = load_model(config)
    table = []
    for num_sequences in NUM_SEQUENCES:
        ours, theirs = 0.0, 0.0
        for _ in range(TURNS):
            ours = max(ours, _ours(loaded, num_sequences))
            if args.llama_batched_bench is not None:
                found = _llama_cpp(
                    args.llama_batched_bench, args.model, num_sequences, args.threads
                )
                theirs = max(theirs, found)
        row: dict[str, object] = {"sequences": num_sequences, "pagewire": f"{ours:.0f}"}
        if theirs:
            row |= {"llama.cpp": f"{theirs:.0f}", "ratio": f"{ours / theirs:.2f}"}
        table.append(row)
    print_table(
        table, f"tokens per second, {args.model.name}, {args.dtype}, {args.threads} threads"
    )


if __name__ == "__main__":
    main()
