"""Drafts of a second model: outputs stay, right drafts are many, and wrong KV costs only drafts."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from scheduler_service.core.config import PreemptionMode, SchedulerConfig
from tests.support.checkpoints import checkpoint
from tests.support.runners import AllDrafts, make_cache
from tests.support.speculation import (
    NUM_DRAFTS,
    PROMPTS,
    SAMPLING,
    SpeculatingEngine,
    loaded_executor,
)
from tests.support.worker_driver import PlanBuilder, Row, column
from worker_service.config import CacheConfig, ModelConfig
from worker_service.errors import InvalidOption, WorkerError
from worker_service.kv_cache.cache_engine import CacheEngine
from worker_service.loader import LoadedModel, load_draft_model, load_model
from worker_service.models.interface import Model
from worker_service.runner.drafting import draft_model
from worker_service.runner.drafting.draft_model import DraftModel
from worker_service.runner.drafting.speculation import Speculation
from worker_service.runner.model_runner import ModelRunner
from worker_service.service import wire


class Engine(SpeculatingEngine):
    """Drafts with the model that `draft` names."""

    def __init__(self, model: Path, draft: Path, **options: Any) -> None:
        self.draft_name = str(draft)
        super().__init__(model, **options)

    def load_draft(self) -> Model:
        return loaded(self.draft_name).model

    def make_drafter(self, cache: CacheEngine) -> DraftModel:
        self.drafter = DraftModel(self.load_draft(), cache.draft_caches)
        return self.drafter


@pytest.mark.parametrize("runner", ["host", "recorded"])
@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("draft", ["llama", "qwen3"])
def test_outputs_are_those_without_drafts(
    draft: str, sampling: dict[str, Any], runner: str
) -> None:
    """Of the model itself as its own draft nearly all are right; another's may all be wrong."""
    engine = Engine(checkpoint("llama"), checkpoint(draft), runner=runner)
    engine.assert_outputs_are_those_without_drafts(PROMPTS, 40, num_choices=2, **sampling)
    assert engine.lengths.num_drafts > 100
    if draft == "llama":
        assert engine.lengths.num_accepted == engine.lengths.num_drafts


@pytest.mark.parametrize("runner", ["host", "recorded"])
@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("sampling", SAMPLING[:2])
def test_drafts_are_right_after_preemption(
    mode: str, sampling: dict[str, Any], runner: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Only a few sequences draft, since those with drafts in flight are never swapped."""
    model = checkpoint("llama")
    engine = Engine(
        model,
        model,
        num_gpu_blocks=48,
        num_cpu_blocks=256,
        config=SchedulerConfig(max_speculative_seqs=3, preemption_mode=PreemptionMode(mode)),
        runner=runner,
    )
    engine.assert_outputs_are_those_without_drafts(PROMPTS, 60, num_choices=2, **sampling)
    moved = "num_swapped" if mode == "swap" else "num_recomputed"
    assert re.search(f"{moved}=[1-9]", caplog.text)
    assert engine.lengths.num_drafts > 20
    assert engine.lengths.num_accepted == engine.lengths.num_drafts


def test_a_copied_block_has_the_draft_model_s_keys() -> None:
    model, draft = (loaded(str(checkpoint("llama"))).model for _ in range(2))
    model.kv_cache_spec = model.kv_cache_spec.with_drafts(draft.kv_cache_spec)
    cache = make_cache(model, 4, num_gpu_blocks=32)
    drafter = DraftModel(draft, cache.draft_caches)
    runner = ModelRunner(model, cache, 4, speculation=Speculation(drafter, AllDrafts()))
    plans = PlanBuilder(block_size=4)

    def step(row: Row, **fields: Any) -> list[int]:
        plan = plans.plan([row], **fields)
        return runner.launch(wire.decode_plan(plan, 0)).collect().token_ids.tolist()

    plans.add(1, PROMPTS[1])
    step(Row(1, len(PROMPTS[1])))
    lookahead = bytes([NUM_DRAFTS])
    plans.grow(1, NUM_DRAFTS)
    assert len(step(Row(1), lookahead=lookahead)) == 1 + NUM_DRAFTS
    plans.grow(1, NUM_DRAFTS)
    plans._updates += [1, 0, 0, 31]
    assert len(step(Row(1), lookahead=lookahead, copy=column([0, 31]))) == 1 + NUM_DRAFTS


def test_a_long_prompt_is_caught_up_with_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_model, "MAX_CATCH_UP", 5)
    engine = Engine(checkpoint("llama"), checkpoint("llama"))
    engine.assert_outputs_are_those_without_drafts(PROMPTS, 20)
    assert 0 < engine.lengths.num_accepted == engine.lengths.num_drafts


def test_no_drafts_beyond_the_length_of_the_draft_model() -> None:
    engine = Engine(checkpoint("llama"), checkpoint("llama"))
    assert engine.drafter._max_model_len > 60
    engine.drafter._max_model_len = 30
    engine.assert_outputs_are_those_without_drafts(PROMPTS[:1], 60)
    assert 10 < engine.lengths.num_accepted == engine.lengths.num_drafts <= 30 - len(PROMPTS[0])


def loaded(model: str) -> LoadedModel:
    return load_model(ModelConfig(model=model, device="cpu", dtype="float32"))


def test_another_vocabulary_is_refused() -> None:
    target = loaded("embedded")
    name = str(checkpoint("llama"))
    with pytest.raises(InvalidOption) as raised:
        load_draft_model(name, target, CacheConfig())
    expected = f"expected a model with the {target.model.vocab_size} tokens of embedded"
    assert str(raised.value) == f"speculative_model: {expected}, got {name} with 300"


def test_a_missing_draft_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match=r"^speculative_model: "):
        load_draft_model(str(tmp_path), loaded("embedded"), CacheConfig())


def test_the_budget_and_the_swap_space_hold_the_draft_model_s_keys_too() -> None:
    model = checkpoint("llama")
    plain = loaded_executor(model).profile_blocks(max_num_seqs=2, max_num_batched_tokens=64)
    drafting = loaded_executor(model, speculative="draft", speculative_model=str(model))
    counts = drafting.profile_blocks(max_num_seqs=2, max_num_batched_tokens=64)
    assert counts.num_gpu_blocks == plain.num_gpu_blocks // 2
    assert counts.num_cpu_blocks == plain.num_cpu_blocks // 2
    drafting.make_runner(counts.num_gpu_blocks, counts.num_cpu_blocks, 1)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux populates memory")
def test_a_cache_is_populated_until_another_takes_its_place() -> None:
    executor = loaded_executor(checkpoint("llama"))
    executor.make_runner(64, 0, 1)
    replaced = executor._cache
    assert replaced is not None
    executor.make_runner(64, 0, 2)
    assert executor._cache is replaced, "its memory is populated already"
    executor.make_runner(32, 0, 3)
    assert replaced._population is not None
    assert not replaced._population.is_alive()
