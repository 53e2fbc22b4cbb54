"""Sequences with LoRA adapters get the tokens of PEFT, and the same bits in any batch."""

import json
import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from pagewire.v1 import context_pb2, sampling_pb2
from pagewire_kernels.batch import AdapterRows
from pagewire_kernels.quantized_weight import quantize
from pagewire_kernels.slot_deltas import NO_SLOT
from scheduler_service.core import ContextKind, ContextPart, Request
from scheduler_service.core.config import SchedulerConfig
from scheduler_service.core.request import Generation
from tests.support.checkpoints import VOCAB_SIZE, checkpoint, make_checkpoint
from tests.support.folders import folder_of_process
from tests.support.in_process import FRONTEND, GREEDY, MODEL
from tests.support.lora import (
    EMBEDDING,
    EXPERTS,
    HEAD,
    LAYERS,
    PeftAdapter,
    load_base,
    make_adapter,
    make_prompt,
    random_adapter,
)
from tests.support.rank_threads import ParallelEngine
from tests.support.transformers_oracle import oracle
from tests.support.worker_driver import PlanBuilder, Row, sampler_params
from worker_service.adapters.peft_format import CONFIG_FILE, WEIGHTS_FILE, read_peft
from worker_service.config import AdapterConfig, CacheConfig, ModelConfig, RunnerConfig
from worker_service.errors import (
    AdapterNotFound,
    BadAdapter,
    InvalidOption,
    InvalidPlan,
)
from worker_service.loader import LoadedModel, load_model
from worker_service.models.adapters import AdapterSlots, require_adaptable
from worker_service.models.linear import packing
from worker_service.models.linear.vocabulary import HEAD_ROUNDING
from worker_service.models.native import NativeModel
from worker_service.plan import StepResult
from worker_service.runner.torch_executor import Profiler, TorchExecutor
from worker_service.service.wire import decode_plan

FAMILIES = (
    "llama",
    "qwen2",
    "gpt2",
    "phi3",
    "olmo2",
    "mixtral",
    "gpt_neox",
    "starcoder2",
    "stablelm_parallel",
    "bloom",
    "glm4",
    "opt",
    "falcon",
)
SETTINGS: tuple[dict[str, Any], ...] = (
    {"r": 4, "lora_alpha": 8},
    {"r": 16, "lora_alpha": 16, "use_rslora": True},
    {
        "r": 64,
        "lora_alpha": 3,
        "rank_pattern": {r".*\.1\..*": 5},
        "alpha_pattern": {"down_proj": 9},
    },
)
NUM_TOKENS = 6
TOLERANCE = 2e-5
UNUSED = ["classifier", "weights_proj", "wq_b", "wk"]
"""LongCat's router, of which PEFT's changes do nothing, and Hunyuan 4's indexers."""
TOLERANCES = {"qwen3_next": 4e-5}
"""Of families whose float32 is farther from float64: that of PEFT is so by up to 1.4e-4."""
BLOCK_SIZE = 4

pytestmark = pytest.mark.usefixtures("one_thread")


@cache
def _folder() -> Path:
    return folder_of_process("adapters")


@cache
def base_of(family: str) -> Path:
    """Llama's MLP has a size that can be quantized."""
    if family != "llama":
        return checkpoint(family)
    return make_checkpoint(family, _folder() / family, intermediate_size=96)


@cache
def adapters(family: str) -> list[PeftAdapter]:
    return [
        make_adapter(base_of(family), _folder() / f"{family}-{i}", seed=i, **settings)
        for i, settings in enumerate(SETTINGS)
    ]


def load_blocks(path: Path, **options: Any) -> LoadedModel:
    model = ModelConfig(model=str(path), **{"device": "cpu", "dtype": "float32", **options})
    return load_model(model, CacheConfig(block_size=BLOCK_SIZE))


def executor(
    family: str, *, max_loras: int = 3, base: Path | None = None, **options: Any
) -> TorchExecutor:
    config = AdapterConfig(enable_lora=True, max_loras=max_loras, max_lora_rank=64)
    made = TorchExecutor(
        CacheConfig(),
        Profiler(Path()),
        lambda: load_blocks(base or base_of(family), **options),
        adapters=config,
    )
    made.load()
    return made


def prompt(number: int) -> list[int]:
    generator = torch.Generator().manual_seed(number)
    return torch.randint(VOCAB_SIZE, (3 + 4 * number,), generator=generator).tolist()


class Steps:
    """Runs sequences on an executor."""

    def __init__(self, executor: TorchExecutor) -> None:
        self.runner = executor.make_runner(64, 0, 1)
        self.builder = PlanBuilder(block_size=executor.loaded.block_size)

    def add(
        self, seq_id: int, token_ids: Sequence[int], digest: bytes | None, **sampling: Any
    ) -> None:
        kind = context_pb2.CONTEXT_KIND_ADAPTER
        context = [] if digest is None else [context_pb2.ContextPart(kind=kind, digest=digest)]
        params = sampler_params(temperature=0.0, logprobs=VOCAB_SIZE, **sampling)
        self.builder.add(seq_id, token_ids, sampling=params, context=context)

    def run(self, rows: Sequence[Row], **fields: Any) -> StepResult:
        return self.runner.launch(decode_plan(self.builder.plan(rows, **fields), 0)).collect()


