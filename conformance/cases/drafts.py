"""Rows that may have drafts, which no token may depend on."""

import random
from typing import Any

from conformance.assertions import Skipped, expect, expect_true
from conformance.case import Alone, case, refusal_case, stream_case
from conformance.sequence import SALT, Sequence, part, sampler_params
from conformance.step_stream import StepStream
from conformance.worker import Worker
from pagewire.v1 import sampling_pb2

LOOKAHEAD = 5
NUM_TOKENS = 24
SAME = "as many rows without drafts would sample"
CONSTANT_BIAS = 100.0
"""Bias of each token that an output may consist of, large enough for most models."""


def params(**fields: Any) -> sampling_pb2.SamplerParams:
    """Parameters without log probabilities."""
    return sampler_params(**({"logprobs": None, "temperature": 0.0} | fields))


def looping(worker: Worker, num_tokens: int, **fields: Any) -> sampling_pb2.SamplerParams:
    """Parameters with which the output consists of a few tokens: what has followed before often
    follows again, but not always."""
    chosen = random.Random(num_tokens).sample(range(worker.vocab_size), num_tokens)
    bias = CONSTANT_BIAS
    biases = [sampling_pb2.LogitBias(token_id=token, bias=bias) for token in chosen]
    return params(logit_bias=biases, **fields)


def extend(stream: StepStream, sequence: Sequence, num_tokens: int, lookahead: int) -> list[int]:
    """Decode to exactly `num_tokens` output tokens; how many each row brought."""
    counts = []
    while (left := num_tokens - len(sequence.output)) > 0:
        before = len(sequence.output)
        stream.step(sequence.row(lookahead=min(lookahead, left - 1)))
        counts.append(len(sequence.output) - before)
    return counts


@stream_case("plan", SAME)
def greedy_tokens_are_those_without_drafts(worker: Worker, stream: StepStream) -> Alone:
    alone = {}
    max_half = (worker.info.model.max_model_len - NUM_TOKENS) // 2
    for lookahead in (1, 3, LOOKAHEAD):
        prompt = worker.prompt(lookahead)[:max_half] * 2
        sequence = stream.prefilled(prompt, sampling=params())
        extend(stream, sequence, NUM_TOKENS, lookahead)
        alone[f"with {lookahead} drafts"] = sequence
    return alone


@stream_case("plan", "samples at the last token and at each draft, every position with its own")
def random_tokens_are_those_without_drafts(worker: Worker, stream: StepStream) -> Alone:
    alone = {}
    for num_choices in (1, 2, 3, 12):
        fields = {"temperature": 1.0, "top_p": 0.9, "seed": 2**40 + num_choices}
        sampling = looping(worker, num_choices, **fields)
        sequence = stream.prefilled(worker.prompt(num_choices), sampling=sampling, choice_index=3)
        extend(stream, sequence, NUM_TOKENS, LOOKAHEAD)
        alone[f"{num_choices} tokens, in random order"] = sequence
    return alone


@stream_case("plan", "as if the drafts before it had been output")
def parameters_see_drafts_as_output(worker: Worker, stream: StepStream) -> Alone:
    first, second = random.Random(2).sample(range(worker.vocab_size), 2)
    ids = [first.to_bytes(4, "little"), second.to_bytes(4, "little")]
    word = sampling_pb2.TokenSequence(token_ids=ids[0] + ids[0] + ids[1])
    fields: dict[str, Any] = {"temperature": 1.0, "seed": 7}
    kinds: dict[str, dict[str, Any]] = {
        "bad words": {"bad_words": [word]},
        "min_tokens": {"min_tokens": 9, "suppressed_token_ids": ids[0]},
        "a frequency penalty": {"frequency_penalty": 2.0},
        "a repetition penalty": {"repetition_penalty": 1.3},
    }
    alone = {}
    for number, (what, kind) in enumerate(kinds.items()):
        sampling = looping(worker, 2, **fields, **kind)
        sequence = stream.prefilled(worker.prompt(number), sampling=sampling)
        extend(stream, sequence, NUM_TOKENS, LOOKAHEAD)
        alone[what] = sequence
    return alone


@stream_case("plan", "one for each of the row's tokens in")
def every_token_has_its_log_probabilities(worker: Worker, stream: StepStream) -> Alone:
    alone = {}
    for num_choices, width in ((1, 0), (2, 4)):
        width = min(width, worker.vocab_size)
        sampling = looping(worker, num_choices, temperature=1.0, logprobs=width)
        sequence = stream.prefilled(worker.prompt(num_choices), sampling=sampling)
        extend(stream, sequence, NUM_TOKENS, LOOKAHEAD)
        tokens = [entry.token_ids[:1] for entry in sequence.sampled]
        expect(
            "tokens of the entries in `logprobs`", tokens, [[token] for token in sequence.output]
        )
        alone[f"{width} most probable tokens"] = sequence
    return alone


