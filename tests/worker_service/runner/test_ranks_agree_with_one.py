"""A group of ranks gives the tokens of one rank, for every family we have models of."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from pagewire.v1 import sampling_pb2
from scheduler_service.core import ContextKind, ContextPart, Request
from scheduler_service.core.config import SchedulerConfig
from scheduler_service.core.request import Generation
from tests.support.checkpoints import NATIVE_FAMILIES, VOCAB_SIZE, checkpoint, make_checkpoint
from tests.support.in_process import FRONTEND, GREEDY, MODEL, InProcessEngine, Output
from tests.support.lora import random_adapter, random_prompt
from tests.support.rank_threads import AheadExecutor, Executor, ParallelEngine
from worker_service.adapters.peft_format import LoraModule, ModelAdapter
from worker_service.config import AdapterConfig, CacheConfig, ModelConfig
from worker_service.errors import BadAdapter, InvalidOption
from worker_service.loader import load_model
from worker_service.models.native import NativeModel

TOLERANCE = 1e-4
NUM_TOKENS = 4
FEW_KV_HEADS = "llama_few_kv_heads"
ODD_LAYERS = "qwen3_odd_layers"
ROTARY_VARIANTS = ("llama_linear", "llama_dynamic", "llama_llama3", "llama_yarn", "mistral_full")
"""What differs in them is the same on every rank."""
SMALL = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=24)
"""Prompts are computed in chunks, beside decodes."""


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def odd_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models whose heads, layers and vocabulary do not divide by the number of ranks."""
    folder = tmp_path_factory.mktemp("models")
    return {
        FEW_KV_HEADS: make_checkpoint(
            "llama", folder / "few", num_key_value_heads=1, vocab_size=301
        ),
        ODD_LAYERS: make_checkpoint(
            "qwen3", folder / "odd", num_hidden_layers=3, tie_word_embeddings=True
        ),
    }


def _prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    return [
        torch.randint(VOCAB_SIZE, (length,), generator=generator).tolist()
        for length in (1, 30, 17, 9, 2)
    ]


@cache
def _alone(model: Path) -> list[Output]:
    return InProcessEngine(model, config=SMALL).generate(_prompts(), NUM_TOKENS, logprobs=0)


@cache
def _adapters(model: Path) -> list[ModelAdapter]:
    loaded = load_model(ModelConfig(model=str(model), device="cpu", dtype="float32"), CacheConfig())
    assert isinstance(loaded.model, NativeModel)
    found = [random_adapter(loaded.model, seed, rank=rank) for seed, rank in enumerate((1, 4))]
    if loaded.model.virtual_token_size is not None:
        found.append(random_prompt(loaded.model, 2, num_tokens=1))
    return found


def _with_adapters(
    model: Path,
    tensor: int,
    pipeline: int,
    executor: type[Executor] = Executor,
    made: Sequence[ModelAdapter] = (),
) -> list[Output]:
    """Outputs of the prompts: without an adapter, and with several, in turn. made: those of
    `_adapters`, if there are none."""
    made = made or _adapters(model)
    engine = ParallelEngine(
        model,
        tensor_parallel_size=tensor,
        pipeline_parallel_size=pipeline,
        config=SMALL,
        executor=executor,
        adapters=AdapterConfig(enable_lora=True, max_loras=3),
    )
    names = {adapter.info.digest.hex(): str(i) for i, adapter in enumerate(made)}
    contexts: list[tuple[ContextPart, ...]] = [()]
    try:
        for adapter in made:
            engine.group.add_adapter(adapter)
            contexts.append((ContextPart(ContextKind.ADAPTER, adapter.info.digest),))
        engine.core.set_adapters(MODEL, names, now=0.0)
        sampling = sampling_pb2.SamplerParams(**GREEDY, logprobs=0)  # type: ignore[arg-type]
        work = Generation(max_tokens=NUM_TOKENS, sampling=sampling, wants_logprobs=True)
        requests = [
            Request(
                frontend_id=FRONTEND,
                handle=number,
                request_id=str(number),
                model=MODEL,
                prompt_token_ids=prompt,
                context=contexts[number % len(contexts) if len(prompt) > 1 else 0],
                work=replace(work),
            )
            for number, prompt in enumerate(_prompts(), start=len(contexts))
        ]
        return list(engine.run(requests).values())
    finally:
        engine.group.close()


@cache
def _one_rank_with_adapters(model: Path) -> list[Output]:
    return _with_adapters(model, 1, 1)


def _largest_difference(some: list[Output], others: list[Output]) -> float:
    pairs = zip(some, others, strict=True)
    return max(abs(a - b) for x, y in pairs for a, b in zip(x.logprobs, y.logprobs, strict=True))


