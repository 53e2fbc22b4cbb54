"""Log probabilities of prompt tokens."""

from conformance.assertions import expect, expect_true
from conformance.case import case
from conformance.sequence import Sequence, sampler_params
from conformance.step_result import Result
from conformance.worker import Worker
from pagewire import columns
from pagewire.v1 import plan_pb2

WIDTH = 3
TOLERANCE = 0.25


def matrix(entry: plan_pb2.RowPromptLogprobs) -> list[tuple[list[int], list[float], int]]:
    """Per token: ids, log probabilities, rank."""
    ids, logprobs = columns.unpack(entry.token_ids), columns.unpack_floats(entry.logprobs)
    ranks, width = columns.unpack(entry.ranks), entry.width
    expect("entries in token_ids", len(ids), len(ranks) * width)
    expect("entries in logprobs", len(logprobs), len(ids))
    return [
        (ids[i * width : (i + 1) * width], logprobs[i * width : (i + 1) * width], rank)
        for i, rank in enumerate(ranks)
    ]


def wished(worker: Worker, prompt: list[int], sizes: list[int], **fields: int) -> list[Result]:
    """The steps of a prompt computed in chunks, the last of which samples."""
    sampling = sampler_params(temperature=0.0, prompt_logprobs=WIDTH)
    with worker.open() as stream:
        sequence: Sequence = stream.new(prompt, sampling=sampling, **fields)
        results = [stream.step(sequence.row(size, brings=False)) for size in sizes]
        return [*results, stream.step(sequence)]


@case("plan", "Position in the prompt of the first token reported, from 1.")
def every_prompt_token_but_the_first_is_reported(worker: Worker) -> None:
    prompt = worker.prompt(1)
    (result,) = wished(worker, prompt, [])
    (entry,) = result.message.prompt_logprobs
    lines = matrix(entry)
    expect("start", entry.start, 1)
    expect("width", entry.width, 1 + WIDTH)
    expect("the prompt's own tokens", [ids[0] for ids, _, _ in lines], prompt[1:])
    for ids, logprobs, rank in lines:
        expect("falling log probabilities", logprobs[1:], sorted(logprobs[1:], reverse=True))
        if ids[0] in ids[1:]:
            expect("rank", rank, 1 + sum(value > logprobs[0] for value in logprobs[1:]))
        else:
            expect_true(rank > WIDTH or logprobs[0] == logprobs[-1], f"rank is {rank}")


@case("plan", "Log probabilities of the prompt tokens that one row computed.")
def they_are_those_of_sampling_in_that_place(worker: Worker) -> None:
    prompt = worker.prompt(2)
    (result,) = wished(worker, prompt, [])
    lines = matrix(result.message.prompt_logprobs[0])
    for position in (1, len(prompt) // 2, len(prompt) - 1):
        step = worker.alone(prompt[:position], 1).steps[0]
        ids, logprobs, _ = lines[position - 1]
        expect(f"the most probable token at {position}", ids[1], step.top_ids[0])
        difference = abs(logprobs[1] - step.top_logprobs[0])
        expect_true(difference <= TOLERANCE, f"its log probability differs by {difference:.4f}")


@case("plan", "For rows that computed prompt tokens and request them, in row order.")
def chunks_report_their_own_tokens(worker: Worker) -> None:
    prompt = worker.prompt(3)
    whole = matrix(wished(worker, prompt, [])[0].message.prompt_logprobs[0])
    sizes = [1, len(prompt) // 3]
    lines, next_start = [], 1
    for result in wished(worker, prompt, sizes):
        for entry in result.message.prompt_logprobs:
            expect("start of the next piece", entry.start, next_start)
            piece = matrix(entry)
            next_start += len(piece)
            lines += piece
    ids, own = [line[0][0] for line in lines], [line[0][0] for line in whole]
    expect("tokens reported by all chunks", ids, own)
    pairs = zip(lines, whole, strict=True)
    worst = max(abs(left[1][0] - right[1][0]) for left, right in pairs)
    expect_true(
        worst <= TOLERANCE, f"log probabilities differ by {worst:.4f} from those of one piece"
    )


@case("plan", "Prompt log probabilities are reported from this position on")
def those_known_before_are_left_out(worker: Worker) -> None:
    prompt = worker.prompt(4)
    start = len(prompt) // 2
    (result,) = wished(worker, prompt, [], prompt_logprobs_start=start)
    (entry,) = result.message.prompt_logprobs
    expect("start", entry.start, start)
    expect("tokens reported", [line[0][0] for line in matrix(entry)], prompt[start:])


@case("sampling", "The same for prompt tokens. Absent: none.")
def nothing_is_reported_without_a_request_or_for_output_tokens(worker: Worker) -> None:
    with worker.open() as stream:
        silent = stream.step(stream.new(worker.prompt(1)))
        expect("entries unasked", len(silent.message.prompt_logprobs), 0)
        sampling = sampler_params(temperature=0.0, prompt_logprobs=0)
        asking = stream.prefilled(worker.prompt(2), sampling=sampling)
        expect("entries of a decode", len(stream.step(asking).message.prompt_logprobs), 0)
