"""CPU time that `--record` adds to a step of steady decoding of the core.

    python -m benchmarks.recording

The load of `benchmarks.scheduler_overhead`, on two cores in turns: one that records to a temporary
file and one that does not. Times are medians of the thread's CPU time; that of the thread that
writes is not among them.
"""

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from benchmarks.steady_core import Queue, SteadyCore, StepTimes
from scheduler_service.core import SchedulerConfig
from scheduler_service.replay.recorder import RecordingCore
from scheduler_service.replay.recording_file import RecordingWriter

TURN_STEPS = 20
"""Steps before it is the other core's turn."""


def measure(num_seqs: int, num_steps: int, folder: Path) -> None:
    """Print one line of the table."""
    made: list[RecordingCore] = []

    def make_core(config: SchedulerConfig) -> RecordingCore:
        made.append(RecordingCore(config, RecordingWriter(folder / f"{num_seqs}.jsonl")))
        return made[-1]

    queue = Queue(num_seqs=num_seqs, prompt_tokens=64)
    plain, recording = SteadyCore(queue), SteadyCore(queue, make_core)
    plain_times: list[StepTimes] = []
    recording_times: list[StepTimes] = []
    while len(plain_times) < num_steps:
        for _ in range(TURN_STEPS):
            plain_times += plain.round()
        for _ in range(TURN_STEPS):
            recording_times += recording.round()
    made[0].close()
    plain_us, recording_us = _total(plain_times), _total(recording_times)
    num_bytes = (folder / f"{num_seqs}.jsonl").stat().st_size
    print(
        f"{num_seqs:8} {plain_us:12.0f} {recording_us:12.0f} "
        f"{recording_us - plain_us:12.0f} {num_bytes:12}"
    )


def _total(times: Sequence[StepTimes]) -> float:
    return median(step.total for step in times)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--running", type=int, nargs="+", default=[16, 256, 1024, 4096])
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    print("microseconds per step")
    print(f"{'running':>8} {'plain':>12} {'recording':>12} {'difference':>12} {'bytes':>12}")
    with tempfile.TemporaryDirectory() as folder:
        for num_seqs in args.running:
            measure(num_seqs, args.steps, Path(folder))


if __name__ == "__main__":
    main()
