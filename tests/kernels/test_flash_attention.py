"""The `flash` backend: what it passes to each package, and the packages themselves on a GPU."""

from pathlib import Path
from typing import Any

import pytest
import torch

from pagewire_kernels import reference
from pagewire_kernels.flash_attention import (
    FlashAttention2,
    FlashAttention3,
    FlashBackend,
    FlashCall,
    TorchVarlen,
    import_if_whole,
)
from pagewire_kernels.interface import AttentionNeeds
from pagewire_kernels.self_check import self_check
from tests.support import fake_flash
from tests.support.paged_batch import PagedSequences, Shape

CALLS: dict[str, FlashCall] = {
    "version 2": FlashAttention2(
        fake_flash.flash_attn_varlen_func, fake_flash.flash_attn_with_kvcache_2
    ),
    "version 3": FlashAttention3(fake_flash.flash_attn_with_kvcache_3),
    "torch": TorchVarlen(fake_flash.varlen_attn),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"sliding_window": 7},
    "window of one": {"sliding_window": 1},
    "cap": {"soft_cap": 2.0},
    "alibi": {"alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 0.0625], dtype=torch.bfloat16)},
}
UNABLE = {("version 3", "alibi"), ("torch", "alibi"), ("torch", "cap")}

LENGTHS = [300, 1, 12]
PARTS = {
    "prefill and chunk": [(0, 250, 300), (1, 0, 1), (2, 0, 12)],
    "decode": [(0, 299, 300), (1, 0, 1), (2, 11, 12)],
}


def _sequences(call: FlashCall, **shape: Any) -> PagedSequences:
    size = call.abilities.default_block_size
    return PagedSequences(Shape(block_size=size, dtype=torch.bfloat16, **shape), LENGTHS)


def _both(
    call: FlashCall, sequences: PagedSequences, parts: list[tuple[int, int, int]], **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    everything = [(i, 0, length) for i, length in enumerate(sequences.lengths)]
    backend = FlashBackend(call, reference.write_kv)
    backend.write_kv(
        sequences.rows(sequences.keys, everything),
        sequences.rows(sequences.values, everything),
        sequences.key_cache,
        sequences.value_cache,
        sequences.metadata(everything).slot_mapping,
    )
    arguments = (
        sequences.rows(sequences.queries, parts),
        sequences.key_cache,
        sequences.value_cache,
        sequences.metadata(parts),
    )
    return (
        backend.paged_attention(*arguments, scale=0.3, **options),
        reference.paged_attention(*arguments, scale=0.3, **options),
    )


@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("option", OPTIONS)
def test_a_package_gets_what_it_expects(name: str, option: str, parts: str) -> None:
    call = CALLS[name]
    sequences = _sequences(call)
    if (name, option) in UNABLE:
        with pytest.raises(ValueError, match="attention backend 'flash' does not support"):
            _both(call, sequences, PARTS[parts], **OPTIONS[option])
    else:
        output, expected = _both(call, sequences, PARTS[parts], **OPTIONS[option])
        assert torch.equal(output, expected)


@pytest.mark.parametrize("name", CALLS)
def test_as_many_kv_heads_as_query_heads_are_served(name: str) -> None:
    sequences = _sequences(CALLS[name], num_heads=2, num_kv_heads=2)
    output, expected = _both(CALLS[name], sequences, PARTS["decode"])
    assert torch.equal(output, expected)


def test_small_blocks_are_for_version_3_alone() -> None:
    sequences = PagedSequences(Shape(dtype=torch.bfloat16), LENGTHS)
    output, expected = _both(CALLS["version 3"], sequences, PARTS["decode"])
    assert torch.equal(output, expected)
    for name in ("version 2", "torch"):
        with pytest.raises(ValueError, match="does not support blocks of 8 tokens"):
            _both(CALLS[name], sequences, PARTS["decode"])
        needs = AttentionNeeds(dtype=torch.bfloat16, head_dim=32, block_size=16)
        (obstacle,) = CALLS[name].abilities.obstacles(needs)
        assert "multiple of 256 tokens (--block-size), not 16" in obstacle


def test_sinks_and_scaled_caches_are_refused() -> None:
    call = CALLS["version 3"]
    for options in ({"sinks": torch.zeros(4)}, {"key_scale": 0.5}):
        with pytest.raises(ValueError, match="attention backend 'flash' does not support"):
            _both(call, _sequences(call), PARTS["decode"], **options)


@pytest.mark.parametrize("name", CALLS)
def test_the_startup_check_passes_with_each_package(name: str) -> None:
    backend = FlashBackend(CALLS[name], reference.write_kv)
    able = CALLS[name].abilities
    needs = AttentionNeeds(
        dtype=torch.bfloat16,
        head_dim=64,
        sliding_window=True,
        soft_cap=able.soft_cap,
        alibi=able.alibi,
    )
    self_check(backend, torch.device("cpu"), needs)


def test_a_package_built_for_another_torch_is_as_good_as_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "broken_flash.py").write_text("raise ImportError('undefined symbol')")
    (tmp_path / "whole_flash.py").write_text("answer = 1")
    assert import_if_whole("absent_flash") is None
    assert not caplog.records
    assert import_if_whole("broken_flash") is None
    assert "name=broken_flash error=undefined symbol" in caplog.text
    whole = import_if_whole("whole_flash")
    assert whole is not None
    assert whole.answer == 1
