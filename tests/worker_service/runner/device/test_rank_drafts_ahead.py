"""Ranks that launch steps ahead compute the drafts that the one which samples has chosen, whichever
host learns first how many were accepted."""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scheduler_service.core.step_plan import StepResult
from tests.support.checkpoints import VOCAB_SIZE, checkpoint
from tests.support.eagle_heads import make_head
from tests.support.in_process import Output
from tests.support.mtp_heads import mtp_checkpoint
from tests.support.rank_threads import AheadExecutor, RankThreads
from tests.support.runners import HostEvent, LateEvent
from tests.support.worker_driver import Row, column, sampler_params
from tests.worker_service.runner.device.test_launching_ahead import PARAMS, TOO_MANY
from tests.worker_service.runner.device.test_ranks_ahead import (
    POISON,
    SOON_S,
    CountedGroups,
    Plans,
    Poisoned,
)
from tests.worker_service.runner.device.test_step_costs import Queue
from tests.worker_service.runner.drafting.test_mtp import edited, make_right
from tests.worker_service.runner.drafting.test_rank_drafts import outputs
from worker_service.config import CacheConfig, ModelConfig, RunnerConfig
from worker_service.distributed.communicator import Communicator
from worker_service.distributed.layout import Layout
from worker_service.errors import GroupBroken, InvalidOption
from worker_service.loader import load_model
from worker_service.runner.device.in_flight_step import DeviceEvent
from worker_service.runner.model_options import check_speculation

pytestmark = pytest.mark.usefixtures("one_thread")

SMALL = RunnerConfig(max_graph_batch_size=8, max_graph_tokens=64)
LEAST_KEPT = {"ngram": 20, "suffix": 20, "draft": 200, "eagle": 20, "mtp": 200}


