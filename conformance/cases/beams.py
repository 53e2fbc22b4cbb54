"""Sequences whose tokens the core chooses: beams."""

from typing import NamedTuple

import grpc

from conformance import columns
from conformance.assertions import expect, expect_true
from conformance.case import case
from conformance.generation import TOLERANCE
from conformance.sequence import NUM_LOGPROBS, Sequence, sampler_params
from conformance.step_stream import Candidates
from conformance.worker import Worker
from pagewire.v1 import plan_pb2, sampling_pb2

NUM_CANDIDATES = 6
ROUNDING = 1e-3


class Top(NamedTuple):
    """The most probable tokens after some others, from a sequence without candidates."""

    ids: list[int]
    logprobs: list[float]


def top(worker: Worker, tokens: list[int]) -> Top:
    """What the worker reports for an undisturbed sequence."""
    step = worker.alone(tokens, 1).steps[0]
    return Top(step.top_ids, step.top_logprobs)


def beam(worker: Worker, **fields: object) -> sampling_pb2.SamplerParams:
    """Parameters of a beam."""
    return sampler_params(num_candidates=min(NUM_CANDIDATES, worker.vocab_size), **fields)


def expect_candidates(worker: Worker, found: Candidates, tokens: list[int]) -> None:
    """Fail unless these are the candidates to follow the tokens."""
    count = min(NUM_CANDIDATES, worker.vocab_size)
    expect("number of candidates", len(found.token_ids), count)
    expect("number of their log probabilities", len(found.logprobs), count)
    falling = sorted(found.logprobs, reverse=True)
    expect("their log probabilities, falling", found.logprobs, falling)
    expected = top(worker, tokens)
    tolerance = ROUNDING if worker.info.model.batch_invariant else TOLERANCE
    for got, wanted in zip(found.logprobs, expected.logprobs, strict=False):
        expect_true(abs(got - wanted) <= tolerance, f"expected {wanted:.5f}, got {got:.5f}")
    if worker.info.model.batch_invariant:
        expect("the best candidates", found.token_ids[:NUM_LOGPROBS], expected.ids)


@case("sampling", "A sampling row reports its candidates instead, this many")
def candidates_are_reported_instead_of_a_token(worker: Worker) -> None:
    for number in range(3):
        prompt = worker.prompt(number)
        with worker.open() as stream:
            sequence = stream.new(prompt, sampling=beam(worker))
            result = stream.step(sequence.row())
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
            found = stream.step(sequence.row()).candidates[sequence.seq_id]
            reports.append((list(sequence.tokens), found))
            stream.append(sequence, found.token_ids[rank])
    for tokens, found in reports:
        expect_candidates(worker, found, tokens)


@case("plan", "they take over their parents' tokens without these")
def a_beam_forks_before_its_parent_gets_its_token(worker: Worker) -> None:
    sampling = beam(worker)
    with worker.open() as stream:
        parent = stream.new(worker.prompt(2), sampling=sampling)
        found = stream.step(parent.row()).candidates[parent.seq_id]
        first, second = found.token_ids[:2]
        target = stream.take_blocks(1)[0]
        blocks = [*parent.blocks[:-1], target]
        copy = [(parent.blocks[-1], target)]
        fork = stream.fork(parent, [second], blocks=blocks, sampling=sampling)
        stream.append(parent, first)
        result = stream.step(parent.row(), fork.row(), copy=copy)
    for each, token in ((parent, first), (fork, second)):
        expect("the last token", each.tokens[-1], token)
        expect_candidates(worker, result.candidates[each.seq_id], each.tokens)


@case("plan", "For sampling rows of sequences with num_candidates, in row order")
def beams_and_sampling_rows_share_a_batch(worker: Worker) -> None:
    prompts = [worker.prompt(number) for number in range(4)]
    with worker.open() as stream:
        beams = [stream.new(prompt, sampling=beam(worker)) for prompt in prompts[:2]]
        others = [stream.new(prompt) for prompt in prompts[2:]]
        family = [others[0], beams[0], others[1], beams[1]]
        result = stream.step(*(each.row() for each in family))
    expect("rows with candidates", [entry.row for entry in result.message.candidates], [1, 3])
    expect("tokens of beams", [result.token(each) for each in beams], [-1, -1])
    for each, prompt in zip(beams, prompts, strict=False):
        expect_candidates(worker, result.candidates[each.seq_id], prompt)
    for each, prompt in zip(others, prompts[2:], strict=True):
        expect("a token beside beams", result.token(each), worker.alone(prompt, 1).tokens[0])


