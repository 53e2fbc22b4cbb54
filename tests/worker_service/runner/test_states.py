"""Models of which some layers keep a state: whatever happens to a sequence, its state is the one
that its tokens lead to, bit for bit."""

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from pagewire.v1 import sampling_pb2
from scheduler_service.core.config import PreemptionMode, SchedulerConfig
from scheduler_service.core.request import Generation, Request
from scheduler_service.errors import PromptTooLong
from tests.support.beams import BeamCase
from tests.support.cases import each_with_one_of
from tests.support.checkpoints import VOCAB_SIZE, checkpoint
from tests.support.in_process import (
    FRONTEND,
    GREEDY,
    MODEL,
    InProcessEngine,
    InProcessWorker,
    KnowingDrafter,
    Output,
    SpeculatingWorker,
)
from tests.support.loading import load
from tests.support.paged_driver import NAN
from tests.support.runners import AllDrafts
from tests.support.speculation import loaded_executor
from tests.support.transformers_oracle import oracle
from worker_service.cache_groups import CacheGroup, CacheLifetime
from worker_service.config import CacheConfig
from worker_service.distributed.communicator import Communicator
from worker_service.distributed.layout import Layout
from worker_service.errors import InvalidOption, OutOfMemory
from worker_service.loader import load_draft_model
from worker_service.runner.drafting.draft_states import num_draft_blocks
from worker_service.runner.model_options import check_drafts_with_states

FAMILIES = (
    *("lfm2", "lfm2_moe", "mamba", "granite_hybrid", "falcon_h1", "nemotron_h_moe", "jamba"),
    *("qwen3_next", "qwen3_5", "kimi_linear", "bailing_hybrid", "recurrent_gemma"),
)
NUM_TOKENS = 60
LENGTHS = (3, 17, 30, 41, 70)

pytestmark = pytest.mark.usefixtures("one_thread")


class PoisonedEngine(InProcessEngine):
    """An engine whose blocks are full of NaN until something is written to them."""

    def make_worker(self, num_gpu_blocks: int, num_cpu_blocks: int) -> InProcessWorker:
        worker = super().make_worker(num_gpu_blocks, num_cpu_blocks)
        worker._cache.device_cache.fill_(NAN)
        return worker


def prompts() -> list[list[int]]:
    draw = np.random.default_rng(4)
    return [draw.integers(5, VOCAB_SIZE, size=length).tolist() for length in LENGTHS]


@cache
def expected_tokens(family: str) -> list[list[int]]:
    """Those of a run alone, which are those of transformers."""
    outputs = [output.token_ids for output in _alone(family)]
    assert {len(output) for output in outputs} == {NUM_TOKENS}
    of_transformers = oracle(checkpoint(family)).choices
    assert outputs == [*map(of_transformers, prompts(), outputs)]
    return outputs


@cache
def _alone(family: str) -> list[Output]:
    """Each prompt by itself, with nothing found in a cache."""
    config = SchedulerConfig(enable_prefix_caching=False)
    engine = PoisonedEngine(checkpoint(family), config=config)
    return [engine.generate([prompt], NUM_TOKENS, logprobs=0)[0] for prompt in prompts()]


class DraftingEngine(PoisonedEngine):
    """The same with drafts, of which about every fourth is wrong, and no limit but memory's."""

    def __init__(self, family: str, outputs: list[list[int]], **options: Any) -> None:
        """outputs: prompts with their outputs, as they will be."""
        self.drafter = KnowingDrafter(outputs)
        self.lengths = AllDrafts()
        super().__init__(checkpoint(family), **options)

    def make_worker(self, num_gpu_blocks: int, num_cpu_blocks: int) -> InProcessWorker:
        worker = SpeculatingWorker(
            self.loaded.model,
            make_drafter=lambda _: self.drafter,
            draft_lengths=self.lengths,
            num_gpu_blocks=num_gpu_blocks,
            num_cpu_blocks=num_cpu_blocks,
            block_size=self.block_size,
        )
        worker._cache.device_cache.fill_(NAN)
        return worker

    def check_drafts(self) -> None:
        """Many drafts were accepted, and many were not."""
        accepted, verified = self.lengths.num_accepted, self.lengths.num_drafts
        assert min(accepted, verified - accepted) > 20


