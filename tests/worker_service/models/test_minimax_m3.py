"""MiniMax-M3: settings that are refused, defaults, and the names of published checkpoints."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support.checkpoints import MAX_POSITIONS, VOCAB_SIZE, checkpoint
from tests.support.loading import edit_config, load
from tests.support.paged_driver import PagedDriver
from tests.support.transformers_oracle import Oracle
from worker_service.errors import UnsupportedModel
from worker_service.models.decoder_families.minimax_m3 import minimax_m3_settings

pytestmark = pytest.mark.usefixtures("one_thread")


def _config() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((checkpoint("minimax_m3") / "config.json").read_text())
    return found


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rotary_dim": 24}, "rotary_dim: expected 12, the part of head_dim that partial_.*got 24"),
        (
            {"layer_types": ["sliding_attention"] * 3},
            "layer_types: expected minimax_m3_sparse or full_attention for each of 3 layers",
        ),
        ({"mlp_layer_types": ["sparse"]}, "mlp_layer_types: expected dense or sparse"),
        ({"num_experts_per_tok": 5}, "experts: num_chosen: expected 1 to 4, got 5"),
    ],
)
def test_a_faulty_field_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=rf"config\.json: {message}"):
        minimax_m3_settings(_config() | changes)


def test_defaults_are_those_of_transformers() -> None:
    from transformers import MiniMaxM3VLTextConfig

    rope = {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5}
    named = {"architectures": ["MiniMaxM3VLForCausalLM"], "rope_parameters": rope}
    sizes = {"hidden_size": 6144, "intermediate_size": 3072, "vocab_size": 200064}
    written = MiniMaxM3VLTextConfig(num_hidden_layers=4).to_dict() | named
    brief = named | sizes | {"num_hidden_layers": 4}
    assert minimax_m3_settings(brief) == minimax_m3_settings(written)


def test_sequences_are_as_long_as_indexers_choose_all_blocks_of_them() -> None:
    assert minimax_m3_settings(_config()).max_model_len == MAX_POSITIONS
    fewer = _config() | {"index_topk_blocks": 3}
    assert minimax_m3_settings(fewer).max_model_len == 3 * 16
    full = fewer | {"layer_types": ["full_attention"] * 3}
    assert minimax_m3_settings(full).max_model_len == MAX_POSITIONS
    path = checkpoint("minimax_m3")
    tokens = torch.randint(VOCAB_SIZE, (200,), generator=torch.Generator().manual_seed(1)).tolist()
    driver = PagedDriver(load(path).model, max_tokens=MAX_POSITIONS)
    found = driver.run([(0, 0, tokens)])[0]
    torch.testing.assert_close(found, Oracle(path).logits(tokens), atol=2e-4, rtol=0)


def test_the_text_model_of_a_published_checkpoint_is_served(tmp_path: Path) -> None:
    """Under names that differ from those that `transformers` writes for a text model alone."""
    import transformers

    text = {key: value for key, value in _config().items() if key != "architectures"}
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    config = transformers.MiniMaxM3VLConfig(
        text_config=text | {"initializer_range": 0.2},
        vision_config=vision | {"num_attention_heads": 2, "patch_size": 4, "image_size": 8},
        projector_hidden_size=64,
    )
    torch.manual_seed(0)
    model = transformers.MiniMaxM3SparseForConditionalGeneration(config).float().eval()
    model.save_pretrained(tmp_path)
    names = load_file(tmp_path / "model.safetensors").keys()
    prefix = "language_model.model.layers.1"
    assert f"{prefix}.block_sparse_moe.experts.0.w1.weight" in names
    assert f"{prefix}.self_attn.index_q_proj.weight" in names
    text = json.loads((tmp_path / "config.json").read_text())["text_config"]
    sparse = {"sparse_topk_blocks": 8, "sparse_block_size": 16, "sparse_num_index_heads": 2}
    sparse |= {"sparse_index_dim": 16, "sparse_attention_freq": [0, 1, 1], "sparse_local_block": 1}
    older = {key: value for key, value in text.items() if key not in ("layer_types",)}
    older |= {"hidden_act": "swigluoai", "sparse_attention_config": sparse}
    tokens = torch.randint(VOCAB_SIZE, (90,), generator=torch.Generator().manual_seed(1)).tolist()
    with torch.inference_mode():
        expected = model(input_ids=torch.tensor([tokens])).logits[0]
    for written, length in ((text, MAX_POSITIONS), (older, 8 * 16)):
        edit_config(tmp_path, text_config=written)
        served = load(tmp_path).model
        assert served.max_model_len == length
        found = PagedDriver(served).run([(0, 0, tokens)])[0]
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
