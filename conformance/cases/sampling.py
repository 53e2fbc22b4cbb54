"""Greedy tokens, and random ones, which depend on seed, choice, position and context only."""

from conformance.assertions import expect, expect_true
from conformance.case import Alone, case, stream_case
from conformance.sequence import GREEDY, sampler_params
from conformance.step_stream import StepStream
from conformance.worker import Worker

SEED = 2**63 + 12345
"""Needs all 64 bits."""

MAX_NOISE = 0.05
"""Maximum difference between two runs of a worker that is not batch-invariant."""


@case("sampling", "Temperature 0 takes the largest logit")
def temperature_0_takes_the_most_probable_token(worker: Worker) -> None:
    for number in range(3):
        for step in worker.alone(worker.prompt(number), 4).steps:
            expect("the token chosen at temperature 0", step.token, step.top_ids[0])


@case("sampling", "Key of the counter-based random numbers")
def a_seeded_sequence_repeats_itself(worker: Worker) -> None:
    prompt, sampling = worker.prompt(1), sampler_params(seed=SEED)
    expected = worker.alone(prompt, 6, sampling)
    with worker.open() as stream:
        sequence = stream.generate(stream.new(prompt, sampling=sampling), 6)
    worker.expect_as_alone("the sequence with the same seed", sequence)
    expect("number of tokens", len(expected.steps), 6)


@stream_case("sampling", "whatever else is in the batch")
def a_draw_does_not_depend_on_the_batch(worker: Worker, stream: StepStream) -> Alone:
    seeds = [0, 1, 2, SEED, 3, 4]
    family = [
        stream.new(worker.prompt(1 if seed == SEED else seed), sampling=sampler_params(seed=seed))
        for seed in seeds
    ]
    for _ in range(4):
        stream.step(*family)
    return {"a draw among others": family[seeds.index(SEED)]}


@case("sampling", "the draw for a sequence at output position p is Philox(seed; choice index, p)")
def seeds_and_choices_draw_differently(worker: Worker) -> None:
    prompt, num_tokens = worker.prompt(1), 8
    for what, variants in (
        ("seeds", [(seed, 0) for seed in range(3)]),
        ("choices", [(1, choice) for choice in range(3)]),
    ):
        outputs = {
            tuple(
                worker.alone(
                    prompt, num_tokens, sampler_params(seed=seed, temperature=5.0), choice
                ).tokens
            )
            for seed, choice in variants
        }
        expect_true(len(outputs) > 1, f"three {what} gave the same {num_tokens} tokens")


@case("sampling", "the draw for a sequence at output position p")
def a_recomputed_sequence_draws_at_its_own_position(worker: Worker) -> None:
    prompt, sampling = worker.prompt(2), sampler_params(seed=SEED, temperature=2.0)
    tokens = [*prompt, *worker.alone(prompt, 6, sampling).tokens[:3]]
    with worker.open() as stream:
        again = stream.new(tokens, num_prompt_tokens=len(prompt), sampling=sampling)
        stream.generate(again, 3)
    worker.expect_as_alone("draws after a recomputation", again)


@case("sampling", "0 considers all tokens.")
def top_k_of_1_is_greedy(worker: Worker) -> None:
    prompt = worker.prompt(1)
    found = worker.alone(prompt, 4, sampler_params(top_k=1, seed=3))
    expect("tokens", found.tokens, worker.alone(prompt, 4, GREEDY).tokens)


@case("plan", "log softmax of the model's own logits, before penalties and temperature")
def log_probabilities_do_not_depend_on_the_parameters(worker: Worker) -> None:
    edited = sampler_params(temperature=3.0, top_p=0.5, presence_penalty=1.0, seed=1)
    expected, found = (
        dict(zip(step.top_ids, step.top_logprobs, strict=True))
        for sampling in (GREEDY, edited)
        for step in worker.alone(worker.prompt(1), 1, sampling).steps
    )
    common = expected.keys() & found.keys()
    expect_true(len(common) > len(expected) // 2, "other tokens are the most probable")
    worst = max(abs(expected[token] - found[token]) for token in common)
    expect_true(worst <= MAX_NOISE, f"log probabilities differ by {worst:.4f}")