def _each_family_with_one_of(name: str, *values: object) -> pytest.MarkDecorator:
    cases = each_with_one_of(FAMILIES, *((value,) for value in values))
    return pytest.mark.parametrize(("family", name), cases)


def _outputs(family: str) -> list[list[int]]:
    pairs = zip(prompts(), expected_tokens(family), strict=True)
    return [[*prompt, *output] for prompt, output in pairs]


def _check(family: str, outputs: list[Output]) -> None:
    """Tokens are those of transformers, and log probabilities have the bits of a run alone."""
    assert [output.token_ids for output in outputs] == expected_tokens(family)
    assert [output.logprobs for output in outputs] == [o.logprobs for o in _alone(family)]


@_each_family_with_one_of("block_size", 4, 16, 64)
def test_tokens_are_those_of_transformers_also_from_saved_states(
    family: str, block_size: int
) -> None:
    engine = PoisonedEngine(checkpoint(family), block_size=block_size, num_gpu_blocks=1024)
    for _ in range(2):  # the second time with hits
        outputs = engine.generate(prompts(), NUM_TOKENS, logprobs=0)
        _check(family, outputs)
    assert max(output.cached_tokens for output in outputs) >= 32


@_each_family_with_one_of("chunk", 7, 24)
def test_chunks_of_prompts_change_no_bit(family: str, chunk: int) -> None:
    config = SchedulerConfig(max_num_batched_tokens=chunk, max_num_seqs=7)
    engine = PoisonedEngine(checkpoint(family), config=config)
    _check(family, engine.generate(prompts(), NUM_TOKENS, logprobs=0))


@_each_family_with_one_of("mode", PreemptionMode.SWAP, PreemptionMode.RECOMPUTE)
def test_preempted_sequences_continue_to_the_bit(family: str, mode: PreemptionMode) -> None:
    config = SchedulerConfig(preemption_mode=mode, max_num_batched_tokens=24, watermark=0.0)
    engine = PoisonedEngine(
        checkpoint(family), num_gpu_blocks=60, num_cpu_blocks=160, config=config
    )
    _check(family, engine.generate(prompts(), NUM_TOKENS, logprobs=0))
    keeps_tokens = family != "mamba"
    assert (engine.core.snapshot().num_preemptions > 0) == keeps_tokens


@pytest.mark.parametrize("family", FAMILIES)
def test_choices_continue_from_a_copy_of_their_prompts_state(family: str) -> None:
    sampling: dict[str, Any] = {"temperature": 1.0, "seed": 7, "logprobs": 0}
    path, without = checkpoint(family), SchedulerConfig(enable_prefix_caching=False)
    engines = [
        PoisonedEngine(path),
        PoisonedEngine(path, num_gpu_blocks=100, num_cpu_blocks=100),
        PoisonedEngine(path, block_size=16, config=without),
    ]
    outputs = [engine.generate(prompts()[1:4], 40, 3, **sampling) for engine in engines]
    tokens = [[(o.token_ids, o.logprobs) for o in of_engine] for of_engine in outputs]
    assert tokens[0] == tokens[1] == tokens[2]
    assert len({tuple(token_ids) for token_ids, _ in tokens[0]}) == len(tokens[0])


def _num_blocks(engine: InProcessEngine, num_tokens: int, num_sequences: int) -> int:
    """Blocks of this many sequences of this length that share nothing."""
    groups = engine.worker.capacity("").cache_groups
    return num_sequences * sum(group.max_blocks(num_tokens, 0) for group in groups)