def generate(
    executor: TorchExecutor, digests: Sequence[bytes | None]
) -> list[tuple[list[int], np.ndarray]]:
    """Tokens and log probabilities, by token, of the prompts 0, 1, … with these adapters."""
    steps, size = Steps(executor), len(digests)
    for i, digest in enumerate(digests):
        steps.add(i + 1, prompt(i), digest)
    rows = [Row(i + 1, len(prompt(i))) for i in range(size)]
    tokens: list[list[int]] = [[] for _ in digests]
    logprobs: list[list[np.ndarray]] = [[] for _ in digests]
    for _ in range(NUM_TOKENS):
        result = steps.run(rows)
        for i in range(size):
            tokens[i].append(int(result.token_ids[i]))
            found = result.logprobs[i]
            logprobs[i].append(found.logprobs[1:][np.argsort(found.token_ids[1:])])
        rows = [Row(i + 1) for i in range(size)]
    return [(t, np.array(p)) for t, p in zip(tokens, logprobs, strict=True)]


def same_bits_in_any_mix(
    here: TorchExecutor, a: bytes, b: bytes, c: bytes
) -> dict[bytes | None, list[tuple[list[int], np.ndarray]]]:
    """Assert that tokens and log probabilities with three adapters and none are the same bits in
    any mix; returns those of batches with one each."""
    alone = {digest: generate(here, [digest] * 4) for digest in (a, b, c, None)}
    for mix in ([a, None, b, c], [None, a, a, None], [c, b, None, a]):
        for i, (tokens, logprobs) in enumerate(generate(here, mix)):
            expected = alone[mix[i]][i]
            assert tokens == expected[0]
            assert logprobs.tobytes() == expected[1].tobytes()
    return alone


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_of_peft_in_a_mixed_batch(family: str) -> None:
    assert_equal_to_peft(family, adapters(family), [0, None, 1, 2, 0, None])


def of_latents(family: str) -> list[PeftAdapter]:
    """Adapters of the expansion of latents, alone and beside all other layers."""
    settings: list[dict[str, Any]] = [
        {"target_modules": ["kv_b_proj"], "lora_alpha": 20},
        {"r": 5, "lora_alpha": 4},
        {"r": 16, "lora_alpha": 6},
    ]
    return [
        make_adapter(
            base_of(family),
            _folder() / f"{family}-latent-{i}",
            seed=i,
            exclude_modules=UNUSED,
            **numbers,
        )
        for i, numbers in enumerate(settings)
    ]


@pytest.mark.parametrize(
    "family",
    ["deepseek_v2", "deepseek_v3", "minicpm3", "glm4_moe_lite", "longcat_flash", "hy_v4", "axk2"],
)
def test_the_expansion_of_latents_is_that_of_peft(family: str) -> None:
    """PEFT changes keys and values, which are never computed here: queries and sums of latents are
    multiplied by the weights of `kv_b_proj`."""
    assert_equal_to_peft(family, of_latents(family), [0, None, 1, 2, 0, None])


@pytest.mark.parametrize("family", ["dots3_note", "bailing_hybrid"])
def test_latents_with_windows_or_beside_states_are_those_of_peft(family: str) -> None:
    made = of_latents(family)
    assert_core_equals_peft(base_of(family), made, [0, None, 1, 2, 0, None], [0] * 6)


OF_DORA: tuple[dict[str, Any], ...] = (
    {"r": 4, "lora_alpha": 8},
    {"r": 16, "lora_alpha": 16, "use_rslora": True, "targets": (LAYERS, EMBEDDING)},
    {"r": 64, "lora_alpha": 3, "targets": (HEAD,)},
)


@cache
def of_dora(family: str) -> list[PeftAdapter]:
    return [
        make_adapter(
            base_of(family), _folder() / f"{family}-dora-{i}", seed=i, use_dora=True, **settings
        )
        for i, settings in enumerate(OF_DORA)
    ]


@pytest.mark.parametrize(
    "family",
    ["llama", "qwen2", "gpt2", "phi3", "mixtral", "gpt_neox", "bloom", "falcon", "opt", "gemma"],
)
def test_dora_is_that_of_peft(family: str) -> None:
    """With biases, weights that the checkpoint stacks, transposes or orders otherwise, and beside
    an adapter that only adds."""
    made = [*of_dora(family), adapters(family)[0]]
    assert_equal_to_peft(family, made, [0, None, 1, 2, 3, 0, 2, None], max_loras=4)


def test_dora_of_models_that_run_through_transformers_is_that_of_peft() -> None:
    made = make_adapter(base_of("phi"), _folder() / "phi-dora", use_dora=True)
    assert_equal_to_peft("phi", [made], [0, None, 0])


def test_dora_is_refused_where_it_is_not_computed(tmp_path: Path) -> None:
    latent = make_adapter(
        base_of("minicpm3"), tmp_path / "latent", use_dora=True, target_modules=["kv_b_proj"]
    )
    with pytest.raises(BadAdapter, match=r"use_dora: expected linear layers and .*kv_b_proj"):
        executor("minicpm3").adapters.load(str(latent.folder))
    tensors = load_file(of_dora("llama")[0].folder / WEIGHTS_FILE)
    name = "base_model.model.model.layers.1.mlp.up_proj.lora_magnitude_vector"
    for numbers, message in (
        (tensors[name][1:].contiguous(), "up_proj.lora_magnitude_vector: expected 96 numbers"),
        (tensors[name][None], "up_proj.lora_magnitude_vector: expected a vector, got .*1, 96"),
        (tensors[name] * torch.nan, "up_proj.lora_magnitude_vector: expected finite numbers"),
    ):
        edited = Path(
            shutil.copytree(of_dora("llama")[0].folder, tmp_path / "edited", dirs_exist_ok=True)
        )
        save_file(tensors | {name: numbers}, edited / WEIGHTS_FILE)
        with pytest.raises(BadAdapter, match=message):
            executor("llama").adapters.load(str(edited))
    settings = json.loads((edited / CONFIG_FILE).read_text())
    (edited / CONFIG_FILE).write_text(json.dumps(settings | {"use_dora": False}))
    save_file(tensors, edited / WEIGHTS_FILE)
    with pytest.raises(BadAdapter, match="expected none, as use_dora is False, got one"):
        executor("llama").adapters.load(str(edited))


