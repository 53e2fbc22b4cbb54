"""CPU time of the scheduler core per step of steady decoding, against the budgets and vLLM.

    python -m benchmarks.scheduler_overhead --vllm-python ENVIRONMENT/bin/python

There is no worker: each plan is answered immediately with fixed tokens. A step is all that the core
does for it: `schedule`, encoding the plan, decoding the result, `update`, and encoding the outputs
for two frontends. Sequences are in steady decoding; their prompts share nothing; prefix caching is
on. With `--drafts`, each row of a step has that many, and keeps half of them on average. With
several worker groups they are shared out among them, and a step is one group's. With `--windows`
the model has a second cache group, whose windows slide, and a core without it works on the same
queue in turns. Times are medians over steps of the thread's CPU time, so waiting for a core does
not count, though sharing its caches does.

With `--vllm-python` vLLM's `Scheduler` works on the same queue in turns with ours (see
`vllm_scheduler` for what its step is). "deciding" is schedule + update alone; "all" is with each
side's own serialisation: protobuf here, pickle and msgpack there. With `--record` a core that
records to a file has turns, too; the time of the thread that writes does not count.
"""

import argparse
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from benchmarks.measuring.json_lines import LineProcess
from benchmarks.measuring.machine import ForeignLoad
from benchmarks.measuring.steady_core import (
    GROWTH_TOKENS,
    PREFILL_TOKENS,
    Queue,
    SteadyCore,
    StepTimes,
    pauses_ms,
)
from benchmarks.measuring.tables import publish, script_parser
from scheduler_service.replay.recorder import RecordingCore
from scheduler_service.replay.recording_file import RecordingWriter
from service_common.garbage import survivors_exempted

BUDGETS_US = {(256, 0): 500.0, (4096, 0): 8000.0, (256, 3): 700.0}
"""Limits for a step's CPU time, by its running sequences and the drafts of each."""

TURN_STEPS = 20
"""Consecutive steps of one scheduler, before the other's turn."""

Row = dict[str, float | int | None]

SCRIPT = Path(__file__).parent / "engines/vllm_scheduler.py"


@dataclass(frozen=True, slots=True)
class VllmTimes:
    """CPU time of one of vLLM's steps, in microseconds."""

    deciding: float
    """`schedule` and `update_from_output`."""
    serializing: float
    """Its messages to and from bytes."""


class VllmProcess(LineProcess):
    """The process in which vLLM's scheduler is timed, `vllm_scheduler`."""

    def __init__(self, command: Sequence[str | Path]) -> None:
        super().__init__(command, {"VLLM_LOGGING_LEVEL": "ERROR"})
        self.version: str = self.ready["version"]

    def prepare(self, queue: Queue) -> None:
        """Start all requests of a queue."""
        asked = {
            "num_seqs": queue.num_seqs,
            "prompt_tokens": queue.prompt_tokens,
            "block_size": queue.block_size,
            "num_blocks": queue.num_blocks + 1,  # it keeps one to itself
            "max_tokens": GROWTH_TOKENS,
            "max_num_batched_tokens": queue.num_seqs + PREFILL_TOKENS,
        }
        self.ask(asked)

    def steps(self, count: int) -> list[VllmTimes]:
        """Times of its next steps."""
        return [VllmTimes(*times) for times in self.ask({"steps": count})]


def queues(args: argparse.Namespace) -> Iterator[Queue]:
    """One for each line of the table."""
    lines = product(args.groups, args.windows, args.prompt_tokens, args.running, args.drafts)
    for num_groups, window, prompt_tokens, num_seqs, num_drafts in lines:
        if num_seqs >= num_groups:
            yield Queue(
                num_seqs=num_seqs,
                prompt_tokens=prompt_tokens,
                num_groups=num_groups,
                num_drafts=num_drafts,
                window=window,
            )


