"""Constrained sequences in batches, ahead of results, forked, recomputed, and failing."""

from typing import Any

from conformance.assertions import expect, expect_true
from conformance.case import Alone, case, stream_case
from conformance.sampling_oracle import draw, expected_token
from conformance.sequence import GREEDY, Sequence
from conformance.step_stream import StepStream
from conformance.structured_output import (
    KnownConstraint,
    end_of,
    known_choice,
    known_constraint,
    offered,
    texts,
    texts_of,
)
from conformance.vocabulary import spell
from conformance.worker import Worker
from pagewire.v1 import plan_pb2

NUM_LETTERS = 12
LETTERS = "abcdefghij"
NUM_DRAWS = 24
LOOKAHEAD = 4
FUNCTION_OF_OUTPUT = (
    "The allowed tokens are therefore a function of the constraint and the output tokens"
)


def letters(worker: Worker, **fields: Any) -> KnownConstraint:
    """Twelve of the first ten letters: many continuations, and a distant end."""
    pattern = f"[{LETTERS[0]}-{LETTERS[-1]}]{{{NUM_LETTERS}}}"
    return known_constraint(worker, {"regex": pattern}, texts(*LETTERS), **fields)


def expect_letters(worker: Worker, what: str, tokens: list[int]) -> None:
    """Fail unless the text of these tokens is a prefix of a text that `letters` allows."""
    known = texts_of(worker)
    text = b"".join(known[token] for token in tokens if token != end_of(worker))
    is_right = len(text) <= NUM_LETTERS and set(text) <= set(LETTERS.encode())
    expect_true(is_right and bool(text), f"{what}: the output {text!r} does not match")


@case("sampling", "tokens that the constraint does not allow are excluded")
def the_most_probable_of_the_allowed_tokens_is_chosen(worker: Worker) -> None:
    asked = letters(worker)
    (found,) = offered(worker, asked, [[]])
    chosen = worker.alone(worker.prompt(1), 1, asked.params(temperature=0.0)).tokens[0]
    expect("the token chosen at temperature 0", chosen, found.token_ids[0])