@pytest.mark.parametrize("mode", [PreemptionMode.SWAP, PreemptionMode.RECOMPUTE])
@pytest.mark.parametrize("family", ["lfm2", "qwen3_5", "mamba2"])
def test_sixteen_choices_are_the_same_wherever_one_of_them_fits(
    family: str, mode: PreemptionMode
) -> None:
    sampling: dict[str, Any] = {"temperature": 1.0, "seed": 7, "logprobs": 0}
    prompt = prompts()[2:3]
    engine = PoisonedEngine(checkpoint(family), num_gpu_blocks=2000)
    expected = engine.generate(prompt, 20, 16, **sampling)
    assert len({tuple(output.token_ids) for output in expected}) == 16
    one = _num_blocks(engine, len(prompt[0]) + 19, 1)
    for num_blocks in (one, 3 * one + 1, 16 * one):
        config = SchedulerConfig(preemption_mode=mode, watermark=0.0, max_num_seqs=16)
        engine.reset(num_gpu_blocks=num_blocks, num_cpu_blocks=4 * num_blocks, config=config)
        outputs = engine.generate(prompt, 20, 16, **sampling)
        assert [(o.token_ids, o.logprobs) for o in outputs] == [
            (o.token_ids, o.logprobs) for o in expected
        ]


@pytest.mark.parametrize("family", ["lfm2", "qwen3_5", "mamba2"])
def test_four_beams_are_the_same_in_a_pool_that_just_fits_and_beside_others(family: str) -> None:
    case = BeamCase(prompt=prompts()[1], width=4, n=4, max_tokens=12)
    engine = PoisonedEngine(checkpoint(family), num_gpu_blocks=2000)
    expected = [output.token_ids for output in engine.run([case.request(1)]).values()]
    assert [len(tokens) for tokens in expected] == [12] * 4
    alone = _num_blocks(engine, len(case.prompt) + 11, 4)
    others = [_request(prompt, handle) for handle, prompt in enumerate(prompts(), 5)]
    for num_blocks, neighbours in ((alone, []), (alone, others), (2 * alone, others)):
        config = SchedulerConfig(watermark=0.0, max_num_seqs=8, max_num_batched_tokens=16)
        engine.reset(num_gpu_blocks=num_blocks, num_cpu_blocks=0, config=config)
        outputs = engine.run([*neighbours, case.request(1)])
        assert [outputs[handle].token_ids for handle in range(1, 5)] == expected
        assert [len(outputs[other.handle].token_ids) for other in neighbours] == [
            9 for _ in neighbours
        ]


def test_beams_whose_states_do_not_fit_together_are_refused_with_both_numbers() -> None:
    case = BeamCase(prompt=prompts()[1], width=4, n=1, max_tokens=12)
    engine = PoisonedEngine(checkpoint("lfm2"), num_gpu_blocks=2000)
    num_blocks = _num_blocks(engine, len(case.prompt), 1)
    engine.reset(num_gpu_blocks=num_blocks, config=SchedulerConfig())
    with pytest.raises(PromptTooLong, match="beside the states of 3 other beams"):
        engine.run([case.request(1)])


def _request(prompt: list[int], handle: int) -> Request:
    params = sampling_pb2.SamplerParams(**GREEDY)  # type: ignore[arg-type]
    return Request(
        frontend_id=FRONTEND,
        handle=handle,
        request_id=str(handle),
        model=MODEL,
        prompt_token_ids=prompt,
        work=Generation(max_tokens=9, num_choices=1, sampling=params),
    )


def test_a_turn_of_a_chat_begins_where_the_one_before_ended() -> None:
    path, prompt = checkpoint("lfm2"), prompts()[3]
    engine = PoisonedEngine(path)
    (first,) = engine.generate([prompt], 21)
    turn = prompt + first.token_ids + prompts()[0]
    (second,) = engine.generate([turn], NUM_TOKENS)
    assert second.token_ids == oracle(path).generate(turn, NUM_TOKENS)
    assert second.cached_tokens >= len(prompt) + 16


