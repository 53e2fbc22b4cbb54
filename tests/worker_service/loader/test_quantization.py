"""`--quantization`: dense weights are rounded while they are loaded, each as far as it says."""

import os
import resource
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from pagewire_kernels.quantized_weight import quantize
from tests.support.checkpoints import checkpoint, make_checkpoint
from tests.support.gguf_files import make_gguf
from tests.support.loading import TOKENS, load, logits
from tests.support.paged_driver import PagedDriver
from tests.support.quantized_checkpoints import FORMATS
from tests.support.quantized_files import make_quantized
from tests.support.transformers_oracle import Oracle
from worker_service.config import QUANTIZATIONS, CacheConfig, ModelConfig
from worker_service.distributed.layout import Layout
from worker_service.errors import InvalidOption
from worker_service.loader import LoadedModel, check_model
from worker_service.loader.loaded_model import arithmetic_of
from worker_service.loader.weights import fill

SHAPES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "ffn_dim": 96,
    "head_dim": 16,
    "moe_intermediate_size": 96,
    "shared_expert_intermediate_size": 32,
}
"""Whose inputs are whole groups."""


@pytest.fixture(params=QUANTIZATIONS)
def quantization(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("bias", [0.0, 3.0])
def test_numbers_are_rounded_to_the_nearest_of_their_group(quantization: str, bias: float) -> None:
    weight = torch.randn(9, 192, generator=torch.Generator().manual_seed(0)) + bias
    rounded = quantize(weight, quantization)
    assert rounded.group_size == 64
    assert rounded.bits == int(quantization.removeprefix("int"))
    errors = (rounded.dequantize() - weight).abs().unflatten(1, (-1, 64))
    steps = rounded.scales.unsqueeze(2)
    assert (errors <= 0.52 * steps).all()
    widths = weight.unflatten(1, (-1, 64))
    span = widths.amax(2) - widths.amin(2) if quantization == "int4" else widths.abs().amax(2)
    assert torch.allclose(rounded.scales, span / (15 if quantization == "int4" else 127), rtol=3e-3)


def test_floats_of_8_bits_are_the_nearest_ones() -> None:
    weight = torch.randn(9, 192, generator=torch.Generator().manual_seed(0))
    weight[3, :64] = 0.0
    rounded = quantize(weight, "fp8")
    assert rounded.is_float
    assert rounded.group_size == 64
    assert torch.allclose(rounded.dequantize(), weight, rtol=1 / 16, atol=1e-4)
    largest = weight.unflatten(1, (-1, 64)).abs().amax(2)
    found = rounded.dequantize().unflatten(1, (-1, 64)).abs().amax(2)
    torch.testing.assert_close(found, largest, rtol=1e-3, atol=1e-9)


@pytest.mark.parametrize("spread", [1e-3, 1e-4, 1e-5])
def test_small_numbers_are_rounded_like_others(quantization: str, spread: float) -> None:
    """Also where float16 has few bits for scales."""
    weight = torch.randn(9, 192, generator=torch.Generator().manual_seed(0))
    errors = (quantize(weight, quantization).dequantize() - weight).abs().amax()
    small = weight * spread
    found = (quantize(small, quantization).dequantize() - small).abs().amax()
    assert found <= 3 * spread * errors


def test_large_weights_are_rounded_like_small_ones(quantization: str) -> None:
    weight = torch.randn(2500, 1152, generator=torch.Generator().manual_seed(0))
    dense = quantize(weight, quantization).dequantize()
    for rows in (slice(0, 7), slice(905, 920), slice(2499, 2500)):
        assert quantize(weight[rows], quantization).dequantize().equal(dense[rows])


def test_groups_of_equal_numbers_stay_as_they_are(quantization: str) -> None:
    weight = torch.tensor([[0.0] * 32, [0.5] * 32, [-2.0] * 32])
    found = quantize(weight, quantization).dequantize()
    assert torch.allclose(found, weight, rtol=1e-3, atol=1e-6)
    assert not found[0].any()


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama", tmp_path_factory.mktemp("llama"), **SHAPES)


BY_ROW = ("LongcatFlashExperts", "HYV4Experts", "MiniMaxM3VLExperts", "Step3p7Experts")
"""Classes of experts whose weights are [num_experts, out_features, in_features]."""

THROUGH_TRANSFORMERS = ("phi", "cohere", "flex_olmo")
EXPERTS = ("mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss", "llama4", "gemma4_moe", "minimax_m3")
NOT_ROUNDED = (
    *("shared_expert_gate", "router", "router.proj", "router.classifier", "kv_b_proj"),
    *("layernorm.mlp.fc1", "layernorm.mlp.fc2"),
    *("altup.modality_router", "altup.prediction_coefs", "altup.correction_coefs"),
)


def _round(model: Any, quantization: str) -> None:
    """Round the linear layers of a model of `transformers`."""
    head = model.get_output_embeddings()
    for name, module in model.named_modules():
        for part in ("gate_up_proj", "down_proj"):
            if isinstance(experts := getattr(module, part, None), nn.Parameter):
                has_rows = type(module).__name__ in BY_ROW
                is_transposed = getattr(module, "is_transposed", not has_rows)
                for expert in experts.data.mT if is_transposed else experts.data:
                    expert.copy_(quantize(expert, quantization).dequantize())
        is_linear = isinstance(module, (nn.Linear, Conv1D))
        if is_linear and not name.endswith(NOT_ROUNDED):
            weight = module.weight.data
            weight = weight.t() if isinstance(module, Conv1D) else weight
            weight.copy_(quantize(weight, "int8" if module is head else quantization).dequantize())


@pytest.mark.parametrize(
    ("family", "quantization"),
    [
        *(
            (family, "int4")
            for family in (
                *(
                    "llama",
                    "gpt2",
                    "opt",
                    "gemma3",
                    "gemma3n",
                    "gemma4_shared",
                    "phi3",
                    "glm4",
                    "gpt_neox",
                    "deepseek_v3",
                    "longcat_flash",
                    "hy_v4",
                    "axk2",
                    "dots3_note",
                    "bailing_hybrid",
                    "step3p5",
                    "laguna",
                    "muse_glimmer",
                ),
                *EXPERTS,
                *THROUGH_TRANSFORMERS,
            )
        ),
        *((family, "int8") for family in ("llama_tied", "gemma3", "gemma4_shared", "gpt_oss")),
        *((family, "fp8") for family in ("qwen3", "gemma3", "gpt_oss", "step3p5", "hy_v4")),
    ],
)
def test_logits_are_those_of_the_rounded_weights(
    family: str, quantization: str, tmp_path: Path
) -> None:
    sizes = {
        "gpt_oss": {"head_dim": 32},
        "deepseek_v3": {"head_dim": 8},
        "hy_v4": {"head_dim": 8},
        "axk2": {"head_dim": 8},
        "dots3_note": {
            "swa_qk_nope_head_dim": 20,
            "swa_head_dim": 32,
            "swa_q_lora_rank": 64,
            "swa_v_head_dim": 16,
            "shared_experts_intermediate_size": 32,
        },
        "bailing_hybrid": {"head_dim": 16, "v_head_dim": 16},
        "minimax_m3": {"rotary_dim": 8, "shared_intermediate_size": 32},
        "step3p5": {"share_expert_dim": 32},
        "longcat_flash": {"head_dim": 8, "expert_ffn_hidden_size": 32},
        "gemma3n": {"hidden_size_per_layer_input": 32, "laurel_rank": 32},
        "gemma4_shared": {"hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": 300},
    }
    shapes = {**SHAPES, **sizes.get(family, {})}
    path = make_checkpoint(family, tmp_path, **shapes)
    found = logits(load(path, quantization=quantization))
    oracle = Oracle(path)
    dense = oracle.logits(TOKENS)
    _round(oracle.model, quantization)
    expected = oracle.logits(TOKENS)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * float(expected.std()))
    assert (dense - expected).abs().max() > 0.01 * dense.std()


