"""What beam searches deliver: nothing by the step, and their best sequences at the end."""

from scheduler_service.columns import to_column, to_float_column
from scheduler_service.core.beam_search import Path
from scheduler_service.core.engine_outputs import ChoiceFinished
from scheduler_service.core.sequence import Sequence, SequenceGroup
from scheduler_service.core.step_plan import RowLogprobs


def deliver_beams(group: SequenceGroup) -> int | None:
    """Tell the frontend all tokens of the best sequences; how many they are.

    None, with nothing told, if the search has found fewer than were asked for: the request's own
    constraints left nothing to go on with.
    """
    assert group.beams is not None
    best = group.beams.search.finished[: group.request.num_choices]
    if len(best) < group.request.num_choices:
        return None
    return sum(
        _deliver_choice(group, group.request.handle + index, finished.path)
        for index, finished in enumerate(best)
    )


def _deliver_choice(group: SequenceGroup, handle: int, path: Path) -> int:
    outbox, request = group.frontend.outbox, group.request
    assert request.beam_search is not None
    steps = path.steps()
    outbox.token_handles += [handle] * len(steps)
    outbox.token_ids += [step.token for step in steps]
    if (num_top := request.beam_search.num_logprobs) is not None:
        outbox.logprobs += [(handle, _logprobs(step, num_top)) for step in steps]
    is_stopped = path.token in request.stop_token_ids
    outbox.choices_finished.append(
        ChoiceFinished(
            handle=handle,
            reason="stop" if is_stopped else "length",
            stop_token_id=path.token if is_stopped else None,
        )
    )
    return len(steps)


def _logprobs(step: Path, num_top: int) -> RowLogprobs:
    """A token's log probability as it was scored, and those of the most probable candidates."""
    assert step.row is not None
    return RowLogprobs(
        token_ids=to_column([step.token, *step.row.token_ids[:num_top]]),
        logprobs=to_float_column([step.logprob, *step.row.logprobs[:num_top]]),
        sampled_rank=step.place + 1,
    )


def without_beams(
    sampled: list[Sequence], token_ids: list[int]
) -> tuple[list[Sequence], list[int]]:
    """Those rows that have tokens of their own."""
    pairs = zip(sampled, token_ids, strict=True)
    chosen = [(seq, token) for seq, token in pairs if not seq.group.is_lockstep]
    return [seq for seq, _ in chosen], [token for _, token in chosen]
