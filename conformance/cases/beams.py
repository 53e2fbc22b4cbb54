"""Sequences whose tokens the core chooses: beams."""

from collections.abc import Mapping

from conformance.assertions import expect, expect_true
from conformance.case import case, refusal_case
from conformance.generation import TOLERANCE
from conformance.sequence import NUM_LOGPROBS, sampler_params
from conformance.step_result import Candidates
from conformance.step_stream import StepStream
from conformance.worker import Worker
from pagewire import columns
from pagewire.v1 import sampling_pb2

NUM_CANDIDATES = 6
ROUNDING = 1e-3


def top(worker: Worker, tokens: list[int]) -> Candidates:
    """The most probable tokens that the worker reports for an undisturbed sequence."""
    step = worker.alone(tokens, 1).steps[0]
    return Candidates(step.top_ids, step.top_logprobs)


def beam(worker: Worker, **fields: object) -> sampling_pb2.SamplerParams:
    """Parameters of a beam."""
    return sampler_params(num_candidates=min(NUM_CANDIDATES, worker.vocab_size), **fields)


def tolerance(worker: Worker) -> float:
    """Maximum difference of a log probability from an undisturbed sequence's."""
    return ROUNDING if worker.info.model.batch_invariant else TOLERANCE


def expect_candidates(worker: Worker, found: Candidates, tokens: list[int]) -> None:
    """Fail unless these are the candidates to follow the tokens."""
    count = min(NUM_CANDIDATES, worker.vocab_size)
    expect("number of candidates", len(found.token_ids), count)
    expect("number of their log probabilities", len(found.logprobs), count)
    falling = sorted(found.logprobs, reverse=True)
    expect("their log probabilities, falling", found.logprobs, falling)
    expected = top(worker, tokens)
    for got, wanted in zip(found.logprobs, expected.logprobs, strict=False):
        near = abs(got - wanted) <= tolerance(worker)
        expect_true(near, f"expected {wanted:.5f}, got {got:.5f}")
    if worker.info.model.batch_invariant:
        expect("the best candidates", found.token_ids[:NUM_LOGPROBS], expected.token_ids)


@case("sampling", "A sampling row reports its candidates instead, this many")
def candidates_are_reported_instead_of_a_token(worker: Worker) -> None:
    for number in range(3):
        prompt = worker.prompt(number)
        with worker.open() as stream:
            sequence = stream.new(prompt, sampling=beam(worker))
            result = stream.step(sequence)
        expect("the row's token", result.token(sequence), -1)
        expect("log probabilities of a token", len(result.message.logprobs), 0)
        expect("errors", result.errors, {})
        expect_candidates(worker, result.candidates[sequence.seq_id], prompt)


@case("plan", "tokens the core has chosen among the candidates")
def the_core_reports_which_token_was_chosen(worker: Worker) -> None:
    with worker.open() as stream:
        sequence = stream.new(worker.prompt(1), sampling=beam(worker))
        reports = []
        for rank in (1, 0, 2):
            found = stream.step(sequence).candidates[sequence.seq_id]
            reports.append((list(sequence.tokens), found))
            stream.append(sequence, found.token_ids[rank])
    for tokens, found in reports:
        expect_candidates(worker, found, tokens)


@case("plan", "they take over their parents' tokens without these")
def a_beam_forks_before_its_parent_gets_its_token(worker: Worker) -> None:
    sampling = beam(worker)
    with worker.open() as stream:
        parent = stream.new(worker.prompt(2), sampling=sampling)
        found = stream.step(parent).candidates[parent.seq_id]
        first, second = found.token_ids[:2]
        fork, copy = stream.fork_with_last_block(parent, [second], sampling=sampling)
        stream.append(parent, first)
        result = stream.step(parent, fork, copy=copy)
    for sequence, token in ((parent, first), (fork, second)):
        expect("the last token", sequence.tokens[-1], token)
        expect_candidates(worker, result.candidates[sequence.seq_id], sequence.tokens)


