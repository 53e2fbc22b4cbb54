"""`python -m tests.chaos`: a long run, with a report at its end.

python -m tests.chaos --kills 200 --streams 500 --dtype bfloat16 --seed 7
"""

import argparse
import asyncio
import signal
import sys
import tempfile
from dataclasses import fields
from pathlib import Path

from benchmarks.measuring.machine import ForeignLoad
from tests.chaos.config import ChaosConfig
from tests.chaos.report import Report
from tests.chaos.run import run_chaos
from tests.chaos.timeline import Timeline


def main() -> None:
    """Kill, stop and disconnect processes at random; compare all streams with undisturbed ones."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=main.__doc__)
    for option in fields(ChaosConfig):
        is_switch = isinstance(option.default, bool)
        parser.add_argument(
            option.metadata["flag"],
            dest=option.name,
            default=option.default,
            help=option.metadata["help"].replace("%", "%%"),
            **{"action": "store_true"}
            if is_switch
            else {"type": type(option.default) if option.default is not None else str},
        )
    parser.set_defaults(
        num_kills=200, num_streams=500, num_asks=120, max_open_streams=24, num_embedders=2
    )
    parser.add_argument(
        "--output", type=Path, help="JSON file of results to which the run is added."
    )
    arguments = vars(parser.parse_args())
    output = arguments.pop("output")
    foreign = ForeignLoad()
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    print(f"timeline and logs: {folder}", flush=True)
    try:
        report = asyncio.run(
            _run(ChaosConfig(**arguments), folder, Timeline(folder / "timeline.txt"))
        )
    except asyncio.CancelledError:
        sys.exit(128 + signal.SIGTERM)
    print(report)
    if output is not None:
        report.add_to(output, foreign.cores)
    sys.exit(1 if report.faults else 0)


async def _run(config: ChaosConfig, folder: Path, timeline: Timeline) -> Report:
    """Clean up also on SIGTERM: no process and no namespace remains."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await run_chaos(config, folder, timeline)


if __name__ == "__main__":
    main()
