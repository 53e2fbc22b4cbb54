"""Plans and results without cache operations: prefill, decode, chunks, fields of results."""

from conformance.assertions import expect, expect_true
from conformance.case import case
from conformance.worker import Worker


@case("plan", "The sampled token of each sampling row, in row order")
def a_prefill_and_decodes_return_one_token_each(worker: Worker) -> None:
    with worker.open() as stream:
        sequence = stream.new(worker.prompt(1))
        tokens = stream.generate(sequence, 5).tokens
    wrong = [token for token in tokens if not 0 <= token < worker.vocab_size]
    expect("tokens outside the vocabulary", wrong, [])


@case("model", "bitwise independent of the rest of the batch and of how its tokens were computed")
def the_same_sequence_gives_the_same_tokens(worker: Worker) -> None:
    prompt = worker.prompt(1)
    expected = worker.alone(prompt, 6)
    with worker.open() as stream:
        found = stream.generate(stream.new(prompt), 6)
    worker.expect_as_alone("the sequence once more", found, prompt)
    expect("number of tokens", len(expected.tokens), 6)


@case("plan", "Tokens to compute per row, following those already computed.")
def a_prompt_in_chunks_leads_to_the_same_tokens(worker: Worker) -> None:
    for number, size in enumerate((1, worker.block_size - 1, worker.block_size, 7)):
        prompt = worker.prompt(number)
        with worker.open() as stream:
            sequence = stream.new(prompt)
            while sequence.num_computed_tokens + max(size, 1) < len(prompt):
                result = stream.step(sequence.row(max(size, 1), sample=False))
                expect("tokens of a chunk that does not sample", len(result.sampled), 0)
            found = stream.generate(sequence, 4)
        worker.expect_as_alone(f"a prompt in chunks of {max(size, 1)}", found, prompt)


@case("plan", "1 samples a token from the row's last logits and appends it to the sequence")
def a_sampled_token_is_fed_forward_by_the_worker(worker: Worker) -> None:
    prompt = worker.prompt(2)
    alone = worker.alone(prompt, 4)
    with worker.open() as stream:
        sequence = stream.new([*prompt, *alone.tokens[:2]], num_prompt_tokens=len(prompt))
        found = stream.generate(sequence, 2)
    worker.expect_as_alone("the sequence given its first two tokens", found, prompt, start=2)


@case("plan", "0 does not")
def a_row_that_does_not_sample_appends_nothing(worker: Worker) -> None:
    prompt = worker.prompt(3)
    with worker.open() as stream:
        sequence = stream.new(prompt)
        stream.step(sequence.row(len(prompt) - 1, sample=False))
        found = stream.generate(sequence, 3)
    worker.expect_as_alone("the last token computed by itself", found, prompt)


@case("plan", "Prompt, then tokens generated so far (after a preemption or the loss of a worker).")
def a_recomputed_sequence_continues_as_before(worker: Worker) -> None:
    for number in range(2):
        prompt = worker.prompt(number)
        with worker.open() as stream:
            first = stream.new(prompt)
            stream.generate(first, 3)
            again = stream.new(first.tokens, num_prompt_tokens=len(prompt))
            found = stream.generate(again, 3, forget=[first])
        worker.expect_as_alone("prompt and output computed again", found, prompt, start=3)


@case("plan", "Worker's monotonic clock when the plan had arrived")
def a_steps_times_follow_each_other(worker: Worker) -> None:
    with worker.open() as stream:
        sequence = stream.new(worker.prompt(1))
        finished_us = 0
        for _ in range(3):
            timings = stream.step(sequence.row()).message.timings
            moments = [timings.received_us, timings.started_us, timings.finished_us]
            expect("received_us, started_us, finished_us", moments, sorted(moments))
            expect_true(timings.received_us > 0, "received_us is 0")
            expect_true(
                timings.received_us >= finished_us,
                "a plan was received before the result that the kit had waited for was finished",
            )
            finished_us = timings.finished_us


@case("worker_service", "When the core half-closes the stream, it ends with OK")
def a_stream_ends_with_ok_when_the_core_has_no_more_plans(worker: Worker) -> None:
    with worker.open() as stream:
        stream.step(stream.new(worker.prompt(1)).row())
        stream.finish()


@case("worker_service", "it ends with OK after the last result")
def results_due_are_sent_before_the_stream_ends(worker: Worker) -> None:
    with worker.open() as stream:
        sequence = stream.new(worker.prompt(1))
        for _ in range(3):
            stream.send(sequence.row())
        stream.send_no_more()
        for _ in range(3):
            stream.receive()
        stream.finish()