def _check(model: Path, tensor_parallel_size: int, pipeline_parallel_size: int) -> None:
    engine = ParallelEngine(
        model,
        tensor_parallel_size=tensor_parallel_size,
        pipeline_parallel_size=pipeline_parallel_size,
        config=SMALL,
    )
    try:
        together = engine.generate(_prompts(), NUM_TOKENS, logprobs=0)
    finally:
        engine.group.close()
    expected = _alone(model)
    assert [o.token_ids for o in together] == [o.token_ids for o in expected]
    assert all(len(o.logprobs) == NUM_TOKENS for o in together)
    # Stages compute what one rank computes; ranks that share layers add in another order.
    allowed = TOLERANCE if tensor_parallel_size > 1 else 0.0
    assert _largest_difference(together, expected) <= allowed
    assert len({token for o in expected for token in o.token_ids}) > len(expected)


FAMILIES = [family for family in NATIVE_FAMILIES if family not in ROTARY_VARIANTS]
EVERY_KIND = (
    *("llama", "llama_bias", "opt_350m", "gpt2", "gpt_neox", "bloom", "phi3", "olmo2", "falcon"),
    *("lfm2", "recurrent_gemma", "mamba", "mamba2", "qwen3_5", "kimi_linear", "nemotron_h_latent"),
    *("mixtral", "qwen2_moe", "gpt_oss", "deepseek_v3", "llama4", "gemma3n", "gemma4_shared"),
    *("mimo_v2_flash", "lfm3", "olmo_hybrid", "zamba2", "falcon_h1_normed", "gpt_bigcode", "bamba"),
    *("qwen3_next", "granitemoeshared", "gptj", "nanochat", "longcat_flash", "hy_v4"),
    *("minimax_m3", "bailing_hybrid", "axk2", "dots3_note"),
    *("step3p5", "laguna", "laguna_elements", "muse_glimmer"),
)
"""Families with every kind of layer that ranks divide: heads and their groups, latents, states,
experts with their scores and biases, embeddings of positions, fused, normed and shared projections,
and all orders of heads and experts in checkpoints."""
every_family = pytest.mark.parametrize(
    "family",
    [
        family if family in EVERY_KIND else pytest.param(family, marks=pytest.mark.long)
        for family in FAMILIES
    ],
)
"""The others, in the long run alone, differ from one of these in what is the same on every rank:
rotary embeddings, windows, scales, activations, norms of whole rows, numbers and order of layers;
or lack a part of it."""


SHARING = ("gemma3n", "gemma4_shared")
"""Families whose last layers share keys and values of earlier ones, which are in their stage."""


@every_family
def test_two_ranks_in_each_of_two_stages_agree_with_one_rank(family: str) -> None:
    _check(checkpoint(family), 2, 1 if family in SHARING else 2)


@pytest.mark.parametrize("family", SHARING)
def test_stages_divide_layers_that_share_keys_within_one(family: str, tmp_path: Path) -> None:
    kinds = ["sliding_attention", "full_attention"] * 4
    shape: dict[str, Any] = {"num_hidden_layers": 8, "layer_types": kinds}
    if family == "gemma3n":
        shape["activation_sparsity_pattern"] = [0.9, 0.0] * 4
    path = make_checkpoint(family, tmp_path / "2", **shape, num_kv_shared_layers=2)
    _check(path, 1, 2)
    path = make_checkpoint(family, tmp_path / "4", **shape, num_kv_shared_layers=4)
    expected = "layer 4 attends to keys and values of layer 2, which 2 stages separate"
    with pytest.raises(InvalidOption, match=expected):
        ParallelEngine(path, pipeline_parallel_size=2)


@pytest.mark.parametrize("family", ["llama_tied", "qwen2", "gpt2", "opt_350m"])
def test_two_stages_agree_with_one_rank_to_the_bit(family: str) -> None:
    _check(checkpoint(family), 1, 2)


@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("num_choices", [1, 2])
def test_prompts_that_stages_cut_among_them_agree_to_the_bit(
    odd_models: dict[str, Path], stages: int, num_choices: int
) -> None:
    model = odd_models[ODD_LAYERS]
    generator = torch.Generator().manual_seed(9)
    lengths = (100, 3, 70, 1, 150, 18)
    prompts = [torch.randint(300, (length,), generator=generator).tolist() for length in lengths]
    wishes = {"num_choices": num_choices, "seed": 4, "temperature": 1.0, "logprobs": 0}
    if num_choices == 1:
        wishes["prompt_logprobs"] = 0
    config = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=96)
    expected = InProcessEngine(model, config=config).generate(prompts, NUM_TOKENS, **wishes)
    engine = ParallelEngine(model, pipeline_parallel_size=stages, config=config)
    try:
        together = engine.generate(prompts, NUM_TOKENS, **wishes)
    finally:
        engine.group.close()
    assert together == expected
    if num_choices == 1:
        assert [len(o.prompt_logprobs) for o in together] == [4 * (n - 1) for n in lengths]


