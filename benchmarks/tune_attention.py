"""The fastest launch of paged decode attention on this GPU.

    python -m benchmarks.tune_attention

Tries tiles of keys, warps, stages and splits around the choice of `choose_launch` (marked). All are
arguments of a launch, so that the best can be entered there.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice, product
from pathlib import Path

import torch

from benchmarks.ceilings import measure
from benchmarks.machine import RESULTS, ForeignLoad, save
from benchmarks.stopwatch import median_seconds
from benchmarks.tables import print_table
from pagewire_kernels.batch import AttentionMetadata
from pagewire_kernels.triton import Launch, choose_launch, paged_attention

BLOCK_TOKENS = 16
HEAD_DIM = 128


def launches(chosen: Launch) -> Iterator[Launch]:
    """The one chosen first, then its neighbours."""
    yield chosen
    splits = sorted({1, chosen.num_splits, 2 * chosen.num_splits})
    for tile_keys, num_warps, num_stages, num_splits in product(
        (32, 64, 128), (2, 4, 8), (3, 5, 7), splits
    ):
        tried = replace(
            chosen,
            tile_keys=tile_keys,
            num_warps=num_warps,
            num_stages=num_stages,
            num_splits=num_splits,
        )
        if tried != chosen:
            yield tried


def timed(
    num_seqs: int, context: int, heads: int, kv_heads: int, device: torch.device, repeats: int
) -> Iterator[tuple[Launch, float]]:
    """Seconds of each launch that fits the device."""
    per_seq = -(-context // BLOCK_TOKENS)
    shape = (num_seqs * per_seq, 1, 2, BLOCK_TOKENS, kv_heads, HEAD_DIM)
    cache = torch.zeros(shape, dtype=torch.bfloat16, device=device)
    query = torch.zeros(num_seqs, heads, HEAD_DIM, dtype=torch.bfloat16, device=device)
    order = torch.randperm(num_seqs * per_seq, device=device)
    metadata = AttentionMetadata(
        query_start=torch.arange(num_seqs + 1, dtype=torch.int32, device=device),
        context_lens=torch.full((num_seqs,), context, dtype=torch.int32, device=device),
        block_tables=order.int().view(num_seqs, per_seq),
        slot_mapping=torch.full((num_seqs,), -1, device=device),
        max_query_len=1,
        max_context_len=context,
    )
    for launch in launches(choose_launch(query, kv_heads, metadata)):

        def attend(launch: Launch = launch) -> torch.Tensor:
            return paged_attention(
                query, cache[:, 0, 0], cache[:, 0, 1], metadata, scale=0.1, launch=launch
            )

        try:
            yield launch, median_seconds(attend, device, repeats=repeats)
        except Exception as error:  # whatever a compiler raises for what does not fit
            print(f"{launch}: {type(error).__name__}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print, the fastest first."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--most-launches", type=int, help="the first of them; default: all")
    parser.add_argument("--output", type=Path, default=RESULTS)
    args = parser.parse_args(arguments)
    device, load = torch.device(args.device), ForeignLoad()
    num_bytes = args.sequences * args.context * 2 * args.kv_heads * HEAD_DIM * 2
    read = measure(torch.bfloat16, device).read_bytes_per_s
    tried = timed(args.sequences, args.context, args.heads, args.kv_heads, device, args.repeats)
    results = [*islice(tried, args.most_launches)]
    chosen = results[0][0]
    rows = [
        {
            "keys": launch.tile_keys,
            "warps": launch.num_warps,
            "stages": launch.num_stages,
            "splits": launch.num_splits,
            "us": round(seconds * 1e6, 1),
            "of reading": round(num_bytes / seconds / read, 3),
            "chosen": "*" if launch == chosen else "",
        }
        for launch, seconds in sorted(results, key=lambda each: each[1])
    ]
    print_table(rows, "launches of paged decode attention")
    figures = {"sequences": args.sequences, "context": args.context, "launches": rows}
    print(f"written to {save('tune_attention', figures, load.cores, args.output)}")


if __name__ == "__main__":
    main()
