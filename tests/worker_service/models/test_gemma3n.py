"""Gemma 3n: settings that are refused, tokens beyond the table of layers, and whole checkpoints."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.checkpoints import VOCAB_SIZE, checkpoint
from tests.support.loading import load, logits
from tests.support.paged_driver import PagedDriver
from tests.support.transformers_oracle import oracle
from worker_service.errors import InvalidOption, UnsupportedModel
from worker_service.models.decoder_families.gemma3n import gemma3n_settings


def _config() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((checkpoint("gemma3n") / "config.json").read_text())
    return found


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"altup_active_idx": 3}, "altup_active_idx: expected one of 3 streams, got 3"),
        (
            {"activation_sparsity_pattern": [0.5]},
            r"activation_sparsity_pattern: expected a number for each of 6 layers, got \[0\.5\]",
        ),
        ({"intermediate_size": [8, 8]}, "intermediate_size: expected a number for each of 6"),
        ({"vocab_size_per_layer_input": 301}, "vocab_size_per_layer_input: expected at most 300"),
        ({"num_kv_shared_layers": 6}, "num_kv_shared_layers: expected a layer of every type"),
    ],
)
def test_a_faulty_field_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=rf"config\.json: {message}"):
        gemma3n_settings(_config() | changes)


def test_defaults_are_those_of_transformers() -> None:
    from transformers import Gemma3nTextConfig

    base = {"architectures": ["Gemma3nForCausalLM"], "num_hidden_layers": 35, "vocab_size": 262400}
    sizes = {"hidden_size": 2048, "num_attention_heads": 8, "num_key_value_heads": 2}
    brief = base | sizes | {"max_position_embeddings": 32768, "vocab_size_per_layer_input": 262144}
    written = Gemma3nTextConfig(num_hidden_layers=35).to_dict() | base
    brief["rope_parameters"] = written["rope_parameters"]
    assert gemma3n_settings(brief) == gemma3n_settings(written)


def test_tokens_that_the_table_lacks_have_the_embedding_of_the_first() -> None:
    path = checkpoint("gemma3n")
    assert _config()["vocab_size_per_layer_input"] == VOCAB_SIZE - 7
    tokens = [5, VOCAB_SIZE - 8, VOCAB_SIZE - 7, 0, VOCAB_SIZE - 1]
    found = PagedDriver(load(path).model).run([(0, 0, tokens)])[0]
    torch.testing.assert_close(found, oracle(path).logits(tokens), atol=1e-4, rtol=0)


def test_draft_heads_are_refused() -> None:
    model: Any = load(checkpoint("gemma3n")).model
    with pytest.raises(InvalidOption, match="speculative: expected no head for Gemma3nForCausalLM"):
        model.capture([1])


def test_the_text_model_of_a_multimodal_checkpoint_is_served(tmp_path: Path) -> None:
    text = _config()
    del text["architectures"]
    whole = {"architectures": ["Gemma3nForConditionalGeneration"], "model_type": "gemma3n"}
    (tmp_path / "config.json").write_text(json.dumps(whole | {"text_config": text}))
    tensors = load_file(checkpoint("gemma3n") / "model.safetensors")
    renamed = {n.replace("model.", "model.language_model.", 1): t for n, t in tensors.items()}
    renamed["model.vision_tower.timm_model.conv_stem.conv.weight"] = torch.zeros(2)
    save_file(renamed, tmp_path / "model.safetensors", {"format": "pt"})
    text_alone = load(checkpoint("gemma3n"))
    config = text_alone.hf_config
    assert config["tie_word_embeddings"] is False
    torch.testing.assert_close(logits(load(tmp_path)), logits(text_alone), atol=0, rtol=0)