def test_dora_of_rows_of_zeros_is_refused(tmp_path: Path) -> None:
    """They have no direction: PEFT divides zero by zero."""
    folder = Path(shutil.copytree(of_dora("llama")[2].folder, tmp_path / "edited"))
    base = Path(shutil.copytree(base_of("llama"), tmp_path / "base"))
    name = "base_model.model.lm_head"
    tensors, weights = load_file(folder / WEIGHTS_FILE), load_file(base / "model.safetensors")
    weights["lm_head.weight"][7] = tensors[f"{name}.lora_B.weight"][7] = 0
    tensors.pop(f"{name}.base_layer.weight", None)
    save_file(tensors, folder / WEIGHTS_FILE)
    save_file(weights, base / "model.safetensors", {"format": "pt"})
    with pytest.raises(BadAdapter, match=r"use_dora: .* without rows of zeros, got zeros in row 7"):
        executor("llama", base=base).adapters.load(str(folder))


VOCABULARIES = ((EMBEDDING,), (HEAD,), (LAYERS, EMBEDDING, HEAD))


@cache
def of_vocabulary(family: str) -> list[PeftAdapter]:
    """Adapters of the embedding, of the LM head, and of all layers."""
    return [
        make_adapter(
            base_of(family), _folder() / f"{family}-vocabulary-{i}", seed=i, targets=targets
        )
        for i, targets in enumerate(VOCABULARIES)
    ]


def assert_equal_to_peft(
    family: str,
    made: Sequence[PeftAdapter],
    chosen: Sequence[int | None],
    base: Path | None = None,
    **options: Any,
) -> None:
    """Compare sequences with adapters in one batch with PEFT. chosen: their adapters."""
    here = executor(family, base=base, **options)
    digests = [here.adapters.load(str(adapter.folder)).digest for adapter in made]
    found = generate(here, [None if i is None else digests[i] for i in chosen])
    plain = oracle(base or base_of(family))
    for i, (tokens, logprobs) in enumerate(found):
        which = chosen[i]
        assert len(tokens) == NUM_TOKENS
        if which is None:
            assert tokens == plain.choices(prompt(i), tokens)
            continue
        expected, expected_logprobs = made[which].choices(prompt(i), tokens)
        assert tokens == expected
        np.testing.assert_allclose(logprobs, expected_logprobs, atol=TOLERANCE, rtol=0)
        assert_changed(plain.logits(prompt(i))[-1], expected_logprobs[0])


def assert_changed(plain_logits: torch.Tensor, logprobs: Sequence[float]) -> None:
    """Assert that an adapter changes the distribution of a token by far more than `TOLERANCE`."""
    changes = torch.tensor(logprobs) - plain_logits.log_softmax(-1)
    assert changes.abs().max() > 1000 * TOLERANCE


def assert_core_equals_peft(
    base: Path,
    made: Sequence[PeftAdapter],
    chosen: Sequence[int | None],
    before: Sequence[int],
    tolerance: float = TOLERANCE,
) -> None:
    """As `assert_equal_to_peft`, with a core, for models with windows or states. before: virtual
    tokens of each sequence."""
    config = AdapterConfig(enable_lora=True, max_loras=len(made))
    scheduler = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=24)
    engine = ParallelEngine(base, config=scheduler, adapters=config)
    read = [read_peft(adapter.folder) for adapter in made]
    digests, requests = [adapter.info.digest for adapter in read], []
    try:
        for adapter in read:
            engine.group.add_adapter(adapter)
        engine.core.set_adapters(MODEL, {d.hex(): d.hex() for d in digests}, now=0.0)
        sampling = sampling_pb2.SamplerParams(**GREEDY, logprobs=0)  # type: ignore[arg-type]
        for i, (which, num_virtual) in enumerate(zip(chosen, before, strict=True)):
            part = None if which is None else ContextPart(ContextKind.ADAPTER, digests[which])
            request = Request(
                frontend_id=FRONTEND,
                handle=i + 1,
                request_id=str(i),
                model=MODEL,
                prompt_token_ids=[0] * num_virtual + prompt(i),
                context=() if part is None else (part,),
                work=Generation(max_tokens=NUM_TOKENS, sampling=sampling, wants_logprobs=True),
            )
            requests.append(request)
        found = list(engine.run(requests).values())
    finally:
        engine.group.close()
    plain = oracle(base)
    for i, (which, output) in enumerate(zip(chosen, found, strict=True)):
        assert len(output.token_ids) == NUM_TOKENS
        if which is None:
            assert output.token_ids == plain.choices(prompt(i), output.token_ids)
            continue
        tokens, logprobs = made[which].choices(prompt(i), output.token_ids)
        expected = [row[token] for row, token in zip(logprobs, tokens, strict=True)]
        assert output.token_ids == tokens
        np.testing.assert_allclose(output.logprobs, expected, atol=tolerance, rtol=0)
        assert_changed(plain.logits(prompt(i))[-1], logprobs[0])


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox", "gemma", "opt_350m", "bloom"])
def test_the_embedding_and_the_head_are_those_of_peft(family: str) -> None:
    """Also heads that are tied to the embedding, which PEFT changes on its own, an embedding that
    is scaled, and one whose rows are projected."""
    assert_equal_to_peft(family, of_vocabulary(family), [0, 1, 2, None, 1, 0])


