"""The fastest launch of paged decode attention on this GPU.

    python -m benchmarks.tune_attention

Tries tiles of keys, warps, stages and splits around the choice of `choose_launch` (marked). All are
arguments of a launch, so that the best can be entered there.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice, product

import torch

from benchmarks.ceilings import measure
from benchmarks.kernel_cases import BLOCK_TOKENS, HEAD_DIM, scattered_batch
from benchmarks.machine import ForeignLoad, save
from benchmarks.tables import print_table, script_parser
from pagewire_kernels.backend_speed import median_seconds
from pagewire_kernels.triton import Launch, choose_launch, paged_attention


def launches(chosen: Launch, num_seqs: int) -> Iterator[Launch]:
    """The one chosen first, then its neighbours."""
    yield chosen
    num_planned = {chosen.num_planned // 2, chosen.num_planned, 2 * chosen.num_planned}
    for tile_keys, num_warps, num_stages, programs in product(
        (32, 64, 128), (2, 4, 8), (3, 5, 7), sorted(each for each in num_planned if each > num_seqs)
    ):
        tried = replace(
            chosen,
            tile_keys=tile_keys,
            num_warps=num_warps,
            num_stages=num_stages,
            num_planned=programs,
        )
        if tried != chosen:
            yield tried


def timed(
    lengths: Sequence[int], heads: int, kv_heads: int, device: torch.device, repeats: int
) -> Iterator[tuple[Launch, float]]:
    """Seconds of each launch that fits the device."""
    num_blocks, metadata = scattered_batch(lengths, 1, BLOCK_TOKENS, device)
    shape = (num_blocks, 1, 2, BLOCK_TOKENS, kv_heads, HEAD_DIM)
    cache = torch.zeros(shape, dtype=torch.bfloat16, device=device)
    query = torch.zeros(len(lengths), heads, HEAD_DIM, dtype=torch.bfloat16, device=device)
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


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print, the fastest first."""
    parser = script_parser(__doc__)
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--longest", type=int, help="context of one sequence; default: as others")
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--most-launches", type=int, help="the first of them; default: all")
    args = parser.parse_args(arguments)
    device, load = torch.device(args.device), ForeignLoad()
    lengths = [args.longest or args.context] + [args.context] * (args.sequences - 1)
    num_bytes = sum(lengths) * 2 * args.kv_heads * HEAD_DIM * 2
    read = measure(torch.bfloat16, device).read_bytes_per_s
    tried = timed(lengths, args.heads, args.kv_heads, device, args.repeats)
    results = [*islice(tried, args.most_launches)]
    if not results:
        parser.exit(1, "no launch ran; the lines above say why\n")
    chosen = results[0][0]
    rows = [
        {
            "keys": launch.tile_keys,
            "warps": launch.num_warps,
            "stages": launch.num_stages,
            "programs": launch.num_planned,
            "us": round(seconds * 1e6, 1),
            "of reading": round(num_bytes / seconds / read, 3),
            "chosen": "*" if launch == chosen else "",
        }
        for launch, seconds in sorted(results, key=lambda each: each[1])
    ]
    print_table(rows, "launches of paged decode attention")
    figures = {"sequences": args.sequences, "context": args.context, "longest": lengths[0]}
    name = f"tune_attention_{'skewed' if args.longest else 'even'}"
    save(name, figures | {"launches": rows}, load.cores, args.results)


if __name__ == "__main__":
    main()
