"""The `flash` backend: what it passes to each package, and the packages themselves on a GPU."""

import sys
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
    VllmFlashAttention,
    import_if_whole,
    import_vllm_flash_attn,
    vllm_calls,
)
from pagewire_kernels.interface import AttentionNeeds
from pagewire_kernels.reference.backend import ReferenceBackend
from pagewire_kernels.self_check import self_check
from tests.support import fake_flash
from tests.support.packed_texts import PackedTexts
from tests.support.paged_batch import PagedSequences, Rows, Shape

CALLS: dict[str, FlashCall] = {
    "version 2": FlashAttention2(
        fake_flash.flash_attn_varlen_func, fake_flash.flash_attn_with_kvcache_2
    ),
    "version 3": FlashAttention3(
        fake_flash.flash_attn_varlen_func, fake_flash.flash_attn_with_kvcache_3
    ),
    "vllm 2": VllmFlashAttention(fake_flash.flash_attn_varlen_func_of_vllm, 2),
    "vllm 3": VllmFlashAttention(fake_flash.flash_attn_varlen_func_of_vllm, 3),
    "torch": TorchVarlen(fake_flash.varlen_attn),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"sliding_window": 7},
    "window of one": {"sliding_window": 1},
    "cap": {"soft_cap": 2.0},
    "alibi": {"alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 0.0625], dtype=torch.bfloat16)},
}
UNABLE = {("version 3", "alibi"), ("vllm 3", "alibi"), ("torch", "alibi"), ("torch", "cap")}

LENGTHS = [300, 1, 12]
PARTS = {
    "prefill and chunk": [(0, 250, 300), (1, 0, 1), (2, 0, 12)],
    "decode": [(0, 299, 300), (1, 0, 1), (2, 11, 12)],
}


def _backend(call: FlashCall) -> FlashBackend:
    return FlashBackend(call, reference.write_kv, reference.packed_attention)


def _sequences(call: FlashCall, **shape: Any) -> PagedSequences:
    size = call.abilities.default_block_size
    return PagedSequences(Shape(block_size=size, dtype=torch.bfloat16, **shape), LENGTHS)


def _both(
    call: FlashCall, sequences: PagedSequences, parts: list[Rows], **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    backend = _backend(call)
    sequences.write(backend)
    output = sequences.attend(parts, backend, scale=0.3, **options)
    return output, sequences.attend(parts, scale=0.3, **options)


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
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("window", [None, 0, 9])
def test_a_package_attends_over_whole_texts(name: str, window: int | None, biased: bool) -> None:
    """With a bias, which no package has, the kernel for that does."""
    texts = PackedTexts([40, 1, 12], 4, 2, 32, torch.bfloat16)
    options: dict[str, Any] = {"scale": 0.2, "window": window}
    if biased:
        options["bias"] = texts.random_bias(40)
    output = texts.attend(_backend(CALLS[name]), **options)
    assert torch.equal(output, texts.attend(ReferenceBackend(), **options))


@pytest.mark.parametrize("name", CALLS)
def test_the_null_block_is_read_instead_of_released_ones(name: str) -> None:
    call = CALLS[name]
    size = call.abilities.block_multiple
    shape = Shape(block_size=max(8, size), dtype=torch.bfloat16)
    sequences = PagedSequences(shape, [2 * shape.block_size + 30, 1, 12])
    (length, *_), window = sequences.lengths, 7
    parts = [(0, length - 2, length), (1, 0, 1), (2, 11, 12)]
    before, _ = _both(call, sequences, parts, sliding_window=window)
    sequences.release(parts, window)
    backend = _backend(call)
    after = sequences.attend(parts, backend, scale=0.3, sliding_window=window)
    assert torch.equal(after, before)
    assert bool((sequences.tables[0] == -1).any())


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
    backend = _backend(CALLS[name])
    able = CALLS[name].abilities
    needs = AttentionNeeds(
        dtype=torch.bfloat16,
        head_dim=64,
        sliding_window=True,
        soft_cap=able.soft_cap,
        alibi=able.alibi,
        packed=True,
    )
    self_check(backend, torch.device("cpu"), needs)


def test_a_package_built_for_another_torch_is_as_good_as_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "broken_flash.py").write_text("raise ImportError('undefined symbol')")
    (tmp_path / "whole_flash.py").write_text("answer = 1")
    (tmp_path / "namespace_flash/cute").mkdir(parents=True)
    assert import_if_whole("absent_flash") is None
    assert import_if_whole("namespace_flash") is None
    assert not caplog.records
    assert import_if_whole("broken_flash") is None
    assert "name=broken_flash error=undefined symbol" in caplog.text
    whole = import_if_whole("whole_flash")
    assert whole is not None
    assert whole.answer == 1


VLLM_INTERFACE = """
from . import _vllm_fa3_C
FA2_AVAILABLE, FA3_AVAILABLE = {available}
def flash_attn_varlen_func(q, k, v, seqused_k=None, block_table=None, fa_version=2):
    return _vllm_fa3_C.answer
"""


@pytest.fixture
def vllm_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel of vLLM that cannot be imported as a whole, without its FlashAttention."""
    monkeypatch.syspath_prepend(tmp_path)
    for name in [module for module in sys.modules if module.startswith("pagewire_vllm_flash_attn")]:
        monkeypatch.delitem(sys.modules, name)
    folder = tmp_path / "vllm/vllm_flash_attn"
    folder.mkdir(parents=True)
    for path in (folder.parent, folder):
        (path / "__init__.py").write_text("raise AssertionError('imports all of vLLM')")
    return folder


@pytest.mark.parametrize(
    ("available", "is_hopper", "versions"),
    [
        ("True, True", True, [3, 2]),
        ("True, True", False, [2]),
        ("False, True", True, [3]),
        ("False, False", True, []),
    ],
)
def test_the_package_in_vllms_wheel_is_found_without_importing_vllm(
    vllm_folder: Path, available: str, is_hopper: bool, versions: list[int]
) -> None:
    (vllm_folder / "flash_attn_interface.py").write_text(VLLM_INTERFACE.format(available=available))
    (vllm_folder / "_vllm_fa3_C.py").write_text("answer = 42")
    interface = import_vllm_flash_attn()
    assert interface is not None
    assert interface.flash_attn_varlen_func(1, 2, 3) == 42
    calls = [*vllm_calls(interface, is_hopper=is_hopper)]
    assert [call.version for call in calls] == [
        f"vllm flash-attn {version}" for version in versions
    ]
    assert "vllm" not in sys.modules


def test_a_vllm_without_flash_attention_is_as_good_as_none(
    vllm_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert import_vllm_flash_attn() is None
    (vllm_folder / "flash_attn_interface.py").write_text("raise ImportError('built for torch 2')")
    assert import_vllm_flash_attn() is None
    assert "built for torch 2" in caplog.text
    assert not [*vllm_calls(None, is_hopper=True)]


def test_vllms_package_of_its_own_is_found_and_an_old_one_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    folder = tmp_path / "vllm_flash_attn"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "flash_attn_interface.py").write_text(
        "FA2_AVAILABLE = True\ndef flash_attn_varlen_func(q, k, v, cu_seqlens_k): ..."
    )
    interface = import_vllm_flash_attn()
    assert interface is not None
    assert interface.__name__ == "vllm_flash_attn.flash_attn_interface"
    assert not [*vllm_calls(interface, is_hopper=True)]
    assert "vllm_flash_attn is too old" in caplog.text