@pytest.mark.parametrize(
    ("family", "quantization"),
    [("llama_tied", "int8"), ("gpt2", "int4"), ("opt", "fp8"), ("qwen3", "int4"), ("opt", "w8a8")],
)
def test_tensors_that_are_rounded_while_they_are_read_have_the_same_bits(
    family: str, quantization: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_checkpoint(family, tmp_path, **SHAPES)
    expected = logits(load(path, quantization=quantization))
    # So are a layer's queries then, but not its keys and values, which are in the same product.
    monkeypatch.setattr(fill, "MAX_MAPPED_BYTES", 10_000)
    assert logits(load(path, quantization=quantization)).equal(expected)


@pytest.fixture(scope="module", params=["llama", "gemma3", "qwen2_moe"])
def rounded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(request.param, tmp_path_factory.mktemp(request.param), **SHAPES)


@pytest.mark.parametrize(
    ("quantization", "dtype"),
    [("int8", "float32"), ("int4", "bfloat16"), ("fp8", "bfloat16"), ("w8a8", "bfloat16")],
)
def test_rows_do_not_depend_on_the_batch(rounded: Path, quantization: str, dtype: str) -> None:
    loaded = load(rounded, quantization=quantization, dtype=dtype)
    assert loaded.batch_invariant
    driver = PagedDriver(loaded.model)
    whole = driver.run([(0, 0, TOKENS)])[0]
    parts = [driver.run([(1, i, [token]), (2, i, [token])]) for i, token in enumerate(TOKENS)]
    assert torch.equal(torch.cat([first for first, _ in parts]), whole)
    assert torch.equal(torch.cat([second for _, second in parts]), whole)


def test_workers_with_other_bits_serve_another_model(llama: Path, quantization: str) -> None:
    dense, rounded = load(llama), load(llama, quantization=quantization)
    assert dense.fingerprint != rounded.fingerprint
    assert arithmetic_of(rounded) != arithmetic_of(dense)
    assert quantization in arithmetic_of(rounded)


def test_what_cannot_be_rounded_is_refused(tmp_path: Path) -> None:
    path = make_checkpoint("llama", tmp_path, hidden_size=40)
    with pytest.raises(
        InvalidOption, match=r"shape \[300, 40\] .*: expected a multiple of 32 input"
    ):
        load(path, quantization="int4")
    with pytest.raises(InvalidOption, match=r"expected int8, .*, w8a8 to round.*, got .fp4."):
        load(checkpoint("llama"), quantization="fp4")
    with pytest.raises(InvalidOption, match=r"expected a multiple of 32 .* 88"):
        load(checkpoint("gemma2"), quantization="int8")


def test_a_cpu_without_the_kernels_rounds_nothing_and_promises_no_batch_invariance(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert load(checkpoint("llama")).batch_invariant
    monkeypatch.setattr("worker_service.models.linear.packing.library", lambda: None)
    plain = load(checkpoint("llama"))
    assert not plain.batch_invariant
    assert arithmetic_of(plain).startswith("cpu/torch-")
    with pytest.raises(InvalidOption, match=r"quantization: expected none, got int8.*compiled CPU"):
        load(checkpoint("llama"), quantization="int8")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("awq", ["awq", "awq_marlin"]),
        ("gptq", ["gptq", "gptq_marlin"]),
        ("pack-quantized", ["compressed-tensors"]),
        ("fp8 of outputs", ["fp8"]),
    ],
)
def test_the_method_of_a_quantized_checkpoint_may_be_named(
    name: str, words: list[str], tmp_path: Path
) -> None:
    path, _ = make_quantized(tmp_path, *FORMATS[next(key for key in FORMATS if name in key)])
    unnamed = load(path)
    for word in words:
        named = load(path, quantization=word)
        assert named.config.quantization is None
        assert (named.fingerprint, arithmetic_of(named)) == (
            unnamed.fingerprint,
            arithmetic_of(unnamed),
        )
    for other in {"awq", "gptq", "compressed-tensors", "gguf"} - {words[0]}:
        with pytest.raises(InvalidOption, match=f"expected {words[0]}, the method of the chec"):
            check_model(
                ModelConfig(model=str(path), device="cpu", quantization=other), CacheConfig()
            )


