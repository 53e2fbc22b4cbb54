"""Measured tiles of attention reach the launches of the GPU on which they were measured."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks import tune_attention
from benchmarks.kernel_cases import scattered_batch
from pagewire_kernels.triton import attention, choose_launch


def _row(us: float, keys: int, programs: int | None = None) -> dict[str, object]:
    sizes = {"tile_rows": 16, "tile_keys": keys, "num_warps": 2, "num_stages": 3, "us": us}
    return sizes if programs is None else sizes | {"programs_per_processor": programs}


LAUNCHES = {
    "even": [_row(10, 32, 2), _row(11, 128, 8), _row(40, 64, 4)],
    "short": [_row(3, 32, 2), _row(3, 128, 8), _row(4, 64, 4)],
    "skewed": [_row(90, 64, 4), _row(100, 128, 8), _row(200, 32, 2)],
    "chunk": [_row(7, 32) | {"tile_rows": 64}, _row(8, 64) | {"tile_rows": 128}],
}


def test_the_fastest_launches_are_written_for_their_gpu(tmp_path: Path) -> None:
    for kind, rows in LAUNCHES.items():
        figures = {"device": "Some GPU", "launches": rows}
        (tmp_path / f"tune_attention_{kind}.json").write_text(json.dumps(figures))
    tiles = tmp_path / "tiles.json"
    tiles.write_text(json.dumps({"Some GPU": {}, "Another GPU": {"decode": {"num_warps": 4}}}))
    tune_attention.write_tiles(tmp_path, tiles)
    decode = {"tile_rows": 16, "tile_keys": 128, "num_warps": 2, "num_stages": 3}
    assert json.loads(tiles.read_text()) == {
        "Some GPU": {
            "decode": decode | {"programs_per_processor": 8},  # 11 x 3 x 100 is the least
            "prefill": {"tile_rows": 64, "tile_keys": 32, "num_warps": 2, "num_stages": 3},
        },
        "Another GPU": {"decode": {"num_warps": 4}},
    }


@pytest.mark.parametrize(
    ("dtype", "invariant", "is_tuned"),
    [(torch.bfloat16, False, True), (torch.float32, False, False), (torch.bfloat16, True, False)],
)
def test_measured_tiles_are_used_where_they_were_measured(
    dtype: torch.dtype, invariant: bool, is_tuned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiles = {
        True: {"tile_rows": 16, "tile_keys": 128, "num_warps": 2, "programs_per_processor": 8},
        False: {"tile_rows": 16, "num_stages": 2},
    }
    monkeypatch.setattr(attention, "_tuned", lambda device, is_decode: tiles[is_decode])
    cpu = torch.device("cpu")
    _, decodes = scattered_batch([100] * 4, 1, 16, cpu)
    launch = choose_launch(
        torch.zeros(4, 8, 128, dtype=dtype), 2, decodes, batch_invariant=invariant
    )
    assert ((launch.tile_keys, launch.num_warps) == (128, 2)) == is_tuned
    if is_tuned:
        assert launch.num_planned == 4 + 8 * attention.num_processors(cpu) // 2
    _, prefill = scattered_batch([100] * 4, 40, 16, cpu)
    query = torch.zeros(160, 64, 128, dtype=dtype)
    launch = choose_launch(query, 2, prefill, batch_invariant=invariant)
    assert (launch.num_stages == 2) == is_tuned
    assert launch.tile_rows >= 32  # the query heads of a KV head
