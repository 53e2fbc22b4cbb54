"""Plans as a person reads them, a few lines each.

In `rows`, 1:6* is sequence 1 computing 6 tokens and sampling the next.
"""

from collections.abc import Iterator

from scheduler_service.core import NewSequence, StepPlan


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
        lines.append(f"{seq_id} goes on by {token}")
    for seq_id, index, block in _tuples(plan.block_updates, 3):
        lines.append(f"block table of {seq_id}: entry {index} is block {block}")
    return [*lines, f"rows {' '.join(_show_rows(plan)) or 'none'}"]


def _show_new(new: NewSequence) -> str:
    if new.parent_seq_id is not None:
        origin = f"forks {new.parent_seq_id}"
        origin += "".join(f" and goes on by {token}" for token in new.token_ids)
    else:
        num_output = len(new.token_ids) - new.num_prompt_tokens
        origin = f"prompt={new.num_prompt_tokens} output={num_output}"
    if new.num_computed_tokens:
        origin += f" computed={new.num_computed_tokens}"
    return f"new {new.seq_id} choice={new.choice_index} {origin} {new.block_ids}"


def _show_rows(plan: StepPlan) -> Iterator[str]:
    num_tokens = plan.num_tokens or [1] * len(plan.seq_ids)
    sample = plan.sample or [True] * len(plan.seq_ids)
    for seq_id, count, samples in zip(plan.seq_ids, num_tokens, sample, strict=True):
        yield f"{seq_id}:{count}{'*' if samples else ''}"


def _tuples(column: list[int], width: int) -> Iterator[tuple[int, ...]]:
    """A flat column as tuples."""
    return zip(*(column[i::width] for i in range(width)), strict=True)