class LateSampler(AheadExecutor):
    """The host of the rank that samples is the last one to learn tokens."""

    def _make_event(self) -> DeviceEvent:
        return LateEvent() if self.loaded.communicator.layout.samples else HostEvent()


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with a head that is right."""
    made = mtp_checkpoint("deepseek_v3")
    folder = tmp_path_factory.mktemp("right")
    return edited(made, folder, lambda tensors: make_right(tensors, made.names))


def speculating(speculative: str, folder: Path) -> RunnerConfig:
    model = None
    if speculative == "draft":
        model = str(checkpoint("llama"))
    if speculative == "eagle":
        model = str(make_head(folder, draft_vocab_size=VOCAB_SIZE))
    return replace(
        SMALL, speculative=speculative, speculative_model=model, num_speculative_tokens=5
    )


@cache
def without_drafts(model: Path) -> list[list[Output]]:
    found, num_kept = outputs(2, 1, SMALL, model, executor=AheadExecutor)
    assert num_kept == 0
    return found


ORDINARY = [
    ("ngram", AheadExecutor),
    ("suffix", LateSampler),
    ("draft", AheadExecutor),
    ("eagle", LateSampler),
    ("mtp", AheadExecutor),
]
"""Each drafter with one of the orders in which hosts learn tokens."""


@pytest.mark.parametrize(
    ("speculative", "executor"),
    [
        case if case in ORDINARY else pytest.param(*case, marks=pytest.mark.long)
        for case in product(LEAST_KEPT, (AheadExecutor, LateSampler))
    ],
)
def test_ranks_keep_drafts_and_every_bit(
    speculative: str, executor: type[AheadExecutor], right: Path, tmp_path: Path
) -> None:
    model = right if speculative == "mtp" else checkpoint("llama")
    runner = speculating(speculative, tmp_path)
    drafting, num_kept = outputs(2, 1, runner, model, executor=executor)
    assert drafting == without_drafts(model)
    assert num_kept > LEAST_KEPT[speculative]


REPEATED = [5, 6, 7, 8] * 3


@contextmanager
def group(
    runner: RunnerConfig, model: Path | None = None, **options: Any
) -> Iterator[tuple[RankThreads, Plans]]:
    """Two ranks that have met, and the plans that they get."""
    options = {"executor": AheadExecutor} | options
    ranks = RankThreads(
        model or checkpoint("llama"), tensor_parallel_size=2, runner=runner, **options
    )
    ranks.join(64)
    try:
        yield ranks, Plans(ranks)
    finally:
        ranks.close()


def _tokens(results: Sequence[StepResult], seq_ids: Sequence[Sequence[int]]) -> dict[int, list]:
    """The tokens of each sequence. seq_ids: of the rows of each step that sample."""
    found: dict[int, list[int]] = {}
    for result, of_rows in zip(results, seq_ids, strict=True):
        counts = [1] * len(of_rows) if result.num_sampled is None else result.num_sampled
        parts = np.split(np.array(result.token_ids), np.cumsum(counts)[:-1])
        for seq_id, part in zip(of_rows, parts, strict=True):
            found[seq_id] = [*found.get(seq_id, []), *part.tolist()]
    return found


def _life(plans: Plans, num_drafts: int) -> tuple[dict[int, list[int]], int]:
    """Sequences with and without drafts, one with a constraint, and a step that the hosts compute
    in between; and how many drafts were kept."""
    builder, seq_ids = plans.builder, [[1, 2, 3], [1, 2, 3]]

    def launch(rows: list[Row], **fields: Any) -> None:
        lookahead = [num_drafts if row.num_tokens == 1 else 0 for row in rows]
        for row, count in zip(rows, lookahead, strict=True):
            builder.grow(row.seq_id, count)
        plans.launch(rows, lookahead=bytes(lookahead) if num_drafts else b"", **fields)

    bias = sampler_params(temperature=0.0, logit_bias=[{"token_id": 9, "bias": 50.0}])
    builder.add(1, REPEATED, sampling=bias)
    builder.add(2, [4, 5], sampling=PARAMS["a constraint"])
    builder.add(3, REPEATED[:5], sampling=PARAMS["random"])
    launch([Row(1, 12), Row(2, 2), Row(3, 5)])
    launch([Row(1), Row(2), Row(3)])
    builder.add(4, [6] * 9, sampling=sampler_params(bad_words=TOO_MANY))
    for _ in range(2):
        launch([Row(3), Row(1), Row(2)])
        seq_ids.append([3, 1, 2])
    launch([Row(3), Row(1), Row(2), Row(4, 4, sample=False)])
    launch([Row(3), Row(1), Row(2)], forget_seq_ids=column([4]))
    for _ in range(4):
        launch([Row(2), Row(1), Row(3)])
    seq_ids += [[3, 1, 2]] * 2 + [[2, 1, 3]] * 4
    results = plans.collect()
    num_kept = sum(sum(result.num_sampled) - 3 for result in results if result.num_sampled)
    return _tokens(results, seq_ids), num_kept


@pytest.mark.parametrize("executor", [AheadExecutor, LateSampler])
@pytest.mark.parametrize("speculative", ["ngram", "mtp"])
def test_all_kinds_of_rows_and_steps_meet(
    speculative: str, executor: type[AheadExecutor], right: Path, tmp_path: Path
) -> None:
    model = right if speculative == "mtp" else None
    with group(SMALL, model) as (_, plans):
        expected, _ = _life(plans, 0)
    with group(speculating(speculative, tmp_path), model, executor=executor) as (_, plans):
        found, num_kept = _life(plans, 2)
    for seq_id, tokens in expected.items():
        shared = min(len(tokens), len(found[seq_id]))
        assert found[seq_id][:shared] == tokens[:shared]
        assert shared == len(tokens)
    assert num_kept > 5


def test_ranks_record_a_failure_in_the_same_step(tmp_path: Path) -> None:
    """The rank that samples learns of it as it looks for drafts. Else later batches, and with them
    the ranks' collectives, would be of different sizes."""
    with group(speculating("ngram", tmp_path), wrap=Poisoned) as (ranks, plans):
        builder = plans.builder
        builder.add(1, REPEATED)
        builder.add(2, [*REPEATED, POISON], sampling=sampler_params(temperature=0.0))
        plans.launch([Row(1, 12), Row(2, 13)])
        for _ in range(4):
            for seq_id in (1, 2):
                builder.grow(seq_id, 2)
            plans.launch([Row(1), Row(2)], lookahead=b"\x02\x02")
        results = plans.collect()
        first, second = (rank.executor.loaded.model for rank in ranks.ranks)
    assert all(list(result.errors) == [1] for result in results)
    assert first.num_batches == second.num_batches > 0  # type: ignore[attr-defined]


