"""Text encoders from GGUF files: weights, pooling and tokenizers."""

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from torch import nn
from transformers import BertTokenizerFast

from tests.support.encoder_gguf import WORDS, Metadata, make_encoder_gguf
from tests.support.encoders import classify, encode, expected_output, load_encoder, texts
from tests.support.gguf_files import make_gguf
from worker_service.errors import BadCheckpoint, UnsupportedModel
from worker_service.gguf.tokenizer import tokenizer_assets
from worker_service.loader.gguf.config import gguf_config, unread_settings
from worker_service.plan import PoolingType

pytestmark = pytest.mark.usefixtures("one_thread")
LENGTHS = (1, 40, 150)
FAMILIES = ("bert", "roberta", "distilbert", "nomic_bert", "modernbert")


@pytest.mark.parametrize("family", FAMILIES)
def test_hidden_states_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    file, source = make_encoder_gguf(family, tmp_path)
    batch = texts(LENGTHS)
    for text, hidden in zip(batch, encode(load_encoder(file), batch), strict=True):
        expected = nn.functional.normalize(expected_output(source, text))
        found = nn.functional.normalize(hidden)
        torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)
    assert unread_settings(file) == []


@pytest.mark.parametrize("family", FAMILIES)
def test_quantized_matrices_make_similar_vectors(family: str, tmp_path: Path) -> None:
    file, source = make_encoder_gguf(family, tmp_path, "Q8_0")
    (text,) = texts([40])
    (hidden,) = encode(load_encoder(file), [text])
    expected = expected_output(source, text)
    assert nn.functional.cosine_similarity(hidden.mean(0), expected.mean(0), dim=0) > 0.99


@pytest.mark.parametrize("family", ["roberta", "modernbert"])
def test_logits_of_a_classifier_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    labels = ["bad", "fair", "good"]

    def metadata(writer: gguf.GGUFWriter) -> None:
        writer.add_pooling_type(gguf.PoolingType.RANK)
        writer.add_classifier_output_labels(labels)

    head = "ForSequenceClassification"
    file, source = make_encoder_gguf(family, tmp_path, head=head, metadata=metadata)
    model, batch = load_encoder(file), texts(LENGTHS)
    assert model.pooling.labels == tuple(labels)
    for text, hidden in zip(batch, encode(model, batch), strict=True):
        expected = expected_output(source, text)
        torch.testing.assert_close(classify(model, hidden), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("stored", "expected"),
    [
        (gguf.PoolingType.NONE, PoolingType.ALL),
        (gguf.PoolingType.MEAN, PoolingType.MEAN),
        (gguf.PoolingType.CLS, PoolingType.CLS),
        (gguf.PoolingType.LAST, PoolingType.LAST),
    ],
)
def test_vectors_are_pooled_as_the_file_says(
    stored: gguf.PoolingType, expected: PoolingType, tmp_path: Path
) -> None:
    file, _ = make_encoder_gguf("bert", tmp_path, metadata=lambda w: w.add_pooling_type(stored))
    assert load_encoder(file).pooling.default_type is expected


def test_a_decoder_pools_as_its_file_says(tmp_path: Path) -> None:
    metadata: Metadata = lambda w: w.add_pooling_type(gguf.PoolingType.LAST)  # noqa: E731
    file, _ = make_gguf("qwen3", "F16", tmp_path, metadata=metadata)
    assert gguf_config(file)["pooling_type"] == "LAST"
    (tmp_path / "plain").mkdir()
    file, _ = make_gguf("qwen3", "F16", tmp_path / "plain")
    assert "pooling_type" not in gguf_config(file)


def test_a_pattern_says_which_layers_of_modernbert_have_a_window(tmp_path: Path) -> None:
    windowed, full = "sliding_attention", "full_attention"
    file, _ = make_encoder_gguf("modernbert", tmp_path)
    assert gguf_config(file)["layer_types"] == [full, windowed, windowed]
    assert gguf_config(file)["local_attention"] == 16
    (tmp_path / "listed").mkdir()
    file, _ = make_encoder_gguf(
        "modernbert",
        tmp_path / "listed",
        metadata=lambda w: (
            w.add_sliding_window_pattern([True, False, True]),
            w.add_rope_freq_base_swa(5000.0),
        ),
    )
    config = gguf_config(file)
    assert config["layer_types"] == [windowed, full, windowed]
    assert config["rope_parameters"]["sliding_attention"]["rope_theta"] == 5000.0


@pytest.mark.parametrize(
    ("family", "metadata", "error", "message"),
    [
        (
            "bert",
            lambda w: w.add_pooling_type(gguf.PoolingType.RANK),
            UnsupportedModel,
            r"bert\.pooling_type: expected 0 to 3: .*; or 4, a classifier, with tensors cls,"
            r" cls\.output, got 4",
        ),
        (
            "nomic_bert",
            lambda w: w.add_pooling_type(gguf.PoolingType.RANK),
            UnsupportedModel,
            r"nomic-bert\.pooling_type: expected 0 to 3: none, mean, cls, last, got 4",
        ),
        (
            "bert",
            lambda w: w.add_causal_attention(True),
            UnsupportedModel,
            r"bert\.attention\.causal: expected false, got True",
        ),
        (
            "nomic_bert",
            lambda w: w.add_expert_count(8),
            UnsupportedModel,
            r"nomic-bert\.expert_count: expected none, got 8",
        ),
        (
            "modernbert",
            lambda w: w.add_sliding_window_pattern([True]),
            BadCheckpoint,
            r"sliding_window_pattern: expected a positive number, or one value for each of 3",
        ),
    ],
)
def test_what_an_encoder_does_not_compute_is_refused_by_name(
    family: str, metadata: Metadata, error: type[Exception], message: str, tmp_path: Path
) -> None:
    file, _ = make_encoder_gguf(family, tmp_path, metadata=metadata)
    with pytest.raises(error, match=message):
        load_encoder(file)


