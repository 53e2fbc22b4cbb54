"""Attention over whole texts without a cache: every backend against torch, and its promises."""

from typing import Any

import pytest
import torch
from torch import Tensor

from pagewire_kernels.batch import AttentionMetadata
from pagewire_kernels.cpu.attention import NativeBackend
from pagewire_kernels.interface import AttentionBackend
from pagewire_kernels.reference.backend import ReferenceBackend
from tests.support.native import native_libraries
from tests.support.packed_texts import PackedTexts

BACKENDS: dict[str, AttentionBackend] = {
    "reference": ReferenceBackend(),
    **{native.instruction_set: NativeBackend(native) for native in native_libraries()},
}
LENGTHS = [10, 1, 70, 64, 300, 129]
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2}

pytestmark = pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(3, 3, 32), (4, 2, 40)])
@pytest.mark.parametrize(
    ("window", "biased"), [(None, False), (16, False), (0, False), (100, True), (None, True)]
)
def test_a_text_is_attended_as_by_torch(
    backend: AttentionBackend,
    dtype: torch.dtype,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    window: int | None,
    biased: bool,
) -> None:
    texts = PackedTexts(LENGTHS, num_heads, num_kv_heads, head_dim, dtype)
    options: dict[str, Any] = {"scale": head_dim**-0.5, "window": window}
    if biased:
        options["bias"] = texts.random_bias(max(LENGTHS) + 7)
    output = texts.attend(backend, **options)
    assert output.dtype == dtype
    expected = texts.attend_by_torch(**options)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(output.float(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", [{}, {"window": 20}], ids=str)
def test_a_text_has_the_same_bits_in_64_random_batches(
    backend: AttentionBackend, dtype: torch.dtype, options: dict[str, Any]
) -> None:
    draw = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 90, (8,), generator=draw).tolist()
    texts = PackedTexts([77, *lengths], 2, 2, 32, dtype)
    expected = texts.attend(backend, [0], scale=0.2, **options)
    for _ in range(64):
        others = torch.randperm(8, generator=draw)[: int(torch.randint(9, (), generator=draw))] + 1
        output = texts.attend(backend, [*others.tolist(), 0], scale=0.2, **options)
        assert torch.equal(output[-77:], expected)


def test_numbers_of_other_texts_are_never_read(backend: AttentionBackend) -> None:
    texts = PackedTexts([100, 30, 65], 2, 1, 32, torch.float32)
    expected = texts.attend(backend, [1], scale=0.2)
    for broken in (texts.texts[0], texts.texts[2]):
        broken.fill_(torch.nan)
    output = texts.attend(backend, scale=0.2)
    assert torch.equal(output[100:130], expected)
    assert output[:100].isnan().all()
    assert output[130:].isnan().all()


def test_the_metadata_of_texts_has_their_bounds(backend: AttentionBackend) -> None:
    metadata = AttentionMetadata.of_texts([3, 1, 5], torch.device("cpu"))
    assert metadata.query_start.tolist() == [0, 3, 4, 9]
    assert metadata.context_lens.tolist() == [3, 1, 5]
    assert metadata.block_tables.shape == (3, 0)
    rows = torch.randn(9, 1, 16)
    output = backend.packed_attention(rows, rows, rows, metadata, scale=1.0)
    assert torch.equal(output[3], rows[3])


def test_keys_and_values_of_different_strides_are_read(backend: AttentionBackend) -> None:
    texts = PackedTexts([20, 33], 2, 2, 32, torch.float32)
    query, key, value = texts.rows([0, 1])
    metadata = AttentionMetadata.of_texts([20, 33], torch.device("cpu"))

    def attend(*rows: Tensor) -> Tensor:
        return backend.packed_attention(*rows, metadata, scale=0.2)

    assert torch.equal(attend(query, key.contiguous(), value), attend(query, key, value))
