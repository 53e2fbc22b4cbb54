"""Greedy tokens, and random ones, which depend on seed, choice, position and context only."""

from conformance.assertions import expect, expect_true
from conformance.case import case
from conformance.generation import Generation
from conformance.sequence import GREEDY, sampler_params
from conformance.worker import Worker

SEED = 2**63 + 12345
"""Needs all 64 bits."""

MAX_NOISE = 0.05
"""By how much a worker that is not batch-invariant may differ from itself."""


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
        found = stream.generate(stream.new(prompt, sampling=sampling), 6)
    worker.expect_as_alone("the sequence with the same seed", found, prompt, sampling)
    expect("number of tokens", len(expected.steps), 6)


@case("sampling", "whatever else is in the batch")
def a_draw_does_not_depend_on_the_batch(worker: Worker) -> None:
    prompt, sampling = worker.prompt(1), sampler_params(seed=SEED)
    with worker.open() as stream:
        company = [
            stream.new(worker.prompt(number), sampling=sampler_params(seed=number))
            for number in range(5)
        ]
        sequence = stream.new(prompt, sampling=sampling)
        family = [*company[:3], sequence, *company[3:]]
        steps = [
            stream.step(*(each.row() for each in family)).sampled[sequence.seq_id] for _ in range(4)
        ]
    worker.expect_as_alone("a draw among others", Generation(steps), prompt, sampling)


@case("sampling", "the draw for a sequence at output position p is Philox(seed; choice index, p)")
def seeds_and_choices_draw_differently(worker: Worker) -> None:
    prompt, num_tokens = worker.prompt(1), 8
    hot = {"temperature": 5.0}
    by_seed = {
        tuple(worker.alone(prompt, num_tokens, sampler_params(seed=seed, **hot)).tokens)
        for seed in range(3)
    }
    by_choice = {
        tuple(worker.alone(prompt, num_tokens, sampler_params(seed=1, **hot), choice).tokens)
        for choice in range(3)
    }
    expect_true(len(by_seed) > 1, f"three seeds gave the same {num_tokens} tokens")
    expect_true(len(by_choice) > 1, f"three choices gave the same {num_tokens} tokens")


@case("sampling", "the draw for a sequence at output position p")
def a_recomputed_sequence_draws_at_its_own_position(worker: Worker) -> None:
    prompt, sampling = worker.prompt(2), sampler_params(seed=SEED, temperature=2.0)
    alone = worker.alone(prompt, 6, sampling)
    with worker.open() as stream:
        tokens = [*prompt, *alone.tokens[:3]]
        again = stream.new(tokens, num_prompt_tokens=len(prompt), sampling=sampling)
        found = stream.generate(again, 3)
    worker.expect_as_alone("draws after a recomputation", found, prompt, sampling, start=3)


@case("sampling", "0 considers all tokens.")
def top_k_of_1_is_greedy(worker: Worker) -> None:
    prompt = worker.prompt(1)
    sampling = sampler_params(top_k=1, seed=3)
    found = worker.alone(prompt, 4, sampling)
    expect("tokens", found.tokens, worker.alone(prompt, 4, GREEDY).tokens)


@case("plan", "log softmax of the model's own logits, before penalties and temperature")
def log_probabilities_do_not_depend_on_the_parameters(worker: Worker) -> None:
    prompt = worker.prompt(1)
    plain = worker.alone(prompt, 1, GREEDY).steps[0]
    edited = sampler_params(temperature=3.0, top_p=0.5, presence_penalty=1.0, seed=1)
    other = worker.alone(prompt, 1, edited).steps[0]
    expected = dict(zip(plain.top_ids, plain.top_logprobs, strict=True))
    found = dict(zip(other.top_ids, other.top_logprobs, strict=True))
    common = expected.keys() & found.keys()
    expect_true(len(common) > len(expected) // 2, "other tokens are the most probable")
    worst = max(abs(expected[token] - found[token]) for token in common)
    expect_true(worst <= MAX_NOISE, f"log probabilities differ by {worst:.4f}")