@case("sampling", "Biases, penalties, min_tokens and bad_words then apply to log probabilities")
def a_bias_changes_a_candidates_log_probability(worker: Worker) -> None:
    prompt = worker.prompt(1)
    expected = top(worker, prompt)
    lifted, value = expected.ids[1], 3.0
    with worker.open() as stream:
        bias = [{"token_id": lifted, "bias": value}]
        sequence = stream.new(prompt, sampling=beam(worker, logit_bias=bias))
        found = stream.step(sequence.row()).candidates[sequence.seq_id]
    logprobs = dict(zip(found.token_ids, found.logprobs, strict=True))
    for token, added in ((lifted, value), (expected.ids[0], 0.0)):
        wanted = expected.logprobs[expected.ids.index(token)] + added
        difference = abs(logprobs.get(token, float("inf")) - wanted)
        tolerance = ROUNDING if worker.info.model.batch_invariant else TOLERANCE
        expect_true(difference <= tolerance, f"expected {wanted:.5f}, it differs by {difference}")


@case("plan", "fewer if the vocabulary is smaller or the sequence's constraints exclude")
def excluded_tokens_are_no_candidates(worker: Worker) -> None:
    prompt = worker.prompt(2)
    first, second, *_ = top(worker, prompt).ids
    held_back = columns.pack([first])
    words = [{"token_ids": columns.pack([second])}]
    sampling = beam(worker, min_tokens=1, suppressed_token_ids=held_back, bad_words=words)
    with worker.open() as stream:
        sequence = stream.new(prompt, sampling=sampling)
        found = stream.step(sequence.row()).candidates[sequence.seq_id]
    expect("excluded candidates", {first, second} & set(found.token_ids), set())
    expect_true(len(found.token_ids) > 0, "there are no candidates at all")


def _refuses_append(worker: Worker, pairs: list[int], *, is_beam: bool = True) -> None:
    """Fail unless a plan with these appended tokens is refused; sequence 1 is known."""
    with worker.open() as stream:
        fields = {"sampling": beam(worker)} if is_beam else {}
        sequence: Sequence = stream.new(worker.prompt(1), **fields)
        stream.step(sequence.row())
        plan: plan_pb2.StepPlan = stream.plan()
        plan.appended_tokens = columns.pack(pairs)
        stream.send_plan(plan)
        stream.refusal().expect(grpc.StatusCode.INVALID_ARGUMENT, "appended_tokens")


@case("worker_service", "A plan that is malformed")
def an_appended_tokens_column_of_3_numbers_is_refused(worker: Worker) -> None:
    _refuses_append(worker, [1, 0, 1])


@case("worker_service", "contradicts what the worker knows")
def a_token_for_an_unknown_sequence_is_refused(worker: Worker) -> None:
    _refuses_append(worker, [7, 0])


@case("plan", "one for a sequence at most")
def two_tokens_for_one_sequence_are_refused(worker: Worker) -> None:
    _refuses_append(worker, [1, 0, 1, 0])


@case("plan", "among the candidates of sequences with num_candidates")
def a_token_for_a_sequence_that_samples_is_refused(worker: Worker) -> None:
    _refuses_append(worker, [1, 0], is_beam=False)


@case("model", "token ids are less than this.")
def an_appended_token_beyond_the_vocabulary_is_refused(worker: Worker) -> None:
    _refuses_append(worker, [1, worker.vocab_size])


@case("sampling", "Present, from 1: the worker chooses no token.")
def no_candidates_at_all_are_refused(worker: Worker) -> None:
    with worker.open() as stream:
        stream.send(stream.new(worker.prompt(1), sampling=sampler_params(num_candidates=0)).row())
        stream.refusal().expect(grpc.StatusCode.INVALID_ARGUMENT, "new_sequences")