@pytest.mark.parametrize(("tensor", "pipeline"), [(2, 1), (4, 1), (2, 2)])
def test_ranks_agree_that_hold_the_same_kv_head_and_unequal_parts_of_the_vocabulary(
    odd_models: dict[str, Path], tensor: int, pipeline: int
) -> None:
    _check(odd_models[FEW_KV_HEADS], tensor, pipeline)


def test_ranks_agree_that_have_parts_of_several_groups_of_heads() -> None:
    _check(checkpoint("mamba2"), 4, 1)


@pytest.mark.parametrize(("tensor", "pipeline"), [(1, 3), (1, 2), (2, 3)])
def test_stages_agree_that_have_unequal_numbers_of_layers(
    odd_models: dict[str, Path], tensor: int, pipeline: int
) -> None:
    _check(odd_models[ODD_LAYERS], tensor, pipeline)


@every_family
def test_two_ranks_in_each_of_two_stages_with_adapters_agree_with_one_rank(family: str) -> None:
    """Also for the requests among them that have none."""
    model = checkpoint(family)
    together = _with_adapters(model, 2, 1 if family in SHARING else 2)
    expected = _one_rank_with_adapters(model)
    assert [o.token_ids for o in together] == [o.token_ids for o in expected]
    assert _largest_difference(together, expected) <= TOLERANCE
    alone = _alone(model)
    is_changed = [
        ours.logprobs != base.logprobs for ours, base in zip(expected, alone, strict=True)
    ]
    num_kinds = 1 + len(_adapters(model))
    assert is_changed == [bool(number % num_kinds) for number in range(len(is_changed))]


@pytest.mark.parametrize("family", ["llama_tied", "gpt2", "gpt_neox"])
def test_two_stages_with_adapters_agree_with_one_rank_to_the_bit(family: str) -> None:
    model = checkpoint(family)
    assert _with_adapters(model, 1, 2) == _one_rank_with_adapters(model)


@pytest.mark.parametrize(("tensor", "pipeline"), [(2, 1), (4, 1), (2, 2)])
def test_ranks_with_adapters_agree_that_hold_the_same_kv_head(
    odd_models: dict[str, Path], tensor: int, pipeline: int
) -> None:
    model = odd_models[FEW_KV_HEADS]
    together, expected = _with_adapters(model, tensor, pipeline), _one_rank_with_adapters(model)
    assert [o.token_ids for o in together] == [o.token_ids for o in expected]
    assert _largest_difference(together, expected) <= TOLERANCE


@pytest.mark.parametrize("family", ["llama", "phi3", "gpt_neox"])
def test_ranks_with_adapters_of_dora_agree_with_one_rank(family: str) -> None:
    """Norms of rows are of all inputs, of which ranks of some layers have a part."""
    model = checkpoint(family)
    loaded = load_model(ModelConfig(model=str(model), device="cpu", dtype="float32"), CacheConfig())
    assert isinstance(loaded.model, NativeModel)
    made = [random_adapter(loaded.model, 3, uses_dora=True)]
    together, expected = (_with_adapters(model, ranks, 1, made=made) for ranks in (2, 1))
    assert [o.token_ids for o in together] == [o.token_ids for o in expected]
    assert _largest_difference(together, expected) <= TOLERANCE


def test_dora_of_inputs_that_ranks_share_is_refused() -> None:
    module = LoraModule(torch.ones(1, 96), torch.ones(64, 1), 1.0, magnitudes=torch.ones(64))
    made = [ModelAdapter.of_modules({"model.layers.0.self_attn.o_proj": module})]
    with pytest.raises(BadAdapter, match=r"use_dora: expected all 96 inputs of .*o_proj.* got 48"):
        _with_adapters(checkpoint("llama"), 2, 1, made=made)


@pytest.mark.parametrize(("family", "tensor"), [("llama", 1), ("llama_tied", 2), ("gpt2", 2)])
def test_ranks_with_adapters_that_launch_ahead_agree_with_one_rank(
    family: str, tensor: int
) -> None:
    """As on GPUs: rows are replayed with the slots of their adapters."""
    model = checkpoint(family)
    together = _with_adapters(model, tensor, 1, AheadExecutor)
    expected = _one_rank_with_adapters(model)
    assert [o.token_ids for o in together] == [o.token_ids for o in expected]
    assert _largest_difference(together, expected) <= TOLERANCE