def _tokenizer(architecture: str, metadata: dict[str, Any]) -> Tokenizer:
    names = {f"tokenizer.ggml.{key}": value for key, value in metadata.items()}
    assets = tokenizer_assets(Path("file.gguf"), {"general.architecture": architecture, **names})
    assert b"add_bos_token" not in assets["tokenizer_config.json"]
    return Tokenizer.from_buffer(assets["tokenizer.json"])


_SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


@pytest.mark.parametrize("cased", [False, True])
def test_word_pieces_and_pairs_are_those_of_transformers(cased: bool, tmp_path: Path) -> None:
    words = [*WORDS, *(["Hello", "##B"] if cased else [])]
    (tmp_path / "vocab.txt").write_text("\n".join([*_SPECIAL, *words]), encoding="utf-8")
    expected = BertTokenizerFast(vocab=str(tmp_path / "vocab.txt"), do_lower_case=not cased)
    stored = [word[2:] if word.startswith("##") else f"▁{word}" for word in words]
    tokenizer = _tokenizer(
        "bert",
        {
            "model": "bert",
            "tokens": [*_SPECIAL, *stored],
            "token_type": [3] * len(_SPECIAL) + [1] * len(words),
            "unknown_token_id": 1,
            "seperator_token_id": 3,
        },
    )
    for text in ("hello, unbelievable World", "Hello café [MASK]", "", "xyz unable\tun中"):
        found = tokenizer.encode(text)
        assert found.ids == expected(text)["input_ids"]
    pair = tokenizer.encode("hello", "un café")
    both = expected("hello", "un café")
    assert (pair.ids, pair.type_ids) == (both["input_ids"], both["token_type_ids"])
    assert tokenizer.decode(tokenizer.encode("unbelievable").ids) == "unbelievable"


def test_pieces_of_a_unigram_model_are_those_of_xlm_r() -> None:
    tokens = [
        "<s>",
        "<pad>",
        "</s>",
        "<unk>",
        "▁",
        "▁he",
        "llo",
        "▁hello",
        "l",
        "o",
        "▁w",
        "<mask>",
    ]
    scores = [0.0, 0.0, 0.0, 0.0, -2.0, -3.0, -3.5, -9.0, -4.0, -4.5, -3.0, 0.0]
    expected = Tokenizer(models.Unigram([*zip(tokens, scores, strict=True)], unk_id=3))
    expected.pre_tokenizer = pre_tokenizers.Metaspace()
    expected.normalizer = normalizers.Replace(" {2,}", " ")
    expected.decoder = decoders.Metaspace()
    tokenizer = _tokenizer(
        "bert",
        {
            "model": "t5",
            "tokens": tokens,
            "scores": scores,
            "token_type": [3, 3, 3, 2, *[1] * 7, 3],
            "bos_token_id": 0,
            "eos_token_id": 2,
            "precompiled_charsmap": [],
        },
    )
    assert tokenizer.encode("hello w").ids == [0, *expected.encode("hello w").ids, 2]
    assert tokenizer.encode("hello   w", "w").tokens == [
        *("<s>", "▁he", "llo", "▁w", "</s>", "</s>", "▁w", "</s>"),
    ]
    assert tokenizer.encode("<mask>x").ids == [0, 11, 4, 3, 2]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "bos_token_id: expected the special tokens before"),
        ({"bos_token_id": "[CLS]"}, r"bos_token_id: expected a token id, got '\[CLS\]'"),
        ({"model": "t5", "scores": [0.0]}, "scores: expected 2, got 1"),
        (
            {"token_type": [1]},
            r"tokens: expected .* for each entry .* got 2 tokens, .* and 1 types",
        ),
        (
            {"model": "t5", "scores": [0.0, 1.0], "precompiled_charsmap": [1, 2]},
            "precompiled_charsmap: ",
        ),
        (
            {"model": "t5", "scores": [0.0, 1.0], "precompiled_charsmap": "abc"},
            "precompiled_charsmap: expected a list of int",
        ),
    ],
)
def test_a_tokenizer_with_wrong_data_is_refused(changes: dict[str, Any], message: str) -> None:
    metadata = {"model": "bert", "tokens": ["▁a", "[UNK]"], "token_type": [1, 3]}
    with pytest.raises(BadCheckpoint, match=message):
        _tokenizer("bert", metadata | changes)


def test_a_byte_level_encoder_ends_texts_with_its_separator() -> None:
    tokens = ["[CLS]", "[SEP]", "a", "Ġ", "b"]
    tokenizer = _tokenizer(
        "modern-bert",
        {
            "model": "gpt2",
            "pre": "modern-bert",
            "tokens": tokens,
            "token_type": [3, 3, 1, 1, 1],
            "merges": [],
            "bos_token_id": 0,
            "seperator_token_id": 1,
            "add_bos_token": True,
        },
    )
    assert tokenizer.encode("a b").ids == [0, 2, 3, 4, 1]
    assert tokenizer.encode("a", "b").ids == [0, 2, 1, 4, 1]
