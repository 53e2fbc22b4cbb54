"""bitsandbytes: weights as the library dequantizes them, and the stored state."""

import json
import math
from pathlib import Path

import pytest
import torch

from tests.support.loading import edit_tensors, load
from tests.support.quantized_checkpoints import FORMATS, LAYER, NF4, replace_part
from tests.support.quantized_files import make_quantized
from worker_service.errors import BadCheckpoint
from worker_service.loader.quantized.schemes import read_schemes, with_quantized_weights
from worker_service.loader.tensors import OpenFiles, describe

DATA = Path(__file__).parent / "data"


@pytest.mark.parametrize("name", ["plain", "nested"])
def test_nf4_is_dequantized_as_bitsandbytes_does(name: str) -> None:
    """The file has weights that bitsandbytes 0.50.2 quantized on a CPU, and dequantized."""
    file = DATA / "bitsandbytes.safetensors"
    schemes = read_schemes(file, {"quantization_config": NF4})
    stored = {tensor.name: tensor for tensor in describe(file, OpenFiles())}
    tensors = with_quantized_weights(schemes, stored)
    assert tensors[f"{name}.weight"][...].equal(tensors[f"expected.{name}"][...])


STATE = {"shape": [64, 128], "blocksize": 64, "nested_blocksize": 5, "nested_offset": 0.0}


@pytest.mark.parametrize(
    "state",
    [
        b"",
        b"\xff",
        b"[" * 100_000,
        b"[]",
        *(
            json.dumps({**STATE, **changes}).encode()
            for changes in (
                {"shape": [64]},
                {"shape": [64, -128]},
                {"shape": [64, math.inf]},
                {"shape": None},
                {"shape": [64, 64]},
                {"blocksize": 0},
                {"blocksize": 32},
                {"blocksize": 1 << 60},
                {"blocksize": "a"},
                {"nested_blocksize": 0},
                {"nested_blocksize": 1 << 60},
                {"nested_offset": None},
                {"nested_offset": math.nan},
            )
        ),
    ],
)
def test_the_state_of_nf4_is_checked(state: bytes, tmp_path: Path) -> None:
    settings, quantize = FORMATS["nf4 with scales that are codes"]
    path, _ = make_quantized(tmp_path, settings, quantize)
    value = torch.tensor(list(state), dtype=torch.uint8)
    edit_tensors(path, replace_part("weight.quant_state.bitsandbytes__nf4", value))
    with pytest.raises(BadCheckpoint, match=rf"model\.safetensors: {LAYER}\.weight"):
        load(path)
