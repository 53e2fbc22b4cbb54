"""Kernels against the device's ceilings, both measured in one run.

    python -m benchmarks.kernels [--device cuda]

What is bound by memory is held to the bandwidth of reading it (or, where as much is written, of
copying), what is bound by products to the best matrix product, and swaps to the bus. A share of 1
is the floor; kernels whose data fits a cache may exceed it.
"""

from collections.abc import Sequence

import torch

from benchmarks.measuring.kernel_cases import Case, all_cases, setting
from benchmarks.measuring.kernel_ceilings import KernelCeilings, measure_ceilings
from benchmarks.measuring.kernel_timing import median_seconds
from benchmarks.measuring.machine import ForeignLoad
from benchmarks.measuring.tables import publish, script_parser

Row = dict[str, object]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_READERS = ("paged decode", "linear", "sample")
"""What writes next to nothing."""


def measure(case: Case, ceilings: KernelCeilings, device: torch.device, repeats: int) -> Row:
    """A row of the table."""
    capture = not case.crosses_bus and "blocks" not in case.kernel
    seconds = median_seconds(case.run, device, repeats=repeats, capture=capture)
    bound, amount, ceiling = _bound(case, ceilings)
    achieved = amount / seconds
    return {
        "kernel": case.kernel,
        "size": case.size,
        "dtype": case.dtype,
        "implementation": case.implementation,
        "us": round(seconds * 1e6, 1),
        "bound": bound,
        "achieved": round(achieved / 1e9, 1),
        "ceiling": round(ceiling / 1e9, 1),
        "share": round(achieved / ceiling, 3),
    }


def _bound(case: Case, ceilings: KernelCeilings) -> tuple[str, int, float]:
    """What bounds a case, how much of that it has, and the ceiling: its bytes or its operations,
    whichever take longer at best."""
    bounds = [(*_memory(case, ceilings), case.num_bytes)] if case.num_bytes else []
    if case.num_flops:
        bounds.append(("GFLOP/s", ceilings.products[DTYPES[case.dtype]], case.num_flops))
    name, ceiling, amount = max(bounds, key=lambda bound: bound[2] / bound[1])
    return name, amount, ceiling


def _memory(case: Case, ceilings: KernelCeilings) -> tuple[str, float]:
    """How a case's bytes are moved, and how fast that can be."""
    if case.crosses_bus:
        assert ceilings.bus is not None, "only a GPU has one"
        return "GB/s of the bus", ceilings.bus
    if case.kernel in _READERS:
        return "GB/s read", ceilings.read
    return "GB/s copied", ceilings.copy


COLUMNS = {
    "kernel": "kernel",
    "size": "size",
    "dtype": "type",
    "implementation": "by",
    "us": "µs",
    "achieved": "achieved",
    "ceiling": "ceiling",
    "bound": "in",
    "share": "share",
}
"""Titles by the names in a row."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, and write the results."""
    parser = script_parser(__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=["bfloat16", "float32"])
    parser.add_argument("--attention-backend", default=None)
    parser.add_argument("--repeats", type=int, default=25)
    parser.add_argument("--kernels", nargs="+", help="those with these names; default: all")
    args = parser.parse_args(arguments)
    load, device = ForeignLoad(), torch.device(args.device)
    dtypes = [DTYPES[name] for name in args.dtype]
    with torch.inference_mode():
        ceilings = measure_ceilings(device, dtypes)
        rows = [
            measure(case, ceilings, device, args.repeats)
            for dtype in dtypes
            for case in all_cases(setting(device, dtype, args.attention_backend))
            if not args.kernels or case.kernel in args.kernels
        ]
    is_gpu = device.type == "cuda"
    threads = f"cpu, {torch.get_num_threads()} threads"
    facts = (
        f"{torch.cuda.get_device_name(device) if is_gpu else threads}: reads "
        f"{ceilings.read / 1e9:.1f} GB/s, copies {ceilings.copy / 1e9:.1f} GB/s (read and "
        "written). Medians."
    )
    name = "kernels_gpu" if is_gpu else "kernels"
    publish(name, facts, COLUMNS, rows, load.cores, args.results)


if __name__ == "__main__":
    main()
