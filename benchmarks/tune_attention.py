"""The fastest launches of paged attention on this GPU, for `attention_tiles.json`.

    python -m benchmarks.tune_attention --results FOLDER
    python -m benchmarks.tune_attention --write-tiles --results FOLDER

The first command tries tiles of keys, warps, stages and programs around the choice of
`choose_launch` (marked): of decodes over equal contexts (even), of fewer ones with shorter contexts
(short), of decodes of which one has a long context (skewed), and of a chunk of a prompt, which is
what a mixed batch computes beside decodes (chunk). The second one writes the fastest of each kind
to the table that `choose_launch` reads. For decodes that is the launch whose product of times in
all their kinds of batches is the least.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice, product
from math import prod
from pathlib import Path

import torch

from benchmarks.measuring import ceilings
from benchmarks.measuring.kernel_cases import BLOCK_TOKENS, HEAD_DIM, scattered_batch
from benchmarks.measuring.kernel_timing import median_seconds
from benchmarks.measuring.machine import ForeignLoad, save
from benchmarks.measuring.tables import print_table, script_parser
from pagewire_kernels.triton import Launch, choose_launch, paged_attention
from pagewire_kernels.triton.attention import TILES_FILE, num_processors

SIZES = ("tile_rows", "tile_keys", "num_warps", "num_stages", "programs_per_processor")
SEQUENCES = {"even": 256, "short": 64, "skewed": 64, "chunk": 1}
PARTS = {"decode": ("even", "short", "skewed"), "prefill": ("chunk",)}
"""The kinds of batches by which the sizes of each entry of the table are chosen."""


def launches(chosen: Launch, num_seqs: int) -> Iterator[Launch]:
    """The one chosen first, then its neighbours."""
    yield chosen
    if chosen.num_planned:
        more = chosen.num_planned - num_seqs
        rows, warps, stages = (chosen.tile_rows,), (2, 4, 8), (3, 5, 7)
        planned = sorted({max(1, programs) for programs in (more // 2, more, 2 * more, 4 * more)})
    else:
        rows, warps, stages = (chosen.tile_rows // 2, chosen.tile_rows), (4, 8), (2, 3, 5)
        planned = [-num_seqs]
    for tile_rows, tile_keys, num_warps, num_stages, programs in product(
        rows, (32, 64, 128), warps, stages, planned
    ):
        tried = replace(
            chosen,
            tile_rows=tile_rows,
            tile_keys=tile_keys,
            num_warps=num_warps,
            num_stages=num_stages,
            num_planned=num_seqs + programs,
        )
        if tried != chosen:
            yield tried


def timed(
    lengths: Sequence[int],
    query_len: int,
    heads: int,
    kv_heads: int,
    device: torch.device,
    repeats: int,
) -> Iterator[tuple[Launch, float]]:
    """Seconds of each launch that fits the device."""
    num_blocks, metadata = scattered_batch(lengths, query_len, BLOCK_TOKENS, device)
    shape = (num_blocks, 1, 2, BLOCK_TOKENS, kv_heads, HEAD_DIM)
    cache = torch.zeros(shape, dtype=torch.bfloat16, device=device)
    query_shape = (len(lengths) * query_len, heads, HEAD_DIM)
    query = torch.zeros(query_shape, dtype=torch.bfloat16, device=device)
    for launch in launches(choose_launch(query, kv_heads, metadata), len(lengths)):

        def attend(launch: Launch = launch) -> torch.Tensor:
            return paged_attention(
                query, cache[:, 0, 0], cache[:, 0, 1], metadata, scale=0.1, launch=launch
            )

        try:
            yield launch, median_seconds(attend, device, repeats=repeats)
        except Exception as error:  # whatever a compiler raises for what does not fit
            reason = (str(error) or "no message").splitlines()[0]
            print(f"{launch}: {type(error).__name__}: {reason}")


def fastest(results: dict[str, Sequence[dict[str, int]]], kinds: Sequence[str]) -> dict[str, int]:
    """The sizes whose product of times in these kinds of batches is the least."""
    times = [
        {tuple(row[size] for size in SIZES if size in row): row["us"] for row in results[kind]}
        for kind in kinds
    ]
    common = set.intersection(*(set(of_kind) for of_kind in times))
    best = min(common, key=lambda sizes: prod(of_kind[sizes] for of_kind in times))
    return dict(zip(SIZES, best, strict=False))


def write_tiles(folder: Path) -> None:
    """Add the GPU of the results in a folder to the table of tiles."""
    found = {
        kind: json.loads((folder / f"tune_attention_{kind}.json").read_text()) for kind in SEQUENCES
    }
    [device] = {result["device"] for result in found.values()}
    results = {kind: result["launches"] for kind, result in found.items()}
    table = json.loads(TILES_FILE.read_text())
    table[device] = {part: fastest(results, kinds) for part, kinds in PARTS.items()}
    TILES_FILE.write_text(json.dumps(table, indent=2) + "\n")
    print(f"written to {TILES_FILE}: {device}: {table[device]}")


def measured(kind: str, args: argparse.Namespace) -> dict[str, object]:
    """Measure and print the launches of a kind of batch, the fastest first."""
    device = torch.device(args.device)
    num_seqs = args.sequences or SEQUENCES[kind]
    context = args.context // 2 if kind == "short" else args.context
    lengths = [args.longest if kind == "skewed" else context] + [context] * (num_seqs - 1)
    query_len = args.chunk if kind == "chunk" else 1
    num_bytes = sum(lengths) * 2 * args.kv_heads * HEAD_DIM * 2
    read = ceilings.reads(device).rate()
    tried = timed(lengths, query_len, args.heads, args.kv_heads, device, args.repeats)
    results = [*islice(tried, args.most_launches)]
    if not results:
        raise SystemExit("no launch ran; the lines above say why")
    rows: list[dict[str, object]] = []
    for launch, seconds in sorted(results, key=lambda result: result[1]):
        row: dict[str, object] = {size: getattr(launch, size) for size in SIZES[:-1]}
        if launch.num_planned:
            programs = (launch.num_planned - num_seqs) * args.kv_heads / num_processors(device)
            row |= {
                SIZES[-1]: max(1, round(programs)),
                "of reading": round(num_bytes / seconds / read, 3),
            }
        chosen = "*" if launch == results[0][0] else ""
        rows.append(row | {"us": round(seconds * 1e6, 1), "chosen": chosen})
    print_table(rows, f"launches of paged attention, {kind}")
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "sequences": num_seqs,
        "context": context,
        "longest": lengths[0],
        "launches": rows,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure each kind, or write the table."""
    parser = script_parser(__doc__)
    parser.add_argument("--kinds", nargs="+", choices=SEQUENCES, default=list(SEQUENCES))
    parser.add_argument("--write-tiles", action="store_true", help="from the results; no run")
    parser.add_argument("--sequences", type=int, help="default: 256; 64 if skewed; one chunk")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--longest", type=int, default=100_000, help="of one sequence, if skewed")
    parser.add_argument("--chunk", type=int, default=512, help="tokens of a chunk")
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--most-launches", type=int, help="the first of them; default: all")
    args = parser.parse_args(arguments)
    if args.write_tiles:
        write_tiles(args.results)
        return
    for kind in args.kinds:
        load = ForeignLoad()
        save(f"tune_attention_{kind}", measured(kind, args), load.cores, args.results)


if __name__ == "__main__":
    main()
