"""From a step's result to the outboxes: tokens, log probabilities, ends of choices."""

from scheduler_service.core.engine_outputs import ChoiceFinished, RequestFinished, RequestTimings
from scheduler_service.core.sequence import Sequence, SequenceGroup, SequenceStatus
from scheduler_service.core.step_plan import RowLogprobs, RowPromptLogprobs

RUNNING = SequenceStatus.RUNNING
STOPPED = SequenceStatus.FINISHED_STOPPED
LENGTH_CAPPED = SequenceStatus.FINISHED_LENGTH_CAPPED
_ENTRY_BYTES = 4  # of an int32 or float32 column

Finished = list[tuple[Sequence, SequenceStatus]]


def deliver_tokens(sampled: list[Sequence], token_ids: list[int]) -> tuple[int, Finished]:
    """Append and deliver sampled tokens; how many, and the sequences that end by them.

    Tokens of sequences that ended while the step was in flight are dropped. A preempted
    sequence's tokens count: its KV was intact when they were sampled.
    """
    finished: Finished = []
    num_dropped = 0
    frontend = None
    for seq, token in zip(sampled, token_ids, strict=True):
        if seq.status is not RUNNING and seq.status.is_finished:
            num_dropped += 1
            continue
        if seq.frontend is not frontend:
            frontend = seq.frontend
            outbox = frontend.outbox
            handles, tokens = outbox.token_handles, outbox.token_ids
        output = seq.output_token_ids
        output.append(token)
        handles.append(seq.handle)
        tokens.append(token)
        if token in seq.stop_token_ids:
            finish_choice(seq, token)
            finished.append((seq, STOPPED))
        elif len(output) >= seq.max_output_tokens:
            finish_choice(seq, None)
            finished.append((seq, LENGTH_CAPPED))
    return len(token_ids) - num_dropped, finished


def finish_choice(seq: Sequence, stop_token_id: int | None) -> None:
    """Tell the frontend that a choice ended, by a stop token or else by length."""
    reason = "length" if stop_token_id is None else "stop"
    finished = ChoiceFinished(handle=seq.handle, reason=reason, stop_token_id=stop_token_id)
    seq.group.frontend.outbox.choices_finished.append(finished)


def finish_resumed(seq: Sequence) -> None:
    """End a choice that comes with all the tokens it can have."""
    output = seq.output_token_ids
    if output and output[-1] in seq.stop_token_ids:
        finish_choice(seq, output[-1])
        seq.group.end(seq, STOPPED)
    elif len(output) >= seq.group.request.max_tokens:
        finish_choice(seq, None)
        seq.group.end(seq, LENGTH_CAPPED)


def finish_request(group: SequenceGroup, timings: RequestTimings) -> None:
    """Tell the frontend that a request ended, well or not; of one that it cancelled, nothing."""
    outbox = group.frontend.outbox
    handle = group.request.handle
    if group.error is not None:
        outbox.requests_failed.append((handle, group.error))
    elif not any(seq.status is SequenceStatus.FINISHED_ABORTED for seq in group.sequences):
        finished = RequestFinished(
            handle=handle, cached_tokens=group.num_cached_tokens, timings=timings
        )
        outbox.requests_finished.append(finished)


def deliver_logprobs(seq: Sequence, logprobs: RowLogprobs) -> None:
    """Pass on the log probabilities of a token that is about to be delivered."""
    if not seq.status.is_finished:
        seq.group.frontend.outbox.logprobs.append((seq.handle, logprobs))


def deliver_prompt_logprobs(group: SequenceGroup, update: RowPromptLogprobs) -> None:
    """Pass on the part of a prompt's log probabilities that was not delivered yet.

    After a preemption, and where several choices are recomputed, a position may be reported
    again.
    """
    if group.num_unfinished == 0:
        return
    num_reported = len(update.ranks) // _ENTRY_BYTES
    num_known = max(0, group.prompt_logprobs_start - update.start)
    if num_known >= num_reported:
        return
    group.prompt_logprobs_start = update.start + num_reported
    news = update if num_known == 0 else _without_first(update, num_known)
    group.frontend.outbox.prompt_logprobs.append((group.request.handle, news))


def _without_first(update: RowPromptLogprobs, num_tokens: int) -> RowPromptLogprobs:
    """The same without its first lines."""
    matrix_start = num_tokens * update.width * _ENTRY_BYTES
    return RowPromptLogprobs(
        start=update.start + num_tokens,
        width=update.width,
        token_ids=update.token_ids[matrix_start:],
        logprobs=update.logprobs[matrix_start:],
        ranks=update.ranks[num_tokens * _ENTRY_BYTES :],
    )
