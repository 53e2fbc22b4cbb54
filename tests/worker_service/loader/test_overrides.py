"""Options that replace parts of a model's files: what is computed, and what frontends get."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.checkpoints import MAX_POSITIONS, checkpoint
from tests.support.gguf_files import make_gguf
from tests.support.loading import copy_checkpoint, edit_config, load, logits
from worker_service.config import CacheConfig, ModelConfig
from worker_service.errors import InvalidOption, UnsupportedModel
from worker_service.loader.drafts.draft_model import load_draft_model
from worker_service.loader.load import check_model
from worker_service.models.native import NativeModel
from worker_service.models.transformers_backend.model import TransformersModel

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


def files(loaded: Any) -> dict[str, Any]:
    return {
        name: json.loads(content) if name.endswith(".json") else content.decode()
        for name, content in loaded.assets.items()
    }


@pytest.mark.parametrize("family", ["llama", "vaultgemma"])
def test_keys_of_the_configuration_count_as_if_they_were_in_its_file(
    family: str, tmp_path: Path
) -> None:
    changes = {"rms_norm_eps": 0.5, "max_position_embeddings": 96}
    edited = copy_checkpoint(family, tmp_path)
    edit_config(edited, **changes)
    expected = load(edited)
    found = load(checkpoint(family), hf_overrides=json.dumps(changes))
    assert isinstance(found.model, TransformersModel) == (family == "vaultgemma")
    assert torch.equal(logits(found), logits(expected))
    assert not torch.equal(logits(found), logits(load(checkpoint(family))))
    assert found.config.max_model_len == expected.config.max_model_len == 96
    given = files(found)["config.json"]
    assert {key: given[key] for key in changes} == changes
    assert found.fingerprint != load(checkpoint(family)).fingerprint


@pytest.mark.parametrize("stored", ["rope_scaling", "rope_parameters"])
def test_scaling_replaces_what_the_configuration_has_under_either_name(
    stored: str, tmp_path: Path
) -> None:
    path = copy_checkpoint("llama", tmp_path)
    own = {"rope_type": "linear", "factor": 2.0}
    if stored == "rope_parameters":
        own["rope_theta"] = 5000.0
    edit_config(path, rope_scaling=None, rope_parameters=None, rope_theta=None)
    edit_config(path, **{stored: own})
    found = load(path, hf_overrides=json.dumps({"rope_scaling": YARN}))
    edit_config(path, rope_scaling=YARN, rope_parameters=None)
    edit_config(path, rope_theta=own.get("rope_theta"))
    assert torch.equal(logits(found), logits(load(path)))
    assert found.config.max_model_len == 256
    theta = load(path, hf_overrides='{"rope_theta": 77.0}')
    assert not torch.equal(logits(theta), logits(found))


def test_theta_replaces_that_of_rope_parameters(tmp_path: Path) -> None:
    path = copy_checkpoint("llama", tmp_path)
    edit_config(path, rope_theta=None, rope_parameters=YARN | {"rope_theta": 5000.0})
    found = load(path, hf_overrides='{"rope_theta": 77.0}')
    edit_config(path, rope_parameters=YARN | {"rope_theta": 77.0})
    assert torch.equal(logits(found), logits(load(path)))


NESTED = {"full_attention": {"rope_theta": 5000.0}, "sliding_attention": {"rope_theta": 300.0}}
PARTIAL = {"rope_theta": 5000.0, "partial_rotary_factor": 0.25}


@pytest.mark.parametrize(
    ("family", "stored", "changes", "expected"),
    [
        (
            "gemma3",
            NESTED,
            {"rope_scaling": YARN},
            NESTED | {"full_attention": {"rope_theta": 5000.0} | YARN},
        ),
        (
            "gemma3",
            NESTED,
            {"rope_theta": 77.0},
            NESTED | {"full_attention": {"rope_theta": 77.0}},
        ),
        ("glm4", PARTIAL | {"rope_type": "default"}, {"rope_scaling": YARN}, PARTIAL | YARN),
        ("glm4", PARTIAL | YARN, {"rope_scaling": None}, PARTIAL),
        ("llama", None, {"rope_scaling": YARN}, YARN),
    ],
)
def test_what_rope_scaling_does_not_say_stays(
    family: str, stored: Any, changes: Any, expected: Any, tmp_path: Path
) -> None:
    """The part of a head that is rotated, and the rotation of layers with windows."""
    path = copy_checkpoint(family, tmp_path)
    edit_config(path, rope_parameters=expected)
    wanted = load(path)
    config = json.loads((path / "config.json").read_text()) | {"rope_parameters": stored}
    (path / "config.json").write_text(json.dumps(config))
    found = load(path, hf_overrides=json.dumps(changes))
    assert isinstance(found.model, NativeModel)
    assert torch.equal(logits(found), logits(wanted))


def test_keys_of_an_inner_configuration_are_replaced_one_by_one(tmp_path: Path) -> None:
    path = copy_checkpoint("qwen3", tmp_path)
    inner = json.loads((path / "config.json").read_text())
    whole = {"model_type": "qwen3_vl", "architectures": ["Qwen3VLForConditionalGeneration"]}
    text = inner | {"model_type": "qwen3_vl_text"}
    (path / "config.json").write_text(json.dumps(whole | {"text_config": text}))
    changes = {"text_config": {"rms_norm_eps": 0.5}}
    found = load(path, hf_overrides=json.dumps(changes))
    (path / "config.json").write_text(
        json.dumps(whole | {"text_config": text | {"rms_norm_eps": 0.5}})
    )
    assert torch.equal(logits(found), logits(load(path)))


def test_keys_of_a_gguf_files_configuration_are_replaced(tmp_path: Path) -> None:
    file, _ = make_gguf("llama", "F32", tmp_path)
    found = load(file, hf_overrides='{"max_position_embeddings": 40}')
    assert found.config.max_model_len == 40
    assert files(found)["config.json"]["max_position_embeddings"] == 40


def test_an_architecture_that_is_not_known_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedModel, match="NoSuchForCausalLM"):
        load(checkpoint("llama"), hf_overrides='{"architectures": ["NoSuchForCausalLM"]}')


def test_a_draft_model_keeps_its_own_configuration() -> None:
    target = load(checkpoint("llama"), hf_overrides='{"max_position_embeddings": 40}')
    draft = load_draft_model(str(checkpoint("llama")), target, CacheConfig())
    assert (target.model.max_model_len, draft.max_model_len) == (40, MAX_POSITIONS)


OWN = {"temperature": 0.2, "top_k": 7, "eos_token_id": [2, 5], "transformers_version": "5"}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, OWN),
        ({"generation_config": "none"}, {"eos_token_id": [2, 5]}),
        (
            {"override_generation_config": '{"top_k": 3, "max_new_tokens": 9}'},
            OWN | {"top_k": 3, "max_new_tokens": 9},
        ),
        (
            {"generation_config": "none", "override_generation_config": '{"top_p": 0.5}'},
            {"eos_token_id": [2, 5], "top_p": 0.5},
        ),
    ],
)
def test_defaults_of_generations(
    options: dict[str, str], expected: dict[str, Any], tmp_path: Path
) -> None:
    path = copy_checkpoint("llama", tmp_path)
    (path / "generation_config.json").write_text(json.dumps(OWN))
    loaded = load(path, **options)
    assert files(loaded)["generation_config.json"] == expected
    assert loaded.eos_token_ids == (2, 5)


def test_defaults_of_a_model_that_has_none(tmp_path: Path) -> None:
    path = copy_checkpoint("llama", tmp_path)
    (path / "generation_config.json").unlink(missing_ok=True)
    loaded = load(path, override_generation_config='{"temperature": 0}')
    assert files(loaded)["generation_config.json"] == {"temperature": 0}


@pytest.mark.parametrize("as_file", [True, False])
def test_a_chat_template_replaces_all_of_the_models(as_file: bool, tmp_path: Path) -> None:
    path = copy_checkpoint("llama", tmp_path)
    more = path / "additional_chat_templates"
    more.mkdir()
    (more / "tool_use.jinja").write_text("other")
    template = "{{ messages[0].content }} ü"
    (tmp_path / "mine.jinja").write_text(template, encoding="utf-8")
    given = str(tmp_path / "mine.jinja") if as_file else template
    found = files(load(path, chat_template=given))
    assert {k: v for k, v in found.items() if k.endswith(".jinja")} == {
        "chat_template.jinja": template
    }


def test_a_chat_template_replaces_that_of_a_gguf_file(tmp_path: Path) -> None:
    file, _ = make_gguf("llama", "F32", tmp_path)
    given = '{"enable_thinking": false}'
    found = files(load(file, chat_template="{{ 1 }}", default_chat_template_kwargs=given))
    assert found["chat_template.jinja"] == "{{ 1 }}"
    assert found["chat_template_kwargs.json"] == {"enable_thinking": False}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"hf_overrides": "["}, "hf_overrides: expected a JSON object, got '\\['"),
        (
            {"default_chat_template_kwargs": "1"},
            "default_chat_template_kwargs: expected a JSON object, got 1",
        ),
        *(
            (
                {"default_chat_template_kwargs": f'{{"tone": "dry", "{name}": []}}'},
                f"default_chat_template_kwargs: expected no '{name}', which each request sets",
            )
            for name in ("messages", "tools", "add_generation_prompt", "continue_final_message")
        ),
        ({"hf_overrides": "[1]"}, "hf_overrides: expected a JSON object, got \\[1\\]"),
        (
            {"override_generation_config": '{"temperatur": 1}'},
            "override_generation_config: temperatur: expected one of temperature, .*max_new_tokens",
        ),
        (
            {"override_generation_config": '{"temperature": "hot"}'},
            "override_generation_config: temperature: expected a number, got 'hot'",
        ),
        (
            {"override_generation_config": '{"top_k": 1.5}'},
            "override_generation_config: top_k: expected a whole number, got 1.5",
        ),
        (
            {"override_generation_config": '{"top_p": 1.5}'},
            "override_generation_config: top_p: expected above 0 and at most 1, got 1.5",
        ),
        (
            {"override_generation_config": '{"max_new_tokens": 0}'},
            "override_generation_config: max_new_tokens: expected at least 1, got 0",
        ),
        (
            {"chat_template": "no/such/file"},
            "chat_template: expected a Jinja template, or a file with one, got 'no/such/file': No",
        ),
    ],
)
def test_what_options_cannot_be_is_refused_before_anything_is_loaded(
    options: dict[str, str], expected: str
) -> None:
    config = ModelConfig(model=str(checkpoint("llama")), device="cpu", **options)  # type: ignore[arg-type]
    with pytest.raises(InvalidOption, match=expected):
        check_model(config, CacheConfig())


def test_the_source_of_defaults_is_one_of_two() -> None:
    with pytest.raises(InvalidOption, match="generation_config: expected one of auto, none"):
        ModelConfig(generation_config="folder")
