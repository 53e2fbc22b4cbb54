"""The KV cache of a loaded model: block size, dtype, scales."""

from pathlib import Path
from random import Random

import pytest
import torch
from tokenizers import Tokenizer

import worker_service
from tests.support.checkpoints import checkpoint, make_checkpoint
from tests.support.loading import copy_checkpoint, edit_tensors, logits
from tests.support.paged_driver import PagedDriver
from worker_service.config import CacheConfig, ModelConfig
from worker_service.errors import BadCheckpoint, InvalidOption
from worker_service.kv_cache.memory_budget import SyntheticBatches, profile_blocks
from worker_service.loader import LoadedModel, load_model
from worker_service.loader.kernels import require_cache_dtype
from worker_service.loader.loaded_model import arithmetic_of, describe_cache, release_windows
from worker_service.models.decoder.model import DecoderModel

FP8 = torch.float8_e4m3fn


def _load(path: Path, *, backend: str | None = "reference", **cache: object) -> LoadedModel:
    config = ModelConfig(model=str(path), device="cpu", attention_backend=backend)
    return load_model(config, CacheConfig(**cache))  # type: ignore[arg-type]


def _with_scales(folder: Path, scales: dict[str, torch.Tensor], family: str = "llama") -> Path:
    path = copy_checkpoint(family, folder)
    edit_tensors(path, lambda tensors: tensors.update(scales))
    return path


def test_the_backend_decides_the_block_size_unless_one_is_given() -> None:
    assert _load(checkpoint("llama"), backend=None).block_size == 64
    assert _load(checkpoint("llama"), backend=None, block_size=32).block_size == 32


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("llama", "growing of 64 tokens (cpu), 0.0% unused"),
        ("gemma4", "growing of 80 tokens (cpu), window 9 of 64 tokens (cpu), 4.0% unused"),
    ],
)
def test_the_layout_names_groups_backends_and_what_is_unused(family: str, layout: str) -> None:
    assert (
        describe_cache(release_windows(_load(checkpoint(family), backend=None), CacheConfig()))
        == layout
    )


def test_an_fp8_cache_takes_a_byte_per_element_and_keeps_the_logits_near() -> None:
    plain, small = _load(checkpoint("llama")), _load(checkpoint("llama"), kv_cache_dtype="fp8")
    spec = small.model.kv_cache_spec
    assert spec.dtype == FP8
    assert 4 * spec.block_bytes(16) == plain.model.kv_cache_spec.block_bytes(16)
    expected, found = logits(plain), logits(small)
    error = float((found - expected).norm() / expected.norm())
    assert 0.0 < error < 0.1


def test_an_fp8_cache_goes_through_transformers_too() -> None:
    loaded = _load(checkpoint("gemma2"), kv_cache_dtype="fp8")
    assert loaded.model.kv_cache_spec.dtype == FP8
    error = (logits(loaded) - logits(_load(checkpoint("gemma2")))).norm()
    assert 0.0 < float(error / logits(loaded).norm()) < 0.1


@pytest.mark.parametrize("backend", [None, "cpu"])
def test_on_a_cpu_fp8_is_refused(backend: str | None) -> None:
    with pytest.raises(
        InvalidOption,
        match=r"kv_cache_dtype: expected auto or int8 on a CPU, got fp8.*--attention-backend",
    ):
        _load(checkpoint("llama"), backend=backend, kv_cache_dtype="fp8")


@pytest.mark.parametrize("backend", [None, "triton", "reference"])
def test_on_a_gpu_int8_is_refused(backend: str | None) -> None:
    with pytest.raises(
        InvalidOption, match="kv_cache_dtype: expected auto or fp8 on a GPU, got int8"
    ):
        require_cache_dtype("int8", torch.device("cuda"), backend)
    require_cache_dtype("fp8", torch.device("cuda"), backend)


@pytest.mark.parametrize(("head_dim", "gain"), [(64, 1.87), (128, 1.93)])
def test_the_same_memory_holds_about_twice_the_blocks_in_int8(
    tmp_path: Path, head_dim: int, gain: float
) -> None:
    path = make_checkpoint("llama", tmp_path, head_dim=head_dim)

    def num_blocks(dtype: str, kv_cache_dtype: str) -> int:
        config = ModelConfig(model=str(path), device="cpu", dtype=dtype)
        cache = CacheConfig(kv_cache_memory=2**24, kv_cache_dtype=kv_cache_dtype)
        loaded = load_model(config, cache)
        return profile_blocks(
            SyntheticBatches(loaded.model, loaded.block_size, torch.device("cpu")),
            cache,
            max_num_seqs=4,
            max_num_batched_tokens=64,
        ).num_gpu_blocks

    in_int8 = num_blocks("bfloat16", "int8")
    assert in_int8 == num_blocks("float32", "int8")
    assert in_int8 >= gain * num_blocks("bfloat16", "auto")
    assert in_int8 >= 2 * gain * num_blocks("float32", "auto") - 2


