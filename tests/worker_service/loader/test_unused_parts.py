"""What a checkpoint holds and a model does not use is named; what it can use, it uses."""

import copy
import json
import logging
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.checkpoints import VOCAB_SIZE, checkpoint, make_checkpoint
from tests.support.loading import (
    TOKENS,
    assert_same,
    copy_checkpoint,
    edit_config,
    edit_tensors,
    load,
    logits,
)
from tests.support.paged_driver import PagedDriver
from tests.support.quantized_checkpoints import FORMATS
from tests.support.quantized_files import make_quantized
from tests.support.transformers_oracle import Oracle
from worker_service.errors import BadCheckpoint, UnsupportedModel

EMBEDDINGS = {
    "opt": "model.decoder.embed_tokens.weight",
    "gpt2": "transformer.wte.weight",
}


def _warnings(caplog: pytest.LogCaptureFixture) -> str:
    return "\n".join(
        record.getMessage()
        for record in caplog.records
        if record.levelno >= logging.WARNING and record.name.startswith("worker_service")
    )


@pytest.mark.parametrize("family", ["llama", "opt", "gpt2", "gemma2"])
def test_a_head_that_differs_from_the_embedding_it_is_tied_to_is_used_with_a_warning(
    family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = make_checkpoint(family, tmp_path, tie_word_embeddings=True)
    embedding = EMBEDDINGS.get(family, "model.embed_tokens.weight")

    def add_head(tensors: dict[str, Tensor]) -> None:
        generator = torch.Generator().manual_seed(1)
        table = tensors[embedding]
        tensors["lm_head.weight"] = table[torch.randperm(len(table), generator=generator)]

    edit_tensors(path, add_head)
    assert_same(path, path)
    assert "lm_head.weight" in _warnings(caplog)
    assert "both are used" in _warnings(caplog)


@pytest.mark.parametrize("family", ["llama_tied", "gpt2", "gemma2"])
def test_a_copy_of_the_embedding_is_a_tied_head_without_a_warning(
    family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = make_checkpoint(family, tmp_path, tie_word_embeddings=True)
    embedding = EMBEDDINGS.get(family, "model.embed_tokens.weight")
    edit_tensors(path, lambda t: t.update({"lm_head.weight": t[embedding].clone()}))
    parameters = load(path).model.num_parameters
    assert (
        parameters
        == load(
            make_checkpoint(family, tmp_path / "plain", tie_word_embeddings=True)
        ).model.num_parameters
    )
    assert _warnings(caplog) == ""


def test_a_quantized_head_is_not_the_dense_embedding_it_is_tied_to(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings, quantize = FORMATS["float-quantized of outputs"]
    path, reference = make_quantized(tmp_path, settings, quantize, tie_word_embeddings=True)
    head = load_file(reference / "model.safetensors")["model.embed_tokens.weight"].flip(0)
    stored, dense = quantize("lm_head", head)
    named = {f"lm_head.{suffix}": part.contiguous() for suffix, part in stored.items()}
    edit_tensors(path, lambda tensors: tensors.update(named))
    edit_tensors(reference, lambda tensors: tensors.update({"lm_head.weight": dense.contiguous()}))
    assert_same(path, reference)
    assert "both are used" in _warnings(caplog)


PREFIXES = {
    "without model.": lambda name: name.removeprefix("model."),
    "language_model.": lambda name: f"language_model.{name}",
    "model.language_model.": lambda name: name.replace("model.", "model.language_model.", 1),
    "language_model. without model.": lambda name: "language_model." + name.removeprefix("model."),
}


@pytest.mark.parametrize("family", ["llama_tied", "gemma3", "gemma4_shared"])
@pytest.mark.parametrize("prefix", PREFIXES)
def test_names_of_a_text_model_inside_another_are_recognised(
    prefix: str, family: str, tmp_path: Path
) -> None:
    path = copy_checkpoint(family, tmp_path)

    def rename(tensors: dict[str, Tensor]) -> None:
        for name in list(tensors):
            tensors[PREFIXES[prefix](name)] = tensors.pop(name)

    edit_tensors(path, rename)
    assert_same(path, checkpoint(family))


@pytest.mark.parametrize("family", ["nemotron_h_latent", "llama", "phi"])
def test_layers_that_predict_further_tokens_are_named_in_a_warning(
    family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = copy_checkpoint(family, tmp_path)
    edit_tensors(path, lambda t: t.update({"mtp.layers.0.eh_proj.weight": torch.ones(2, 2)}))
    assert_same(path, path)
    assert "mtp.layers.0.eh_proj.weight" in _warnings(caplog)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_other_parts_of_a_multimodal_model_are_named_in_a_warning(
    family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = copy_checkpoint(family, tmp_path)

    def embed(tensors: dict[str, Tensor]) -> None:
        for name in list(tensors):
            tensors[f"language_model.{name}"] = tensors.pop(name)
        tensors["vision_tower.patch.weight"] = torch.ones(2, 2)
        tensors["mm_projector.bias"] = torch.ones(2)

    edit_tensors(path, embed)
    assert_same(path, checkpoint(family))
    assert "tensors not used num=2 names=mm_projector.bias, vision_tower.patch.weight" in _warnings(
        caplog
    )


def test_two_tensors_of_one_name_are_refused(tmp_path: Path) -> None:
    path = copy_checkpoint("llama", tmp_path)
    edit_tensors(path, lambda t: t.update({"norm.weight": t["model.norm.weight"].clone()}))
    with pytest.raises(BadCheckpoint, match=r"model\.norm\.weight and norm\.weight"):
        load(path)
    edit_tensors(path, lambda t: t.update({"language_model.norm.weight": t.pop("norm.weight")}))
    with pytest.raises(BadCheckpoint, match=r"two tensors are .* of the text model"):
        load(path)


def test_tensors_that_a_class_of_transformers_ignores_are_named_in_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Such as a second layer of GLM 4.5 that drafts tokens."""
    from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

    config = Glm4MoeConfig(
        vocab_size=300,
        hidden_size=64,
        intermediate_size=88,
        head_dim=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        moe_intermediate_size=32,
        n_routed_experts=4,
        num_experts_per_tok=2,
        first_k_dense_replace=1,
        max_position_embeddings=64,
        initializer_range=0.2,
    )
    torch.manual_seed(0)
    Glm4MoeForCausalLM(config).save_pretrained(tmp_path)
    name = "model.layers.46.eh_proj.weight"
    edit_tensors(tmp_path, lambda tensors: tensors.update({name: torch.ones(2, 2)}))
    load(tmp_path)
    assert _warnings(caplog) == f"tensors not used num=1 names={name}"


def test_scales_of_activations_that_are_not_quantized_are_named_in_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings, quantize = FORMATS["fp8 of tensors"]
    path, reference = make_quantized(tmp_path, settings, quantize)
    scale = {"model.layers.0.mlp.down_proj.input_scale": torch.tensor(0.5)}
    edit_tensors(path, lambda tensors: tensors.update(scale))
    assert_same(path, reference)
    message = "tensors not used num=1 names=model.layers.0.mlp.down_proj.input_scale"
    assert message in _warnings(caplog)


def test_weight_files_that_are_not_read_are_named_in_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = copy_checkpoint("llama", tmp_path)
    for name in ("adapter_model", "consolidated", "model-00001-of-00002"):
        shutil.copy(path / "model.safetensors", path / f"{name}.safetensors")
    load(path)
    files = "adapter_model.safetensors, model-00001-of-00002.safetensors"
    assert _warnings(caplog) == f"weight files not read num=2 names={files}"


def test_frequencies_and_masks_of_old_checkpoints_are_ignored_silently(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for family, name in (
        ("llama", "model.layers.0.self_attn.rotary_emb.inv_freq"),
        ("gpt2", "transformer.h.0.attn.masked_bias"),
        ("gpt_neox", "gpt_neox.layers.0.attention.masked_bias"),
        ("phi3", "model.layers.0.self_attn.rotary_emb.inv_freq"),
    ):
        path = copy_checkpoint(family, tmp_path)
        edit_tensors(path, lambda t, name=name: t.update({name: torch.ones(1)}))  # type: ignore[misc]
        load(path)
    assert _warnings(caplog) == ""


@pytest.mark.parametrize(
    ("family", "key", "value"),
    [
        ("llama", "final_logit_softcapping", 30.0),
        ("llama", "sliding_window", 8),
        ("llama", "layer_types", ["sliding_attention", "full_attention"]),
        ("qwen3", "residual_multiplier", 0.5),
        ("mistral", "auto_map", {"AutoModelForCausalLM": "modeling_x.X"}),
    ],
)
def test_a_setting_that_the_model_does_not_have_is_named_in_a_warning(
    family: str, key: str, value: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = copy_checkpoint(family, tmp_path)
    edit_config(path, **{key: value})
    load(path)
    assert f"config.json: {key} is not used by" in _warnings(caplog)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2_sliding", "qwen3", "gpt2", "opt"])
def test_settings_as_transformers_writes_them_cause_no_warning(
    family: str, caplog: pytest.LogCaptureFixture
) -> None:
    load(checkpoint(family))
    assert _warnings(caplog) == ""


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_attention_that_is_not_causal_is_refused(family: str, tmp_path: Path) -> None:
    path = copy_checkpoint(family, tmp_path)
    edit_config(path, is_causal=False)
    with pytest.raises(UnsupportedModel, match="is_causal"):
        load(path)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"partial_rotary_factor": 0.5}),
        ("qwen2", {"head_dim": 16}),
    ],
)
def test_settings_beside_the_usual_ones_are_honoured(
    family: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    path = make_checkpoint(family, tmp_path, **changes)
    edit_config(path, **changes)
    assert_same(path, path)


TRAINED = {"original_max_position_embeddings": 32}
LLAMA_3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize(
    ("family", "scaling", "length", "spelling"),
    [
        ("qwen3_moe", {"rope_type": "yarn", "factor": 4.0}, 256, "rope_scaling"),
        ("qwen3_moe", {"rope_type": "yarn", "factor": 4.0}, 256, "rope_parameters"),
        ("qwen3_moe", {"rope_type": "linear", "factor": 2.0}, 128, "rope_scaling"),
        ("olmo2", {"rope_type": "yarn", "factor": 4.0, **TRAINED}, 128, "rope_parameters"),
        ("qwen3_moe", {**LLAMA_3, **TRAINED}, 64, "rope_scaling"),
        ("qwen3_moe", {"rope_type": "default"}, 64, "rope_parameters"),
        ("qwen3", {"rope_type": "yarn", "factor": 4.0}, 256, "rope_scaling"),
    ],
)
def test_scaled_rotary_embeddings_lengthen_models(
    family: str, scaling: dict[str, Any], length: int, spelling: str, tmp_path: Path
) -> None:
    path = make_checkpoint(family, tmp_path, max_position_embeddings=64)
    edit_config(path, rope_parameters=None)
    edit_config(path, **{spelling: {**scaling, "rope_theta": 10000.0}})
    assert load(path, max_model_len=length).model.max_model_len == length
    assert load(path).model.max_model_len == length
    assert_same(path, path)


def test_a_model_of_transformers_computes_beyond_its_trained_length(tmp_path: Path) -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    path = make_checkpoint(
        "qwen3_moe", tmp_path, max_position_embeddings=32, rope_parameters=scaling
    )
    tokens = (TOKENS * 5)[:120]
    found = PagedDriver(load(path).model).run([(0, 0, tokens)])[0]
    torch.testing.assert_close(found, Oracle(path).logits(tokens), rtol=1e-3, atol=1e-3)


TEXT = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 88,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
}
VISION_OF: dict[str, dict[str, Any]] = {
    "Lfm3Vl": {"num_key_value_heads": 2},
    "GraniteDocling": {
        "out_hidden_size": 64,
        "scale_factor": 2,
        "use_fine_route": False,
        "deepstack_visual_indexes": [0],
    },
}


@pytest.mark.parametrize(
    ("whole", "text", "vision"),
    [
        ("Llava", "LlamaConfig", "CLIPVisionConfig"),
        ("Llava", "Qwen2Config", "SiglipVisionConfig"),
        ("Mistral3", "MistralConfig", "PixtralVisionConfig"),
        ("Mistral3", "Ministral3Config", "PixtralVisionConfig"),
        ("Gemma3", "Gemma3TextConfig", "SiglipVisionConfig"),
        ("Gemma4", "Gemma4TextConfig", "Gemma4VisionConfig"),
        ("InternVL", "Qwen3Config", "InternVLVisionConfig"),
        ("Llama4", "Llama4TextConfig", "Llama4VisionConfig"),
        ("Qwen3_5", "Qwen3_5TextConfig", "Qwen3_5VisionConfig"),
        ("Qwen3_5Moe", "Qwen3_5MoeTextConfig", "Qwen3_5MoeVisionConfig"),
        ("Qwen2_5_VL", "Qwen2_5_VLTextConfig", "Qwen2_5_VLVisionConfig"),
        ("Qwen3VL", "Qwen3VLTextConfig", "Qwen3VLVisionConfig"),
        ("Glm4v", "Glm4vTextConfig", "Glm4vVisionConfig"),
        ("Glm4vMoe", "Glm4vMoeTextConfig", "Glm4vMoeVisionConfig"),
        ("SmolVLM", "LlamaConfig", "SmolVLMVisionConfig"),
        ("Qwen3VLMoe", "Qwen3VLMoeTextConfig", "Qwen3VLMoeVisionConfig"),
        ("HyperCLOVAXVisionV2", "HyperCLOVAXConfig", "Qwen2_5_VLVisionConfig"),
        ("GlmOcr", "GlmOcrTextConfig", "GlmOcrVisionConfig"),
        ("PaddleOCRVL", "PaddleOCRTextConfig", "PaddleOCRVisionConfig"),
        ("Gemma4Unified", "Gemma4UnifiedTextConfig", "Gemma4UnifiedVisionConfig"),
        ("Lfm2Vl", "Lfm2Config", "Siglip2VisionConfig"),
        ("Lfm3Vl", "Lfm3Config", "Lfm3VlVisionConfig"),
        ("Cohere2Vision", "Cohere2Config", "SiglipVisionConfig"),
        ("GraniteDocling", "GraniteDoclingTextConfig", "GraniteDoclingVisionConfig"),
        ("HunYuanVL", "HunYuanVLTextConfig", "HunYuanVLVisionConfig"),
    ],
)
def test_the_text_model_of_a_multimodal_checkpoint_is_served_with_a_warning(
    whole: str, text: str, vision: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    import transformers

    more = {"mm_tokens_per_image": 4} if whole == "Gemma3" else {}
    kinds = {"layer_types": ["linear_attention", "full_attention"]}
    of_text = TEXT | kinds if whole.startswith("Qwen3_5") else TEXT
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
    if whole.startswith(("Glm4v", "GlmOcr")):
        rope |= {"partial_rotary_factor": 0.5, "mrope_section": [1, 1, 2]}
    if whole.startswith(("Qwen2_5_VL", "Qwen3VL", "Glm4v", "GlmOcr", "PaddleOCRVL")):
        of_text = TEXT | {"rope_parameters": rope}
    if whole == "Glm4vMoe":
        experts = {"n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2}
        of_text |= {**experts, "moe_intermediate_size": 40, "first_k_dense_replace": 1}
    if whole == "Qwen3VLMoe":
        of_text |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
    if whole.startswith("Glm4v"):
        of_text = {key: value for key, value in of_text.items() if key != "head_dim"}
    if whole == "Lfm3Vl":
        of_text = TEXT | {"layer_types": ["conv", "full_attention"]}
    if whole == "HunYuanVL":
        of_text = TEXT | {
            "rope_parameters": rope | {"rope_type": "dynamic", "factor": 1.0, "alpha": 50.0}
        }
    if whole == "Cohere2Vision":
        of_text = TEXT | {"logit_scale": 1.0}  # which transformers 5.24 does not apply here
    if whole == "Gemma4":
        of_text = TEXT | {"vocab_size_per_layer_input": TEXT["vocab_size"]}
    config = getattr(transformers, f"{whole}Config")(
        text_config=getattr(transformers, text)(**of_text),
        vision_config=getattr(transformers, vision)(**VISION | VISION_OF.get(whole, {})),
        **more,
    )
    torch.manual_seed(0)
    model = getattr(transformers, f"{whole}ForConditionalGeneration")(config).float().eval()
    model.save_pretrained(tmp_path)
    loaded = load(tmp_path)
    found = logits(loaded)
    with torch.inference_mode():
        # Llama 4's whole model needs images in transformers 5.24.
        served = model.language_model if whole == "Llama4" else model
        expected = served(input_ids=torch.tensor([TOKENS])).logits[0]
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4 * float(expected.std()))
    assert found.argmax(1).equal(expected.argmax(1))
    assert loaded.eos_token_ids == (2,)
    assert f"only the text model of {whole}ForConditionalGeneration is served" in _warnings(caplog)
    assert "tensors not used num=" in _warnings(caplog)


def test_the_text_model_of_nemotron_omni_is_served(tmp_path: Path) -> None:
    """Under the names with which it was published."""
    path = copy_checkpoint("nemotron_h", tmp_path)
    expected = logits(load(path))
    edit_tensors(path, lambda t: t.update({"vision_model.norm.weight": torch.zeros(2)}))
    _rename(path, r"^(?:model|backbone)\.", "backbone.")
    _rename(path, r"^(?=backbone|lm_head)", "language_model.")
    whole = {"architectures": ["NemotronH_Omni_Reasoning_V3"], "model_type": "nemotron_h_omni"}
    text = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**whole, "llm_config": text}))
    assert logits(load(path)).equal(expected)


def _rename(path: Path, pattern: str, replacement: str) -> None:
    def rename(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            tensors[re.sub(pattern, replacement, name)] = tensors.pop(name)

    edit_tensors(path, rename)


def test_keys_of_another_part_do_not_matter(tmp_path: Path) -> None:
    """As Music Flamingo keeps the number of its audio's positions."""
    path = copy_checkpoint("qwen2", tmp_path)
    text = json.loads((path / "config.json").read_text())
    _rename(path, "^", "language_model.")
    whole = {
        "architectures": ["MusicFlamingoForConditionalGeneration"],
        "max_position_embeddings": 1200.0,
    }
    (path / "config.json").write_text(
        json.dumps({**whole, "model_type": "musicflamingo", "text_config": text})
    )
    assert load(path).model.max_model_len == text["max_position_embeddings"]


@pytest.mark.parametrize(
    "changes", [{"tie_word_embeddings": True}, {"output_vocab_size": VOCAB_SIZE + 21}]
)
def test_a_head_of_other_tokens_than_the_first_of_the_embedding_is_refused(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    path = copy_checkpoint("apertus1p5", tmp_path)
    edit_config(path, **changes)
    with pytest.raises(UnsupportedModel, match="output_vocab_size: expected 320, or fewer"):
        load(path)


def test_the_text_model_of_apertus_is_served(tmp_path: Path) -> None:
    """The last tokens of its embedding are those of images and sounds."""
    path = copy_checkpoint("apertus1p5", tmp_path)
    expected = logits(load(path))
    _rename(path, r"^model\.", "model.language_model.")
    text = json.loads((path / "config.json").read_text())
    ids = {"image_token_offset": VOCAB_SIZE, "audio_token_offset": VOCAB_SIZE + 10}
    parts: dict[str, Any] = {
        "vision_config": {"codebook_size": 10},
        "audio_config": {"codebook_size": 10},
    }
    parts["audio_config"]["model_type"] = "wavtokenizer_encoder"
    whole = {"architectures": ["Apertus1p5ForConditionalGeneration"], "model_type": "apertus1p5"}
    (path / "config.json").write_text(json.dumps({**whole, **ids, **parts, "text_config": text}))
    loaded = load(path)
    assert loaded.model.vocab_size == VOCAB_SIZE
    assert logits(loaded).equal(expected)


@pytest.mark.parametrize("revision", [None, "main"])
def test_a_revision_has_no_effect_on_a_local_model_which_is_told(
    revision: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    load(checkpoint("llama"), revision=revision)
    told = "revision is not used of a local model: main"
    assert (told in _warnings(caplog)) == (revision is not None)


def test_a_flat_configuration_and_names_without_a_text_part_are_read(tmp_path: Path) -> None:
    """As Qwen2-VL was published."""
    import transformers

    rope = {"type": "mrope", "mrope_section": [2, 3, 3]}
    vision = {"embed_dim": 16, "hidden_size": 64, "depth": 1, "num_heads": 2, "patch_size": 4}
    text = {key: value for key, value in TEXT.items() if key != "head_dim"}
    flat = {**text, "rope_scaling": rope, "rope_theta": 10000.0, "vision_config": vision}
    torch.manual_seed(0)
    config = transformers.Qwen2VLConfig(**copy.deepcopy(flat))
    model = transformers.Qwen2VLForConditionalGeneration(config).float().eval()
    tensors = {
        name.replace("model.language_model.", "model.").replace("model.visual.", "visual."): tensor
        for name, tensor in model.state_dict().items()
    }
    save_file(tensors, tmp_path / "model.safetensors")
    named = {"architectures": ["Qwen2VLForConditionalGeneration"], "model_type": "qwen2_vl"}
    (tmp_path / "config.json").write_text(json.dumps({**named, **flat}))
    with torch.inference_mode():
        expected = model(input_ids=torch.tensor([TOKENS])).logits[0]
    torch.testing.assert_close(logits(load(tmp_path)), expected, rtol=1e-3, atol=1e-4)


def test_tensors_of_all_experts_may_be_transposed(tmp_path: Path) -> None:
    """As Qwen3-VL with experts was published."""
    import transformers

    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
    config = transformers.Qwen3VLMoeConfig(
        text_config=transformers.Qwen3VLMoeTextConfig(**TEXT, **experts, rope_parameters=rope),
        vision_config=transformers.Qwen3VLMoeVisionConfig(**VISION),
    )
    torch.manual_seed(0)
    transformers.Qwen3VLMoeForConditionalGeneration(config).float().save_pretrained(tmp_path)
    expected = logits(load(tmp_path))

    def transpose(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if ".experts." in name]:
            tensors[name] = tensors[name].transpose(1, 2).contiguous()

    edit_tensors(tmp_path, transpose)
    assert logits(load(tmp_path)).equal(expected)


def test_the_thinker_of_an_omni_model_is_served(tmp_path: Path) -> None:
    import transformers

    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
    audio = {"d_model": 16, "encoder_layers": 1, "encoder_attention_heads": 2, "num_mel_bins": 8}
    vision = {"hidden_size": 16, "depth": 1, "num_heads": 2, "intermediate_size": 16}
    config = transformers.Qwen3OmniMoeThinkerConfig(
        text_config=TEXT | experts | {"rope_parameters": rope},
        audio_config={**audio, "encoder_ffn_dim": 16, "output_dim": 64},
        vision_config={**vision, "out_hidden_size": 64, "patch_size": 4},
    )
    torch.manual_seed(0)
    thinker = transformers.Qwen3OmniMoeThinkerForConditionalGeneration(config).float().eval()
    thinker.save_pretrained(tmp_path)
    with torch.inference_mode():
        expected = thinker(input_ids=torch.tensor([TOKENS])).logits[0]
    stored = load_file(tmp_path / "model.safetensors")
    tensors = {f"thinker.{name}": tensor for name, tensor in stored.items()}
    tensors["talker.model.layers.0.mlp.gate.weight"] = torch.zeros(2, 2)
    save_file(tensors, tmp_path / "model.safetensors")
    whole = {"architectures": ["Qwen3OmniMoeForConditionalGeneration"]}
    whole |= {"model_type": "qwen3_omni_moe", "thinker_config": config.to_dict()}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    torch.testing.assert_close(logits(load(tmp_path)), expected, rtol=1e-3, atol=1e-4)


def test_a_whole_model_may_keep_tied_embeddings_in_its_text_model(tmp_path: Path) -> None:
    import transformers

    audio = {"d_model": 16, "encoder_layers": 1, "encoder_attention_heads": 2, "num_mel_bins": 8}
    config = transformers.Qwen2AudioConfig(
        text_config=transformers.Qwen2Config(**TEXT, tie_word_embeddings=True),
        audio_config={**audio, "encoder_ffn_dim": 16, "model_type": "qwen2_audio_encoder"},
    )
    torch.manual_seed(0)
    model = transformers.Qwen2AudioForConditionalGeneration(config).float().eval()
    model.save_pretrained(tmp_path)
    with torch.inference_mode():
        expected = model(input_ids=torch.tensor([TOKENS])).logits[0]
    torch.testing.assert_close(logits(load(tmp_path)), expected, rtol=1e-3, atol=1e-4)
