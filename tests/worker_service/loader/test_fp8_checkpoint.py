"""FP8: scales that are exponents, and those of the KV cache."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from tests.support.loading import assert_same
from tests.support.quantized_checkpoints import FP8
from tests.support.quantized_files import fp8, make_quantized


def test_scales_that_are_powers_of_two_may_be_exponents(tmp_path: Path) -> None:
    def quantize(module: str, weight: Tensor) -> tuple[Mapping[str, Tensor], Tensor]:
        scales = torch.full((-(-weight.shape[0] // 32), weight.shape[1] // 32), 2.0**-6)
        codes = (weight * 64).to(torch.float8_e4m3fn)
        parts = {"weight": codes, "weight_scale_inv": scales.to(torch.float8_e8m0fnu)}
        return parts, codes.float() / 64

    settings = {**FP8, "weight_block_size": [32, 32], "scale_fmt": "ue8m0"}
    assert_same(*make_quantized(tmp_path, settings, quantize))


def test_scales_of_the_kv_cache_stay_as_they_are(tmp_path: Path) -> None:
    def quantize(module: str, weight: Tensor) -> tuple[Mapping[str, Tensor], Tensor]:
        stored, dense = fp8(weight, (1, weight.shape[1]), "weight_scale", [-1, 1])
        name = module.rpartition(".")[2]
        more = {"k_proj": "k_scale", "v_proj": "v_scale"}.get(name)
        return {**stored, **({more: torch.tensor(0.5)} if more else {})}, dense

    for scheme in (None, "static"):
        (tmp_path / str(scheme)).mkdir()
        settings = {**FP8, "kv_cache_scheme": scheme}
        assert_same(*make_quantized(tmp_path / str(scheme), settings, quantize))
