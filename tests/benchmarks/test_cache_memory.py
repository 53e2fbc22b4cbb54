"""What the core allocates for sequences of a hybrid stays near the arithmetic's bytes."""

import pytest
import torch

from benchmarks.cache_memory import cache_spec, main, minimal_bytes


@pytest.mark.parametrize("shape", ["qwen3.5-0.8b", "lfm2-350m", "granite4-h-350m"])
def test_sequences_of_a_hybrid_take_little_more_than_their_states_and_tokens(
    shape: str, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["--shape", shape, "--num-seqs", "4", "--num-output", "32"])
    row = capsys.readouterr().out.splitlines()[-1].split("|")
    assert row[1].strip() == shape
    assert 1 <= float(row[6]) <= 1.05


def test_arithmetic_counts_every_value_once() -> None:
    spec = cache_spec("qwen3.5-0.8b", torch.bfloat16, 4097)
    of_tokens = 6 * 2 * 2 * 256 * 2  # layers, keys and values, heads, values, bytes
    of_states = 18 * (16 * 128 * 128 * 4 + 3 * 6144 * 2)
    assert minimal_bytes(spec, 4096) == 4096 * of_tokens + of_states
