"""The same work on a GPU: the tokens of the CPU, and cache operations on a stream of their own."""

import dataclasses
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from scheduler_service.core.config import PreemptionMode, SchedulerConfig
from tests.support.checkpoints import VOCAB_SIZE, checkpoint
from tests.support.eagle_heads import head_for
from tests.support.in_process import InProcessEngine, KnowingDrafter
from tests.support.mtp_heads import mtp_checkpoint
from tests.support.paged_driver import PagedDriver
from tests.support.plans import step_plan
from tests.support.speculation import PROMPTS, SAMPLING, SpeculatingEngine
from worker_service.config import CacheConfig, ModelConfig
from worker_service.kv_cache.cache_engine import CacheEngine
from worker_service.kv_cache.memory_budget import SyntheticBatches, profile_blocks
from worker_service.loader import load_eagle_head, load_model, load_mtp_head
from worker_service.models.decoder.draft_head import DraftHead
from worker_service.models.kv_cache_spec import KVCacheSpec
from worker_service.runner.device.drafts import DeviceHeadDrafter

pytestmark = pytest.mark.gpu

FAMILIES = (
    *("llama", "mistral", "qwen3", "opt", "gpt2", "gemma2", "gemma3", "olmo2", "ministral3"),
    *("glm4", "cohere2", "gptj", "falcon_groups", "bloom"),
    *("qwen2_moe", "qwen3_moe", "gpt_oss", "granitemoe", "hunyuan_moe", "llama4", "phimoe"),
    *("lfm2", "lfm2_moe", "qwen3_5", "qwen3_next", "kimi_linear"),
    *("granite_hybrid", "falcon_h1", "nemotron_h", "jamba", "mamba", "mamba2"),
)

