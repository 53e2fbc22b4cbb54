"""Runners of models with several cache groups: blocks that windows release are used again, for any
group, and no token changes."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest
import torch

from pagewire.v1 import plan_pb2
from tests.support.checkpoints import VOCAB_SIZE, checkpoint
from tests.support.runners import RUNNERS
from tests.support.worker_driver import PlanBuilder, Row, sampler_params
from worker_service.cache_groups import CacheGroup, CacheLifetime
from worker_service.config import ModelConfig
from worker_service.kv_cache.cache_engine import CacheEngine
from worker_service.loader import load_model
from worker_service.models.interface import Model
from worker_service.service import wire

BLOCK_SIZE, NUM_BLOCKS = 8, 60

pytestmark = pytest.mark.usefixtures("one_thread")


@dataclass
class GroupPlanBuilder(PlanBuilder):
    """Gives sequences blocks in every cache group, and takes those back that no token sees."""

    groups: Sequence[CacheGroup] = ()
    free: list[int] = field(default_factory=lambda: list(range(NUM_BLOCKS)))
    held: dict[tuple[int, int], dict[int, int]] = field(default_factory=dict)
    """By sequence and group: block by index."""
    num_released: int = 0

    def grow(self, seq_id: int, num_tokens: int) -> None:
        """Release what the next token does not see, then add blocks for some more tokens."""
        start = self.lengths[seq_id]
        self.lengths[seq_id] += num_tokens
        for index, group in enumerate(self.groups):
            table = self.held.setdefault((seq_id, index), {})
            if group.lifetime is CacheLifetime.WINDOW:
                first = max(0, start - group.span + 1) // group.block_tokens
                for released in [entry for entry in table if entry < first]:
                    self.free.insert(0, table.pop(released))  # used again at once
                    self.num_released += 1
            for entry in range(-(-self.lengths[seq_id] // group.block_tokens)):
                if entry >= start // group.block_tokens and entry not in table:
                    table[entry] = self.free.pop(0)
                    self._updates += [seq_id, index, entry, table[entry]]


def _model(family: str, *, releases: bool) -> Model:
    model = load_model(ModelConfig(model=str(checkpoint(family)), device="cpu")).model
    model.kv_cache_spec = replace(model.kv_cache_spec, releases_windows=releases)
    return model


def _tokens(model: Model, kind: str) -> tuple[list[list[int]], int]:
    """Prompts in chunks beside decodes. Returns the tokens of each step, and released blocks."""
    spec = model.kv_cache_spec
    cache = CacheEngine(
        spec,
        block_size=BLOCK_SIZE,
        num_gpu_blocks=NUM_BLOCKS,
        num_cpu_blocks=0,
        device=torch.device("cpu"),
    )
    runner = RUNNERS[kind](model, cache, BLOCK_SIZE)
    plans = GroupPlanBuilder(groups=spec.groups(BLOCK_SIZE))
    generator = torch.Generator().manual_seed(5)
    params = sampler_params(temperature=1.0, seed=9, top_k=20)

    def step(rows: Sequence[Row]) -> list[int]:
        message: plan_pb2.StepPlan = plans.plan(rows)
        return runner.launch(wire.decode_plan(message, 0)).collect().token_ids.tolist()

    for seq_id, length in ((1, 40), (2, 3), (3, 25)):
        prompt = torch.randint(VOCAB_SIZE, (length,), generator=generator).tolist()
        plans.add(seq_id, prompt, sampling=params)
    steps = [step([Row(1, 20, sample=False), Row(2, 3)])]
    steps.append(step([Row(1, 20), Row(2), Row(3, 25)]))
    return steps + [step([Row(1), Row(3), Row(2)]) for _ in range(30)], plans.num_released


@pytest.mark.parametrize("kind", RUNNERS)
@pytest.mark.parametrize("family", ["qwen2_sliding", "gemma3"])
def test_windows_that_give_blocks_back_change_no_token(family: str, kind: str) -> None:
    expected, num_released = _tokens(_model(family, releases=False), "host")
    assert num_released == 0
    model = _model(family, releases=True)
    assert len(model.kv_cache_spec.groups(BLOCK_SIZE)) == 2
    tokens, num_released = _tokens(model, kind)
    assert tokens == expected
    assert num_released > 10
