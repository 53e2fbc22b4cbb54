"""RecurrentGemma: a long text against transformers, and what is refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.checkpoints import VOCAB_SIZE, checkpoint, make_checkpoint
from tests.support.loading import load
from tests.support.paged_driver import PagedDriver
from tests.support.transformers_oracle import Oracle
from worker_service.distributed.layout import Layout
from worker_service.errors import InvalidOption, UnsupportedModel
from worker_service.models.decoder_families.recurrent_gemma import recurrent_gemma_settings


@pytest.mark.usefixtures("one_thread")
def test_the_next_token_is_that_of_transformers_after_1_to_300_tokens(tmp_path: Path) -> None:
    path = make_checkpoint("recurrent_gemma", tmp_path, max_position_embeddings=400)
    model, oracle = load(path, dtype="float32").model, Oracle(path)
    tokens = torch.randint(VOCAB_SIZE, (300,), generator=torch.Generator().manual_seed(1)).tolist()
    (together,) = PagedDriver(model, max_tokens=300).run([(0, 0, tokens)])
    expected = oracle.logits(tokens)
    found, wanted = together.log_softmax(1), expected.log_softmax(1)
    torch.testing.assert_close(found, wanted, atol=2e-5, rtol=0)
    assert torch.equal(together.argmax(1), expected.argmax(1))
    assert len(together.argmax(1).unique()) > 30
    driver, start = PagedDriver(model, max_tokens=300, block_size=16, seed=3), 0
    for size in (1, 2, 40, 1, 127, 128, 1):
        (rows,) = driver.run([(0, start, tokens[start : start + size])])
        assert torch.equal(rows, together[start : start + size]), "the same bits in other chunks"
        start += size
    assert start == len(tokens)


def _config(**changes: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((checkpoint("recurrent_gemma") / "config.json").read_text())
    return found | changes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_types": ["recurrent", "mamba"]}, "block_types: expected recurrent or attention"),
        ({"lru_width": 66}, "lru_width: expected a multiple of 4 heads, got 66"),
        ({"logits_soft_cap": 0}, "logits_soft_cap: expected a number above 0, got 0"),
    ],
)
def test_a_faulty_field_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=rf"config\.json: {message}"):
        recurrent_gemma_settings(_config(**changes))


def test_ranks_that_cannot_share_blocks_are_refused() -> None:
    mixer = recurrent_gemma_settings(_config()).layers[0].attention
    assert mixer is not None
    mixer.require_shards(Layout(tensor_parallel_size=2))
    with pytest.raises(InvalidOption, match="blocks of the recurrence"):
        mixer.require_shards(Layout(tensor_parallel_size=3))


def test_a_configuration_that_states_no_length_has_that_of_its_training() -> None:
    config = _config()
    del config["max_position_embeddings"]
    assert recurrent_gemma_settings(config).max_model_len == 8192
