"""Every family, ragged batches, chunks and preemption: the tokens of `transformers`."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from scheduler_service.core.config import PreemptionMode, SchedulerConfig
from tests.support.checkpoints import make_checkpoint
from tests.support.in_process import InProcessEngine

MAX_TOKENS = 12
PROMPT_LENS = (1, 3, 4, 7, 17, 26, 2, 33, 9)

ROOMY = SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=4096)
CHUNKED = SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=16)
TIGHT = SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=16, watermark=0.0)
TIGHT_BLOCKS = 24
"""Of 4 tokens: enough for the longest request and two or three others, not for nine."""


def prompts_for(vocab_size: int) -> list[list[int]]:
    draw = np.random.default_rng(7)
    return [draw.integers(5, vocab_size, size=length).tolist() for length in PROMPT_LENS]


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("config", [ROOMY, CHUNKED], ids=["roomy", "chunked"])
def test_a_prefix_found_in_the_cache_gives_the_same_tokens(
    family: str, config: SchedulerConfig, tmp_path: Path
) -> None:
    engine = InProcessEngine(make_checkpoint(family, tmp_path / family), config=config)
    prompts = prompts_for(engine.loaded.model.vocab_size)
    first = engine.generate(prompts, MAX_TOKENS, logprobs=0)
    second = engine.generate(prompts, MAX_TOKENS, logprobs=0)
    assert [o.cached_tokens for o in first] == [0] * len(prompts)
    assert [o.cached_tokens for o in second] == [(n - 1) // 4 * 4 for n in PROMPT_LENS]
    assert [o.token_ids for o in second] == [o.token_ids for o in first]
    assert [o.logprobs for o in second] == [o.logprobs for o in first]

    chats = [prompt + o.token_ids + [7] for prompt, o in zip(prompts, first, strict=True)]
    found = engine.generate(chats, MAX_TOKENS, logprobs=0)
    assert all(
        o.cached_tokens == (len(chat) - 2) // 4 * 4 for chat, o in zip(chats, found, strict=True)
    )
    without = dataclasses.replace(config, enable_prefix_caching=False)
    engine.reset(num_gpu_blocks=512, config=without)
    computed = engine.generate(chats, MAX_TOKENS, logprobs=0)
    assert [o.cached_tokens for o in computed] == [0] * len(chats)
    assert [o.token_ids for o in found] == [o.token_ids for o in computed]
    assert [o.logprobs for o in found] == [o.logprobs for o in computed]


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("num_cpu_blocks", [4, 64])
def test_swapping_gives_the_same_tokens(num_cpu_blocks: int, caching: bool, tmp_path: Path) -> None:
    engine = InProcessEngine(make_checkpoint("llama", tmp_path / "llama"), config=ROOMY)
    prompts = prompts_for(engine.loaded.model.vocab_size)
    sampling = {"num_choices": 2, "temperature": 0.9, "seed": 11, "logprobs": 0}
    expected = engine.generate(prompts, MAX_TOKENS, **sampling)
    swapping = dataclasses.replace(
        TIGHT, preemption_mode=PreemptionMode.SWAP, enable_prefix_caching=caching
    )
    for depth in (1, 3):
        engine.reset(
            num_gpu_blocks=TIGHT_BLOCKS,
            num_cpu_blocks=num_cpu_blocks,
            config=dataclasses.replace(swapping, pipeline_depth=depth),
        )
        generated = engine.generate(prompts, MAX_TOKENS, **sampling)
        assert [o.token_ids for o in generated] == [o.token_ids for o in expected]
        assert [o.logprobs for o in generated] == [o.logprobs for o in expected]
        status = engine.core.snapshot()
        assert status.num_swapped_in_blocks > 0
        assert caching or status.num_swapped_in_blocks == status.num_swapped_out_blocks
        assert status.worker_groups[0].num_free_cpu_blocks == num_cpu_blocks


@pytest.mark.parametrize("num_cpu_blocks", [6, 200])
def test_what_comes_back_from_the_host_gives_the_same_tokens(
    num_cpu_blocks: int, tmp_path: Path
) -> None:
    engine = InProcessEngine(make_checkpoint("llama", tmp_path / "llama"), config=ROOMY)
    prompts = prompts_for(engine.loaded.model.vocab_size)
    chats = [[*prompt, 7, 8, 9] for prompt in prompts]
    expected = engine.generate(chats, MAX_TOKENS, logprobs=0)
    engine.reset(num_gpu_blocks=TIGHT_BLOCKS, num_cpu_blocks=num_cpu_blocks, config=TIGHT)
    for prompt in prompts:
        engine.generate([prompt], MAX_TOKENS)
    before = engine.core.snapshot()
    generated = [engine.generate([chat], MAX_TOKENS, logprobs=0)[0] for chat in chats[::-1]][::-1]
    assert [o.token_ids for o in generated] == [o.token_ids for o in expected]
    assert [o.logprobs for o in generated] == [o.logprobs for o in expected]
    after = engine.core.snapshot()
    assert after.num_preemptions == 0
    assert after.num_swapped_in_blocks > before.num_swapped_in_blocks
    if num_cpu_blocks == 200:
        assert [o.cached_tokens for o in generated] == [n // 4 * 4 for n in PROMPT_LENS]