@case("sampling", "the first is taken at which their cumulative probability exceeds the draw")
def a_draw_is_among_the_allowed_tokens(worker: Worker) -> None:
    known = texts_of(worker)
    asked = known_choice(worker, *"abcdefgh")
    (found,) = offered(worker, asked, [[]])
    logprobs = dict(zip(found.token_ids, found.logprobs, strict=True))
    num_predicted = 0
    with worker.open() as stream:
        sequences = [
            stream.new(worker.prompt(1), sampling=asked.params(seed=seed, temperature=3.0))
            for seed in range(NUM_DRAWS)
        ]
        result = stream.step(*sequences)
    for sequence in sequences:
        seed = sequence.sampling.seed
        wanted = expected_token(logprobs, sequence.sampling, draw(seed, 0, 0))
        if wanted is not None:
            num_predicted += 1
            got = result.token(sequence)
            expect(f"the token drawn with seed {seed}, which reads {known[got]!r}", got, wanted)
    expect_true(num_predicted > NUM_DRAWS // 2, "hardly any draw could be predicted")


@stream_case("sampling", FUNCTION_OF_OUTPUT)
def steps_planned_ahead_follow_the_constraint(worker: Worker, stream: StepStream) -> Alone:
    sequence = stream.new(worker.prompt(2), sampling=letters(worker).params(seed=5))
    for _ in range(4):
        stream.send(sequence)
    stream.receive_all()
    expect_letters(worker, "four steps sent at once", sequence.output)
    return {"four steps sent at once": sequence}


@stream_case("sampling", FUNCTION_OF_OUTPUT)
def drafts_count_as_output(worker: Worker, stream: StepStream) -> Alone:
    known, alone = texts_of(worker), {}
    for pattern in ("(?:abc){99}", "[ab]{99}", "(?:ab|ba|c){99}"):
        asked = known_constraint(worker, {"regex": pattern}, texts(*LETTERS))
        sequence = stream.prefilled(worker.prompt(4), sampling=asked.params(seed=3))
        for _ in range(NUM_LETTERS):
            stream.step(sequence.row(lookahead=LOOKAHEAD))
        text = b"".join(known[token] for token in sequence.output)
        expect_true(set(text) <= set(b"abc"), f"{pattern}: the output {text!r} does not match")
        alone[f"a text of {pattern}, with drafts"] = sequence
    return alone


@case("sampling", "continues where the other worker stopped")
def a_recomputed_sequence_continues_where_it_was(worker: Worker) -> None:
    params = letters(worker).params(seed=7, temperature=2.0)
    prompt = worker.prompt(3)
    alone = worker.alone(prompt, 5, params)
    expect_letters(worker, "a constrained sequence", alone.tokens)
    with worker.open() as stream:
        tokens = [*prompt, *alone.tokens[:2]]
        again = stream.new(tokens, num_prompt_tokens=len(prompt), sampling=params)
        stream.generate(again, 3)
    worker.expect_as_alone("a recomputed sequence", again)


@case("sampling", FUNCTION_OF_OUTPUT)
def a_fork_follows_its_own_output(worker: Worker) -> None:
    known = texts_of(worker)
    words = ["ab", "cd"]
    asked = known_choice(worker, *words)
    params = asked.params(temperature=0.0)
    with worker.open() as stream:
        parent = stream.prefilled(
            worker.prompt(1), sampling=asked.params(num_candidates=min(8, worker.vocab_size))
        )
        forks: list[Sequence] = []
        copies: list[tuple[int, int]] = []
        for word in words:
            (first,) = spell(known, word[0])
            fork, own_copies = stream.fork_with_last_block(parent, [first], sampling=params)
            forks.append(fork)
            copies += own_copies
        result = stream.step(*forks, copy=copies)
    found = [known[result.token(follower)].decode() for follower in forks]
    expect("what follows `a` and `c` in forks of one sequence", found, [word[1] for word in words])


@stream_case("plan", "Rows that failed; the rest of the batch is unaffected.")
def rows_without_a_constraint_are_unaffected(worker: Worker, stream: StepStream) -> Alone:
    params = letters(worker).params(seed=1)
    free = stream.new(worker.prompt(0))
    bound = [stream.new(worker.prompt(number), sampling=params) for number in (1, 2)]
    for _ in range(3):
        stream.step(bound[0], free, bound[1])
    for sequence in bound:
        expect_letters(worker, "a constrained row in a batch with others", sequence.output)
    return {"a row between constrained ones": free}


@case("plan", "log softmax of the model's own logits, before penalties and temperature")
def log_probabilities_are_those_of_before_the_constraint(worker: Worker) -> None:
    prompt = worker.prompt(1)
    free = worker.alone(prompt, 1, GREEDY)
    bound = worker.alone(prompt, 1, letters(worker).params(temperature=0.0))
    expect("the most probable tokens", bound.steps[0].top_ids, free.steps[0].top_ids)
    expect_letters(worker, "a constrained sequence", bound.tokens)


@stream_case("sampling", "Tokens after such a token are irrelevant.")
def a_step_beyond_the_end_affects_no_other_row(worker: Worker, stream: StepStream) -> Alone:
    params = known_choice(worker, "ab").params(temperature=0.0)
    ended = [*worker.prompt(1), *spell(texts_of(worker), "ab"), end_of(worker)]
    late = stream.new(ended, num_prompt_tokens=len(ended) - 3, sampling=params)
    other = stream.new(worker.prompt(0))
    stream.step(late, other)
    stream.generate(other, 2, forget=[late])
    return {"a row in a batch with one that has ended": other}


@stream_case("plan", "or tokens generated on another worker do not match it.")
def an_output_that_does_not_match_fails_alone(worker: Worker, stream: StepStream) -> Alone:
    wrong = [*worker.prompt(1), *spell(texts_of(worker), "zz")]
    params = letters(worker).params()
    bad = stream.new(wrong, num_prompt_tokens=len(wrong) - 2, sampling=params)
    good = stream.new(worker.prompt(0))
    result = stream.step(bad, good)
    reason = plan_pb2.ROW_ERROR_REASON_CONSTRAINT
    expect("the rows' errors", result.errors, {bad.seq_id: reason})
    expect("the failed row's token", result.token(bad), -1)
    stream.generate(good, 2, forget=[bad])
    return {"a row in a batch with a failed one": good}


@case("plan", "Every token was excluded by the request's own constraints.")
def bad_words_may_exclude_everything_allowed(worker: Worker) -> None:
    known = texts_of(worker)
    asked = known_choice(worker, "a")
    (letter,) = spell(known, "a")
    words = [{"token_ids": letter.to_bytes(4, "little")}]
    with worker.open() as stream:
        sequence = stream.new(worker.prompt(1), sampling=asked.params(bad_words=words))
        result = stream.step(sequence)
    reason = plan_pb2.ROW_ERROR_REASON_NO_CANDIDATES
    expect("the row's error", result.errors, {sequence.seq_id: reason})
