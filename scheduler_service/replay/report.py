"""What an exact replay found, as text."""

from itertools import zip_longest

from rich.table import Table

from scheduler_service.core import StepPlan
from scheduler_service.replay.exact_replay import Difference, Summary
from scheduler_service.replay.reader import RecordingReader
from scheduler_service.replay.show import show_plan

TRUNCATED = "the file ends within a line, as when a core is killed: that line is left out"


def summary_lines(reader: RecordingReader, summary: Summary, took_s: float) -> list[str]:
    """The recording and how its replay went, differences aside."""
    header = reader.header
    lines = [
        f"recorded at {header.recorded_at} by version {header.software_version}",
        f"requests: {summary.num_requests} accepted",
        f"inputs:   {summary.num_inputs} in {summary.seconds:.3f} s, "
        f"replayed in {took_s:.2f} s ({summary.seconds / took_s:.1f} seconds per second)",
        f"plans:    {summary.num_plans} equal{' until the difference' * bool(summary.difference)}",
        f"news:     {summary.num_news} equal",
    ]
    if reader.is_truncated:
        lines.append(f"notice:   {TRUNCATED}")
    return lines


def difference_lines(title: str, difference: Difference) -> list[str]:
    """Where a replay is unlike its recording, and what it has instead."""
    entry = difference.entry
    lines = [
        f"{title}: {entry.do}, input {difference.number} (line {entry.line}), "
        f"{difference.seconds:.6f} s after the first"
    ]
    if "group_id" in entry.arguments:
        lines.append(f"  group:    {entry.arguments['group_id']}")
    recorded = _outcome(entry.do, entry.chain, entry.raised, entry.plan)
    replayed = _outcome(entry.do, difference.chain, difference.raised, difference.plan)
    return [*lines, f"  recorded: {recorded}", f"  replayed: {replayed}"]


def _outcome(do: str, chain: str | None, raised: list[str] | None, plan: StepPlan | None) -> str:
    if raised is not None:
        return f"raised {': '.join(raised)}"
    if chain is None:
        return {"schedule": "nothing to do", "take_outboxes": "no news"}.get(do, "no error")
    step = f"step {plan.step_id}, " if plan is not None else ""
    return f"{step}hash {chain}"


def plans_table(difference: Difference) -> Table:
    """The plans side by side, a line each that says the same; recorded ones only if kept."""
    recorded = difference.entry.plan
    table = Table("", "recorded", "replayed")
    left = show_plan(recorded) if recorded or difference.entry.chain is None else ["not recorded"]
    for one, other in zip_longest(left, show_plan(difference.plan), fillvalue=""):
        table.add_row("" if one == other else "≠", one, other)
    return table
