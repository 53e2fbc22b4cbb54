"""Requests that move between workers with their KV, at any token, have the tokens of an undisturbed
run, and its log probabilities bit for bit.

The configurations are those of `test_random_configurations.py`, on three workers of one size that
are drained in turn, again and again. Some fetches fail, and leave something else in their blocks;
workers and the core are lost meanwhile.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest

from scheduler_service.core.config import MoveKV, Role
from tests.end_to_end.test_random_configurations import (
    configuration,
    model,
    run_and_compare,
    undisturbed,
)
from tests.support.deployment import Deployment
from tests.support.random_configurations import Configuration, Drain, Loss

NUM_WORKERS = 3
FAMILIES = ("embedded", "gemma2", "llama4", "lfm2", "embedded-kv", "qwen3_5", "mistral")
"""With full attention, windows, chunks and states; with keys and values in int8; with windows
alone."""

QUICK = (2, 4, 5, 6, 7, 8, 10)
"""One of each family, and among them some whose workers give requests away. How often depends on
when the garbage collector takes lost workers, which others fetch from until then."""
LONG = sorted(set(range(120)).difference(QUICK))
KINDS = (
    "drained workers",
    "fetches",
    "failed fetches",
    "lost workers",
    "lost cores",
    "kept sequences",
)


def moving(number: int) -> Configuration:
    """A configuration whose requests move."""
    drawn, draw = configuration(number, family=FAMILIES[number % len(FAMILIES)]), Random(number)
    largest = max(drawn.workers, key=lambda worker: worker.num_gpu_blocks)
    ticks = range(3, 120, 4)
    return replace(
        drawn,
        workers=(replace(largest, num_gpu_blocks=2 * largest.num_gpu_blocks),) * NUM_WORKERS,
        drains=tuple(
            Drain(at=tick, worker=turn % NUM_WORKERS, absence=0) for turn, tick in enumerate(ticks)
        ),
        losses=tuple(
            Loss(at=draw.randint(5, 60), worker=draw.choice((None, 0, 1, 2)), absence=2)
            for _ in range(draw.choice((0, 1, 3)))
        ),
        scheduler=replace(drawn.scheduler, enable_prefix_caching=True, enable_chunked_prefill=True),
    )


def handing_over(number: int) -> Configuration:
    """A configuration whose prompts are computed by one worker, and continued by two others."""
    drawn = moving(number)
    roles = (Role.PREFILL, Role.DECODE, Role.DECODE)
    workers = zip(drawn.workers, roles, strict=True)
    return replace(
        drawn,
        workers=tuple(replace(worker, role=role) for worker, role in workers),
        drains=drawn.drains[:2],
    )


def crowded(number: int) -> Configuration:
    """A configuration whose requests all begin on one worker; the others join again and again, and
    get some that it has no memory for."""
    drawn = moving(number)
    return replace(
        drawn,
        drains=(),
        losses=tuple(
            Loss(at=tick, worker=worker, absence=9)
            for tick in (1, 20, 40, 60)
            for worker in range(1, NUM_WORKERS)
        ),
        jobs=tuple(replace(job, arrives_at=0) for job in drawn.jobs),
        scheduler=replace(drawn.scheduler, move_kv=MoveKV.ALWAYS, max_num_seqs=16, watermark=0.0),
    )


def run(number: int, make_configuration: Callable[[int], Configuration] = moving) -> Counter[str]:
    drawn = make_configuration(number)
    expected = undisturbed(number, family=FAMILIES[number % len(FAMILIES)])
    prompts = [list(received.request.prompt_token_ids) for received in expected]
    return run_and_compare(drawn, Deployment(drawn, model(drawn.model), prompts), expected)


def test_requests_that_move_are_those_of_an_undisturbed_run() -> None:
    total = sum((run(number) for number in QUICK), Counter[str]())
    assert [kind for kind in KINDS if total[kind] == 0] == []
    assert total["fetches"] > 25


def test_requests_that_are_handed_over_are_those_of_an_undisturbed_run() -> None:
    total = sum((run(number, handing_over) for number in QUICK), Counter[str]())
    assert total["fetches"] > 25


def test_requests_that_are_given_away_are_those_of_an_undisturbed_run() -> None:
    total = sum((run(number, crowded) for number in QUICK), Counter[str]())
    assert total["given away"] > 0


@pytest.mark.long
@pytest.mark.parametrize("number", LONG)
def test_many_more_requests_that_move(number: int) -> None:
    assert run(number)["steps"] > 0
    assert run(number, crowded)["steps"] > 0
    assert run(number, handing_over)["steps"] > 0