MIXTURES: Mapping[str, Mapping[str, Any]] = {
    "mixtral": {},
    "qwen2_moe": {},
    "granitemoe": {},
    "glm4_moe": {},
    "minimax_m2": {},
    "minimax_m3": {"layer_types": ["full_attention"] * 3},
    "hunyuan_moe": {},
    "gpt_oss": {"layer_types": ["full_attention"] * 2},
    "llama4": {"attention_chunk_size": None, "layer_types": ["full_attention"] * 2},
}
"""Checkpoints without windows."""


DOWN = "experts.down_proj"


@cache
def mixture(family: str) -> Path:
    return make_checkpoint(family, _folder() / f"{family}-base", **MIXTURES[family])


@cache
def quantizable() -> Path:
    """Mixtral of sizes that can be quantized."""
    return make_checkpoint("mixtral", _folder() / "mixtral-96", intermediate_size=96)


@cache
def quantizable_latents() -> Path:
    """DeepSeek-V3 of sizes that can be quantized."""
    sizes = {"moe_intermediate_size": 32, "intermediate_size": 96, "v_head_dim": 32}
    return make_checkpoint("deepseek_v3", _folder() / "deepseek-32", **sizes)


def of_experts(family: str, base: Path, alpha: float = 8) -> list[PeftAdapter]:
    """Adapters of the parameters with the weights of all experts: of both, also beside layers, and
    of one."""
    return [
        make_adapter(
            base,
            _folder() / f"{family}-experts-{i}",
            seed=i,
            targets=targets,
            exclude_modules=["router", "out_proj"],  # of llama4 and Mamba: PEFT cannot adapt them
            **settings,
        )
        for i, (targets, settings) in enumerate(
            [
                ((EXPERTS,), {"r": 4, "lora_alpha": alpha}),
                ((LAYERS, EXPERTS), {"rank_pattern": {DOWN: 6}}),
                (
                    (),
                    {
                        "target_parameters": ["experts.down_proj"],
                        "alpha_pattern": {"experts.down_proj": 30},
                    },
                ),
            ]
        )
    ]


@pytest.mark.parametrize("family", MIXTURES)
def test_experts_are_those_of_peft(family: str) -> None:
    base = mixture(family)
    assert_equal_to_peft(family, of_experts(family, base), [0, 1, 2, None, 1, 0, 2], base=base)


@pytest.mark.parametrize("family", ["nemotron_h_moe", "nemotron_h_latent"])
def test_experts_without_gates_are_those_of_peft(family: str) -> None:
    made = of_experts(family, base_of(family), alpha=400)[:2]
    assert_core_equals_peft(base_of(family), made, [0, 1, 0, None, 1, 0], [0] * 6)


@pytest.mark.parametrize("family", ["flint", "mimo_v2_flash", "step3p5", "laguna"])
def test_experts_behind_windows_and_sinks_are_those_of_peft(family: str) -> None:
    made = of_experts(family, base_of(family))
    assert_core_equals_peft(base_of(family), made, [0, 1, 2, None, 1, 0], [0] * 6)


def test_gates_of_attention_with_windows_are_those_of_peft() -> None:
    base = base_of("muse_glimmer")
    made = adapters("muse_glimmer")[:2]
    assert_core_equals_peft(base, made, [0, 1, 0, None, 1, 0], [0] * 6)


def test_layers_that_share_modules_have_adapters_of_their_own_ones() -> None:
    base, folder = base_of("zamba2"), _folder()
    targets: dict[str, Any] = {"target_modules": ["in_proj", "linear"], "init_lora_weights": False}
    made = [make_adapter(base, folder / f"zamba2-{r}", seed=r, r=r, **targets) for r in (4, 8)]
    assert_core_equals_peft(base, made, [0, 1, 0, None, 1, 0], [0] * 6)
    of_shared = make_adapter(base, folder / "zamba2-shared", target_modules=["q_proj"]).folder
    message = "target_modules: expected linear layers of Zamba2ForCausalLM.*shared_transformer"
    for num_stages in (1, 2):
        adapted = AdapterConfig(enable_lora=True)
        engine = ParallelEngine(base, pipeline_parallel_size=num_stages, adapters=adapted)
        try:
            with pytest.raises(BadAdapter, match=message):
                engine.group.add_adapter(read_peft(of_shared))
        finally:
            engine.group.close()


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5", "olmo_hybrid", "kimi_linear"])
def test_delta_nets_are_those_of_peft(family: str) -> None:
    base, folder = base_of(family), _folder()
    made = [make_adapter(base, folder / f"{family}-{r}", seed=r, r=r) for r in (4, 8)]
    tolerance = TOLERANCES.get(family, TOLERANCE)
    assert_core_equals_peft(base, made, [0, 1, 0, None, 1, 0], [0] * 6, tolerance)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_adapters_of_quantized_bases_are_those_of_peft(quantization: str, tmp_path: Path) -> None:
    """PEFT has the weights that the codes mean."""
    base = Path(shutil.copytree(base_of("llama"), tmp_path / "base"))
    weights = load_file(base / "model.safetensors")
    for name, weight in weights.items():
        if name.endswith("_proj.weight"):
            weights[name] = quantize(weight, quantization).dequantize()
        elif name == "lm_head.weight":
            weights[name] = quantize(weight, HEAD_ROUNDING).dequantize()
    save_file(weights, base / "model.safetensors", {"format": "pt"})
    settings: tuple[dict[str, Any], ...] = ({"r": 4}, {"r": 16, "use_dora": True})
    made = [
        make_adapter(base, tmp_path / str(i), seed=i, **of_adapter)
        for i, of_adapter in enumerate(settings)
    ]
    here = executor("llama", quantization=quantization)
    digests = [here.adapters.load(str(adapter.folder)).digest for adapter in made]
    chosen = [0, 1, None, 1, 0]
    found = generate(here, [None if which is None else digests[which] for which in chosen])
    for i, (which, (tokens, logprobs)) in enumerate(zip(chosen, found, strict=True)):
        assert len(tokens) == NUM_TOKENS
        if which is None:
            assert tokens == oracle(base).choices(prompt(i), tokens)
            continue
        expected, expected_logprobs = made[which].choices(prompt(i), tokens)
        assert tokens == expected
        np.testing.assert_allclose(logprobs, expected_logprobs, atol=TOLERANCE, rtol=0)