@pytest.mark.parametrize("family", ["lfm2", "qwen3_5", "mamba2"])
def test_a_chat_computes_only_its_new_tokens_and_answers_as_one_without_a_cache(
    family: str,
) -> None:
    engine = PoisonedEngine(checkpoint(family), num_gpu_blocks=400)
    without = SchedulerConfig(enable_prefix_caching=False)
    alone = PoisonedEngine(checkpoint(family), num_gpu_blocks=400, config=without)
    draw, history = np.random.default_rng(8), list[int]()
    for _ in range(8):
        message = draw.integers(5, VOCAB_SIZE, size=19).tolist()
        history += message
        outputs = [served.generate([history], 8, logprobs=0)[0] for served in (engine, alone)]
        assert outputs[0].token_ids == outputs[1].token_ids
        assert outputs[0].logprobs == outputs[1].logprobs
        assert len(history) - outputs[0].cached_tokens <= len(message) + 16
        history += outputs[0].token_ids


@pytest.mark.parametrize("family", ["lfm2", "qwen3_5"])
def test_requests_that_share_a_prefix_continue_from_the_state_where_they_differ(
    family: str,
) -> None:
    draw = np.random.default_rng(9)
    shared = draw.integers(5, VOCAB_SIZE, size=100).tolist()
    ends = [draw.integers(5, VOCAB_SIZE, size=30).tolist() for _ in range(4)]
    engine = PoisonedEngine(checkpoint(family), num_gpu_blocks=400)
    without = SchedulerConfig(enable_prefix_caching=False)
    alone = PoisonedEngine(checkpoint(family), num_gpu_blocks=400, config=without)
    cached = []
    for end in ends:
        outputs = [
            served.generate([[*shared, *end]], 8, logprobs=0)[0] for served in (engine, alone)
        ]
        assert outputs[0].token_ids == outputs[1].token_ids
        assert outputs[0].logprobs == outputs[1].logprobs
        cached.append(outputs[0].cached_tokens)
    assert cached == [0, 0, 100, 100], "the second one saves the state, with blocks of 4 tokens"


@_each_family_with_one_of("block_size", 4, 16)
def test_drafts_change_no_bit_whether_or_not_they_are_right(family: str, block_size: int) -> None:
    options = {"block_size": block_size, "num_gpu_blocks": 1024}
    engine = DraftingEngine(family, _outputs(family), **options)
    for _ in range(2):  # the second time with hits
        outputs = engine.generate(prompts(), NUM_TOKENS, logprobs=0)
        _check(family, outputs)
    assert max(output.cached_tokens for output in outputs) >= 32
    engine.check_drafts()


@_each_family_with_one_of("mode", PreemptionMode.SWAP, PreemptionMode.RECOMPUTE)
def test_preempted_sequences_with_drafts_continue_to_the_bit(
    family: str, mode: PreemptionMode
) -> None:
    config = SchedulerConfig(
        preemption_mode=mode, max_num_batched_tokens=24, watermark=0.0, max_speculative_seqs=4
    )
    engine = DraftingEngine(
        family, _outputs(family), num_gpu_blocks=60, num_cpu_blocks=160, config=config
    )
    _check(family, engine.generate(prompts(), NUM_TOKENS, logprobs=0))
    engine.check_drafts()
    assert (engine.core.snapshot().num_preemptions > 0) == (family != "mamba")


@pytest.mark.parametrize("family", FAMILIES)
def test_choices_with_penalties_and_drafts_are_those_without(family: str) -> None:
    sampling: dict[str, Any] = {
        "temperature": 0.9,
        "seed": 7,
        "logprobs": 0,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.3,
    }
    plain = PoisonedEngine(checkpoint(family)).generate(prompts()[1:3], 40, 3, **sampling)
    owners = [prompt for prompt in prompts()[1:3] for _ in range(3)]
    outputs = [[*prompt, *o.token_ids] for prompt, o in zip(owners, plain, strict=True)]
    engine = DraftingEngine(family, outputs)
    drafting = engine.generate(prompts()[1:3], 40, 3, **sampling)
    assert [(o.token_ids, o.logprobs) for o in drafting] == [
        (o.token_ids, o.logprobs) for o in plain
    ]
    engine.check_drafts()