CHUNKED = SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=16)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_gpu_gives_the_tokens_of_the_cpu(family: str) -> None:
    draw = np.random.default_rng(3)
    prompts = [draw.integers(5, 250, size=length).tolist() for length in (1, 3, 17, 26, 9, 40, 8)]
    outputs = {}
    for device in ("cpu", "cuda"):
        engine = InProcessEngine(checkpoint(family), device=device)
        engine.reset(num_gpu_blocks=64, config=CHUNKED)
        outputs[device] = engine.generate(prompts, 12, logprobs=0)
    for ours, theirs in zip(outputs["cuda"], outputs["cpu"], strict=True):
        assert ours.token_ids == theirs.token_ids
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-3)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_batch_invariant_gpu_gives_a_sequence_the_same_logits_in_any_batch(
    family: str, dtype: str
) -> None:
    draw = np.random.default_rng(5)
    prompts = [draw.integers(5, 250, size=length).tolist() for length in (1, 3, 17, 60, 9, 40, 8)]
    config = ModelConfig(
        model=str(checkpoint(family)), device="cuda", dtype=dtype, batch_invariant=True
    )
    loaded = load_model(config)
    assert loaded.batch_invariant
    together = PagedDriver(loaded.model, device="cuda").run(
        [(i, 0, prompt) for i, prompt in enumerate(prompts)]
    )
    for prompt, expected in zip(prompts, together, strict=True):
        driver = PagedDriver(loaded.model, device="cuda")
        cuts = sorted({0, len(prompt) // 2, len(prompt) - 1, len(prompt)})
        pieces = [driver.run([(0, a, prompt[a:b])])[0] for a, b in pairwise(cuts)]
        assert torch.equal(torch.cat(pieces), expected)


@pytest.mark.parametrize("sampling", SAMPLING)
def test_drafts_on_a_gpu_change_no_token(sampling: dict[str, Any]) -> None:
    """Most are right, some are wrong."""
    plain = InProcessEngine(checkpoint("llama"), device="cuda").generate(PROMPTS, 40, 2, **sampling)
    outputs = [[*PROMPTS[index // 2], *output.token_ids] for index, output in enumerate(plain)]

    class Engine(SpeculatingEngine):
        def make_drafter(self, cache: CacheEngine) -> KnowingDrafter:
            return KnowingDrafter(outputs)

    engine = Engine(checkpoint("llama"), device="cuda", runner="gpu")
    drafting = engine.generate(PROMPTS, 40, 2, **sampling)
    assert [answer.token_ids for answer in drafting] == [answer.token_ids for answer in plain]
    assert 0 < engine.lengths.num_accepted < engine.lengths.num_drafts


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("family", ["llama", "deepseek_v3", "glm4_moe"])
def test_drafts_of_a_head_on_a_gpu_change_no_token(family: str, sampling: dict[str, Any]) -> None:
    """They are made there, and most are wrong. Llama has a head of EAGLE-3, others their own."""
    path = checkpoint(family) if family == "llama" else mtp_checkpoint(family).path

    class Engine(SpeculatingEngine):
        def load_draft(self) -> DraftHead:
            if family == "llama":
                name = str(head_for(self.loaded.model.hidden_size, VOCAB_SIZE))  # type: ignore[attr-defined]
                self.head = load_eagle_head(name, self.loaded, CacheConfig())
            else:
                self.head = load_mtp_head(self.loaded)
            assert self.head is not None
            return self.head

        def make_drafter(self, cache: CacheEngine) -> DeviceHeadDrafter:
            assert self.head is not None
            return DeviceHeadDrafter(self.head, cache.draft_caches)

    plain = InProcessEngine(path, device="cuda").generate(PROMPTS, 40, 2, **sampling)
    engine = Engine(path, device="cuda", runner="gpu")
    drafting = engine.generate(PROMPTS, 40, 2, **sampling)
    assert [answer.token_ids for answer in drafting] == [answer.token_ids for answer in plain]
    assert engine.lengths.num_drafts > 100


def test_a_step_computes_while_blocks_are_swapped_in_and_the_next_one_finds_them() -> None:
    device = torch.device("cuda")
    spec = KVCacheSpec.uniform(num_layers=32, num_kv_heads=8, head_dim=128, dtype=torch.bfloat16)
    engine = CacheEngine(spec, block_size=16, num_gpu_blocks=514, num_cpu_blocks=512, device=device)
    engine.host_cache[:] = 3
    engine.device_cache[512] = 5
    pairs = [(block, block) for block in range(512)]  # a gigabyte
    for _ in range(2):  # the first time includes start-up
        engine.finish()
        engine.device_cache[511] = 0
        engine.execute(step_plan(swap_in=pairs, copy=[(512, 513)]))
        computed = engine.device_cache[513].sum()
        done = torch.cuda.Event()
        done.record()
        done.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):
            last_block = float(engine.device_cache[511].max())
    assert last_block == 0.0, "the swap-in has not come so far"
    assert float(computed) > 0
    engine.execute(step_plan())
    assert float(engine.device_cache[511].min()) == 3.0


@pytest.mark.parametrize("overwrites", [False, True])
def test_a_step_computes_while_blocks_are_swapped_out_unless_it_may_overwrite_them(
    overwrites: bool,
) -> None:
    device = torch.device("cuda")
    spec = KVCacheSpec.uniform(num_layers=32, num_kv_heads=8, head_dim=128, dtype=torch.bfloat16)
    engine = CacheEngine(spec, block_size=16, num_gpu_blocks=512, num_cpu_blocks=512, device=device)
    engine.device_cache[:] = 3
    pairs = [(block, block) for block in range(512)]  # a gigabyte
    updates = [(1, 0, 0, 511)] if overwrites else []
    for _ in range(2):  # the first time includes start-up
        engine.finish()
        engine.host_cache[511] = 0
        engine.execute(step_plan(swap_out=pairs, block_updates=updates))
        done = torch.cuda.Event()
        done.record()
        done.synchronize()
        last_block = float(engine.host_cache[511].max())
    assert last_block == (3.0 if overwrites else 0.0)
    engine.execute(step_plan())
    engine.device_cache[511] = 5
    torch.cuda.synchronize()
    assert float(engine.host_cache[511].min()) == 3.0


def test_swapping_on_a_gpu_gives_the_tokens_of_a_roomy_cache() -> None:
    draw = np.random.default_rng(3)
    prompts = [draw.integers(5, 250, size=length).tolist() for length in (9, 17, 26, 9, 30, 8)]
    engine = InProcessEngine(checkpoint("llama"), device="cuda")
    expected = engine.generate(prompts, 12)
    config = dataclasses.replace(CHUNKED, preemption_mode=PreemptionMode.SWAP, watermark=0.0)
    engine.reset(num_gpu_blocks=20, num_cpu_blocks=64, config=config)
    outputs = engine.generate(prompts, 12)
    assert engine.core.snapshot().num_swapped_in_blocks > 0
    assert [o.token_ids for o in outputs] == [o.token_ids for o in expected]


def test_profiling_leaves_room_for_what_else_is_on_the_gpu() -> None:
    engine = InProcessEngine(checkpoint("llama"), device="cuda")
    counts = profile_blocks(
        SyntheticBatches(engine.loaded.model, 16, torch.device("cuda")),
        CacheConfig(gpu_memory_utilization=0.5, swap_space=1 << 20),
        max_num_seqs=16,
        max_num_batched_tokens=256,
    )
    block_bytes = engine.loaded.model.kv_cache_spec.block_bytes(16)
    total = torch.cuda.get_device_properties(0).total_memory
    assert 0 < counts.num_gpu_blocks * block_bytes < total / 2
    assert counts.num_cpu_blocks == (1 << 20) // block_bytes
