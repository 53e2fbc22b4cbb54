"""What a GPU gets: our kernels for any model, and FlashAttention where it is installed."""

from typing import Any

import pytest
import torch

from pagewire_kernels import reference
from pagewire_kernels.flash_attention import FlashBackend, installed_calls
from pagewire_kernels.interface import AttentionNeeds
from pagewire_kernels.select import select_backend
from pagewire_kernels.self_check import self_check

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda")
NEEDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "heads of 64": {"head_dim": 64},
    "heads of 80": {"head_dim": 80},
    "heads of 256": {"head_dim": 256},
    "blocks of 64": {"block_size": 64},
    "all features": {"sliding_window": True, "soft_cap": True, "sinks": True, "alibi": True},
    "fp8": {"cache_dtype": torch.float8_e4m3fn},
    "batch-invariant": {"batch_invariant": True},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("needs", NEEDS.values(), ids=NEEDS)
def test_a_gpu_gets_our_kernels_or_a_flash_attention(
    needs: dict[str, Any], dtype: torch.dtype
) -> None:
    wanted = AttentionNeeds(**({"dtype": dtype, "head_dim": 128} | needs))
    assert select_backend(GPU, None, wanted).name in ("triton", "flash")
    assert select_backend(GPU, "triton", wanted).name == "triton"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_installed_packages_agree_with_the_reference(dtype: torch.dtype) -> None:
    calls = [*installed_calls(GPU)]
    if not calls:
        pytest.skip("no FlashAttention with block tables is installed")
    for call in calls:
        for head_dim in (64, 128):
            needs = AttentionNeeds(
                dtype=dtype,
                head_dim=head_dim,
                sliding_window=True,
                soft_cap=call.abilities.soft_cap,
                alibi=call.abilities.alibi,
            )
            self_check(
                FlashBackend(call, reference.write_kv, reference.packed_attention), GPU, needs
            )