OF_EXPERTS = {
    "mixtral": ("block_sparse_moe", "w1", "w3", "w2"),
    "qwen2_moe": ("mlp", "gate_proj", "up_proj", "down_proj"),
}
"""Older names of the modules of experts: gate, up and down."""


@pytest.mark.parametrize("family", OF_EXPERTS)
def test_modules_of_experts_in_older_adapters_change_their_weights(
    family: str, tmp_path: Path
) -> None:
    """PEFT still reads those of Mixtral, and passes over those of Qwen2-MoE."""
    base, (place, *kinds) = mixture(family), OF_EXPERTS[family]
    model = load_base(base)
    generator, tensors, scale = torch.Generator().manual_seed(5), {}, 0.5
    for number, layer in enumerate(model.model.layers):
        experts = layer.mlp.experts
        for expert in range(4):
            gate, up = experts.gate_up_proj.data[expert].chunk(2)
            weights = zip(kinds, (gate, up, experts.down_proj.data[expert]), strict=True)
            for kind, weight in weights:
                a = torch.randn(4, weight.shape[1], generator=generator) / 8
                b = torch.randn(weight.shape[0], 4, generator=generator)
                weight += scale * b @ a
                name = f"base_model.model.model.layers.{number}.{place}.experts.{expert}.{kind}"
                tensors |= {f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b}
    folder = tmp_path / "old"
    folder.mkdir()
    save_file(tensors, folder / WEIGHTS_FILE)
    settings = {"peft_type": "LORA", "r": 4, "lora_alpha": 2, "target_modules": kinds}
    (folder / CONFIG_FILE).write_text(json.dumps(settings))
    assert_equal_to_peft(family, [PeftAdapter(folder, model)], [0, None, 0, None], base=base)


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3"])
def test_experts_and_latents_have_the_same_bits_in_any_mix(family: str) -> None:
    base = quantizable() if family == "mixtral" else quantizable_latents()
    for options in ({}, {"dtype": "bfloat16"}, {"quantization": "int8"}):
        here = executor(family, base=base, **options)
        made = [random_adapter(here.loaded.model, i, rank=4 + i) for i in range(3)]
        a, b, c = (here.adapters._hold(adapter).digest for adapter in made)
        same_bits_in_any_mix(here, a, b, c)


def test_experts_of_another_number_are_refused(tmp_path: Path) -> None:
    base = mixture("mixtral")
    made = make_adapter(base, tmp_path / "adapter", targets=(EXPERTS,), r=4)
    tensors = load_file(made.folder / WEIGHTS_FILE)
    half = {name: t[:8] if "lora_A" in name else t[:, :8] for name, t in tensors.items()}
    save_file({name: t.contiguous() for name, t in half.items()}, made.folder / WEIGHTS_FILE)
    with pytest.raises(BadAdapter, match="expected weights of 4 experts, got 2"):
        executor("mixtral", base=base).adapters.load(str(made.folder))


def assert_prompts_equal_to_peft(here: TorchExecutor, made: Sequence[PeftAdapter]) -> None:
    """Compare the log probabilities of a prompt's tokens with each adapter."""
    steps, tokens = Steps(here), prompt(4)
    for i, adapter in enumerate(made):
        digest = here.adapters.load(str(adapter.folder)).digest
        steps.add(i + 1, tokens, digest, prompt_logprobs=0)
    result = steps.run([Row(i + 1, len(tokens)) for i in range(len(made))])
    for i, adapter in enumerate(made):
        logits = adapter.logits(tokens)
        expected = logits.log_softmax(-1)[torch.arange(len(tokens) - 1), tokens[1:]]
        found = result.prompt_logprobs[i].logprobs[:, 0]
        np.testing.assert_allclose(found, expected.numpy(), atol=TOLERANCE, rtol=0)


def test_prompt_tokens_have_the_log_probabilities_of_the_head_of_their_adapter() -> None:
    assert_prompts_equal_to_peft(executor("llama"), of_vocabulary("llama"))