def test_a_method_of_a_dense_checkpoint_is_refused_with_what_rounds_it() -> None:
    with pytest.raises(InvalidOption, match=r"expected none, .*, got awq; .* w8a8 round"):
        load(checkpoint("llama"), quantization="awq")


def _cached(path: Path, folder: Path, quantization: str = "int4", **options: Any) -> LoadedModel:
    return load(path, quantization=quantization, quantization_cache=str(folder), **options)


@pytest.mark.parametrize(
    ("family", "quantization"),
    [
        *((family, "int4") for family in ("llama", "opt", "gpt2", "gemma3", "qwen2_moe")),
        *(("llama_tied", "int8"), ("gemma", "int8"), ("gpt_oss", "fp8"), ("llama", "fp8")),
        ("opt", "w8a8"),
    ],
)
def test_a_cache_changes_no_bit(family: str, quantization: str, tmp_path: Path) -> None:
    shapes = {**SHAPES, "head_dim": 32} if family == "gpt_oss" else SHAPES
    path, folder = make_checkpoint(family, tmp_path / "model", **shapes), tmp_path / "cache"
    expected = logits(load(path, quantization=quantization))
    written = logits(_cached(path, folder, quantization))
    (file,) = folder.iterdir()
    stat = file.stat()
    read = _cached(path, folder, quantization)
    assert file.stat() == stat
    assert logits(read).equal(expected)
    assert written.equal(expected)
    assert read.fingerprint == load(path, quantization=quantization).fingerprint


