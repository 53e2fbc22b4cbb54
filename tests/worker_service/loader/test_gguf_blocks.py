"""Codes, scales and offsets of the block formats are what the library multiplies and adds."""

import gguf
import numpy as np
import pytest

from worker_service.loader.gguf.blocks import BLOCK_TYPES, quantized_weight

NUM_ROWS, BLOCKS_PER_ROW = 64, 3


@pytest.mark.parametrize("kind", BLOCK_TYPES)
def test_dequantized_blocks_are_bit_for_bit_those_of_the_library(kind: str) -> None:
    number = gguf.GGMLQuantizationType[kind]
    block, block_bytes = gguf.GGML_QUANT_SIZES[number]
    random = np.random.default_rng(0)
    data = random.integers(0, 256, (NUM_ROWS, BLOCKS_PER_ROW * block_bytes), dtype=np.uint8)
    with np.errstate(all="ignore"):  # random scales may be infinite
        expected = gguf.quants.dequantize(data, number)
        weight = quantized_weight(data.ravel(), kind, (NUM_ROWS, BLOCKS_PER_ROW * block))
    found = weight.dequantize().numpy()
    finite = np.isfinite(expected)
    assert finite.mean() > 0.8
    assert np.array_equal(found[finite], expected[finite])
    assert weight.bits == (4 if kind[1] in "234" or kind.startswith(("IQ", "MX")) else 8)
