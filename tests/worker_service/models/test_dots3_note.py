"""Dots 3 Note: published checkpoints, the multimodal model, lengths, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.checkpoints import MAX_POSITIONS, VOCAB_SIZE, checkpoint, make_checkpoint
from tests.support.loading import load
from tests.support.paged_driver import PagedDriver
from tests.support.transformers_oracle import oracle
from worker_service.errors import UnsupportedModel
from worker_service.loader.files.config import read_config
from worker_service.models.decoder_families.dots3_note import dots3_note_settings

pytestmark = pytest.mark.usefixtures("one_thread")

TOKENS = [5, 80, 299, 7, 160, 33, 4, 4, 90, 201, 17, 64, 250, 3, 122]


def _config() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((checkpoint("dots3_note") / "config.json").read_text())
    return found


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_bias": True}, "attention_bias: expected False, got True"),
        ({"mlp_bias": True}, "mlp_bias: expected False, got True"),
        ({"layer_types": ["full_attention"]}, "layer_types: expected indexed_attention, full_"),
        ({"num_key_value_heads": 2}, "num_key_value_heads: expected 4, got 2"),
        ({"n_group": 3, "topk_group": 1}, "experts: num_groups: "),
        ({"mlp_layer_types": ["sparse"]}, "mlp_layer_types: expected dense or sparse"),
    ],
)
def test_a_faulty_field_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=rf"config\.json: {message}"):
        dots3_note_settings(_config() | changes)


def test_defaults_are_those_of_transformers() -> None:
    from transformers import Dots3NoteTextConfig

    named = {"architectures": ["Dots3NoteForCausalLM"], "num_hidden_layers": 6}
    sizes = {"hidden_size": 5120, "intermediate_size": 13824, "vocab_size": 152064}
    written = Dots3NoteTextConfig(num_hidden_layers=6).to_dict() | named
    of_layers = {"per_layer_config": written["per_layer_config"]}
    assert dots3_note_settings(named | sizes | of_layers) == dots3_note_settings(written)


def test_sequences_are_as_long_as_indexers_choose_all_of_them() -> None:
    assert dots3_note_settings(_config()).max_model_len == MAX_POSITIONS
    assert dots3_note_settings(_config() | {"index_topk": 96}).max_model_len == 96
    kinds = ["full_attention", *["sliding_attention"] * 2, "full_attention"]
    no_indexers = {"layer_types": kinds, "index_topk": 96}
    assert dots3_note_settings(_config() | no_indexers).max_model_len == MAX_POSITIONS


@pytest.mark.parametrize("length", [1, 8, 9, 10, 90, 200])
def test_logits_of_short_and_long_prompts(length: int) -> None:
    path, draw = checkpoint("dots3_note"), torch.Generator().manual_seed(length)
    tokens = torch.randint(VOCAB_SIZE, (length,), generator=draw).tolist()
    found = PagedDriver(load(path).model, max_tokens=MAX_POSITIONS).run([(0, 0, tokens)])[0]
    expected = oracle(path).logits(tokens)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * float(expected.std()))


def test_a_model_without_indexers_is_served(tmp_path: Path) -> None:
    path = make_checkpoint("dots3_note", tmp_path, layer_types=None, use_dsa=False)
    assert "full_attention" in json.loads((path / "config.json").read_text())["layer_types"]
    (found,) = PagedDriver(load(path).model).run([(0, 0, TOKENS)])
    torch.testing.assert_close(found, oracle(path).logits(TOKENS), atol=4e-5, rtol=0)


PUBLISHED = {
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "use_dsa": True,
    "sliding_window_size": 9,
    "moe_shared_expert_intermediate_size": 56,
    "rope_theta": 500.0,
    "swa_rope_theta": 200.0,
    "swa_num_attention_heads": 2,
    "swa_num_key_value_heads": 2,
    "swa_q_lora_rank": 48,
    "swa_kv_lora_rank": 96,
    "swa_head_dim": 28,
    "swa_qk_nope_head_dim": 16,
    "swa_v_head_dim": 20,
    "swa_qk_rope_head_dim": 12,
}


def test_the_keys_of_published_checkpoints_are_read(tmp_path: Path) -> None:
    """They have the text model's keys beside those of the other parts, and call layers with
    indexers those of full attention."""
    ours = _config()
    written = (*("mlp_layer_types", "sliding_window", "shared_experts_intermediate_size"),)
    written += ("per_layer_config", "rope_parameters", "index_topk", "model_type")
    published = {key: value for key, value in ours.items() if key not in written} | PUBLISHED
    kinds = [kind.replace("indexed", "full") for kind in ours["layer_types"]]
    published |= {"model_type": "dots3_note", "layer_types": kinds, "index_topk": MAX_POSITIONS}
    published |= {"architectures": ["Dots3NoteForConditionalGeneration"]}
    published |= {f"{part}_config": {"adapter_out_dim": 64} for part in ("vision", "audio")}
    thetas = {"indexed_attention": 500.0, "sliding_attention": 200.0}
    ours["rope_parameters"] = {
        kind: values | {"rope_theta": thetas[kind]}
        for kind, values in ours["rope_parameters"].items()
    }
    (tmp_path / "config.json").write_text(json.dumps(published))
    found, expected = dots3_note_settings(read_config(tmp_path)), dots3_note_settings(ours)
    assert found.layers == expected.layers
    assert found == expected


def test_the_text_model_of_the_multimodal_one_is_served(tmp_path: Path) -> None:
    import transformers

    text = {k: v for k, v in _config().items() if k not in ("architectures", "model_type")}
    vision = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16}
    audio = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16}
    config = transformers.Dots3NoteConfig(
        text_config=text,
        vision_config=vision
        | {"num_hidden_layers": 1, "adapter_in_dim": 16, "adapter_out_dim": 64}
        | {"mlp_layer_types": ["dense"], "patch_size": 4},
        audio_config=audio
        | {"num_hidden_layers": 1, "adapter_input_size": 16, "adapter_out_dim": 64}
        | {"feature_size": 8, "downsample_hidden_size": 8},
    )
    torch.manual_seed(0)
    model = transformers.Dots3NoteForConditionalGeneration(config).float().eval()
    model.save_pretrained(tmp_path)
    with torch.inference_mode():
        expected = model(input_ids=torch.tensor([TOKENS])).logits[0]
    (found,) = PagedDriver(load(tmp_path).model).run([(0, 0, TOKENS)])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * float(expected.std()))