@pytest.mark.parametrize("what", ["other numbers", "other shape", "other name"])
def test_a_saved_embedding_that_is_not_that_of_the_base_is_refused(
    what: str, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(of_vocabulary("llama")[0].folder, tmp_path / "edited"))
    tensors = load_file(folder / WEIGHTS_FILE)
    name = "base_model.model.model.embed_tokens.base_layer.weight"
    saved = tensors.pop(name)
    message = "embed_tokens.base_layer.weight: expected the weight .* of the model, got another"
    if what == "other shape":
        saved = saved[:-1].contiguous()
    elif what == "other name":
        name, message = name.replace("embed_tokens", "other"), "expected no such weight"
    else:
        saved[7, 3] += 1
    save_file(tensors | {name: saved}, folder / WEIGHTS_FILE)
    with pytest.raises(BadAdapter, match=message):
        executor("llama").adapters.load(str(folder))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dtype": "bfloat16"},
        {"quantization": "int8"},
        {"quantization": "int4", "dtype": "bfloat16"},
    ],
    ids=str,
)
def test_a_row_has_the_same_bits_alone_beside_the_base_and_beside_adapters(
    options: dict[str, Any],
) -> None:
    here = executor("llama", **options)
    made = [of_dora("llama")[1], adapters("llama")[1], of_vocabulary("llama")[2]]
    a, b, c = (here.adapters.load(str(adapter.folder)).digest for adapter in made)
    plain = TorchExecutor(
        CacheConfig(),
        Profiler(Path()),
        lambda: load_blocks(base_of("llama"), **options),
    )
    plain.load()
    base = generate(plain, [None] * 4)
    alone = {digest: generate(here, [digest] * 4) for digest in (a, b, c)}
    for mix in ([a, None, b, c], [None, a, a, None], [c, b, None, a]):
        for i, (tokens, logprobs) in enumerate(generate(here, mix)):
            digest = mix[i]
            expected = base[i] if digest is None else alone[digest][i]
            assert tokens == expected[0]
            assert logprobs.tobytes() == expected[1].tobytes()


def test_slots_are_refilled_and_more_adapters_than_slots_are_an_invalid_plan() -> None:
    here, made = executor("llama", max_loras=1), adapters("llama")
    digests = [here.adapters.load(str(adapter.folder)).digest for adapter in made]
    for _ in range(2):
        for adapter, digest in zip(made, digests, strict=True):
            [(tokens, _)] = generate(here, [digest])
            assert len(tokens) == NUM_TOKENS
            assert tokens == adapter.choices(prompt(0), tokens)[0]
    assert here.adapters.slot_changes == {"filled": 6, "evicted": 5}
    with pytest.raises(InvalidPlan, match="expected at most 1 adapters in a step"):
        generate(here, digests[:2])


def test_a_program_that_was_recorded_with_other_slots_is_not_run() -> None:
    """It has the addresses of their memory, which may have been freed."""
    here = executor("llama")
    store, model = here.adapters.require_store(), here.loaded.model
    assert isinstance(model, NativeModel)
    digest = here.adapters.load(str(adapters("llama")[0].folder)).digest
    spec, size = model.kv_cache_spec, 8
    batch = spec.batch_of_ranges(
        torch.arange(size),
        [(0, size)],
        [torch.arange(2, dtype=torch.int32)[None]],
        spec.views(torch.zeros(2, spec.block_bytes(BLOCK_SIZE), dtype=torch.uint8), BLOCK_SIZE),
        BLOCK_SIZE,
    )
    plain = model.forward(batch).clone()
    changed = model.forward(replace(batch, adapters=[AdapterRows(digest, None)])).clone()
    assert not torch.equal(changed, plain)
    previous = model.adapters
    model.adapters = AdapterSlots(model, store, 3, 64)
    no_slots = torch.full((size,), NO_SLOT, dtype=torch.int32)
    assert torch.equal(model.forward(replace(batch, adapters=no_slots)), plain)
    assert previous is not None, "it lives until here, so that its memory can be read"


def test_an_adapter_travels_to_another_worker_and_stays_until_its_last_sequence_ends() -> None:
    here, there, [made, *_] = executor("llama"), executor("llama"), adapters("llama")
    info = here.adapters.load(str(made.folder))
    assert there.adapters.add(bytearray().join(here.adapters.chunks(info.digest))) == info
    assert (info.rank, len(info.digest)) == (4, 32)
    assert "q_proj" in info.targets
    [(tokens, _)] = generate(there, [info.digest])
    assert len(tokens) == NUM_TOKENS
    assert tokens == made.choices(prompt(0), tokens)[0]
    steps = Steps(there)
    steps.add(1, prompt(0), info.digest)
    first = steps.run([Row(1, len(prompt(0)))])
    there.adapters.retain(set())
    assert [*first.token_ids, *steps.run([Row(1)]).token_ids] == tokens[:2]
    steps.run([], forget_seq_ids=np.array([1], "<i4").tobytes())
    with pytest.raises(AdapterNotFound):
        list(there.adapters.chunks(info.digest))
    with pytest.raises(InvalidPlan, match=r"new_sequences\[0\].context\[0\].digest"):
        generate(there, [info.digest])


@pytest.fixture
def edited(tmp_path: Path) -> Path:
    return Path(shutil.copytree(adapters("llama")[0].folder, tmp_path / "edited"))


