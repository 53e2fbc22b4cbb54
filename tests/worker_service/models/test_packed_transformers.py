"""Models that run through `transformers` keep the bits of their weights on CPUs."""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from pagewire_kernels.cpu.linear import NativeWeight
from tests.support.checkpoints import make_checkpoint
from tests.support.loading import TOKENS, assert_same, load
from tests.support.paged_driver import PagedDriver
from tests.support.quantized_checkpoints import AWQ, FP8, NF4
from tests.support.quantized_files import (
    GROUP_SIZE,
    awq,
    bitsandbytes,
    fp8,
    integers,
    make_quantized,
)
from tests.support.transformers_oracle import Oracle
from worker_service.errors import BadCheckpoint
from worker_service.loader import LoadedModel
from worker_service.models.transformers_backend.packed import (
    PackedExperts,
    PackedLinear,
)


def _to_awq(module: str, weight: Tensor) -> tuple[Mapping[str, Tensor], Tensor]:
    rounded = integers(weight, 4, size=GROUP_SIZE, symmetric=False)
    return awq(rounded, 4), rounded.values


def _to_fp8(module: str, weight: Tensor) -> tuple[Mapping[str, Tensor], Tensor]:
    return fp8(weight, (1, weight.shape[1]), "weight_scale", [-1, 1])


def _to_nf4(module: str, weight: Tensor) -> tuple[Mapping[str, Tensor], Tensor]:
    return bitsandbytes(weight, nested=True)


def _to_small_blocks(module: str, weight: Tensor) -> tuple[Mapping[str, Tensor], Tensor]:
    grid = [-(-size // 8) for size in weight.shape]
    return fp8(weight, (8, 8), "weight_scale_inv", grid)


def _bits(loaded: LoadedModel) -> dict[str, set[str]]:
    """Of the packed weights, by the last part of their module's name; empty: dense."""
    found: dict[str, set[str]] = {}
    model: Any = loaded.model
    for name, module in (*model._decoder.named_modules(), ("lm_head", model._head.lm_head)):
        if isinstance(module, PackedLinear):
            weights = [module.packed]
        elif isinstance(module, PackedExperts):
            weights = [weight for part in module.packed.values() for weight in part.values()]
        else:
            continue
        kind = name.rpartition(".")[2]
        for weight in weights:
            assert isinstance(weight, NativeWeight)
            found.setdefault(kind, set()).add(weight._suffix)
    for table in model._ops._tables.values():
        found.setdefault("embed_tokens", set()).add(table._suffix)
    return found


KINDS = {"_int4": (AWQ, _to_awq), "_float8": (FP8, _to_fp8), "_float4": (NF4, _to_nf4)}
"""Settings and conversions of checkpoints, by the suffix of the kernels."""

MOE = ("flex_olmo",)


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        *((family, "_int4") for family in MOE),
        *((family, "_float8") for family in ("phi", "flex_olmo")),
        *((family, "_float4") for family in ("phi", "flex_olmo")),
    ],
)
def test_all_quantized_weights_stay_packed(
    family: str, kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings, convert = KINDS[kind]
    path, reference = make_quantized(tmp_path, settings, convert, family=family)
    with caplog.at_level(logging.INFO):
        loaded = load(path)
    assert "weights dequantized" not in caplog.text
    bits = _bits(loaded)
    dense = {"lm_head", "embed_tokens"}
    assert all(found == ({""} if name in dense else {kind}) for name, found in bits.items())
    assert ("experts" in bits) == (family in MOE)
    assert loaded.batch_invariant
    assert loaded.model.num_parameters == load(reference).model.num_parameters
    assert_same(loaded, reference)


@pytest.mark.parametrize("family", ["vaultgemma", "flex_olmo"])
def test_the_log_says_what_is_dequantized(
    family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = {**FP8, "weight_block_size": [8, 8]}
    path, reference = make_quantized(tmp_path, settings, _to_small_blocks, family=family)
    with caplog.at_level(logging.INFO):
        loaded = load(path)
    stored = load_file(path / "model.safetensors")
    codes = [tensor for tensor in stored.values() if tensor.dtype == torch.float8_e4m3fn]
    message = next(r.getMessage() for r in caplog.records if "weights dequantized" in r.msg)
    num_bytes = 4 * sum(tensor.numel() for tensor in codes)
    assert f"num_tensors={len(codes)} num_bytes={num_bytes} names=model.layers.0." in message
    assert_same(loaded, reference)


@pytest.mark.parametrize("family", ["vaultgemma", "flex_olmo"])
def test_missing_tensors_are_named(family: str, tmp_path: Path) -> None:
    path = make_checkpoint(family, tmp_path)
    tensors = load_file(path / "model.safetensors")
    del tensors[next(name for name in tensors if "layers.1" in name and "down_proj" in name)]
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(BadCheckpoint, match=r"(missing|misshapen) tensors: .*layers\.1\."):
        load(path)


def test_a_head_in_a_tied_checkpoint_is_read(tmp_path: Path) -> None:
    """Both tensors are there and differ: neither is dropped."""
    path = make_checkpoint("vaultgemma", tmp_path, tie_word_embeddings=False)
    config = json.loads((path / "config.json").read_text())
    oracle = Oracle(path)
    (path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    found = PagedDriver(load(path).model).run([(0, 0, TOKENS)])[0]
    torch.testing.assert_close(found, oracle.logits(TOKENS), rtol=1e-4, atol=1e-3)