@pytest.mark.parametrize("backend", [None, "reference"])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_an_int8_cache_keeps_the_logits_within_two_hundredths(
    family: str, backend: str | None
) -> None:
    small = _load(checkpoint(family), backend=backend, kv_cache_dtype="int8")
    assert small.model.kv_cache_spec.dtype == torch.int8
    expected, found = logits(_load(checkpoint(family), backend=backend)), logits(small)
    assert 0.0 < float((found - expected).norm() / expected.norm()) < 0.02


def test_the_embedded_models_greedy_answers_are_the_same_from_an_int8_cache() -> None:
    path = Path(worker_service.__file__).parent / "embedded_model"
    draw = Random(0)
    questions = [f"{draw.randint(2, 60)} + {draw.randint(2, 39)} =" for _ in range(24)]
    questions += ["The days of the week are Monday,", "Count from 3 to 19:", "January, February,"]
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    prompts = [tokenizer.encode(question).ids for question in questions]
    answers = []
    for kind in ("auto", "int8"):
        loaded = _load(path, backend=None, kv_cache_dtype=kind)
        driver, end = PagedDriver(loaded.model, max_seqs=len(prompts)), loaded.eos_token_ids[0]
        outputs = driver.generate(prompts, 40)
        answers.append([output[: output.index(end)] for output in outputs if end in output])
    assert answers[0] == answers[1]
    assert len(answers[0]) >= 24


def test_the_arithmetic_is_named_after_an_int8_cache() -> None:
    plain, small = (_load(checkpoint("llama"), kv_cache_dtype=kind) for kind in ("auto", "int8"))
    assert "kv-int8" in arithmetic_of(small).split("/")
    assert arithmetic_of(small).replace("/kv-int8", "") == arithmetic_of(plain)


def test_scales_come_from_the_checkpoint_where_it_has_them(tmp_path: Path) -> None:
    scales = {
        "model.layers.0.self_attn.k_scale": torch.tensor(0.25),
        "model.layers.0.self_attn.v_scale": torch.tensor([0.125]),
        "model.layers.1.self_attn.v_proj.v_scale": torch.tensor(0.5, dtype=torch.bfloat16),
    }
    path = _with_scales(tmp_path, scales)
    loaded = _load(path, kv_cache_dtype="fp8")
    assert isinstance(loaded.model, DecoderModel)
    held = [(holder.key_scale, holder.value_scale) for _, holder in loaded.model.kv_scale_holders()]
    assert held == [(0.25, 0.125), (1.0, 0.5)]
    expected = logits(_load(checkpoint("llama")))
    found = logits(loaded)
    assert float((found - expected).norm() / expected.norm()) < 0.1


def test_both_attentions_of_a_layer_have_scales_in_the_checkpoint(tmp_path: Path) -> None:
    scales = {
        "model.layers.0.self_attn.0.k_scale": torch.tensor(0.25),
        "model.layers.1.self_attn.1.k_scale": torch.tensor(0.5),
    }
    path = _with_scales(tmp_path, scales, "longcat_flash")
    loaded = _load(path, kv_cache_dtype="fp8")
    assert isinstance(loaded.model, DecoderModel)
    holders = loaded.model.kv_scale_holders()
    assert [holder.key_scale for _, holder in holders] == [0.25, 1.0, 1.0, 0.5]


def test_scales_are_ignored_by_a_cache_of_the_models_own_dtype(tmp_path: Path) -> None:
    scales = {"model.layers.0.self_attn.k_scale": torch.tensor(0.25)}
    path = _with_scales(tmp_path, scales)
    assert torch.equal(logits(_load(path)), logits(_load(checkpoint("llama"))))


def test_a_scale_that_is_no_positive_number_is_refused(tmp_path: Path) -> None:
    scales = {"model.layers.0.self_attn.k_scale": torch.tensor(0.0)}
    path = _with_scales(tmp_path, scales)
    with pytest.raises(BadCheckpoint, match=r"k_scale: expected one positive number, got 0\.0"):
        _load(path, kv_cache_dtype="fp8")
