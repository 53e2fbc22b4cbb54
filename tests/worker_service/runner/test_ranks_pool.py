"""A group of ranks pools as one rank does."""

from collections.abc import Iterator

import numpy as np
import pytest

from tests.support.checkpoints import checkpoint
from tests.support.loading import load
from tests.support.pooled_texts import BLOCK_SIZE, NUM_BLOCKS, PooledTexts
from tests.support.rank_threads import AheadExecutor, Executor, RankThreads
from worker_service.engine.executor import Step, WorkKind
from worker_service.plan import PoolingParams, PoolingType, StepPlan

pytestmark = pytest.mark.usefixtures("one_thread")

TEXTS = [[7, 250, 3], [*range(40, 75)], [99] * 9, [12]]
TOLERANCE = 1e-5


class Ranks:
    """A group as a runner."""

    block_memory = None

    def __init__(self, group: RankThreads) -> None:
        self.group = group
        group.join(NUM_BLOCKS)

    def launch(self, plan: StepPlan) -> Step:
        """The sampling rank's step; the others bring no vectors."""
        steps = []
        for rank in self.group.ranks:
            runner = rank.runner
            assert runner is not None
            steps.append(rank.run(lambda runner=runner: runner.launch(plan)))
        sampler = self.group.ranks[0].layout.sampler
        launched = [step.result() for step in steps]
        assert not any(step.collect().vectors for i, step in enumerate(launched) if i != sampler)
        return launched[sampler]

    def reset(self) -> None:
        """Not asked for."""


@pytest.fixture(params=[(2, 1, Executor), (2, 1, AheadExecutor), (1, 2, Executor)])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    """Ranks that share layers, on the host and as on devices; and stages."""
    tensor, pipeline, executor = request.param
    group = RankThreads(
        checkpoint("qwen3"),
        tensor_parallel_size=tensor,
        pipeline_parallel_size=pipeline,
        block_size=BLOCK_SIZE,
        executor=executor,
        options={"runner": "pooling"},
    )
    try:
        yield Ranks(group)
    finally:
        group.close()


def test_ranks_pool_as_one(ranks: Ranks) -> None:
    loaded = ranks.group.ranks[ranks.group.ranks[0].layout.sampler].executor.loaded
    assert loaded.pooler is not None
    facts, texts = loaded.pooler.pooling, PooledTexts(loaded, runner=ranks)
    assert {fact.work_kinds for fact in ranks.group.facts} == {(WorkKind.POOLING,)}
    has_stages = loaded.config.layout.pipeline_parallel_size > 1
    assert set(PoolingType) - set(facts.types) == ({PoolingType.ALL} if has_stages else set())
    alone = PooledTexts(load(checkpoint("qwen3"), runner="pooling"))
    for kind in facts.types:
        params = PoolingParams(type=kind, normalize=True)
        found, expected = texts.pool(TEXTS, params, chunk=20), alone.pool(TEXTS, params)
        for vector, one in zip(found, expected, strict=True):
            # Stages compute what one rank does; ranks that share layers add in another order.
            allowed = 0.0 if has_stages else TOLERANCE
            np.testing.assert_allclose(vector, one, rtol=0, atol=allowed)