@stream_case("plan", "Rows that failed; the rest of the batch is unaffected.")
def rows_with_drafts_leave_others_alone(worker: Worker, stream: StepStream) -> Alone:
    plain = [stream.prefilled(worker.prompt(number)) for number in range(2)]
    drafting = [
        stream.prefilled(worker.prompt(2 + number), sampling=looping(worker, 1 + number))
        for number in range(2)
    ]
    for _ in range(8):
        rows = [sequence.row(lookahead=LOOKAHEAD) for sequence in drafting]
        stream.step(plain[0], rows[0], stream.new(worker.prompt(9)), rows[1], plain[1])
    sequences = {f"a row without drafts, {index}": sequence for index, sequence in enumerate(plain)}
    return sequences | {
        f"a row with drafts, {index}": sequence for index, sequence in enumerate(drafting)
    }


@stream_case("plan", "-1 where the row is in `errors` or in `candidates`")
def rows_with_drafts_are_planned_ahead(worker: Worker, stream: StepStream) -> Alone:
    sequence = stream.prefilled(worker.prompt(4), sampling=looping(worker, 2, temperature=1.0))
    for _ in range(4):
        for lookahead in (LOOKAHEAD, 0, 2):
            stream.send(sequence.row(lookahead=lookahead))
        stream.receive_all()
    return {"three rows in flight": sequence}


@stream_case("plan", "what refused ones leave there is never read")
def accepted_tokens_are_computed_in_their_blocks(worker: Worker, stream: StepStream) -> Alone:
    num_tokens = 3 * worker.block_size + 2
    # Short, so that all tokens fit into a model of four large blocks.
    prompt = worker.prompt(5, max(worker.block_size // 2, 1))
    sequence = stream.prefilled(prompt, sampling=looping(worker, 2, temperature=1.0))
    extend(stream, sequence, num_tokens, LOOKAHEAD)
    again = stream.borrowed(list(sequence.tokens), sequence.blocks)
    again.num_prompt_tokens, again.sampling = sequence.num_prompt_tokens, sequence.sampling
    stream.generate(again, 4)
    return {"a sequence that reuses the blocks": again, "the one that filled them": sequence}


@stream_case("plan", "Prompt, then tokens generated so far (after a preemption")
def output_cut_between_accepted_tokens_continues(worker: Worker, stream: StepStream) -> Alone:
    sequence = stream.prefilled(worker.prompt(6), sampling=looping(worker, 1))
    extend(stream, sequence, NUM_TOKENS, LOOKAHEAD)
    cut = sequence.tokens[: sequence.num_prompt_tokens + 10]  # a stop token's place
    kept = {"num_prompt_tokens": sequence.num_prompt_tokens, "sampling": sequence.sampling}
    again = stream.new(cut, **kept)
    stream.step(again, forget=[sequence])
    extend(stream, again, NUM_TOKENS, LOOKAHEAD)
    return {"the output after the cut": again}


@stream_case("plan", "from 1 to one more than")
def a_row_never_has_more_tokens_than_allowed(worker: Worker, stream: StepStream) -> Alone:
    sequence = stream.prefilled(worker.prompt(7), sampling=looping(worker, 1))
    for lookahead in (0, 1, 2, LOOKAHEAD, 0):  # max_tokens, for the core
        counts = extend(stream, sequence, len(sequence.output) + 1 + lookahead, lookahead)
        expect_true(max(counts) <= 1 + lookahead, f"{counts} tokens with {lookahead} drafts")
    return {"drafts limited": sequence}


@stream_case("context", "It changes no KV")
def tokens_are_the_same_with_every_salt(worker: Worker, stream: StepStream) -> Alone:
    sampling = looping(worker, 3, temperature=1.0, seed=5)
    alone: dict[str, Sequence] = {}
    for salts in ((), ("a",), ("b",), ("a", "b"), ("a",)):
        context = tuple(part(SALT, salt) for salt in salts)
        sequence = stream.prefilled(worker.prompt(9), sampling=sampling, context=context)
        extend(stream, sequence, NUM_TOKENS, LOOKAHEAD)
        alone[f"sequence {len(alone)}, with the salts {salts}"] = sequence
    return alone


@case("worker_service", "The most drafts that the worker adds to a row")
def right_drafts_are_kept(worker: Worker) -> None:
    most = worker.info.num_speculative_tokens
    if most == 0:
        raise Skipped("the worker does not speculate")
    with worker.open() as stream:
        sequence = stream.prefilled(worker.prompt(8), sampling=looping(worker, 1))
        counts = extend(stream, sequence, 40, most)
    expect_true(max(counts) > 1, "no draft was kept of an output that repeats one token")
    expect_true(max(counts) <= 1 + most, f"{max(counts)} tokens in a row with {most} drafts")


@refusal_case("plan", "One byte per row: the most drafts", "lookahead")
def a_lookahead_column_of_another_length(worker: Worker, stream: StepStream) -> None:
    sequence = stream.prefilled(worker.prompt(1), sampling=params())
    stream.send_changed(sequence, lookahead=b"\x01\x01")


@refusal_case("plan", "blocks for all drafts allowed", "lookahead")
def drafts_without_blocks(worker: Worker, stream: StepStream) -> None:
    sequence = stream.prefilled(worker.prompt(1), sampling=params())
    stream.send_changed(sequence, lookahead=b"\xff")


@refusal_case("plan", "such a row brings a token and computes tokens", "lookahead")
def drafts_of_a_row_that_does_not_sample(worker: Worker, stream: StepStream) -> None:
    sequence = stream.new(worker.prompt(1), sampling=params())
    stream.send_changed(sequence.row(1, brings=False), lookahead=b"\x01")
