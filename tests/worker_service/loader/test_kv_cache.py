"""The KV cache of a loaded model: block size, dtype, scales."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.checkpoints import checkpoint, make_checkpoint
from tests.support.paged_driver import PagedDriver
from worker_service.config import CacheConfig, ModelConfig
from worker_service.errors import BadCheckpoint, InvalidOption
from worker_service.loader import LoadedModel, load_model
from worker_service.models.llama import LlamaModel

FP8 = torch.float8_e4m3fn
TOKENS = list(range(3, 30))


def _load(path: Path, *, backend: str | None = "reference", **cache: object) -> LoadedModel:
    config = ModelConfig(model=str(path), device="cpu", attention_backend=backend)
    return load_model(config, CacheConfig(**cache))  # type: ignore[arg-type]


def _logits(loaded: LoadedModel) -> torch.Tensor:
    return PagedDriver(loaded.model).run([(0, 0, TOKENS)])[0]


def _with_scales(path: Path, scales: dict[str, torch.Tensor]) -> Path:
    file = path / "model.safetensors"
    save_file(load_file(file) | scales, file, metadata={"format": "pt"})
    return path


def test_the_backend_decides_the_block_size_unless_one_is_given() -> None:
    assert _load(checkpoint("llama"), backend=None).block_size == 64
    assert _load(checkpoint("llama"), backend=None, block_size=32).block_size == 32


def test_an_fp8_cache_takes_a_byte_per_element_and_keeps_the_logits_near() -> None:
    plain, small = _load(checkpoint("llama")), _load(checkpoint("llama"), kv_cache_dtype="fp8")
    spec = small.model.kv_cache_spec
    assert spec.dtype == FP8
    assert 4 * spec.block_bytes(16) == plain.model.kv_cache_spec.block_bytes(16)
    expected, found = _logits(plain), _logits(small)
    error = float((found - expected).norm() / expected.norm())
    assert 0.0 < error < 0.1


def test_an_fp8_cache_goes_through_transformers_too() -> None:
    loaded = _load(checkpoint("gemma2"), kv_cache_dtype="fp8")
    assert loaded.model.kv_cache_spec.dtype == FP8
    error = (_logits(loaded) - _logits(_load(checkpoint("gemma2")))).norm()
    assert 0.0 < float(error / _logits(loaded).norm()) < 0.1


@pytest.mark.parametrize("backend", [None, "cpu"])
def test_on_a_cpu_fp8_is_refused(backend: str | None) -> None:
    with pytest.raises(
        InvalidOption, match=r"kv_cache_dtype: fp8 is for GPUs.*--attention-backend"
    ):
        _load(checkpoint("llama"), backend=backend, kv_cache_dtype="fp8")


def test_scales_come_from_the_checkpoint_where_it_has_them(tmp_path: Path) -> None:
    scales = {
        "model.layers.0.self_attn.k_scale": torch.tensor(0.25),
        "model.layers.0.self_attn.v_scale": torch.tensor([0.125]),
        "model.layers.1.self_attn.v_proj.v_scale": torch.tensor(0.5, dtype=torch.bfloat16),
    }
    path = _with_scales(make_checkpoint("llama", tmp_path / "llama"), scales)
    loaded = _load(path, kv_cache_dtype="fp8")
    assert isinstance(loaded.model, LlamaModel)
    held = [(each.key_scale, each.value_scale) for _, each in loaded.model.kv_scale_holders()]
    assert held == [(0.25, 0.125), (1.0, 0.5)]
    expected = _logits(_load(checkpoint("llama")))
    found = _logits(loaded)
    assert float((found - expected).norm() / expected.norm()) < 0.1


def test_scales_are_ignored_by_a_cache_of_the_models_own_dtype(tmp_path: Path) -> None:
    scales = {"model.layers.0.self_attn.k_scale": torch.tensor(0.25)}
    path = _with_scales(make_checkpoint("llama", tmp_path / "llama"), scales)
    assert torch.equal(_logits(_load(path)), _logits(_load(checkpoint("llama"))))


def test_a_scale_that_is_no_positive_number_is_refused(tmp_path: Path) -> None:
    scales = {"model.layers.0.self_attn.k_scale": torch.tensor(0.0)}
    path = _with_scales(make_checkpoint("llama", tmp_path / "llama"), scales)
    with pytest.raises(BadCheckpoint, match=r"k_scale: expected one positive number, got 0\.0"):
        _load(path, kv_cache_dtype="fp8")
