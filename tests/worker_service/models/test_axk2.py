"""A.X-K2: settings that are refused, defaults, lengths, and the weights of its gates."""

import json
from typing import Any

import pytest
import torch

from tests.support.checkpoints import MAX_POSITIONS, VOCAB_SIZE, checkpoint
from tests.support.loading import load
from tests.support.paged_driver import PagedDriver
from tests.support.transformers_oracle import oracle
from worker_service.errors import UnsupportedModel
from worker_service.models.decoder_families.axk2 import axk2_settings

pytestmark = pytest.mark.usefixtures("one_thread")


def _config(family: str = "axk2") -> dict[str, Any]:
    found: dict[str, Any] = json.loads((checkpoint(family) / "config.json").read_text())
    return found


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"layer_types": ["full_attention"] * 3},
            r"layer_types: expected \['indexed_attention', .*, got \['full_attention',",
        ),
        ({"moe_layer_freq": 2}, "moe_layer_freq: expected 1, got 2"),
        ({"head_dim": 9}, "head_dim: expected 8, got 9"),
        ({"n_group": 3, "topk_group": 1}, "experts: num_groups: "),
        ({"mlp_layer_types": ["sparse"]}, "mlp_layer_types: expected dense or sparse"),
    ],
)
def test_a_faulty_field_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=rf"config\.json: {message}"):
        axk2_settings(_config() | changes)


def test_defaults_are_those_of_transformers() -> None:
    from transformers import AXK2Config

    named = {"architectures": ["AXK2ForCausalLM"], "num_hidden_layers": 4}
    sizes = {"hidden_size": 2048, "intermediate_size": 5120, "vocab_size": 163840}
    written = AXK2Config(num_hidden_layers=4).to_dict() | named
    brief = named | sizes | {"rope_parameters": written["rope_parameters"]}
    assert axk2_settings(brief) == axk2_settings(written)


@pytest.mark.parametrize("family", ["axk2", "axk2_groups"])
def test_sequences_are_as_long_as_indexers_choose_all_of_them(family: str) -> None:
    assert axk2_settings(_config(family)).max_model_len == MAX_POSITIONS
    assert axk2_settings(_config(family) | {"index_topk": 96}).max_model_len == 96
    path, draw = checkpoint(family), torch.Generator().manual_seed(1)
    model = load(path).model
    for length in (1, 17, 90, 200):
        tokens = torch.randint(VOCAB_SIZE, (length,), generator=draw).tolist()
        found = PagedDriver(model, max_tokens=MAX_POSITIONS).run([(0, 0, tokens)])[0]
        expected = oracle(path).logits(tokens)
        torch.testing.assert_close(found, expected, atol=4e-5, rtol=0)
