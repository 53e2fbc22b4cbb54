"""Plans and results without cache operations: prefill, decode, chunks, fields of results."""

from conformance.assertions import expect, expect_true
from conformance.case import Alone, case, stream_case
from conformance.step_stream import StepStream
from conformance.worker import Worker


@stream_case("plan", "The sampled token of each sampling row, in row order")
def a_prefill_and_decodes_return_one_token_each(worker: Worker, stream: StepStream) -> None:
    tokens = stream.generate(stream.new(worker.prompt(1)), 5).output
    wrong = [token for token in tokens if not 0 <= token < worker.vocab_size]
    expect("tokens outside the vocabulary", wrong, [])


@case("model", "bitwise independent of the rest of the batch and of how its tokens were computed")
def the_same_sequence_gives_the_same_tokens(worker: Worker) -> None:
    expected = worker.alone(worker.prompt(1), 6)
    with worker.open() as stream:
        sequence = stream.generate(stream.new(worker.prompt(1)), 6)
    worker.expect_as_alone("the sequence once more", sequence)
    expect("number of tokens", len(expected.tokens), 6)


@case("plan", "Tokens to compute per row, following those already computed.")
def a_prompt_in_chunks_leads_to_the_same_tokens(worker: Worker) -> None:
    for number, size in enumerate((1, max(worker.block_size - 1, 1), worker.block_size, 7)):
        with worker.open() as stream:
            sequence = stream.new(worker.prompt(number))
            while sequence.num_computed_tokens + size < sequence.num_prompt_tokens:
                result = stream.step(sequence.row(size, brings=False))
                expect("tokens of a chunk that does not sample", len(result.sampled), 0)
            stream.generate(sequence, 4)
        worker.expect_as_alone(f"a prompt in chunks of {size}", sequence)


@case("plan", "a token, sampled from the row's last logits and appended to the sequence")
def a_sampled_token_is_fed_forward_by_the_worker(worker: Worker) -> None:
    prompt = worker.prompt(2)
    alone = worker.alone(prompt, 4)
    with worker.open() as stream:
        sequence = stream.new([*prompt, *alone.tokens[:2]], num_prompt_tokens=len(prompt))
        stream.generate(sequence, 2)
    worker.expect_as_alone("the sequence given its first two tokens", sequence)


@stream_case("plan", "what it brings. 0: nothing.")
def a_row_that_does_not_sample_appends_nothing(worker: Worker, stream: StepStream) -> Alone:
    sequence = stream.new(worker.prompt(3))
    stream.step(sequence.row(len(sequence.tokens) - 1, brings=False))
    stream.generate(sequence, 3)
    return {"the last token computed alone": sequence}


@case("plan", "Prompt, then tokens generated so far (after a preemption or the loss of a worker).")
def a_recomputed_sequence_continues_as_before(worker: Worker) -> None:
    for number in range(2):
        with worker.open() as stream:
            first = stream.generate(stream.new(worker.prompt(number)), 3)
            again = stream.generate(stream.resumed(first), 3, forget=[first])
        worker.expect_as_alone("prompt and output computed again", again)


@stream_case("plan", "Worker's monotonic clock when the plan had arrived")
def a_steps_times_follow_each_other(worker: Worker, stream: StepStream) -> None:
    sequence = stream.new(worker.prompt(1))
    finished_us = 0
    for _ in range(3):
        timings = stream.step(sequence).message.timings
        moments = [timings.received_us, timings.started_us, timings.finished_us]
        expect("received_us, started_us, finished_us", moments, sorted(moments))
        expect_true(timings.received_us > 0, "received_us is 0")
        expect_true(
            timings.received_us >= finished_us,
            "a plan was received before the result that the kit had waited for was finished",
        )
        finished_us = timings.finished_us


@stream_case("worker_service", "When the core half-closes the stream, it ends with OK")
def a_stream_ends_with_ok_when_the_core_has_no_more_plans(
    worker: Worker, stream: StepStream
) -> None:
    stream.prefilled(worker.prompt(1))
    stream.call.finish()


@stream_case("worker_service", "it ends with OK after the last result")
def results_due_are_sent_before_the_stream_ends(worker: Worker, stream: StepStream) -> None:
    sequence = stream.new(worker.prompt(1))
    for _ in range(3):
        stream.send(sequence)
    stream.call.send_no_more()
    stream.receive_all()
    stream.call.finish()
