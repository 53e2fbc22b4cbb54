"""CPU time of the scheduler core's thread with and without metrics.

    python -m benchmarks.metrics_cost

A step is that of `scheduler_overhead`; counting its metrics is timed in turns within the same run,
so that a drifting machine affects both equally. A scrape reads the core's registry for the same
queue, on the core's thread, and renders it on another thread, which holds the GIL. The total share
of the core is given for steps without pauses and a scrape every five seconds, the interval in
`deploy/prometheus`.
"""

import asyncio
from collections.abc import Sequence
from statistics import median
from time import thread_time_ns

from prometheus_client import generate_latest

from benchmarks.machine import ForeignLoad, save
from benchmarks.steady_core import Queue, SteadyCore
from benchmarks.tables import general, print_table, script_parser
from pagewire.v1 import plan_pb2, worker_service_pb2
from scheduler_service.core_service.config import CoreServiceConfig
from scheduler_service.core_service.counters import StepCounters
from scheduler_service.core_service.driver import CoreDriver
from scheduler_service.core_service.metrics import CoreMetrics
from scheduler_service.core_service.service import CoreService
from service_common.prometheus import LoopCollector, make_registry

SCRAPE_INTERVAL_S = 5.0
NUM_SCRAPES = 30
Row = dict[str, float]


def counting_us(meter: StepCounters, num_rows: int) -> float:
    """CPU time of counting one step, in microseconds."""
    plan = plan_pb2.StepPlan(epoch=1, step_id=1, seq_ids=bytes(4 * num_rows))
    request = worker_service_pb2.ExecuteStepsRequest(plan=plan)
    began = thread_time_ns()
    meter.tokens.observe(num_rows)
    meter.plan_bytes.observe(request.ByteSize())
    meter.duration.observe(0.01)
    meter.planning_s += 0.001
    meter.planning_s += 0.001
    return (thread_time_ns() - began) / 1000


def timer_us() -> float:
    """CPU time of reading the clock, in microseconds."""
    began = thread_time_ns()
    return (thread_time_ns() - began) / 1000


async def scrape_us(core: SteadyCore) -> tuple[float, float]:
    """(on the core's thread, on another) of one scrape, medians in microseconds."""
    service = CoreService(CoreServiceConfig())
    metrics = CoreMetrics(
        driver=CoreDriver(core.core),
        registry=service.registry,
        frontends=service.frontends,
        counters=service.counters,
    )
    service.counters.steps_of("m")
    registry = make_registry(LoopCollector(metrics.collect))
    reading, all_of_it = [], []
    for _ in range(NUM_SCRAPES):
        times = [thread_time_ns()]
        list(metrics.collect())
        times.append(thread_time_ns())
        generate_latest(registry)  # reads once more
        times.append(thread_time_ns())
        reading.append((times[1] - times[0]) / 1000)
        all_of_it.append((times[2] - times[1]) / 1000)
    return median(reading), max(0.0, median(all_of_it) - median(reading))


def measure(num_seqs: int, num_steps: int) -> Row:
    """One line of the table."""
    core = SteadyCore(Queue(num_seqs=num_seqs, prompt_tokens=64))
    meter = StepCounters()
    steps, counting, clock = [], [], []
    for _ in range(num_steps):
        (step,) = core.round()
        steps.append(step.total)
        counting.append(counting_us(meter, num_seqs))
        clock.append(timer_us())
    step_us = median(steps)
    metrics_us = max(0.0, median(counting) - median(clock))
    reading_us, writing_us = asyncio.run(scrape_us(core))
    share = metrics_us / step_us + reading_us / 1e6 / SCRAPE_INTERVAL_S
    row = {
        "running": num_seqs,
        "step_us": step_us,
        "metrics_us": metrics_us,
        "with_to_without": (step_us + metrics_us) / step_us,
        "scrape_on_core_us": reading_us,
        "scrape_elsewhere_us": writing_us,
        "share_percent": 100 * share,
    }
    return {name: round(value, 4) for name, value in row.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, and write the results."""
    parser = script_parser(__doc__)
    parser.add_argument("--running", type=int, nargs="+", default=[1, 16, 256, 4096])
    parser.add_argument("--steps", type=int, default=500)
    args = parser.parse_args(arguments)
    load = ForeignLoad()
    rows = [measure(num_seqs, args.steps) for num_seqs in args.running]
    print_table(rows, "medians of CPU time", width=140, cell=general)
    figures = {"steps": args.steps, "scrape_interval_s": SCRAPE_INTERVAL_S, "rows": rows}
    save("metrics_cost", figures, load.cores, args.results)


if __name__ == "__main__":
    main()
