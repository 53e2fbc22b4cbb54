"""`python -m tests.chaos`: a long run, with a report at its end.

python -m tests.chaos --kills 200 --streams 500 --dtype bfloat16 --seed 7
"""

import asyncio
import signal
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.machine import ForeignLoad
from tests.chaos.config import ChaosConfig
from tests.chaos.report import Report
from tests.chaos.run import run_chaos
from tests.chaos.timeline import Timeline

DEFAULT = ChaosConfig()


def main(
    kills: Annotated[int, typer.Option(help="Least number of SIGKILLs.")] = 200,
    streams: Annotated[int, typer.Option(help="Least number of streams.")] = 500,
    time_limit: Annotated[
        float, typer.Option(help="Time limit of the run in seconds.")
    ] = DEFAULT.time_limit_s,
    requests: Annotated[int, typer.Option(help="Number of different requests.")] = 120,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = DEFAULT.dtype,
    device: Annotated[str, typer.Option(help="Of the workers.")] = DEFAULT.device,
    batch_invariant: Annotated[bool, typer.Option("--batch-invariant")] = DEFAULT.batch_invariant,
    preemption_mode: Annotated[
        str | None, typer.Option(help="auto, swap or recompute; drawn unless given.")
    ] = DEFAULT.preemption_mode,
    seed: Annotated[int, typer.Option(help="Seed of requests and disturbances.")] = DEFAULT.seed,
    speculative: Annotated[
        str, typer.Option(help="ngram, draft, eagle or no; the undisturbed run has no drafts.")
    ] = DEFAULT.speculative,
    workers: Annotated[int, typer.Option()] = DEFAULT.num_workers,
    ranks: Annotated[int, typer.Option(help="Hosts of each worker.")] = DEFAULT.num_ranks,
    bad_links: Annotated[
        bool, typer.Option("--bad-links", help="Lose 2 % of packets, delay all by 50 ms.")
    ] = DEFAULT.has_bad_links,
    frontends: Annotated[int, typer.Option()] = DEFAULT.num_frontends,
    open_streams: Annotated[int, typer.Option(help="Concurrent streams.")] = 24,
    at_once: Annotated[int, typer.Option(help="Concurrent disturbances.")] = DEFAULT.num_monkeys,
    pause: Annotated[
        float, typer.Option(help="Mean seconds between disturbances.")
    ] = DEFAULT.mean_pause_s,
    lease: Annotated[float, typer.Option(help="Seconds.")] = DEFAULT.lease_s,
    patience: Annotated[
        float, typer.Option(help="Seconds without output after which a stream hangs.")
    ] = DEFAULT.patience_s,
    network: Annotated[str, typer.Option(help="namespaces, relays or auto.")] = DEFAULT.network,
    output: Annotated[
        Path | None, typer.Option(help="JSON file of results to which the run is added.")
    ] = None,
) -> None:
    """Kill, stop and disconnect processes at random; compare all streams with undisturbed ones."""
    config = ChaosConfig(
        seed=seed,
        num_kills=kills,
        num_streams=streams,
        time_limit_s=time_limit,
        num_asks=requests,
        dtype=dtype,
        device=device,
        batch_invariant=batch_invariant,
        preemption_mode=preemption_mode,
        speculative=speculative,
        num_workers=workers,
        num_ranks=ranks,
        has_bad_links=bad_links,
        num_frontends=frontends,
        max_open_streams=open_streams,
        num_monkeys=at_once,
        mean_pause_s=pause,
        lease_s=lease,
        patience_s=patience,
        network=network,
    )
    foreign = ForeignLoad()
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    print(f"timeline and logs: {folder}", flush=True)
    try:
        report = asyncio.run(_run(config, folder, Timeline(folder / "timeline.txt")))
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
    typer.run(main)
