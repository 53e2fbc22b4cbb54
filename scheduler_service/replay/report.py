"""A replay's summary, its first differences, and plans as text."""

from collections.abc import Iterator
from itertools import zip_longest

from rich.table import Table

from scheduler_service.core import NewSequence, StepPlan
from scheduler_service.core.step_plan import BlockTable, RowOutput
from scheduler_service.replay.exact_replay import Difference, Summary
from scheduler_service.replay.recording_file import RecordingReader


def show_plan(plan: StepPlan | None) -> list[str]:
    """A plan in a few lines."""
    if plan is None:
        return ["nothing to do"]
    lines = [f"step {plan.step_id}"]
    if plan.forget_seq_ids:
        lines.append(f"forget {' '.join(map(str, plan.forget_seq_ids))}")
    lines += [f"swap block {block} to host block {h}" for block, h in _tuples(plan.swap_out, 2)]
    lines += [f"swap host block {h} to block {block}" for h, block in _tuples(plan.swap_in, 2)]
    lines += [f"copy block {source} to {target}" for source, target in _tuples(plan.copy, 2)]
    lines += [_show_new(new) for new in plan.new_sequences]
    for seq_id, token in _tuples(plan.appended_tokens, 2):
        lines.append(f"{seq_id} continues with {token}")
    for seq_id, group, position, block in _tuples(plan.saved_states, 4):
        lines.append(f"save state of {seq_id} in group {group} at {position} in block {block}")
    for seq_id, group, index, block in _tuples(plan.block_updates, 4):
        where = f" in group {group}" if group else ""
        lines.append(f"block table of {seq_id}{where}: entry {index} is block {block}")
    return [*lines, f"rows {' '.join(_show_rows(plan)) or 'none'}"]


def _show_new(new: NewSequence) -> str:
    if new.parent_seq_id is not None:
        origin = f"forks {new.parent_seq_id}"
        origin += "".join(f" and continues with {token}" for token in new.token_ids)
    else:
        num_output = len(new.token_ids) - new.num_prompt_tokens
        origin = f"prompt={new.num_prompt_tokens} output={num_output}"
    if new.num_computed_tokens:
        origin += f" computed={new.num_computed_tokens}"
    tables = " ".join(map(_show_table, new.tables))
    return f"new {new.seq_id} choice={new.choice_index} {origin} {tables}"


def _show_table(table: BlockTable) -> str:
    where = f"in group {table.group} " if table.group else ""
    where += f"from {table.first_index} " if table.first_index else ""
    return f"{where}{table.block_ids}"


_OUTPUTS = {
    RowOutput.NOTHING: "",
    RowOutput.TOKEN: "*",
    RowOutput.CANDIDATES: "*",
    RowOutput.VECTOR: "v",
}


def _show_rows(plan: StepPlan) -> Iterator[str]:
    num_tokens = plan.num_tokens or [1] * len(plan.seq_ids)
    outputs = plan.output or [RowOutput.TOKEN] * len(plan.seq_ids)
    for seq_id, count, output in zip(plan.seq_ids, num_tokens, outputs, strict=True):
        yield f"{seq_id}:{count}{_OUTPUTS[RowOutput(output)]}"


def _tuples(column: list[int], width: int) -> Iterator[tuple[int, ...]]:
    return zip(*(column[i::width] for i in range(width)), strict=True)


TRUNCATED = "the file ends within a line, as if the core was killed; that line is left out"


def summary_lines(reader: RecordingReader, summary: Summary, elapsed_s: float) -> list[str]:
    """The recording and how its replay went, differences aside."""
    header = reader.header
    lines = [
        f"recorded at {header.recorded_at} by version {header.software_version}",
        f"requests: {summary.num_requests} accepted",
        f"inputs:   {summary.num_inputs} in {summary.seconds:.3f} s, "
        f"replayed in {elapsed_s:.2f} s ({summary.seconds / elapsed_s:.1f} seconds per second)",
        f"plans:    {summary.num_plans} equal{' until the difference' * bool(summary.difference)}",
        f"outputs:  {summary.num_outputs} equal",
    ]
    if reader.is_truncated:
        lines.append(f"notice:   {TRUNCATED}")
    return lines


def difference_lines(title: str, difference: Difference) -> list[str]:
    """The difference between a replay and its recording, line by line."""
    entry = difference.entry
    lines = [
        f"{title}: {entry.do}, input {difference.number} (line {entry.line}), "
        f"{difference.seconds:.6f} s after the first"
    ]
    if "worker_group_id" in entry.arguments:
        lines.append(f"  group:    {entry.arguments['worker_group_id']}")
    recorded = _outcome(entry.do, entry.chain, entry.raised, entry.plan)
    replayed = _outcome(entry.do, difference.chain, difference.raised, difference.plan)
    return [*lines, f"  recorded: {recorded}", f"  replayed: {replayed}"]


def _outcome(do: str, chain: str | None, raised: list[str] | None, plan: StepPlan | None) -> str:
    if raised is not None:
        return f"raised {': '.join(raised)}"
    if chain is None:
        return {"schedule": "nothing to do", "pop_outboxes": "no outputs"}.get(do, "no error")
    step = f"step {plan.step_id}, " if plan is not None else ""
    return f"{step}hash {chain}"


def plans_table(difference: Difference) -> Table:
    """The plans side by side; the recorded one only if the recording has plans."""
    recorded = difference.entry.plan
    table = Table("", "recorded", "replayed")
    recorded_lines = (
        show_plan(recorded) if recorded or difference.entry.chain is None else ["not recorded"]
    )
    for one, other in zip_longest(recorded_lines, show_plan(difference.plan), fillvalue=""):
        table.add_row("" if one == other else "≠", one, other)
    return table
