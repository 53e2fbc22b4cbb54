"""Whatever happens to a request with an adapter, and whichever adapters other requests have, its
tokens are those that it gets alone, and its log probabilities bit for bit.

The configurations are those of `test_random_configurations.py`, with an adapter for most requests:
as many as a worker has slots, or more. Adapters are loaded when the first request for them arrives,
and unloaded when none is left, while others run.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest

from tests.end_to_end.test_random_configurations import (
    AHEAD,
    compare,
    compare_tokens,
    configuration,
    drafting_worker,
    model,
    run_and_compare,
    with_drafts,
)
from tests.support.deployment import Deployment, Received
from tests.support.in_process import AheadWorker, InProcessWorker
from tests.support.lora import random_adapter, random_prompt
from tests.support.random_configurations import Configuration, with_adapters
from worker_service.adapters.peft_format import ModelAdapter
from worker_service.adapters.store import AdapterStore
from worker_service.models.adapters import AdapterSlots
from worker_service.models.interface import Model
from worker_service.models.native import NativeModel

NUM_ADAPTERS = 8
MAX_RANK = 8
PROMPTS = {3: 1, 6: 5}
"""Virtual tokens of the adapters that are prompts, by number."""

NUM_QUICK, NUM_LONG = 16, 64
QUICK, LONG = range(NUM_QUICK), range(NUM_QUICK, NUM_LONG)
SPECULATING = range(0, NUM_QUICK, 2)
"""With each drafter once or twice."""
DRAFTERS = ("draft", "suffix", "eagle", "ngram", "knowing")

KINDS = (
    "steps with several adapters",
    "steps with adapters and without",
    "loaded adapters",
    "unloaded adapters",
    "preemptions",
    "swapped-in blocks",
    "recomputed answers",
    "cached tokens",
    "chunks",
    "copied blocks",
    "forks",
    "beam searches",
    "constraints",
    "cancels",
    "lost workers",
    "lost cores",
    "drained workers",
)
"""What makes up a disturbed run."""


def drawn_configuration(number: int, *, speculates: bool = False) -> Configuration:
    drawn = with_adapters(configuration(number, speculates), NUM_ADAPTERS)
    jobs = []
    for job in drawn.jobs:
        adapter = job.adapter
        # The first tokens of a prompt are virtual ones here: others must follow.
        if adapter in PROMPTS and len(job.tokens) <= PROMPTS[adapter]:
            adapter = (adapter + 1) % NUM_ADAPTERS
        jobs.append(replace(job, adapter=adapter))
    return replace(drawn, jobs=tuple(jobs))


@cache
def adapters_of(name: str) -> list[ModelAdapter]:
    """Those of a model, of several ranks, and prompts."""
    target = model(name)
    assert isinstance(target, NativeModel)
    ranks = (1, 2, 4, MAX_RANK)
    found = [random_adapter(target, i, rank=ranks[i % len(ranks)]) for i in range(NUM_ADAPTERS)]
    if target.virtual_token_size is not None:
        for i, num_tokens in PROMPTS.items():
            found[i] = random_prompt(target, i, num_tokens=num_tokens)
    return found


def give_slots(target: Model, name: str, max_loras: int) -> None:
    """Let a model apply the adapters that a plan names."""
    assert isinstance(target, NativeModel)
    every: AdapterStore[ModelAdapter] = AdapterStore(NUM_ADAPTERS)
    for adapter in adapters_of(name):
        every.add(adapter)
    target.adapters = AdapterSlots(target, every, max_loras, MAX_RANK)


@cache
def undisturbed(number: int, speculates: bool = False) -> list[Received]:
    """What each job gets when it is alone, without drafts."""
    drawn = drawn_configuration(number, speculates=speculates)
    give_slots(model(drawn.model), drawn.model, 1)
    runs: list[Received] = []
    for job in drawn.jobs:
        history: list[int] = []
        if job.follows is not None:
            before = runs[job.follows]
            history = [*before.request.prompt_token_ids, *before.choices[0].token_ids]
        prompts = [[*history, *job.tokens]]
        alone = Deployment(
            drawn.undisturbed(job),
            model(drawn.model),
            prompts,
            adapters=adapters_of(drawn.model),
        )
        runs += alone.run()
    return runs


def compare_runs(
    number: int,
    worker_type: Callable[..., InProcessWorker] = InProcessWorker,
    *,
    speculates: bool = False,
    check: Callable[[Received, Received], None] = compare,
) -> Counter[str]:
    """Run a configuration and compare; how much it was disturbed."""
    drawn = drawn_configuration(number, speculates=speculates)
    expected = undisturbed(number, speculates)
    prompts = [list(received.request.prompt_token_ids) for received in expected]
    give_slots(model(drawn.model), drawn.model, drawn.max_loras)
    deployment = Deployment(
        drawn, model(drawn.model), prompts, worker_type, adapters_of(drawn.model)
    )
    return run_and_compare(drawn, deployment, expected, check)


@cache
def disturbance(number: int) -> Counter[str]:
    """How much a configuration was disturbed, all tokens being right."""
    return compare_runs(number)


@pytest.mark.parametrize("number", QUICK)
def test_tokens_with_adapters_are_those_of_a_request_alone(number: int) -> None:
    assert disturbance(number)["steps"] > 0


def test_the_runs_were_disturbed_in_every_way(capsys: pytest.CaptureFixture[str]) -> None:
    total = sum((disturbance(number) for number in QUICK), Counter[str]())
    with capsys.disabled():
        print(f"\n{NUM_QUICK} configurations: {dict(total)}")
    assert [kind for kind in KINDS if total[kind] == 0] == []


@pytest.mark.parametrize("number", AHEAD)
def test_tokens_with_adapters_of_steps_launched_ahead(number: int) -> None:
    """And replayed, as on a GPU, in batches that rows without an adapter pad."""
    assert compare_runs(number, AheadWorker, check=compare_tokens)["steps"] > 0


@cache
def speculation(number: int) -> Counter[str]:
    """Run a configuration with drafts; how much it was disturbed. A draft model and a head compute
    the base: their drafts are worse for sequences with adapters, but their tokens the same."""
    drawn = drawn_configuration(number, speculates=True)
    drafter = DRAFTERS[number % len(DRAFTERS)]
    if drafter in ("draft", "eagle"):
        target, _ = with_drafts(drawn.model, drafter)
        give_slots(target, drawn.model, drawn.max_loras)
    worker_type = drafting_worker(drafter, drawn, undisturbed(number, True))
    return compare_runs(number, worker_type, speculates=True)


@pytest.mark.parametrize("number", SPECULATING)
def test_tokens_with_adapters_and_drafts_are_those_without_drafts(number: int) -> None:
    assert speculation(number)["steps"] > 0


def test_drafts_were_kept_and_refused_among_adapters() -> None:
    total = sum((speculation(number) for number in SPECULATING), Counter[str]())
    assert total["rows with drafts"] > 100
    assert total["rows with drafts"] > total["kept drafts"] / 2 > 10
    assert total["steps with several adapters"] > 0


@pytest.mark.long
@pytest.mark.parametrize("number", LONG)
def test_tokens_with_adapters_of_many_more_are_those_of_a_request_alone(number: int) -> None:
    assert compare_runs(number)["steps"] > 0


@pytest.mark.long
@pytest.mark.parametrize("number", set(range(NUM_LONG)).difference(SPECULATING))
def test_tokens_with_adapters_and_drafts_of_many_more(number: int) -> None:
    assert speculation(number)["steps"] > 0