@pytest.mark.parametrize(
    ("targets", "is_named"),
    [
        (["foo"], False),
        (["q_proj"], False),
        (r".*\.(self_attn|mlp)\.[a-z]+_proj", True),
        ("all-linear", True),
        (None, True),
    ],
)
def test_modules_that_the_settings_do_not_name_are_a_warning(
    edited: Path, targets: object, *, is_named: bool, caplog: pytest.LogCaptureFixture
) -> None:
    settings = json.loads((edited / CONFIG_FILE).read_text())
    (edited / CONFIG_FILE).write_text(json.dumps(settings | {"target_modules": targets}))
    read_peft(edited)
    assert ("PEFT would not" not in caplog.text) == is_named


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model."])
def test_an_adapter_of_a_multimodal_model_changes_the_text_model(
    prefix: str, edited: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its names are those that the text model has in the other one, also in patterns."""
    settings = json.loads((edited / CONFIG_FILE).read_text())
    changed = {
        "target_modules": rf".*{prefix}.*_proj",
        "alpha_pattern": {rf"{prefix}layers.1.*": 3},
    }
    plain = {"target_modules": r".*_proj", "alpha_pattern": {r"model.layers.1.*": 3}}
    (edited / CONFIG_FILE).write_text(json.dumps(settings | plain))
    expected = read_peft(edited)
    (edited / CONFIG_FILE).write_text(json.dumps(settings | changed))
    tensors = load_file(edited / WEIGHTS_FILE)
    renamed = {name.replace(".model.model.", f".model.{prefix}"): tensors[name] for name in tensors}
    vision = "base_model.model.model.vision_tower.layers.0.fc1.lora_"
    renamed |= {f"{vision}A.weight": torch.ones(4, 8), f"{vision}B.weight": torch.ones(8, 4)}
    save_file(renamed, edited / WEIGHTS_FILE)
    found = read_peft(edited)
    assert found.info == expected.info
    assert "not of the text model" in caplog.text
    assert "model.vision_tower.layers.0.fc1" in caplog.text
    here = executor("llama")
    assert generate(here, [here.adapters.load(str(edited)).digest])[0][0]


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("peft_type", "PREFIX_TUNING", "peft_type: expected one of LORA, .* got 'PREFIX_TUNING'"),
        ("modules_to_save", ["lm_head"], r"modules_to_save: expected none.*\['lm_head'\]"),
        ("use_dora", True, "lora_magnitude_vector: expected one, as use_dora is True, got none"),
        ("bias", "all", "bias: expected 'none', got 'all'"),
        ("init_lora_weights", "pissa", "init_lora_weights: expected one of"),
        ("alora_invocation_tokens", [1], "alora_invocation_tokens: expected none"),
        ("a_setting_of_tomorrow", 1, "a_setting_of_tomorrow: expected none"),
        ("r", 8, "expected matrices of rank 8"),
        ("lora_alpha", -1, "lora_alpha: expected a positive number, finite in float32, got -1"),
        ("lora_alpha", math.inf, "lora_alpha: expected a positive number, .* got inf"),
        ("lora_alpha", 10**400, "lora_alpha: expected a positive number, .* got 1000"),
        ("r", 0, "r: expected a positive number, .* got 0"),
        ("rank_pattern", ["q_proj"], r"rank_pattern: expected an object, got \['q_proj'\]"),
        ("alpha_pattern", {"(": 8}, "alpha_pattern: expected regular expressions, got"),
        ("target_modules", 5, "target_modules: expected an array or a string, got 5"),
        ("target_modules", "*", r"target_modules: expected regular expressions, got '\*'"),
        ("target_parameters", "up_proj", "target_parameters: expected an array, got 'up_proj'"),
    ],
)
def test_settings_that_are_not_computed_are_refused(
    edited: Path, name: str, value: object, message: str
) -> None:
    settings = json.loads((edited / CONFIG_FILE).read_text())
    (edited / CONFIG_FILE).write_text(json.dumps(settings | {name: value}))
    with pytest.raises(BadAdapter, match=message):
        executor("llama").adapters.load(str(edited))


NAME = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        (NAME, torch.full((4, 64), torch.nan), "q_proj.lora_A.weight: expected finite numbers"),
        (NAME, torch.zeros(4, 7), "q_proj: expected a weight of"),
        (NAME, torch.zeros(3, 64), "q_proj: expected matrices of rank 4"),
        (NAME, torch.zeros(4, 64, dtype=torch.int8), "expected one of float32"),
        (NAME, torch.zeros(4), "expected a matrix"),
        ("base_model.model.lm_head.weight", torch.zeros(4, 4), "expected only base_model"),
        (NAME.replace("q_proj", "x_proj"), torch.zeros(4, 64), "x_proj: expected lora_A and"),
        (
            NAME.replace("lora_A.weight", "lora_embedding_A"),
            torch.zeros(4, 64),
            "expected one A of model.layers.0.self_attn.q_proj, got .*lora_embedding_A', too",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_refused(
    edited: Path, name: str, tensor: torch.Tensor, message: str
) -> None:
    tensors = load_file(edited / WEIGHTS_FILE)
    save_file(tensors | {name: tensor}, edited / WEIGHTS_FILE)
    with pytest.raises(BadAdapter, match=message):
        executor("llama").adapters.load(str(edited))


def test_two_changes_of_one_module_are_refused(edited: Path) -> None:
    tensors = load_file(edited / WEIGHTS_FILE)
    again = {
        name.replace(".model.model.", ".model.model.language_model."): tensor.clone()
        for name, tensor in tensors.items()
    }
    save_file(tensors | again, edited / WEIGHTS_FILE)
    with pytest.raises(BadAdapter, match=r"expected one change of model.layers.\d.*, got two"):
        read_peft(edited)


def test_settings_that_are_no_json_object_are_refused(edited: Path) -> None:
    for text in ("", "[]", "[" * 100_000):
        (edited / CONFIG_FILE).write_text(text)
        with pytest.raises(BadAdapter, match=f"{CONFIG_FILE}: expected"):
            read_peft(edited)


def test_what_is_missing_pickled_elsewhere_or_too_much_is_refused(edited: Path) -> None:
    here = executor("llama")
    with pytest.raises(AdapterNotFound, match=CONFIG_FILE):
        here.adapters.load(str(edited / "nowhere"))
    other = adapters("gpt2")[0]
    with pytest.raises(
        BadAdapter, match=r"linear layers of Llama.* in 2 layers, got .transformer.h"
    ):
        here.adapters.load(str(other.folder))
    (edited / WEIGHTS_FILE).rename(edited / "adapter_model.bin")
    with pytest.raises(BadAdapter, match="pickled weights are not read"):
        here.adapters.load(str(edited))
    with pytest.raises(BadAdapter, match="chunks: expected"):
        here.adapters.add(bytearray(b'{"modules":[]}\n'))
    small = executor("llama")
    small.adapters.slots._max_rank = 8  # type: ignore[union-attr]
    with pytest.raises(BadAdapter, match="r: expected at most 8, --max-lora-rank, got 16"):
        small.adapters.load(str(adapters("llama")[1].folder))


THROUGH_TRANSFORMERS = ["phi", "flex_olmo"]


@pytest.mark.parametrize("family", THROUGH_TRANSFORMERS)
def test_models_that_run_through_transformers_have_the_tokens_of_peft(family: str) -> None:
    assert not isinstance(executor(family).loaded.model, NativeModel)
    assert_equal_to_peft(family, adapters(family), [0, None, 1, 2, 0, None])


@pytest.mark.parametrize("options", [{}, {"dtype": "bfloat16"}, {"quantization": "int8"}])
def test_models_that_run_through_transformers_have_the_same_bits_in_any_mix(
    options: Mapping[str, Any], tmp_path: Path
) -> None:
    base = make_checkpoint("phi", tmp_path / "base", intermediate_size=96)
    made = [make_adapter(base, tmp_path / str(i), seed=i, r=4 + i) for i in range(3)]
    here = executor("phi", base=base, **options)
    a, b, c = (here.adapters.load(str(adapter.folder)).digest for adapter in made)
    alone = same_bits_in_any_mix(here, a, b, c)
    assert len({array.tobytes() for rows in alone.values() for _, array in rows[:1]}) == 4


def test_models_that_run_through_transformers_change_their_head_as_peft_does() -> None:
    """PEFT saves the weight of the base with it, which is not compared."""
    made = make_adapter(base_of("phi"), _folder() / "phi-head", targets=(HEAD,))
    with pytest.raises(BadAdapter, match="save the adapter with save_embedding_layers=False"):
        executor("phi").adapters.load(str(made.folder))
    assert_equal_to_peft("phi", [without_base(made)], [0, None, 0])


def without_base(adapter: PeftAdapter) -> PeftAdapter:
    """Remove the weights of the base that PEFT has saved with an adapter."""
    tensors = load_file(adapter.folder / WEIGHTS_FILE)
    changes = {name: tensor for name, tensor in tensors.items() if "lora_" in name}
    save_file(changes, adapter.folder / WEIGHTS_FILE)
    return adapter


def test_models_that_run_through_transformers_refuse_other_modules(tmp_path: Path) -> None:
    here = executor("phi")
    embedding = make_adapter(base_of("phi"), tmp_path / "embedding", targets=(EMBEDDING,))
    with pytest.raises(BadAdapter, match="embed_tokens"):
        here.adapters.load(str(embedding.folder))
    prompts = make_prompt(base_of("phi"), tmp_path / "prompt", num_tokens=2)
    with pytest.raises(BadAdapter, match="peft_type: expected LORA"):
        here.adapters.load(str(prompts.folder))


def test_other_models_without_linear_layers_refuse_adapters() -> None:
    model = executor("phi").loaded.model
    assert require_adaptable(model) is model
    model.adaptable_layers = []  # type: ignore[attr-defined]
    with pytest.raises(InvalidOption, match=r"enable_lora: .* PhiForCausalLM, which runs through"):
        require_adaptable(model)


@pytest.mark.parametrize("family", THROUGH_TRANSFORMERS)
def test_models_that_run_through_transformers_have_the_tokens_of_peft_without_our_products(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a CPU for which no kernels were built."""
    monkeypatch.setattr(packing, "library", lambda: None)
    assert_equal_to_peft(family, adapters(family), [0, None, 1, 2, 0, None])


def test_compiled_layers_refuse_adapters() -> None:
    config = AdapterConfig(enable_lora=True)
    runner = RunnerConfig(compile=True)
    compiled = TorchExecutor(
        CacheConfig(),
        Profiler(Path()),
        lambda: load_blocks(base_of("llama")),
        runner=runner,
        adapters=config,
    )
    with pytest.raises(InvalidOption, match="enable_lora: cannot be combined with --compile"):
        compiled.load()


def test_an_adapter_of_the_hub_is_read_from_its_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    cached = tmp_path / "models--some--adapter"
    shutil.copytree(adapters("llama")[0].folder, cached / "snapshots/abc")
    (cached / "refs").mkdir()
    (cached / "refs/main").write_text("abc")
    here = executor("llama")
    of_folder = here.adapters.load(str(adapters("llama")[0].folder))
    assert here.adapters.load("some/adapter") == of_folder
    with pytest.raises(AdapterNotFound, match="nor in the local cache, and HF_HUB_OFFLINE"):
        here.adapters.load("other/adapter")
    for path in ("/other/adapter", "./other/adapter", "adapter"):
        with pytest.raises(AdapterNotFound, match=CONFIG_FILE):
            here.adapters.load(path)