@case("plan", "For sampling rows of sequences with num_candidates, in row order")
def beams_and_sampling_rows_share_a_batch(worker: Worker) -> None:
    with worker.open() as stream:
        beams = [stream.new(worker.prompt(number), sampling=beam(worker)) for number in (0, 1)]
        others = [stream.new(worker.prompt(number)) for number in (2, 3)]
        result = stream.step(others[0], beams[0], others[1], beams[1])
    expect("rows with candidates", [entry.row for entry in result.message.candidates], [1, 3])
    expect("tokens of beams", [result.token(held) for held in beams], [-1, -1])
    for number, held in enumerate(beams):
        expect_candidates(worker, result.candidates[held.seq_id], worker.prompt(number))
    for number, other in enumerate(others, start=2):
        expected = worker.alone(worker.prompt(number), 1).tokens[0]
        expect("a token of a row in a batch with beams", result.token(other), expected)


def candidates_of(worker: Worker, prompt: list[int], **fields: object) -> Mapping[int, float]:
    """A beam's candidates with these parameters, and their log probabilities."""
    with worker.open() as stream:
        sequence = stream.new(prompt, sampling=beam(worker, **fields))
        found = stream.step(sequence).candidates[sequence.seq_id]
    return dict(zip(found.token_ids, found.logprobs, strict=True))


@case("sampling", "Biases, penalties, min_tokens and bad_words then apply to log probabilities")
def a_bias_changes_a_candidates_log_probability(worker: Worker) -> None:
    prompt, value = worker.prompt(1), 3.0
    best, lifted, *_ = top(worker, prompt).token_ids
    unbiased = dict(zip(*top(worker, prompt), strict=True))
    logprobs = candidates_of(worker, prompt, logit_bias=[{"token_id": lifted, "bias": value}])
    for token, added in ((lifted, value), (best, 0.0)):
        wanted = unbiased[token] + added
        difference = abs(logprobs.get(token, float("inf")) - wanted)
        expect_true(
            difference <= tolerance(worker), f"expected {wanted:.5f}, it differs by {difference}"
        )


@case("plan", "fewer if the vocabulary is smaller or the sequence's constraints exclude")
def excluded_tokens_are_no_candidates(worker: Worker) -> None:
    prompt = worker.prompt(2)
    first, second, *_ = top(worker, prompt).token_ids
    found = candidates_of(
        worker,
        prompt,
        min_tokens=1,
        suppressed_token_ids=columns.pack([first]),
        bad_words=[{"token_ids": columns.pack([second])}],
    )
    expect("excluded candidates", {first, second} & set(found), set())
    expect_true(len(found) > 0, "there are no candidates at all")


@refusal_case("worker_service", "A plan that is malformed", "appended_tokens")
def an_appended_tokens_column_of_3_numbers_is_refused(worker: Worker, stream: StepStream) -> None:
    stream.prefilled(worker.prompt(1), sampling=beam(worker))
    stream.send_changed(appended_tokens=[1, 0, 1])


@refusal_case("worker_service", "contradicts what the worker knows", "appended_tokens")
def a_token_for_an_unknown_sequence_is_refused(worker: Worker, stream: StepStream) -> None:
    stream.prefilled(worker.prompt(1), sampling=beam(worker))
    stream.send_changed(appended_tokens=[7, 0])


@refusal_case("plan", "one for a sequence at most", "appended_tokens")
def two_tokens_for_one_sequence_are_refused(worker: Worker, stream: StepStream) -> None:
    stream.prefilled(worker.prompt(1), sampling=beam(worker))
    stream.send_changed(appended_tokens=[1, 0, 1, 0])


@refusal_case("plan", "among the candidates of sequences with num_candidates", "appended_tokens")
def a_token_for_a_sequence_that_samples_is_refused(worker: Worker, stream: StepStream) -> None:
    stream.prefilled(worker.prompt(1))
    stream.send_changed(appended_tokens=[1, 0])


@refusal_case("model", "token ids are less than this.", "appended_tokens")
def an_appended_token_beyond_the_vocabulary_is_refused(worker: Worker, stream: StepStream) -> None:
    stream.prefilled(worker.prompt(1), sampling=beam(worker))
    stream.send_changed(appended_tokens=[1, worker.vocab_size])


@refusal_case("sampling", "Present, from 1: the worker chooses no token.", "new_sequences")
def no_candidates_at_all_are_refused(worker: Worker, stream: StepStream) -> None:
    stream.send(stream.new(worker.prompt(1), sampling=sampler_params(num_candidates=0)))
