"""Models whose windows or chunks are cache groups, over a cache whose released blocks are NaN.

`PagedDriver` releases every block that no row sees, so that reading one shows in the tokens."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.support.checkpoints import VOCAB_SIZE, checkpoint
from tests.support.paged_driver import PagedDriver
from worker_service.cache_groups import CacheGroup, CacheLifetime
from worker_service.config import CacheConfig, ModelConfig
from worker_service.loader import load_model
from worker_service.loader.trial import try_model
from worker_service.models.interface import Model

NATIVE = (
    "mistral",
    "qwen2_sliding",
    "gemma2",
    "gemma3",
    "gemma4_shared",
    "gemma4_moe",
    "gpt_oss",
    "phi3",
)
THROUGH_TRANSFORMERS = ("vaultgemma",)
FAMILIES = NATIVE + THROUGH_TRANSFORMERS

pytestmark = pytest.mark.usefixtures("one_thread")


def _model(family: str, dtype: str = "float32", kv_cache_dtype: str = "auto") -> Model:
    config = ModelConfig(model=str(checkpoint(family)), device="cpu", dtype=dtype)
    model = load_model(config, CacheConfig(kv_cache_dtype=kv_cache_dtype)).model
    model.kv_cache_spec = replace(model.kv_cache_spec, releases_windows=True)
    return model


def _prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(11)
    return [
        torch.randint(VOCAB_SIZE, (length,), generator=generator).tolist()
        for length in (1, 12, 33, 58)
    ]


each_dtype = pytest.mark.parametrize(
    ("dtype", "kv_cache_dtype"), [("float32", "auto"), ("bfloat16", "auto"), ("bfloat16", "int8")]
)


@each_dtype
@pytest.mark.parametrize("family", FAMILIES)
def test_released_windows_change_no_bit(family: str, dtype: str, kv_cache_dtype: str) -> None:
    model, prompts = _model(family, dtype, kv_cache_dtype), _prompts()
    released = PagedDriver(model)
    model.kv_cache_spec = replace(model.kv_cache_spec, releases_windows=False)
    kept = PagedDriver(model)
    assert len(kept.groups) == 1
    for start, end in ((0, 1), (1, 11), (11, 40), (40, 41), (41, 58)):
        batch = [(i, start, p[start:end]) for i, p in enumerate(prompts) if len(p) > start]
        expected = kept.run(batch)
        model.kv_cache_spec = replace(model.kv_cache_spec, releases_windows=True)
        assert all(map(torch.equal, released.run(batch), expected))
        model.kv_cache_spec = replace(model.kv_cache_spec, releases_windows=False)


class Keeping(PagedDriver):
    """Releases nothing."""

    def _release(self, group: CacheGroup, table: Tensor, position: int) -> None:
        pass


@each_dtype
def test_released_chunks_change_no_bit(dtype: str, kv_cache_dtype: str) -> None:
    model, prompts = _model("llama4", dtype, kv_cache_dtype), _prompts()
    released, kept = PagedDriver(model), Keeping(model)
    assert [group.lifetime for group in kept.groups][1:] == [CacheLifetime.CHUNK]
    for start, end in ((0, 1), (1, 11), (11, 40), (40, 41), (41, 58)):
        batch = [(i, start, p[start:end]) for i, p in enumerate(prompts) if len(p) > start]
        assert all(map(torch.equal, released.run(batch), kept.run(batch)))
    assert bool((released.tables[1] == -1).any())


@pytest.mark.parametrize("family", [*FAMILIES, "llama4"])
def test_the_trial_run_computes_with_several_groups(family: str) -> None:
    assert try_model(_model(family), torch.device("cpu"), 16)


def test_a_window_or_chunk_that_hides_nothing_keeps_its_layers_in_the_growing_group() -> None:
    for family, length in (("qwen2_sliding", 9), ("gemma3", 9), ("llama4", 16)):
        config = ModelConfig(model=str(checkpoint(family)), device="cpu", max_model_len=length)
        spec = replace(load_model(config).model.kv_cache_spec, releases_windows=True)
        assert [group.lifetime for group in spec.groups(16)] == [CacheLifetime.GROWING]