def test_quantization_of_weights_that_are_quantized_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file, _ = make_gguf("llama", "Q4_1", tmp_path)
    expected = logits(load(file))
    assert "rounds dense weights only" not in caplog.text
    loaded = load(file, quantization="int8")
    assert "quantization: int8 rounds dense weights only; most weights are stored as Q4_1" in (
        caplog.text
    )
    assert logits(loaded).equal(expected)
    assert loaded.weights == "Q4_1"


def test_other_weights_bits_and_types_are_other_files(tmp_path: Path) -> None:
    path, folder = make_checkpoint("llama", tmp_path / "model", **SHAPES), tmp_path / "cache"
    _cached(path, folder)
    _cached(path, folder, "int8")
    _cached(path, folder, dtype="bfloat16")
    assert len(list(folder.iterdir())) == 3
    make_checkpoint("llama", path, seed=1, **SHAPES)  # of the same shapes and sizes
    assert logits(_cached(path, folder)).equal(logits(load(path, quantization="int4")))
    assert len(list(folder.iterdir())) == 4


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[: len(content) // 2],
        lambda content: b"",
        lambda content: content[:-1000] + bytes(1000),
        lambda content: content[:5] + b"\xff" + content[6:],
    ],
    ids=["half", "empty", "numbers", "header"],
)
def test_a_damaged_file_is_written_again(
    damage: Callable[[bytes], bytes],
    llama: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    expected = logits(_cached(llama, tmp_path))
    (file,) = tmp_path.iterdir()
    content = file.read_bytes()
    file.write_bytes(damage(content))
    (tmp_path / f"{file.name[:32]}-unfinished").mkdir()  # of a worker that was killed
    assert logits(_cached(llama, tmp_path)).equal(expected)
    assert f"cached weights are damaged, rounding again file={file}" in caplog.text
    assert file.read_bytes() == content


def test_a_damaged_file_that_another_worker_deletes_is_written_again(
    llama: Path, tmp_path: Path
) -> None:
    expected = logits(_cached(llama, tmp_path))
    (file,) = tmp_path.iterdir()
    key = file.name[:32]
    content = file.read_bytes()
    file.unlink()
    file.symlink_to(tmp_path / "deleted")  # it is listed, and cannot be opened
    assert logits(_cached(llama, tmp_path)).equal(expected)
    assert file.read_bytes() == content
    assert not file.is_symlink()
    assert [found.name for found in tmp_path.glob(f"{key}-*")] == [file.name]


def test_a_cache_file_that_cannot_be_read_or_deleted_is_written_beside(
    llama: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = logits(_cached(llama, tmp_path))
    (file,) = tmp_path.iterdir()
    name = f"{file.name[:32]}-{'0' * 32}.safetensors"
    file.unlink()
    (tmp_path / name).mkdir()
    assert logits(_cached(llama, tmp_path)).equal(expected)
    assert "cached weights are damaged, rounding again" in caplog.text
    assert file.is_file()


def test_workers_may_find_a_damaged_file_at_once(llama: Path, tmp_path: Path) -> None:
    expected = logits(_cached(llama, tmp_path))
    (file,) = tmp_path.iterdir()
    content = file.read_bytes()
    for _ in range(3):
        file.write_bytes(content[:-1])
        with ThreadPoolExecutor(4) as pool:
            loaded = list(pool.map(lambda _: _cached(llama, tmp_path), range(4)))
        assert all(logits(model).equal(expected) for model in loaded)
        assert file.read_bytes() == content


def test_what_killed_workers_have_left_is_deleted_after_a_day(llama: Path, tmp_path: Path) -> None:
    young, old = (tmp_path / f"{name}-unfinished" for name in ("young", "old"))
    for left, age_s in ((young, 3600), (old, 25 * 3600)):
        left.mkdir()
        (left / "part").write_bytes(b"half")
        os.utime(left, (0, time.time() - age_s))
    expected = logits(_cached(llama, tmp_path))
    assert young.exists()
    assert not old.exists()
    assert len(list(tmp_path.glob("*.safetensors"))) == 1
    assert logits(_cached(llama, tmp_path)).equal(expected)


def test_workers_may_write_at_once(llama: Path, tmp_path: Path) -> None:
    expected = logits(_cached(llama, tmp_path / "alone"))
    with ThreadPoolExecutor(4) as pool:
        loaded = list(pool.map(lambda _: _cached(llama, tmp_path / "shared"), range(4)))
    assert all(logits(model).equal(expected) for model in loaded)
    (file,) = (tmp_path / "shared").iterdir()
    assert file.read_bytes() == next((tmp_path / "alone").iterdir()).read_bytes()


@pytest.mark.parametrize("num_bytes", [1000, 30_000], ids=["at its header", "amid its weights"])
def test_a_full_disk_costs_the_cache_only(
    num_bytes: int, llama: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = logits(load(llama, quantization="int4"))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
    try:
        loaded = _cached(llama, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert f"rounded weights not cached folder={tmp_path}" in caplog.text
    assert not list(tmp_path.iterdir())
    assert logits(loaded).equal(expected)


def test_a_cache_that_cannot_be_is_refused(llama: Path, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(InvalidOption, match=r"quantization_cache: expected a folder .*file"):
        _cached(llama, file)
    with pytest.raises(InvalidOption, match="quantization_cache: expected none without --quantiz"):
        ModelConfig(quantization_cache=str(tmp_path))
    with pytest.raises(InvalidOption, match=r"quantization_cache: expected one rank, .* got 2"):
        _cached(llama, tmp_path, layout=Layout(tensor_parallel_size=2))
