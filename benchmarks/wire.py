"""Cost of the wire between core and worker: sizes, conversions, round trips.

    python -m benchmarks.wire

- How large are plans and results, and what does either end take to make and to read them? With the
  services' own conversions, on plans of a real core. Bytes are those of the message; gRPC and
  HTTP/2 add 14 or more. Steady decoding has a budget of 16 per sequence and step on average.
- How long does a message of some size take to another process and back, on a bidirectional gRPC
  stream like that of plans, with the services' channel options, by unix socket and loopback TCP?

What of that a device notices is measured by `benchmarks.pipelining`.
"""

import argparse
import asyncio
import tempfile
from collections.abc import Sequence

from benchmarks.machine import ForeignLoad, save
from benchmarks.tables import print_table, script_parser
from benchmarks.wire_echo import Echo
from benchmarks.wire_messages import Row, new_row, steady_row
from pagewire_cli.load import percentile

BUDGET_BYTES = 16
"""Of a plan, per sequence and step of steady decoding, on average."""

TURN = 200
"""Round trips before it is another size's turn."""


def message_rows(args: argparse.Namespace) -> list[Row]:
    """Sizes and conversions."""
    steady = [steady_row(num_seqs, args.steps) for num_seqs in args.running]
    return steady + [new_row(length, args.steps) for length in args.prompt_tokens]


async def round_trip_rows(sizes: Sequence[int], count: int) -> list[Row]:
    """A row for each transport and size; they take turns."""
    with tempfile.TemporaryDirectory() as folder:
        addresses = {"unix socket": f"unix:{folder}/echo.sock", "loopback TCP": "127.0.0.1:0"}
        times: dict[tuple[str, int], list[float]] = {}
        async with Echo(addresses["unix socket"]) as unix, Echo(addresses["loopback TCP"]) as tcp:
            echoes = dict(zip(addresses, (unix, tcp), strict=True))
            for _ in range(-(-count // TURN)):
                for name, echo in echoes.items():
                    for size in sizes:
                        seen = await echo.round_trips_us(size, min(count, TURN))
                        times.setdefault((name, size), []).extend(seen)
    return [
        {
            "transport": transport,
            "bytes": size,
            "round_trips": len(seen),
            "p50_us": round(percentile(seen, 50), 1),
            "p99_us": round(percentile(seen, 99), 1),
        }
        for (transport, size), seen in times.items()
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, and write the results."""
    parser = script_parser(__doc__)
    parser.add_argument("--running", type=int, nargs="+", default=[1, 16, 64, 256, 1024, 4096])
    parser.add_argument("--prompt-tokens", type=int, nargs="*", default=[512, 8192])
    parser.add_argument("--steps", type=int, default=64, help="plans of each kind; 16 at least")
    sizes = [64, 1024, 4096, 16_384, 65_536, 262_144]
    parser.add_argument("--bytes", type=int, nargs="+", default=sizes)
    parser.add_argument("--round-trips", type=int, default=2000, help="of each size")
    args = parser.parse_args(arguments)
    load = ForeignLoad()
    messages = message_rows(args)
    round_trips = asyncio.run(round_trip_rows(args.bytes, args.round_trips))
    print_table(messages, "plans and results: bytes, and CPU time in microseconds", width=180)
    print_table(round_trips, "round trips on a bidirectional stream", width=180)
    figures = {"budget_bytes": BUDGET_BYTES, "messages": messages, "round_trips": round_trips}
    print(f"written to {save('wire', figures, load.cores, args.results)}")


if __name__ == "__main__":
    main()
