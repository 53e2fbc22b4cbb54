"""Choosing a backend, and getting it ready."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from pagewire_kernels import reference
from pagewire_kernels.interface import Abilities, AttentionBackend, AttentionNeeds
from pagewire_kernels.reference.backend import ReferenceBackend
from pagewire_kernels.select import (
    SelectBackend,
    candidates,
    choose,
    layer_kernels,
    select_backend,
    select_kernels,
)
from pagewire_kernels.self_check import self_check

CPU, GPU = torch.device("cpu"), torch.device("cuda")
NEEDS = AttentionNeeds(dtype=torch.bfloat16, head_dim=128)


class FakeBackend(ReferenceBackend):
    """A backend with any name and abilities."""

    def __init__(self, name: str, **abilities: Any) -> None:
        self.name = name
        self.abilities = Abilities(**abilities)


def _passes(*arguments: object) -> None:
    """A check that finds nothing."""


def test_the_cpu_gets_the_compiled_kernels(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        assert select_backend(CPU).name == "cpu"
    assert "name=cpu reason=default for device type cpu" in caplog.text


def test_a_device_without_kernels_gets_the_reference() -> None:
    assert select_backend(torch.device("meta")).name == "reference"


def test_a_backend_can_be_asked_for_by_name(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        assert select_backend(CPU, "reference").name == "reference"
    assert "name=reference reason=requested" in caplog.text


@pytest.mark.parametrize(
    ("device", "name", "message"),
    [
        (CPU, "warp", "expected one of flash, triton, cpu, reference, got 'warp'"),
        (GPU, "cpu", "'cpu' does not run on device cuda"),
        (CPU, "triton", "'triton' does not run on device cpu"),
        (CPU, "flash", "'flash' does not run on device cpu"),
    ],
)
def test_a_backend_that_cannot_be_is_refused(device: torch.device, name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        select_backend(device, name)


def test_the_reference_promises_no_batch_invariance() -> None:
    with pytest.raises(
        ValueError, match=r"--attention-backend reference: .*reference is not batch-invariant"
    ):
        select_backend(CPU, "reference", replace(NEEDS, batch_invariant=True))


@pytest.mark.parametrize(
    ("needs", "abilities", "obstacle"),
    [
        ({"dtype": torch.float32}, {"dtypes": (torch.bfloat16,)}, "does not compute in float32"),
        ({"cache_dtype": torch.float8_e4m3fn}, {}, "has no fp8 cache (--kv-cache-dtype)"),
        ({"cache_dtype": torch.int8}, {}, "has no int8 cache (--kv-cache-dtype)"),
        ({"head_dim": 320}, {"max_head_dim": 256}, "takes heads of at most 256 elements, not 320"),
        (
            {"head_dim": 20},
            {"head_dim_multiple": 8},
            "takes heads of a multiple of 8 elements, not 20",
        ),
        (
            {"block_size": 16},
            {"block_multiple": 256},
            "takes blocks of a multiple of 256 tokens (--block-size), not 16",
        ),
        (
            {"chunks": True},
            {"chunks": False},
            "has blocks that are too large for chunked attention",
        ),
        ({"sinks": True}, {"sinks": False}, "has no attention sinks"),
        ({"soft_cap": True}, {"soft_cap": False}, "has no soft cap"),
        ({"alibi": True}, {"alibi": False}, "has no ALiBi biases"),
        ({"sliding_window": True}, {"sliding_window": False}, "has no sliding window"),
        ({"batch_invariant": True}, {}, "is not batch-invariant"),
    ],
)
def test_what_a_backend_cannot_do_is_told(
    needs: dict[str, Any], abilities: dict[str, Any], obstacle: str
) -> None:
    backend = FakeBackend("first", **abilities)
    assert [*backend.abilities.obstacles(NEEDS)] == []
    assert [*backend.abilities.obstacles(replace(NEEDS, **needs))] == [obstacle]


def test_what_the_best_backend_cannot_do_the_next_one_does(
    caplog: pytest.LogCaptureFixture,
) -> None:
    offered = [FakeBackend("first", sinks=False), FakeBackend("second")]
    with caplog.at_level("INFO"):
        assert choose(GPU, None, replace(NEEDS, sinks=True), offered, _passes).name == "second"
    assert "default for device type cuda, since first has no attention sinks" in caplog.text
    assert choose(GPU, None, NEEDS, offered, _passes).name == "first"


def test_a_backend_that_fails_its_check_is_passed_over_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def check(backend: AttentionBackend, *others: object) -> None:
        if backend.name == "first":
            raise RuntimeError("no kernel image is available")

    offered = [FakeBackend("first"), FakeBackend("second")]
    assert choose(GPU, None, NEEDS, offered, check).name == "second"
    (record,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert "name=first error=failed its check: no kernel image" in record.getMessage()


def test_a_backend_that_was_asked_for_and_fails_ends_the_choice() -> None:
    def check(*arguments: object) -> None:
        raise RuntimeError("no kernel image")

    with pytest.raises(ValueError, match="first failed its check: no kernel image"):
        choose(GPU, "first", NEEDS, [FakeBackend("first")], check)


@pytest.mark.parametrize("backend", ["triton", "flash"])
def test_layer_kernels_go_with_the_backend(backend: str) -> None:
    assert layer_kernels(FakeBackend(backend), GPU, torch.bfloat16).name == "triton"
    assert layer_kernels(ReferenceBackend(), GPU, torch.bfloat16).name == "torch"


class OffBackend(FakeBackend):
    """The reference, but for a factor."""

    def paged_attention(self, *arguments: Any, **options: Any) -> torch.Tensor:  # type: ignore[override]
        return reference.paged_attention(*arguments, **options) * 1.1


class OffTexts(FakeBackend):
    """The reference, but for a factor over whole texts."""

    def packed_attention(self, *arguments: Any, **options: Any) -> torch.Tensor:  # type: ignore[override]
        return reference.packed_attention(*arguments, **options) * 1.1


def test_the_check_of_an_encoder_attends_over_whole_texts() -> None:
    self_check(OffTexts("off"), CPU, NEEDS)
    self_check(ReferenceBackend(), CPU, replace(NEEDS, packed=True))
    with pytest.raises(ValueError, match="its results differ from the reference by"):
        self_check(OffTexts("off"), CPU, replace(NEEDS, packed=True))


@pytest.mark.parametrize(
    "needs",
    [
        NEEDS,
        replace(NEEDS, dtype=torch.float32, sliding_window=True, sinks=True, alibi=True),
        replace(NEEDS, dtype=torch.float16, soft_cap=True, block_size=32),
        replace(NEEDS, cache_dtype=torch.float8_e4m3fn),
    ],
)
def test_the_check_tells_right_results_from_wrong_ones(needs: AttentionNeeds) -> None:
    self_check(ReferenceBackend(), CPU, needs)
    with pytest.raises(ValueError, match="its results differ from the reference by"):
        self_check(OffBackend("off"), CPU, needs)


def test_without_native_kernels_the_reference_serves_cpus() -> None:
    def without_library(name: str | None) -> AttentionBackend:
        return choose(CPU, name, NEEDS, candidates(CPU, name, False, lambda: None))

    assert without_library(None).name == "reference"
    with pytest.raises(ValueError, match="--attention-backend cpu: none can serve this model here"):
        without_library("cpu")


FULL = AttentionNeeds(dtype=torch.float32, head_dim=512)
WINDOWED = replace(FULL, head_dim=256, sliding_window=True)
SMALL_HEADS = {"max_head_dim": 256}


def _select_from(*offered: FakeBackend) -> SelectBackend:
    return lambda device, name, needs: choose(device, name, needs, offered)


def test_windows_with_smaller_heads_get_a_backend_of_their_own() -> None:
    select = _select_from(FakeBackend("flash", **SMALL_HEADS), FakeBackend("triton"))
    kernels = select_kernels(CPU, FULL, windowed=WINDOWED, select=select)
    assert [kernels.attention_of(window).name for window in (None, 9)] == ["triton", "flash"]
    assert len(kernels.backends) == 2


def test_a_backend_that_serves_both_kinds_of_layers_is_one() -> None:
    select = _select_from(FakeBackend("triton"))
    kernels = select_kernels(CPU, FULL, windowed=WINDOWED, select=select)
    assert kernels.backends == [kernels.attention]


def test_a_backend_of_large_blocks_serves_all_layers_or_none() -> None:
    large = FakeBackend("flash", block_multiple=256, **SMALL_HEADS)
    select = _select_from(large, FakeBackend("reference"))
    kernels = select_kernels(CPU, FULL, windowed=WINDOWED, select=select)
    assert [backend.name for backend in kernels.backends] == ["reference"]
    small = replace(FULL, head_dim=128)
    kernels = select_kernels(CPU, small, windowed=replace(WINDOWED, head_dim=64), select=select)
    assert [backend.name for backend in kernels.backends] == ["flash"]
