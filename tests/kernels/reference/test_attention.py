"""The oracle itself, against torch's own attention and against index arithmetic by hand."""

import pytest
import torch

from pagewire_kernels import reference
from pagewire_kernels.reference.kv_cache import dequantize_heads, quantize_heads
from tests.support.paged_batch import PagedSequences, Shape


def test_a_whole_prefill_equals_torchs_causal_attention() -> None:
    sequences = PagedSequences(Shape(), [19, 1, 8])
    sequences.write()
    output = sequences.attend(sequences.everything, scale=0.2)
    expected = [
        torch.nn.functional.scaled_dot_product_attention(
            q.transpose(0, 1),
            k.transpose(0, 1),
            v.transpose(0, 1),
            is_causal=True,
            scale=0.2,
            enable_gqa=True,
        ).transpose(0, 1)
        for q, k, v in zip(sequences.queries, sequences.keys, sequences.values, strict=True)
    ]
    torch.testing.assert_close(output, torch.cat(expected), atol=1e-5, rtol=1e-5)


def test_a_window_hides_all_but_the_last_positions() -> None:
    sequences = PagedSequences(Shape(), [20])
    sequences.write()
    last = [(0, 19, 20)]
    query = sequences.rows(sequences.queries, last)
    window = sequences.attend(last, scale=0.2, sliding_window=3)
    keys = sequences.keys[0][17:].repeat_interleave(2, dim=1)
    values = sequences.values[0][17:].repeat_interleave(2, dim=1)
    weights = torch.softmax((query * keys).sum(-1) * 0.2, dim=0)
    expected = (weights[..., None] * values).sum(0, keepdim=True)
    torch.testing.assert_close(window, expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("cache_dtype", [None, torch.int8])
def test_released_blocks_are_not_read(cache_dtype: torch.dtype | None) -> None:
    sequences = PagedSequences(Shape(cache_dtype=cache_dtype), [33, 400, 390, 17])
    sequences.write()
    parts = [(0, 32, 33), (1, 399, 400), (2, 203, 390), (3, 0, 17)]
    before = sequences.attend(parts, scale=0.2, sliding_window=20)
    sequences.release(parts, 20)
    assert torch.equal(sequences.attend(parts, scale=0.2, sliding_window=20), before)


def test_a_sink_takes_its_share_of_the_weight_and_gives_nothing() -> None:
    sequences = PagedSequences(Shape(), [1])
    sequences.write()
    keys = sequences.keys[0].repeat_interleave(2, dim=1)
    score = (sequences.queries[0] * keys).sum(-1) * 0.2
    # The sink is as heavy as the only key.
    output = sequences.attend([(0, 0, 1)], scale=0.2, sinks=score[0])
    half = sequences.values[0].repeat_interleave(2, dim=1) / 2
    torch.testing.assert_close(output, half, atol=1e-6, rtol=1e-5)


def test_a_cap_bounds_the_scores() -> None:
    sequences = PagedSequences(Shape(), [12])
    sequences.write()
    # All scores become next to equal.
    output = sequences.attend([(0, 11, 12)], scale=1e4, soft_cap=1e-4)
    mean = sequences.values[0].mean(0, keepdim=True).repeat_interleave(2, dim=1)
    torch.testing.assert_close(output, mean, atol=1e-3, rtol=1e-3)


def test_rows_with_a_negative_slot_are_not_written() -> None:
    cache = torch.zeros(2, 4, 1, 8)
    other = torch.zeros_like(cache)
    rows = torch.ones(3, 1, 8)
    reference.write_kv(rows, rows * 2, cache, other, torch.tensor([5, -1, 0]))
    assert cache.sum() == 2 * 8
    assert other.sum() == 4 * 8
    assert bool((cache[1, 1] == 1).all())
    assert bool((cache[0, 0] == 1).all())


def test_copied_blocks_take_all_layers_with_them() -> None:
    cache = torch.randn(5, 3, 2, 4, 2, 8)
    before = cache.clone()
    reference.swap_blocks(cache, cache, torch.tensor([[0, 3], [1, 4]]))
    assert torch.equal(cache[[3, 4]], before[[0, 1]])
    assert torch.equal(cache[:3], before[:3])


def test_a_copy_reads_all_sources_before_it_writes() -> None:
    cache = torch.arange(3.0).view(3, 1)
    reference.swap_blocks(cache, cache, torch.tensor([[0, 1], [1, 0]]))
    assert cache.flatten().tolist() == [1.0, 0.0, 2.0]


def test_swapped_blocks_come_back_unchanged() -> None:
    device, host = torch.randn(4, 2, 3), torch.zeros(6, 2, 3)
    before = device.clone()
    reference.swap_blocks(device, host, torch.tensor([[1, 5], [2, 0]]))
    device.zero_()
    reference.swap_blocks(host, device, torch.tensor([[5, 3], [0, 1]]))
    assert torch.equal(device[3], before[1])
    assert torch.equal(device[1], before[2])


def test_a_code_of_an_int8_cache_is_within_half_a_step() -> None:
    heads = torch.randn(200, 3, 64) * 10.0 ** torch.randint(-30, 30, (200, 3, 1))
    stored = quantize_heads(heads)
    step = heads.abs().amax(-1, keepdim=True) / 127
    assert ((dequantize_heads(stored) - heads).abs() <= 0.5001 * step).all()
    assert stored[..., :64].abs().amax(-1).eq(127).all()
    assert torch.equal(quantize_heads(heads[7:8]), stored[7:8])


@pytest.mark.parametrize("head_dim", [64, 128])
def test_an_int8_cache_moves_an_output_by_less_than_a_hundredth(head_dim: int) -> None:
    """Of normally distributed keys and values, against a cache of float32."""
    outputs = []
    for cache_dtype in (torch.float32, torch.int8):
        sequences = PagedSequences(Shape(head_dim=head_dim, cache_dtype=cache_dtype), [300])
        sequences.write()
        outputs.append(sequences.attend(sequences.everything, scale=head_dim**-0.5))
    error = (outputs[1] - outputs[0]).norm() / outputs[0].norm()
    assert 0.002 < error < 0.01
