"""What the files beside a checkpoint, its configuration and options say of its pooling."""

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor
from transformers import (
    AutoModel,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from tests.support.checkpoints import checkpoint, make_checkpoint, write_tokenizer
from tests.support.encoders import make_encoder
from tests.support.loading import copy_checkpoint, edit_config, edit_tensors, load
from tests.support.pooled_texts import PooledTexts
from tests.support.transformers_oracle import oracle
from worker_service.array_types import Float32Array
from worker_service.errors import BadCheckpoint, InvalidOption, UnsupportedModel
from worker_service.loader import LoadedModel
from worker_service.loader.files.assets import iter_assets
from worker_service.plan import PoolingHead, PoolingParams, PoolingType
from worker_service.pooling_facts import LabelActivation, PoolingFacts, Similarity

pytestmark = pytest.mark.usefixtures("one_thread")

SIZE = 64
TOKENS = [5, 250, 17, 90, 33, 120, 8, 61, 77]
TOLERANCE = 2e-5

MODULE = "sentence_transformers.models"
TRANSFORMER = {"type": f"{MODULE}.Transformer", "path": ""}
POOLING = {"type": f"{MODULE}.Pooling", "path": "1_Pooling"}
DENSE = {"type": f"{MODULE}.Dense", "path": "2_Dense"}
NORMALIZE = {"type": f"{MODULE}.Normalize", "path": "3_Normalize"}
MEAN = {"word_embedding_dimension": SIZE, "pooling_mode_mean_tokens": True}
LINEAR = {"in_features": SIZE, "out_features": 12, "bias": True}


def write(path: Path, content: object) -> None:
    """Write a JSON file, and its folder."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content))


def sentence_model(
    folder: Path,
    *modules: dict[str, str],
    pooling: dict[str, Any] = MEAN,
    family: str = "qwen3",
    **settings: Any,
) -> Path:
    """A decoder with `modules.json`. settings: of `config_sentence_transformers.json`."""
    path = copy_checkpoint(family, folder)
    write(path / "modules.json", [TRANSFORMER, *(modules or (POOLING,))])
    write(path / "1_Pooling/config.json", pooling)
    if settings:
        write(path / "config_sentence_transformers.json", settings)
    return path


def add_dense(path: Path, name: str, config: dict[str, Any]) -> dict[str, Tensor]:
    """Write a dense layer with random weights, and return these."""
    generator = torch.Generator().manual_seed(len(name))
    shape = config["out_features"], config["in_features"]
    tensors = {"linear.weight": torch.randn(shape, generator=generator)}
    if config.get("bias", True):
        tensors["linear.bias"] = torch.randn(shape[0], generator=generator)
    write(path / name / "config.json", config)
    save_file(tensors, path / name / "model.safetensors")
    return tensors


def facts_of(loaded: LoadedModel) -> PoolingFacts:
    """What a model pools."""
    assert loaded.pooler is not None
    return loaded.pooler.pooling


def pool(loaded: LoadedModel, kind: PoolingType, **params: Any) -> Float32Array:
    """The vector of `TOKENS`."""
    return PooledTexts(loaded).pool([TOKENS], PoolingParams(type=kind, **params))[0]


def hidden_states(family: str) -> Tensor:
    """Those of `TOKENS`, by `transformers`."""
    with torch.inference_mode():
        decoder = oracle(checkpoint(family)).model.model
        hidden: Tensor = decoder(torch.tensor([TOKENS])).last_hidden_state[0]
    return hidden


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        (MEAN, PoolingType.MEAN),
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, PoolingType.CLS),
        ({"pooling_mode_lasttoken": True, "include_prompt": False}, PoolingType.LAST),
        ({"pooling_mode": "mean"}, PoolingType.MEAN),
        ({**MEAN, "include_prompt": False}, PoolingType.MEAN),
    ],
)
def test_the_mode_of_pooling_is_obeyed(
    config: dict[str, Any], kind: PoolingType, tmp_path: Path
) -> None:
    facts = facts_of(load(sentence_model(tmp_path, pooling=config)))
    assert (facts.default_type, facts.normalize, facts.vector_size) == (kind, False, SIZE)


def test_dense_layers_follow_the_pooling_in_order(tmp_path: Path) -> None:
    second = {"type": f"{MODULE}.Dense", "path": "3_Dense"}
    path = sentence_model(tmp_path, POOLING, DENSE, second, NORMALIZE)
    gelu = {"activation_function": "torch.nn.modules.activation.GELU"}
    first = add_dense(path, "2_Dense", {**LINEAR, "in_features": SIZE, **gelu})
    last = add_dense(path, "3_Dense", {"in_features": 12, "out_features": 5, "bias": False})
    loaded = load(path)
    facts = facts_of(loaded)
    assert (facts.vector_size, facts.normalize) == (5, True)
    rows = hidden_states("qwen3").mean(0) @ first["linear.weight"].T + first["linear.bias"]
    expected = torch.tanh(torch.nn.functional.gelu(rows) @ last["linear.weight"].T)
    found = pool(loaded, PoolingType.MEAN, normalize=True)
    np.testing.assert_allclose(found, expected / expected.norm(), atol=TOLERANCE)


def test_a_model_without_pooling_has_vectors_of_tokens_for_late_interaction(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    dense = {"type": "pylate.models.Dense.Dense", "path": "1_Dense"}
    settings = {"query_prefix": "[Q] ", "document_prefix": "[D] ", "query_length": 32}
    path = sentence_model(tmp_path, dense, similarity_fn_name="MaxSim", **settings)
    identity = {"activation_function": "torch.nn.modules.linear.Identity", "bias": False}
    weights = add_dense(path, "1_Dense", {**LINEAR, **identity})
    with caplog.at_level(logging.WARNING):
        loaded = load(path)
    facts = facts_of(loaded)
    assert (facts.default_type, facts.normalize) == (PoolingType.ALL, True)
    assert facts.similarity is Similarity.MAX_SIM
    assert facts.prompts == (("query", "[Q] "), ("document", "[D] "))
    assert "query_length is not used: 32" in caplog.text
    expected = hidden_states("qwen3") @ weights["linear.weight"].T
    np.testing.assert_allclose(
        pool(loaded, PoolingType.ALL), expected.flatten(), atol=10 * TOLERANCE
    )


def test_prompts_similarity_and_lengths_are_those_of_the_files(tmp_path: Path) -> None:
    prompts = {"query": "Instruct: ", "document": ""}
    path = sentence_model(
        tmp_path, prompts=prompts, default_prompt_name="query", similarity_fn_name="dot"
    )
    write(path / "sentence_bert_config.json", {"max_seq_length": 40, "do_lower_case": False})
    edit_config(path, matryoshka_dimensions=[32, 16], is_matryoshka=True)
    facts = facts_of(load(path))
    assert facts.prompts == (("query", "Instruct: "), ("document", ""))
    assert (facts.default_prompt_name, facts.similarity) == ("query", Similarity.DOT)
    assert (facts.max_text_tokens, facts.matryoshka_dimensions) == (40, (16, 32))
    assert facts_of(load(path, max_model_len=40)).max_text_tokens == 0


@pytest.mark.parametrize(("length", "expected"), [(40, 40), (10**30, 0)])
def test_without_a_length_of_its_own_that_of_the_tokenizer_counts(
    length: int, expected: int, tmp_path: Path
) -> None:
    path = sentence_model(tmp_path)
    write(path / "tokenizer_config.json", {"model_max_length": length})
    assert facts_of(load(path)).max_text_tokens == expected


def test_a_cross_encoder_of_newer_versions_keeps_its_activation_and_prompts_there(
    tmp_path: Path,
) -> None:
    path = copy_checkpoint("qwen3", tmp_path)
    edit_config(path, architectures=["Qwen3ForSequenceClassification"], id2label={"0": "LABEL_0"})
    edit_tensors(path, lambda tensors: tensors.update({"score.weight": torch.ones(1, SIZE)}))
    write(path / "modules.json", [TRANSFORMER])
    activation = "torch.nn.modules.linear.Identity"
    settings = {"model_type": "CrossEncoder", "activation_fn": activation, "prompts": {"a": "b"}}
    write(path / "config_sentence_transformers.json", settings)
    facts = facts_of(load(path))
    assert facts.label_activation is LabelActivation.UNSPECIFIED
    assert (facts.scores_pairs, facts.vector_size, facts.types) == (True, 0, (PoolingType.LAST,))
    assert facts.prompts == (("a", "b"),)


def test_texts_are_changed_to_lower_case_by_the_tokenizer(tmp_path: Path) -> None:
    path = sentence_model(tmp_path)
    write(path / "sentence_bert_config.json", {"do_lower_case": True})
    tokenizer = Tokenizer.from_buffer(dict(iter_assets(path))["tokenizer.json"])
    assert tokenizer.encode("A bC").ids == tokenizer.encode("a bc").ids


@pytest.mark.parametrize(
    ("files", "error"),
    [
        (
            {"modules.json": [TRANSFORMER, {"type": f"{MODULE}.LSTM", "path": "1_LSTM"}]},
            r"modules\.json: expected modules Transformer, .* got .*models\.LSTM",
        ),
        ({"modules.json": {}}, r"modules\.json holds no list of JSON objects"),
        (
            {"1_Pooling/config.json": {"pooling_mode_max_tokens": True}},
            r"1_Pooling/config\.json: expected one mode of pooling of cls, mean, .* got max",
        ),
        (
            {"1_Pooling/config.json": {**MEAN, "pooling_mode_cls_token": True}},
            r"got mean and cls",
        ),
        ({"1_Pooling/config.json": {}}, r"got none"),
        (
            {
                "1_Pooling/config.json": {**MEAN, "include_prompt": False},
                "config_sentence_transformers.json": {"prompts": {"query": "Q: "}},
            },
            r"include_prompt: expected true, .* got false",
        ),
        (
            {"config_sentence_transformers.json": {"similarity_fn_name": "hamming"}},
            r"similarity_fn_name: expected one of cosine, .* got hamming",
        ),
        (
            {"config_sentence_transformers.json": {"default_prompt_name": "query"}},
            r"default_prompt_name: expected one of null, got query",
        ),
        (
            {"modules.json": [TRANSFORMER, POOLING, DENSE], "2_Dense/config.json": LINEAR},
            r"2_Dense/model\.safetensors is missing; pickled weights are refused",
        ),
        (
            {
                "modules.json": [TRANSFORMER, POOLING, DENSE],
                "2_Dense/config.json": {**LINEAR, "in_features": 3},
            },
            r"2_Dense/config\.json: in_features: expected 64, got 3",
        ),
        (
            {
                "modules.json": [TRANSFORMER, POOLING, DENSE],
                "2_Dense/config.json": {**LINEAR, "activation_function": "torch.nn.Softsign"},
            },
            r"activation_function: expected one of Identity, .* got torch\.nn\.Softsign",
        ),
        (
            {
                "modules.json": [TRANSFORMER, POOLING, DENSE],
                "2_Dense/config.json": {**LINEAR, "activation_function": 5},
            },
            r"activation_function: expected one of Identity, .* got 5",
        ),
        *(
            (
                {
                    "modules.json": [TRANSFORMER, POOLING, DENSE],
                    "2_Dense/config.json": {**LINEAR, "out_features": size},
                },
                r"2_Dense/config\.json: out_features: expected a positive number, got ",
            )
            for size in (None, "12", -1, 0, 10**30)
        ),
        ({"1_Pooling/config.json": {"pooling_mode": 5}}, r"expected one mode of pooling .* got 5"),
        *(
            (
                {"config_sentence_transformers.json": {"prompts": prompts}},
                r"config_sentence_transformers\.json: (the prompt a|prompts): expected ",
            )
            for prompts in ("x", ["x"], 5, {"a": 5}, {"a": ["x"]})
        ),
        (
            {"config_sentence_transformers.json": {"default_prompt_name": ["a"]}},
            r"default_prompt_name: expected one of null, got \['a'\]",
        ),
        (
            {"config_sentence_transformers.json": {"activation_fn": 5}},
            "activation_fn: expected one of Identity, Sigmoid, Softmax of torch, got 5",
        ),
        *(
            (
                {"sentence_bert_config.json": {"max_seq_length": length}},
                "max_seq_length: expected a number of tokens, got ",
            )
            for length in ("128", -1, [128], True)
        ),
    ],
)
def test_files_that_cannot_be_obeyed_are_refused_by_name(
    files: dict[str, Any], error: str, tmp_path: Path
) -> None:
    path = sentence_model(tmp_path)
    for name, content in files.items():
        write(path / name, content)
    with pytest.raises((BadCheckpoint, UnsupportedModel), match=error):
        load(path)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("matryoshka_dimensions", 32, None),
        ("matryoshka_dimensions", "x", "matryoshka_dimensions: expected 1 to 64: x"),
        ("matryoshka_dimensions", [1.5], r"matryoshka_dimensions: expected 1 to 64: \[1.5\]"),
        ("classifier_from_token", "no", "classifier_from_token: expected a list of tokens, got 'n"),
        ("classifier_from_token", [1, 2], r"classifier_from_token: expected .* got \[1, 2\]"),
        ("dtype", ["float32"], None),
        ("layer_types", 5, "layer_types: expected a list, got 5"),
    ],
)
def test_keys_of_pooling_of_another_kind_are_refused_by_name(
    key: str, value: object, message: str | None, tmp_path: Path
) -> None:
    path = sentence_model(tmp_path)
    edit_config(path, **{key: value})
    if message is None:
        load(path)
        return
    with pytest.raises(BadCheckpoint, match=f"^config.json: {message}"):
        load(path)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("id2label", ["a"], r"id2label: expected names by number, got \['a'\]"),
        ("id2label", {"a": "b"}, "id2label: expected names by number, got {'a': 'b'}"),
        ("num_labels", "2", "num_labels: expected at least 1, got '2'"),
        ("num_labels", -1, "num_labels: expected at least 1, got -1"),
        ("sentence_transformers", "x", "sentence_transformers: expected an object, got 'x'"),
        (
            "sentence_transformers",
            {"activation_fn": 5},
            "sentence_transformers.activation_fn: expected one of .* got 5",
        ),
    ],
)
def test_keys_of_labels_of_another_kind_are_refused_by_name(
    key: str, value: object, message: str, tmp_path: Path
) -> None:
    path = make_encoder("bert", tmp_path, "ForSequenceClassification", num_hidden_layers=1)
    edit_config(path, **{"id2label": None, key: value})
    with pytest.raises((BadCheckpoint, UnsupportedModel), match=f"^config.json: {message}"):
        load(path)


def test_a_file_nested_too_deeply_is_named(tmp_path: Path) -> None:
    path = sentence_model(tmp_path)
    (path / "modules.json").write_text("[" * 100_000)
    with pytest.raises(BadCheckpoint, match=r"modules\.json cannot be read as JSON"):
        load(path)


def test_a_model_pools_by_itself_where_its_files_or_its_architecture_say_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        assert load(sentence_model(tmp_path)).pooler is not None
    assert "runner chosen runner=pooling reason=there is a modules.json" in caplog.text
    assert load(sentence_model(tmp_path / "g"), runner="generate").pooler is None
    assert load(checkpoint("qwen3")).pooler is None
    pooled = load(checkpoint("qwen3"), runner="pooling")
    assert facts_of(pooled).normalize
    assert getattr(pooled.model, "head") is None  # noqa: B009 (of native models)


@pytest.mark.parametrize(
    ("family", "base"),
    [
        ("qwen3", "Qwen3Model"),
        ("llama", "LlamaModel"),
        ("gpt2", "GPT2Model"),
        ("gemma3", "Gemma3TextModel"),
    ],
)
def test_a_decoder_without_an_lm_head_pools(family: str, base: str, tmp_path: Path) -> None:
    path = copy_checkpoint(family, tmp_path)
    edit_config(path, architectures=[base])
    edit_tensors(path, _remove_head)
    loaded = load(path)
    assert loaded.model.architecture == base
    expected = pool(load(checkpoint(family), runner="pooling"), PoolingType.LAST)
    assert pool(loaded, PoolingType.LAST).tobytes() == expected.tobytes()
    with pytest.raises(InvalidOption, match=f"runner: expected auto or pooling for {base}"):
        load(path, runner="generate")


def test_a_variant_without_an_lm_head_pools_through_transformers(tmp_path: Path) -> None:
    path = make_checkpoint("llama", tmp_path, hidden_act="tanh")
    expected = pool(load(path, runner="pooling"), PoolingType.LAST)
    edit_config(path, architectures=["LlamaModel"])
    edit_tensors(path, _remove_head)
    loaded = load(path)
    assert loaded.model.architecture == "LlamaModel"
    np.testing.assert_allclose(pool(loaded, PoolingType.LAST), expected, atol=TOLERANCE)
    edit_config(path, architectures=["LlamaForSequenceClassification"])
    with pytest.raises(UnsupportedModel, match=r"labels are computed of .* activation tanh"):
        load(path)


def _remove_head(tensors: dict[str, Tensor]) -> None:
    """As a base model is saved: no LM head, and no prefix."""
    tensors.pop("lm_head.weight", None)
    for name in list(tensors):
        tensors[name.removeprefix("model.").removeprefix("transformer.")] = tensors.pop(name)


@pytest.mark.parametrize(("family", "num_labels"), [("qwen3", 1), ("llama", 3)])
def test_a_decoders_classifier_has_the_logits_of_transformers(
    family: str, num_labels: int, tmp_path: Path
) -> None:
    model = AutoModelForSequenceClassification.from_pretrained(
        checkpoint(family), num_labels=num_labels, pad_token_id=0, dtype=torch.float32
    )
    torch.nn.init.normal_(model.score.weight)
    path = copy_checkpoint(family, tmp_path)
    (path / "model.safetensors").unlink()
    model.save_pretrained(path)
    loaded = load(path)
    facts = facts_of(loaded)
    assert facts.labels == tuple(f"LABEL_{i}" for i in range(num_labels))
    assert (facts.vector_size, facts.scores_pairs) == (0, num_labels == 1)
    found = pool(loaded, PoolingType.LAST, head=PoolingHead.CLASSIFIER)
    with torch.inference_mode():
        expected = model.eval()(torch.tensor([TOKENS])).logits[0]
    np.testing.assert_allclose(found, expected, atol=10 * TOLERANCE)


@pytest.mark.parametrize("family", ["qwen3", "falcon", "gpt2"])
def test_a_decoders_classifier_of_tokens_has_the_logits_of_transformers(
    family: str, tmp_path: Path
) -> None:
    model = AutoModelForTokenClassification.from_pretrained(
        checkpoint(family), num_labels=3, dtype=torch.float32
    )
    layer = model.classifier if hasattr(model, "classifier") else model.score
    torch.nn.init.normal_(layer.weight)
    torch.nn.init.normal_(layer.bias)
    path = copy_checkpoint(family, tmp_path)
    (path / "model.safetensors").unlink()
    model.save_pretrained(path)
    found = pool(load(path), PoolingType.ALL, head=PoolingHead.CLASSIFIER)
    with torch.inference_mode():
        expected = model.eval()(torch.tensor([TOKENS])).logits[0]
    np.testing.assert_allclose(found, expected.flatten(), atol=10 * TOLERANCE)


@pytest.mark.parametrize("family", ["qwen3", "llama_tied", "granite", "gptj"])
def test_tokens_of_the_vocabulary_are_labels(family: str) -> None:
    logits = oracle(checkpoint(family)).logits(TOKENS)[-1]
    tokenizer = Tokenizer.from_file(str(checkpoint(family) / "tokenizer.json"))
    ids = [tokenizer.token_to_id(letter) for letter in "abc"]
    two = load(checkpoint(family), classifier_tokens="a,b")
    facts = facts_of(two)
    assert (facts.labels, facts.scores_pairs) == (("b",), True)
    assert facts.label_activation is LabelActivation.SIGMOID
    (logit,) = pool(two, PoolingType.LAST, head=PoolingHead.CLASSIFIER)
    expected = torch.softmax(logits[ids[:2]], 0)[1]
    assert 1 / (1 + np.exp(-logit)) == pytest.approx(float(expected), abs=TOLERANCE)
    three = load(checkpoint(family), classifier_tokens="a, b, c")
    assert facts_of(three).labels == ("a", "b", "c")
    found = pool(three, PoolingType.LAST, head=PoolingHead.CLASSIFIER)
    np.testing.assert_allclose(found, logits[ids], atol=10 * TOLERANCE)


def test_qwen3_reranker_has_its_own_template(tmp_path: Path) -> None:
    path = copy_checkpoint("qwen3", tmp_path)
    architectures = ["Qwen3ForSequenceClassification"]  # as vLLM's overrides name it
    edit_config(path, classifier_from_token=["no", "yes"], architectures=architectures)
    tokenizer = json.loads((path / "tokenizer.json").read_text())
    added = [{"id": 290 + i, "content": text} for i, text in enumerate(("no", "yes"))]
    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    tokenizer["added_tokens"] += [{**token, **dict.fromkeys(flags, False)} for token in added]
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    facts = facts_of(load(path, runner="pooling"))
    assert facts.labels == ("yes",)
    assert "<Query>: {{ query }}\n<Document>: {{ document }}" in facts.pair_template
    (tmp_path / "pair.jinja").write_text("{{ query }}|{{ document }}")
    for given in ("{{ query }}|{{ document }}", str(tmp_path / "pair.jinja")):
        found = facts_of(load(path, runner="pooling", pair_template=given))
        assert found.pair_template == "{{ query }}|{{ document }}"


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"pooling_type": "MEAN"}, {"default_type": PoolingType.MEAN}),
        ({"seq_pooling_type": "CLS", "normalize": False}, {"normalize": False}),
        ({"use_activation": False, "tok_pooling_type": "ALL"}, {"normalize": False}),
        ({"dimensions": 16}, {"vector_size": 16}),
        ({"pooling_type": None}, {"default_type": PoolingType.LAST}),
    ],
)
def test_the_pooler_config_changes_what_files_say(
    settings: dict[str, Any], expected: dict[str, Any]
) -> None:
    loaded = load(checkpoint("qwen3"), pooler_config=json.dumps(settings))
    assert {name: getattr(facts_of(loaded), name) for name in expected} == expected
    assert len(pool(loaded, PoolingType.LAST)) == settings.get("dimensions", SIZE)


def test_tokens_of_limited_logits_are_no_labels() -> None:
    expected = r"classifier_tokens: .*Gemma2ForCausalLM does \(final_logit_softcapping: [\d.]+\)"
    with pytest.raises(InvalidOption, match=expected):
        load(checkpoint("gemma2"), classifier_tokens="a,b")


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"pooler_config": "MEAN"}, r"pooler_config: expected a JSON object"),
        ({"pooler_config": "[]"}, r"pooler_config: expected a JSON object, got \[\]"),
        (
            {"pooler_config": '{"pooling_type": "STEP"}'},
            r"pooling_type: expected LAST or .* 'STEP'",
        ),
        ({"pooler_config": '{"pooling_type": ["LAST"]}'}, r"expected LAST or .* \['LAST'\]"),
        ({"pooler_config": '{"normalize": 1}'}, r"normalize: expected true or false, got 1"),
        ({"pooler_config": '{"dimensions": 65}'}, r"dimensions: expected 1 to 64, got 65"),
        ({"pooler_config": '{"max_embed_len": 9}'}, r"max_embed_len: expected pooling_type, .* 9"),
        ({"classifier_tokens": "a"}, r"classifier_tokens: expected two or more tokens"),
        ({"classifier_tokens": "a,quite"}, r"'quite' is no token of the vocabulary"),
        ({"pair_template": "no/file", "runner": "pooling"}, r"pair_template: .* got 'no/file'"),
        ({"pair_template": "{{ query }}"}, r"pair_template: expected none, .* generates; --runner"),
        ({"pair_template": "{{ query }}", "runner": "pooling"}, r"pair_template: .* makes vectors"),
    ],
)
def test_options_that_cannot_be_obeyed_are_refused_by_name(
    options: dict[str, str], error: str
) -> None:
    with pytest.raises(InvalidOption, match=error):
        load(checkpoint("qwen3"), **options)


def test_options_of_pooling_are_refused_for_a_generator() -> None:
    with pytest.raises(InvalidOption, match="pooler_config: expected none with --runner generate"):
        load(checkpoint("qwen3"), runner="generate", pooler_config="{}")


@pytest.mark.parametrize(
    ("family", "architecture", "changes"),
    [
        ("gemma2", "Gemma2ForCausalLM", {}),
        ("gemma2", "Gemma2Model", {}),
        ("gemma3", "Gemma3TextModel", {"use_bidirectional_attention": True, "sliding_window": 8}),
    ],
)
def test_a_model_that_runs_through_transformers_pools(
    family: str, architecture: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    path = make_checkpoint(family, tmp_path / family, **changes)
    edit_config(path, architectures=[architecture])
    if architecture.endswith("Model"):
        edit_tensors(path, _remove_head)
    loaded = load(path, runner="pooling")
    assert loaded.model.architecture == architecture
    assert bool(loaded.model.kv_cache_spec.layers) == (not changes)
    texts = [TOKENS * 3, TOKENS, TOKENS[:1]]
    found = PooledTexts(loaded).pool(texts, PoolingParams(type=PoolingType.MEAN))
    model = AutoModel.from_pretrained(path, attn_implementation="eager", dtype=torch.float32)
    for tokens, vector in zip(texts, found, strict=True):
        with torch.inference_mode():
            hidden = model(torch.tensor([tokens])).last_hidden_state[0]
        np.testing.assert_allclose(vector, hidden.mean(0), atol=TOLERANCE)


@pytest.mark.parametrize(
    ("base", "settings"),
    [
        ("Phi", {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}),
        ("BioGpt", {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}),
        ("GPTBigCode", {"n_embd": 64, "n_layer": 2, "n_head": 4}),
        (
            "ModernBertDecoder",
            {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4},
        ),
    ],
)
def test_a_base_model_pools_through_transformers_whatever_its_head_would_have(
    base: str, settings: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Heads with biases, norms and layers, and decoders of other names than `model`."""
    small = {"vocab_size": 300, "intermediate_size": 88, "max_position_embeddings": 256}
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    special |= {"cls_token_id": 1, "sep_token_id": 2}
    config = getattr(transformers, f"{base}Config")(**small, **settings, **special)
    torch.manual_seed(0)
    model = getattr(transformers, f"{base}Model")(config).eval()
    model.save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    loaded = load(tmp_path)
    assert (loaded.model.architecture, loaded.batch_invariant) == (f"{base}Model", True)
    assert "NaN" not in caplog.text
    texts = [TOKENS * 3, TOKENS, TOKENS[:1]]
    found = PooledTexts(loaded).pool(texts, PoolingParams(type=PoolingType.MEAN))
    for tokens, vector in zip(texts, found, strict=True):
        with torch.inference_mode():
            hidden = model(torch.tensor([tokens])).last_hidden_state[0]
        np.testing.assert_allclose(vector, hidden.mean(0), atol=TOLERANCE)
    with pytest.raises(InvalidOption, match=f"runner: expected auto or pooling for {base}Model"):
        load(tmp_path, runner="generate")


def test_a_base_model_without_a_weight_of_its_decoder_is_refused(tmp_path: Path) -> None:
    path = make_checkpoint("phi", tmp_path)
    edit_config(path, architectures=["PhiModel"])
    edit_tensors(path, _remove_head)
    edit_tensors(path, lambda tensors: tensors.pop("final_layernorm.bias"))
    with pytest.raises(BadCheckpoint, match=r"missing tensors: model\.final_layernorm\.bias$"):
        load(path)


def test_a_generator_whose_tokens_see_those_that_follow_is_refused(tmp_path: Path) -> None:
    path = make_checkpoint("gemma3", tmp_path / "gemma3", use_bidirectional_attention=True)
    with pytest.raises(UnsupportedModel, match="its attention is not causal"):
        load(path)


def test_how_a_model_pools_is_part_of_its_fingerprint(tmp_path: Path) -> None:
    path = sentence_model(tmp_path, POOLING, DENSE)
    add_dense(path, "2_Dense", LINEAR)
    others = [load(path), load(path, pooler_config='{"normalize": true}')]
    assert others[0].fingerprint != others[1].fingerprint