def measure(
    queue: Queue, num_steps: int, vllm: VllmProcess | None, record_to: Path | None = None
) -> Row:
    """One line: medians per step, in microseconds.

    record_to: file to which a second core records its steps.
    """
    times: list[StepTimes] = []
    simpler: list[StepTimes] = []
    recorded: list[StepTimes] = []
    rivals: list[VllmTimes] = []
    with pauses_ms() as default_pauses:
        SteadyCore(queue)
    with survivors_exempted(), pauses_ms() as pauses:
        ours, recording = SteadyCore(queue), None
        without_window = SteadyCore(replace(queue, window=0)) if queue.window else None
        if record_to is not None:
            writer = RecordingWriter(record_to)
            recording = SteadyCore(queue, lambda config: RecordingCore(config, writer))
        rival = vllm if (queue.num_groups, queue.num_drafts, queue.window) == (1, 0, 0) else None
        if rival is not None:
            rival.prepare(queue)
        while len(times) < num_steps:
            num_rounds = -(-TURN_STEPS // queue.num_groups)
            for core, of_core in ((ours, times), (without_window, simpler), (recording, recorded)):
                if core is not None:
                    of_core += [step for _ in range(num_rounds) for step in core.round()]
            if rival is not None:
                rivals += rival.steps(TURN_STEPS)
        if recording is not None:
            writer.close()
    row = _row(queue, times, simpler, rivals, recorded)
    return row | {
        "longest_pause_ms": round(max(pauses), 1),
        "default_longest_pause_ms": round(max(default_pauses), 1),
    }


def _row(
    queue: Queue,
    times: Sequence[StepTimes],
    simpler: Sequence[StepTimes],
    rivals: Sequence[VllmTimes],
    recorded: Sequence[StepTimes],
) -> Row:
    rows = queue.num_seqs // queue.num_groups
    total = median(step.total for step in times)
    deciding = median(step.deciding for step in times)
    row: Row = {
        "groups": queue.num_groups,
        "window": queue.window or None,
        "running": queue.num_seqs,
        "prompt_tokens": queue.prompt_tokens,
        "drafts": queue.num_drafts,
        "rows_per_step": rows,
        "schedule_us": median(step.schedule for step in times),
        "encode_plan_us": median(step.encode_plan for step in times),
        "decode_result_us": median(step.decode_result for step in times),
        "update_us": median(step.update for step in times),
        "encode_outputs_us": median(step.encode_outputs for step in times),
        "deciding_us": deciding,
        "all_us": total,
        "all_us_per_row": total / rows,
        "plan_bytes_per_row": sum(step.plan_bytes for step in times) / len(times) / rows,
        "budget_us": BUDGETS_US.get((rows, queue.num_drafts)),
    }
    if simpler:
        row["ratio_to_no_window"] = total / median(step.total for step in simpler)
    if rivals:
        theirs_all = median(step.deciding + step.serializing for step in rivals)
        row["vllm_deciding_us"] = median(step.deciding for step in rivals)
        row |= {"vllm_all_us": theirs_all, "all_ratio": theirs_all / total}
    if recorded:
        row["recording_us"] = median(step.total for step in recorded)
    return {name: round(v, 2) if isinstance(v, float) else v for name, v in row.items()}


COLUMNS = {
    "groups": "groups",
    "window": "window",
    "running": "running",
    "prompt_tokens": "prompt",
    "drafts": "drafts",
    "deciding_us": "deciding, µs",
    "all_us": "all, µs",
    "all_us_per_row": "all per row, µs",
    "budget_us": "budget, µs",
    "longest_pause_ms": "longest pause for garbage, ms",
    "default_longest_pause_ms": "by Python's defaults, ms",
}
OF_VLLM = {
    "vllm_deciding_us": "vLLM deciding, µs",
    "vllm_all_us": "vLLM all, µs",
    "all_ratio": "vLLM all ÷ ours",
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, and write the results."""
    parser = script_parser(__doc__)
    parser.add_argument("--running", type=int, nargs="+", default=[16, 256, 1024, 4096])
    parser.add_argument("--prompt-tokens", type=int, nargs="+", default=[64, 4096])
    parser.add_argument("--groups", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--windows", type=int, nargs="+", default=[0, 64], help="0: no windows")
    parser.add_argument("--drafts", type=int, nargs="+", default=[0, 3])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--record", action="store_true", help="with a core that records, too")
    parser.add_argument("--vllm-python", type=Path, help="a Python that can import vllm")
    args = parser.parse_args(arguments)
    load = ForeignLoad()
    with ExitStack() as stack:
        vllm = None
        if args.vllm_python:
            vllm = stack.enter_context(VllmProcess([args.vllm_python, SCRIPT]))
        folder = Path(stack.enter_context(TemporaryDirectory()))
        rows = [
            measure(queue, args.steps, vllm, folder / str(number) if args.record else None)
            for number, queue in enumerate(queues(args))
        ]
    columns = COLUMNS | (OF_VLLM if vllm else {})
    columns |= {"ratio_to_no_window": "÷ without window"} if any(args.windows) else {}
    columns |= {"recording_us": "with --record, µs"} if args.record else {}
    facts = f"vLLM {vllm.version}." if vllm else "Without vLLM."
    publish("scheduler_overhead", facts, columns, rows, load.cores, args.results, steps=args.steps)


if __name__ == "__main__":
    main()
