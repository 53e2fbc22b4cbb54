"""Time of products with quantized weights, against dense weights and the memory bandwidth.

    python -m benchmarks.quantized_weights --dtype bfloat16

Like the layers of a model, the weights of a run exceed the processor's caches. For one row, the
limit is reading them: `floor` is the share of the bandwidth that was measured in the same run.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch

from benchmarks.ceilings import reads
from benchmarks.tables import print_table, script_parser
from pagewire_kernels.cpu.linear import HugeMemory, NativeWeight
from pagewire_kernels.cpu.native_library import library
from pagewire_kernels.quantized_weight import (
    SIGNED_TABLE,
    UNSIGNED_TABLE,
    Int8Activations,
    QuantizedWeight,
    quantize,
)

OUT_FEATURES, IN_FEATURES = 3072, 1024
NUM_WEIGHTS = 64
NUM_ROWS = (1, 2, 4, 8, 16, 64, 192, 256)
ROUNDS = 5


def _quantized(bits: int, group_size: int, offsets: bool) -> QuantizedWeight:
    scales = torch.rand(OUT_FEATURES, IN_FEATURES // group_size).half().float()
    table = UNSIGNED_TABLE if offsets else SIGNED_TABLE
    return QuantizedWeight(
        codes=torch.randint(0, 1 << bits, (OUT_FEATURES, IN_FEATURES), dtype=torch.uint8),
        scales=scales,
        offsets=-scales if offsets else None,
        table=table if bits == 4 else None,
    )


def _table_of_floats(group_size: int) -> QuantizedWeight:
    return QuantizedWeight(
        codes=torch.randint(0, 16, (OUT_FEATURES, IN_FEATURES), dtype=torch.uint8),
        scales=torch.rand(OUT_FEATURES, IN_FEATURES // group_size),
        table=tuple(torch.linspace(-1.0, 1.0, 16).tolist()),
        is_float=True,
    )


def _weights(dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor | QuantizedWeight]]:
    dense = torch.randn(OUT_FEATURES, IN_FEATURES)
    yield "dense", dense.to(dtype)
    yield "FP8 (E4M3), groups of 128", quantize(dense, "fp8")
    yield "NF4, blocks of 64", _table_of_floats(64)
    yield "int8, groups of 128", _quantized(8, 128, offsets=False)
    yield "Q8_0 (8 bits, 32)", _quantized(8, 32, offsets=False)
    yield "6 bits, groups of 32", _quantized(6, 32, offsets=False)
    yield "Q5_1 (5 bits, 32, offsets)", _quantized(5, 32, offsets=True)
    yield "int4, groups of 128, offsets", _quantized(4, 128, offsets=True)
    yield "Q4_0 (4 bits, 32)", _quantized(4, 32, offsets=False)
    yield "Q4_1 (4 bits, 32, offsets)", _quantized(4, 32, offsets=True)
    whole = _quantized(8, IN_FEATURES, offsets=False)
    yield "W8A8 (8 bits, of outputs; rows, too)", replace(whole, activations=Int8Activations())


def _seconds(
    weights: Sequence[NativeWeight], rows: torch.Tensor, clock: Callable[[], float]
) -> float:
    """Seconds per product, the best of some rounds over all weights."""
    found = []
    for _ in range(ROUNDS):
        began = clock()
        for weight in weights:
            weight.apply(rows)
        found.append(clock() - began)
    return min(found) / len(weights)


@torch.inference_mode()
def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table: a row for each kind of weight, a column for each number of rows."""
    parser = script_parser(__doc__)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--rows", type=int, nargs="*", default=NUM_ROWS, help="besides one row")
    parser.add_argument(
        "--processor-time",
        action="store_true",
        help="measure the time of one thread, for a machine with other load; invalidates `floor`",
    )
    args = parser.parse_args(arguments)
    dtype, clock = getattr(torch, args.dtype), time.perf_counter
    num_rows = sorted({1, *args.rows})
    if args.processor_time:
        torch.set_num_threads(1)
        clock = time.thread_time
    kernels = library()
    if kernels is None:
        raise SystemExit("the CPU kernels are not compiled: run pagewire_kernels/cpu/build.py")
    memory_reads = reads(torch.device("cpu"))
    dense: dict[int, float] = {}
    table = []
    for name, weight in _weights(dtype):
        memory = HugeMemory()
        weights = [NativeWeight(weight, kernels, memory, dtype) for _ in range(NUM_WEIGHTS)]
        times = {
            n: _seconds(weights, torch.randn(n, IN_FEATURES).to(dtype), clock) for n in num_rows
        }
        dense = dense or times
        floor = weights[0].num_bytes / memory_reads.rate() / times[1]
        row: dict[str, object] = {"weight": name, "floor": f"{floor:.2f}"}
        table.append(row | {f"{n} rows": f"{dense[n] / times[n]:.2f}" for n in num_rows})
    print_table(table, f"speed over dense {dtype}, {IN_FEATURES} inputs, {OUT_FEATURES} outputs")


if __name__ == "__main__":
    main()