@pytest.mark.parametrize("speculative", ["ngram", "mtp"])
def test_a_step_with_drafts_costs_two_messages_more_at_most(
    speculative: str, right: Path, tmp_path: Path
) -> None:
    """One between hosts, and one between devices for drafts that are made there."""
    of_head = speculative == "mtp"
    model = right if of_head else None
    with group(speculating(speculative, tmp_path), model) as (ranks, plans):
        plans.builder.add(1, REPEATED)
        plans.builder.add(2, [4, 5])
        plans.launch([Row(1, 12), Row(2, 2)])
        plans.builder.grow(1, 3)
        plan = plans.builder.plan([Row(1), Row(2)], lookahead=b"\x03\x00").SerializeToString()

        def costs(rank: Any) -> tuple[Queue, Counter[str]]:
            queue, communicator = Queue(), rank.executor.loaded.communicator
            groups = communicator.groups = CountedGroups(communicator.groups)
            with queue:
                rank.launch(plan)
            communicator.groups = groups._groups
            return queue, groups.calls

        found = [rank.run(lambda r=rank: costs(r)) for rank in ranks.ranks]
        for future in found:
            queue, calls = future.result(SOON_S)
            assert (len(queue.copies_in), len(queue.copies_out)) == (1, 1)
            assert calls.pop("sum") > 0
            shared = {"gather_columns": 1, "share_in_stage": 1 + of_head, "share_with_all": 1}
            assert calls == {"check": 1, **shared}


def test_a_rank_that_waits_for_drafts_can_be_interrupted(tmp_path: Path) -> None:
    with group(speculating("ngram", tmp_path)) as (ranks, plans):
        plans.builder.add(1, REPEATED)
        plans.launch([Row(1, 12)])
        plans.builder.grow(1, 3)
        plan = plans.builder.plan([Row(1)], lookahead=b"\x03").SerializeToString()
        _, other = ranks.ranks
        waiting = other.run(lambda: other.launch(plan))
        other.executor.interrupt(1)
        with pytest.raises(GroupBroken, match="interrupted"):
            waiting.result(SOON_S)


def test_ranks_with_other_drafts_do_not_meet(tmp_path: Path) -> None:
    ranks = RankThreads(
        checkpoint("llama"),
        tensor_parallel_size=2,
        runner=speculating("ngram", tmp_path),
        executor=AheadExecutor,
    )
    ranks.ranks[1].executor._runner = speculating("suffix", tmp_path)
    joining = [rank.run(lambda r=rank: r.join(64, 0, 1)) for rank in ranks.ranks]
    for future in joining:
        with pytest.raises(GroupBroken, match=r"same flags: .* speculative=suffix "):
            future.result(SOON_S)
    ranks.close()


@pytest.mark.parametrize("speculative", ["ngram", "mtp"])
def test_stages_of_a_pipeline_on_gpus_are_refused_by_name(speculative: str) -> None:
    loaded = load_model(ModelConfig(model=str(checkpoint("llama")), device="cpu"), CacheConfig())
    runner, on_gpus = RunnerConfig(speculative=speculative), replace(loaded.config, device="cuda")

    def check(**ranks: int) -> None:
        communicator = Communicator(Layout(**ranks))
        check_speculation(replace(loaded, config=on_gpus, communicator=communicator), runner)

    check(tensor_parallel_size=2)
    match = f"GPUs with pipeline_parallel_size 2, got {speculative}; share layers by"
    with pytest.raises(InvalidOption, match=match):
        check(tensor_parallel_size=2, pipeline_parallel_size=2)
