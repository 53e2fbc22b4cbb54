"""Attention over whole texts on the GPU against the reference."""

from typing import Any

import pytest
import torch

from pagewire_kernels.batch import AttentionMetadata
from pagewire_kernels.reference.backend import ReferenceBackend
from pagewire_kernels.triton import TritonBackend, packed_attention
from tests.support.gpu_kernels import DEVICE, DTYPES, MARKS, assert_agrees
from tests.support.packed_texts import PackedTexts

pytestmark = MARKS

LENGTHS = [70, 1, 130, 64]
BACKEND = TritonBackend()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(2, 2, 32), (4, 2, 40)])
@pytest.mark.parametrize(("window", "biased"), [(None, False), (5, False), (80, True)])
def test_texts_agree_with_the_reference(
    dtype: torch.dtype,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    window: int | None,
    biased: bool,
) -> None:
    texts = PackedTexts(LENGTHS, num_heads, num_kv_heads, head_dim, dtype, DEVICE)
    options: dict[str, Any] = {"scale": head_dim**-0.5, "window": window}
    if biased:
        options["bias"] = texts.random_bias(max(LENGTHS) + 3)
    output = texts.attend(BACKEND, **options)
    assert_agrees(output, texts.attend(ReferenceBackend(), **options))


@pytest.mark.parametrize("window", [None, 20])
def test_a_text_has_the_same_bits_in_any_batch(window: int | None) -> None:
    texts = PackedTexts(LENGTHS, 2, 1, 32, torch.float32, DEVICE)
    together = texts.attend(BACKEND, scale=0.2, window=window).split(LENGTHS)
    for i, output in enumerate(together):
        assert torch.equal(texts.attend(BACKEND, [i], scale=0.2, window=window), output)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's about NaN, in the interpreter
def test_numbers_of_other_texts_are_never_read() -> None:
    texts = PackedTexts(LENGTHS, 2, 1, 32, torch.float32, DEVICE)
    expected = texts.attend(BACKEND, [0], scale=0.2)
    for other in texts.texts[1:]:
        other.fill_(torch.nan)
    assert torch.equal(texts.attend(BACKEND, scale=0.2)[:70], expected)


def test_a_bias_that_is_too_short_is_refused() -> None:
    rows, metadata = torch.zeros(9, 2, 16, device=DEVICE), AttentionMetadata.of_texts([9], DEVICE)
    for width in (15, 18):
        bias = torch.zeros(2, width, device=DEVICE)
        with pytest.raises(ValueError, match=f"odd number of at least 17 columns, got {width}"):
            packed_attention(rows, rows, rows, metadata, scale=1.0, bias=bias)