@pytest.mark.parametrize("family", ["lfm2", "qwen3_5", "mamba2"])
def test_what_follows_an_output_with_drafts_begins_after_its_last_token(family: str) -> None:
    """A state that is saved at an end, or while a sequence runs, never contains a draft."""
    without = SchedulerConfig(enable_prefix_caching=False)
    alone = PoisonedEngine(checkpoint(family), num_gpu_blocks=400, config=without)
    engine = DraftingEngine(family, [], num_gpu_blocks=400)
    draw, history = np.random.default_rng(8), list[int]()
    for turn in range(5):
        history += draw.integers(5, VOCAB_SIZE, size=19).tolist()
        (plain,) = alone.generate([history], 24, logprobs=0)
        engine.drafter.learn_outputs([[*history, *plain.token_ids]])
        stop = plain.token_ids[10 + turn]  # in the middle of what a step accepts
        for stop_token_ids in ([stop], []):
            (output,) = engine.generate([history], 24, stop_token_ids=stop_token_ids, logprobs=0)
            end = len(output.token_ids)
            assert output.token_ids == plain.token_ids[:end]
            assert output.logprobs == plain.logprobs[:end]
        assert end == 24
        history += output.token_ids
    engine.check_drafts()
    assert output.cached_tokens > 100


def test_memory_for_states_after_drafts_is_a_bounded_share() -> None:
    groups = (CacheGroup(), CacheGroup(lifetime=CacheLifetime.STATE, num_blocks=3))
    assert num_draft_blocks(groups, 1000, 0) == 0
    assert num_draft_blocks(groups[:1], 1000, 4) == 0
    assert num_draft_blocks(groups, 10_000, 4) == 16 * 4 * 3
    assert num_draft_blocks(groups, 1000, 4) == 1000 // 8 // 3 * 3
    assert num_draft_blocks(groups, 24, 4) == 3
    with pytest.raises(OutOfMemory, match="speculative: the state after a draft takes 3 KV blocks"):
        num_draft_blocks(groups, 23, 4)


def test_memory_of_draft_states_is_part_of_the_cache_memory() -> None:
    path, sizes = checkpoint("lfm2"), {"max_num_seqs": 4, "max_num_batched_tokens": 64}
    plain = loaded_executor(path).profile_blocks(**sizes)
    executor = loaded_executor(path, speculative="ngram", num_speculative_tokens=2)
    counts = executor.profile_blocks(**sizes)
    assert 0 < counts.num_gpu_blocks < plain.num_gpu_blocks
    assert counts.num_cpu_blocks == plain.num_cpu_blocks
    executor.make_runner(counts.num_gpu_blocks, counts.num_cpu_blocks, epoch=1)
    assert executor._cache is not None
    block_bytes = executor.loaded.model.kv_cache_spec.block_bytes(16)
    assert executor._cache.device_bytes <= (plain.num_gpu_blocks + 1) * block_bytes
    assert len(executor._cache.draft_blocks) > 0


@pytest.mark.parametrize(
    ("device", "layout", "expected"),
    [
        ("cuda", Layout(), "none on a GPU"),
        ("cpu", Layout(pipeline_parallel_size=2), "none with stages"),
        ("cpu", Layout(tensor_parallel_size=2), "ngram or suffix on 2 ranks"),
    ],
)
def test_drafts_with_states_are_refused_where_they_are_not_supported(
    device: str, layout: Layout, expected: str
) -> None:
    draft = str(checkpoint("llama"))
    executor = loaded_executor(checkpoint("lfm2"), speculative="draft", speculative_model=draft)
    loaded = replace(
        executor.loaded,
        config=replace(executor.loaded.config, device=device),
        communicator=Communicator(layout),
    )
    match = f"speculative: expected {expected} for Lfm2ForCausalLM, .* got draft"
    with pytest.raises(InvalidOption, match=match):
        check_drafts_with_states(loaded, executor._runner)


def test_layers_with_states_are_not_compiled() -> None:
    with pytest.raises(InvalidOption, match="compile: expected none for Lfm2ForCausalLM"):
        loaded_executor(checkpoint("lfm2"), compile=True)


def test_a_draft_model_with_states_is_refused() -> None:
    target = load(checkpoint("llama"))
    with pytest.raises(InvalidOption, match="speculative_model: expected a model without states"):
        load_draft_model(str(checkpoint("lfm2")), target, CacheConfig())
