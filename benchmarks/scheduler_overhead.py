"""CPU time of the scheduler core per step of steady decoding, against the budgets and vLLM.

    python -m benchmarks.scheduler_overhead --vllm-python ENVIRONMENT/bin/python

There is no worker: each plan is answered immediately with fixed tokens. A step is all that the core
does for it: `schedule`, encoding the plan, decoding the result, `update`, and encoding the outputs
for two frontends. Sequences are in steady decoding; their prompts share nothing; prefix caching is
on. With `--drafts`, each row of a step has that many, and keeps half of them on average. With
several worker groups they are shared out among them, and a step is one group's. Times are medians
over steps of the thread's CPU time, so waiting for a core does not count, though sharing its caches
does.

With `--vllm-python` vLLM's `Scheduler` works on the same queue in turns with ours (see
`vllm_scheduler` for what its step is). "deciding" is schedule + update alone; "all" is with each
side's own serialisation: protobuf here, pickle and msgpack there.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import median

from benchmarks.json_lines import LineProcess
from benchmarks.machine import ForeignLoad, save
from benchmarks.steady_core import GROWTH_TOKENS, PREFILL_TOKENS, Queue, SteadyCore, StepTimes
from benchmarks.tables import general, print_table, script_parser

BUDGETS_US = {(256, 0): 500.0, (4096, 0): 8000.0, (256, 3): 700.0}
"""Limits for a step's CPU time, by its running sequences and the drafts of each."""

TURN_STEPS = 20
"""Consecutive steps of one scheduler, before the other's turn."""

Row = dict[str, float | int | None]


SCRIPT = Path(__file__).with_name("vllm_scheduler.py")


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """The sizes that are measured."""

    running: Sequence[int]
    prompt_tokens: Sequence[int]
    groups: Sequence[int]
    drafts: Sequence[int]
    steps: int

    def queues(self) -> Iterator[Queue]:
        """One for each line of the table."""
        lines = product(self.groups, self.prompt_tokens, self.running, self.drafts)
        for num_groups, prompt_tokens, num_seqs, num_drafts in lines:
            if num_seqs >= num_groups:
                yield Queue(
                    num_seqs=num_seqs,
                    prompt_tokens=prompt_tokens,
                    num_groups=num_groups,
                    num_drafts=num_drafts,
                )


def measure(queue: Queue, num_steps: int, vllm: VllmProcess | None) -> Row:
    """One line: medians per step, in microseconds."""
    ours = SteadyCore(queue)
    rival = vllm if queue.num_groups == 1 and queue.num_drafts == 0 else None
    if rival is not None:
        rival.prepare(queue)
    times: list[StepTimes] = []
    rivals: list[VllmTimes] = []
    while len(times) < num_steps:
        turn_start = len(times)
        while len(times) < turn_start + TURN_STEPS:
            times += ours.round()
        if rival is not None:
            rivals += rival.steps(TURN_STEPS)
    return _row(queue, times, rivals)


def _row(queue: Queue, times: Sequence[StepTimes], rivals: Sequence[VllmTimes]) -> Row:
    rows = queue.num_seqs // queue.num_groups
    total = median(step.total for step in times)
    deciding = median(step.deciding for step in times)
    row: Row = {
        "groups": queue.num_groups,
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
    if rivals:
        theirs = median(step.deciding for step in rivals)
        theirs_all = median(step.deciding + step.serializing for step in rivals)
        row |= {
            "vllm_deciding_us": theirs,
            "vllm_all_us": theirs_all,
            "deciding_ratio": theirs / deciding,
            "all_ratio": theirs_all / total,
        }
    return {name: round(v, 2) if isinstance(v, float) else v for name, v in row.items()}


def growth(rows: Sequence[Row]) -> dict[str, float | None]:
    """Cost of a row in a larger batch relative to a smaller one (1 is linear growth), and in a
    longer context relative to a shorter one (1 is flat): the worst of all such pairs. Below 256
    rows the fixed cost of a step outweighs them. None: there is no such pair."""
    return {
        "with_rows": _worst(rows, "rows_per_step", 256, ("groups", "prompt_tokens", "drafts")),
        "with_length": _worst(rows, "prompt_tokens", 0, ("groups", "rows_per_step", "drafts")),
    }


def _worst(rows: Sequence[Row], size: str, least: int, equal: tuple[str, ...]) -> float | None:
    ratios = [
        _number(larger, "all_us_per_row") / _number(smaller, "all_us_per_row")
        for smaller in rows
        for larger in rows
        if all(smaller[name] == larger[name] for name in equal)
        and least <= _number(smaller, size) < _number(larger, size)
    ]
    return round(max(ratios), 2) if ratios else None


def _number(row: Row, name: str) -> float:
    value = row[name]
    assert value is not None
    return value


COLUMNS = {
    "groups": "groups",
    "running": "running",
    "prompt_tokens": "prompt",
    "drafts": "drafts",
    "schedule_us": "schedule",
    "encode_plan_us": "encode",
    "decode_result_us": "decode",
    "update_us": "update",
    "encode_outputs_us": "outputs",
    "deciding_us": "deciding",
    "all_us": "all",
    "all_us_per_row": "all/row",
    "budget_us": "budget",
    "vllm_deciding_us": "vLLM deciding",
    "vllm_all_us": "vLLM all",
    "all_ratio": "ratio",
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, and write the results."""
    parser = script_parser(__doc__)
    parser.add_argument("--running", type=int, nargs="+", default=[16, 256, 1024, 4096])
    parser.add_argument("--prompt-tokens", type=int, nargs="+", default=[64, 4096])
    parser.add_argument("--groups", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--drafts", type=int, nargs="+", default=[0, 3])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--vllm-python", type=Path, help="a Python that can import vllm")
    args = parser.parse_args(arguments)
    settings = Settings(
        running=args.running,
        prompt_tokens=args.prompt_tokens,
        groups=args.groups,
        drafts=args.drafts,
        steps=args.steps,
    )
    load = ForeignLoad()
    with ExitStack() as stack:
        vllm = (
            stack.enter_context(VllmProcess([args.vllm_python, SCRIPT]))
            if args.vllm_python
            else None
        )
        rows = [measure(queue, settings.steps, vllm) for queue in settings.queues()]
        version = vllm.version if vllm is not None else None
    print_table(
        rows, "medians per step, in microseconds of CPU time", COLUMNS, width=160, cell=general
    )
    print(f"growth of a row's cost, at worst: {growth(rows)}")
    figures = {"vllm": version, "steps": settings.steps, "growth": growth(rows), "rows": rows}
    save("scheduler_overhead", figures, load.cores, args.results)


if __name__ == "__main__":
    main()
