"""GGUF files as other tools write them: what is missing, wrong or only implied in them."""

import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, pre_tokenizers
from transformers import GemmaTokenizer

from tests.support.checkpoints import BOS_TOKEN_ID, EOS_TOKEN_ID, MAX_POSITIONS
from tests.support.gguf_files import make_gguf, tokenizer_of
from tests.support.loading import load
from worker_service.errors import BadCheckpoint, UnsupportedModel
from worker_service.gguf.tokenizer import PRE_TOKENIZERS, merges_of, tokenizer_assets
from worker_service.loader.files.assets import iter_assets
from worker_service.loader.gguf.config import gguf_config
from worker_service.loader.gguf.file import GgufTensor, open_gguf
from worker_service.models.layers.rotary import RotarySettings, RotaryTable

NORMAL, CONTROL, USER_DEFINED = 1, 3, 4


def _with_tokens(named: dict[str, int]) -> Callable[[gguf.GGUFWriter], None]:
    """Put these tokens, of these types, at the end of the vocabulary of 300."""

    def write(writer: gguf.GGUFWriter) -> None:
        letters = sorted(pre_tokenizers.ByteLevel.alphabet())
        words = [*letters, "<bos>", "<stop>", "he", "ll"]
        fill = [f"unused{number}" for number in range(300 - len(words) - len(named))]
        types = [NORMAL] * (300 - len(named))
        types[BOS_TOKEN_ID] = types[EOS_TOKEN_ID] = CONTROL
        writer.add_token_list([*words, *fill, *named])
        writer.add_token_types([*types, *named.values()])

    return write


@pytest.mark.parametrize(
    ("named", "ends"),
    [
        ({"<|eot_id|>": CONTROL, "<|eom_id|>": CONTROL}, [298, 299]),
        ({"<|im_start|>": CONTROL, "<|im_end|>": USER_DEFINED}, [299]),
        ({"<|end|>": CONTROL, "<|endoftext|>": NORMAL}, [298, 299]),
        ({"</s>": CONTROL, "<|file_sep|>": CONTROL}, [298, 299]),
        ({"</s>": USER_DEFINED, "<end_of_turn>": CONTROL}, [299]),
        ({"<|end|>": CONTROL, "<|return|>": CONTROL, "<|call|>": CONTROL}, [298, 299]),
        ({"<\uff5cend▁of▁sentence\uff5c>": CONTROL}, [299]),
    ],
)
def test_tokens_that_end_a_turn_are_recognised_by_their_names(
    named: dict[str, int], ends: list[int], tmp_path: Path
) -> None:
    file, _ = make_gguf("llama", "F16", tmp_path, metadata=_with_tokens(named))
    assert gguf_config(file)["eos_token_id"] == [EOS_TOKEN_ID, *ends]


def test_a_token_that_ends_a_turn_is_special_whatever_the_file_says(tmp_path: Path) -> None:
    write = _with_tokens({"<|im_end|>": NORMAL})
    file, _ = make_gguf("llama", "F16", tmp_path, metadata=write)
    tokenizer = tokenizer_of(dict(iter_assets(file)))
    ids = tokenizer.encode("he<|im_end|>", add_special_tokens=False)
    assert ids[-1] == 299
    assert tokenizer.decode(ids, skip_special_tokens=True) == "he"


@pytest.mark.parametrize("number", [-1, 300, 0xFFFFFFFF])
@pytest.mark.parametrize("key", ["padding", "bos", "eos", "eot", "unknown"])
def test_an_id_of_a_special_token_beyond_the_vocabulary_is_absent_with_a_warning(
    key: str, number: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def write(writer: gguf.GGUFWriter) -> None:
        add = writer.add_int32 if number < 0 else writer.add_uint32
        add(f"tokenizer.ggml.{key}_token_id", number)

    file, _ = make_gguf("llama", "F16", tmp_path, metadata=write)
    with caplog.at_level(logging.WARNING):
        config, files = gguf_config(file), dict(iter_assets(file))
    name = {"padding": "pad_token", "unknown": "unk_token"}.get(key, f"{key}_token")
    assert name not in json.loads(files["tokenizer_config.json"])
    assert number not in [config["bos_token_id"], *config["eos_token_id"]]
    warnings = [record.getMessage() for record in caplog.records if "worker" in record.name]
    expected = f"tokenizer.ggml.{key}_token_id: no token has the id {number}; ignored"
    assert warnings == [f"{file}: {expected}"]


def _retyped(file: Path, name: str, kind: str) -> None:
    _edit_header(file, name, lambda place, content: _put(content, place, int(_number(kind)), 4))


def _number(kind: str) -> int:
    return int(gguf.GGMLQuantizationType[kind])


def _put(content: bytearray, place: int, value: int, size: int) -> None:
    content[place : place + size] = value.to_bytes(size, "little")


def _edit_header(file: Path, name: str, edit: Callable[[int, bytearray], None]) -> None:
    """Call `edit` with the place of a tensor's type, which its offset follows."""
    num_dims = len(open_gguf(file).tensors[name].shape)
    content = bytearray(file.read_bytes())
    stored = len(name).to_bytes(8, "little") + name.encode()
    edit(content.index(stored) + len(stored) + 4 + num_dims * 8, content)
    file.write_bytes(content)


def _moved(file: Path, name: str, other: str) -> None:
    gguf_file = open_gguf(file)
    offset = gguf_file.tensors[other].offset - gguf_file.header_bytes[0]
    _edit_header(file, name, lambda place, content: _put(content, place + 4, offset, 8))


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda f: _moved(f, "blk.1.attn_v.weight", "blk.1.attn_k.weight"), r"blk\.1\.attn_v"),
        (
            lambda f: _retyped(f, "blk.0.attn_k.weight", "Q5_K"),
            r"where blk\.0\.attn_k\.weight ends",
        ),
        (
            lambda f: _retyped(f, "blk.0.attn_k.weight", "Q3_K"),
            r"where blk\.0\.attn_k\.weight ends",
        ),
        (lambda f: _retyped(f, "output_norm.weight", "F16"), "512 bytes follow output_norm.weight"),
        (lambda f: _retyped(f, "output_norm.weight", "Q4_K"), "bytes follow output_norm.weight"),
    ],
)
def test_tensors_that_overlap_or_have_another_type_are_refused_by_name(
    edit: Callable[[Path], None], message: str, tmp_path: Path
) -> None:
    file, _ = make_gguf("llama", "Q4_K", tmp_path)
    edit(file)
    with pytest.raises(BadCheckpoint, match=message):
        open_gguf(file)


def _overwrite(tensor: GgufTensor, offset: int, value: float) -> None:
    with tensor.file.open("r+b") as stream:
        stream.seek(tensor.offset + offset)
        stream.write(np.float16(value).tobytes())


@pytest.mark.parametrize(
    ("kind", "offset"),
    [
        *(("Q4_0", 0), ("Q4_1", 0), ("Q4_1", 2), ("Q5_0", 0), ("Q5_1", 2), ("Q8_0", 0)),
        *(("Q2_K", 80), ("Q2_K", 82), ("Q3_K", 108), ("Q4_K", 0), ("Q4_K", 2), ("Q5_K", 2)),
        *(("Q6_K", 208), ("IQ4_NL", 0), ("IQ4_XS", 0)),
    ],
)
@pytest.mark.parametrize("name", ["blk.1.ffn_down.weight", "token_embd.weight"])
def test_a_scale_that_is_not_finite_is_refused_by_tensor(
    name: str, kind: str, offset: int, tmp_path: Path
) -> None:
    file, _ = make_gguf("llama", kind, tmp_path)
    _overwrite(open_gguf(file).tensors[name], offset, -np.inf)
    tensor = open_gguf(file).tensors[name]
    for read in (tensor.quantized, lambda: tensor[...]):
        with pytest.raises(BadCheckpoint, match=rf"{name}: expected finite scales of {kind} "):
            read()


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_a_scale_that_is_not_finite_is_refused_at_start(family: str, tmp_path: Path) -> None:
    file, _ = make_gguf(family, "Q8_0", tmp_path)
    names = open_gguf(file).tensors
    name = next(name for name in names if name.startswith("blk.1.ffn_down"))
    _overwrite(names[name], 0, np.nan)
    with pytest.raises(BadCheckpoint, match=f"{name}: expected finite scales of Q8_0 blocks"):
        load(file)


@given(st.lists(st.text("ab\u2581\U0001f600", max_size=6), unique=True))
def test_merges_are_all_pairs_of_tokens_that_are_a_token_together(tokens: list[str]) -> None:
    expected = [
        (token[:cut], token[cut:], token)
        for token in tokens
        for cut in range(1, len(token))
        if token[:cut] in tokens and token[cut:] in tokens
    ]
    found = zip(*(part.tolist() for part in merges_of(tokens)), strict=True)
    assert [tuple(tokens[i] for i in merge) for merge in found] == expected


def _pieces(pre: str | None, text: str) -> list[str]:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    metadata: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": letters,
        "tokenizer.ggml.token_type": [1] * len(letters),
        "tokenizer.ggml.merges": [],
    }
    if pre is not None:
        metadata["tokenizer.ggml.pre"] = pre
    made = tokenizer_assets(Path("x.gguf"), metadata)["tokenizer.json"]
    tokenizer = Tokenizer.from_str(made.decode())
    pieces = tokenizer.pre_tokenizer.pre_tokenize_str(text)
    assert "".join(text[start:end] for _, (start, end) in pieces) == text
    return [text[start:end] for _, (start, end) in pieces]


@pytest.mark.parametrize(("pre", "count"), [("glm4", 1), ("glm5", 1), ("chatglm-bpe", 3)])
def test_a_word_that_is_a_token_is_not_merged_from_parts(pre: str, count: int) -> None:
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "hey"]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * len(tokens),
        "tokenizer.ggml.merges": [],
    }
    tokenizer = tokenizer_of(tokenizer_assets(Path("x.gguf"), metadata))
    assert len(tokenizer.encode("hey")) == count


TEXT = "Don't  (12345) fooBar, e\u0301a\n\n y 中文かな!"


SPLITS = json.loads(Path(__file__).with_name("pre_tokenizer_splits.json").read_text())
"""By the names of pre-tokenizers: the pieces of one text in several scripts, separated by |. The
package `regex` made them with the expressions in llama.cpp's `src/llama-vocab.cpp` and, where those
are approximations, with the original ones that its comments name."""


@pytest.mark.parametrize(
    ("pre", "expected"),
    [(name, pieces) for names, pieces in SPLITS.items() for name in names.split()],
)
def test_a_pre_tokenizer_splits_text_as_llama_cpp_does(pre: str, expected: str) -> None:
    assert _pieces(pre, expected.replace("|", "")) == expected.split("|")


def test_splits_of_all_pre_tokenizers_are_stored() -> None:
    assert {name for names in SPLITS for name in names.split()} == PRE_TOKENIZERS.keys()


GEMMA_TEXTS = (
    "he  hell\nhe\n\nhell\n\n\n é 中",
    " he\n he \n\n",
    "hellhe<bos>he",
    "\t¬\U0001f642\x00",
)


@pytest.mark.parametrize("kind", ["gemma4", "sarvam-moe"])
@pytest.mark.parametrize("text", GEMMA_TEXTS)
def test_spaces_are_letters_of_vocabularies_like_gemma_4(kind: str, text: str) -> None:
    words = ["▁", "he", "ll", "hell", "▁he", "▁hell", "▁▁", "\n", "\n\n", *"hel\t"]
    names = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens = [*names, *words]
    merges = ["h e", "l l", "he ll", "▁ he", "▁ hell", "▁ ▁", "\n \n"]
    is_gemma = kind == "gemma4"
    metadata: dict[str, Any] = {
        "tokenizer.ggml.model": "gemma4" if is_gemma else "gpt2",
        "tokenizer.ggml.pre": "default" if is_gemma else kind,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [CONTROL] * 3 + [2] + [6] * 256 + [NORMAL] * len(words),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.unknown_token_id": 3,
        "tokenizer.ggml.add_bos_token": False,
    }
    assets = tokenizer_assets(Path("x.gguf"), metadata)
    expected = GemmaTokenizer(
        {token: i for i, token in enumerate(tokens)}, [tuple(merge.split(" ")) for merge in merges]
    )
    found = Tokenizer.from_str(assets["tokenizer.json"].decode())
    ids = found.encode(text, add_special_tokens=False).ids
    assert ids == expected.encode(text, add_special_tokens=False)
    assert found.decode(ids, skip_special_tokens=False) == text
    # Files of Gemma 4 were converted without it at first.
    assert json.loads(assets["tokenizer_config.json"])["add_bos_token"] == is_gemma


def test_spaces_are_split_in_halves_of_a_run_by_jais_2() -> None:
    assert _pieces("jais-2", f"a{' ' * 13}b") == ["a", " " * 8, " " * 4, " b"]


def test_letters_of_east_asian_scripts_are_split_from_each_other_by_youtu() -> None:
    assert _pieces("youtu", "가나ㄅㄆ中か、。x") == ["가나", "ㄅㄆ", "中か", "、。", "x"]


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_no_pre_tokenizer_drops_text(pre: str) -> None:
    _pieces(pre, TEXT + " \t\u3000«a»_$5.00 ``` 'S don\u2019t \r\n  1 234,5 end  ")


@pytest.mark.parametrize("count", ["2", 2.5, [2]])
def test_a_number_of_files_that_is_none_is_named(count: Any, tmp_path: Path) -> None:
    def metadata(writer: gguf.GGUFWriter) -> None:
        writer.add_key_value("split.count", count, gguf.GGUFValueType.get_type(count))

    file, _ = make_gguf("llama", "F32", tmp_path, metadata=metadata)
    with pytest.raises(BadCheckpoint, match=r"split\.count: expected a number of files, got "):
        open_gguf(file)


def test_a_name_of_no_files_is_that_of_one_file(tmp_path: Path) -> None:
    file, _ = make_gguf("llama", "F32", tmp_path)
    renamed = file.rename(tmp_path / "model-00001-of-00000.gguf")
    assert open_gguf(renamed).files == (renamed,)


@pytest.mark.parametrize("pre", ["mine", 7, [], ["qwen2"]])
def test_a_pre_tokenizer_that_is_not_known_is_named(pre: Any) -> None:
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": ["a"],
        "tokenizer.ggml.token_type": [1],
    }
    message = rf"tokenizer\.ggml\.pre: expected one of gpt-2, .*, got {re.escape(repr(pre))}"
    with pytest.raises(UnsupportedModel, match=message):
        tokenizer_assets(Path("file.gguf"), metadata)


def test_a_file_without_a_pre_tokenizer_is_split_by_the_default_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert _pieces(None, "a12 (b)") == _pieces("default", "a12 (b)")
    assert "tokenizer.ggml.pre is missing" in caplog.text


@pytest.mark.parametrize(
    ("family", "key", "value", "is_named"),
    [
        ("llama", "llama.logit_scale", 0.5, True),
        ("llama_yarn", "llama.rope.scaling.yarn_ext_factor", 0.5, True),
        ("llama", "llama.logit_scale", 1.0, False),
        ("llama", "llama.residual_scale", 0.0, False),
        ("qwen3", "llama.logit_scale", 0.5, False),
    ],
)
def test_a_setting_of_the_architecture_that_is_not_used_is_named_in_a_warning(
    family: str,
    key: str,
    value: float,
    is_named: bool,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    file, _ = make_gguf(family, "F16", tmp_path, metadata=lambda w: w.add_float32(key, value))
    load(file)
    assert (f"{key} is not used" in caplog.text) == is_named


@pytest.mark.parametrize(
    "family", ["llama", "qwen2", "qwen3", "gemma2", "gemma3", "phi3", "mistral"]
)
def test_settings_as_llama_cpp_writes_them_cause_no_warning(
    family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file, _ = make_gguf(family, "F16", tmp_path)
    caplog.clear()
    load(file)
    assert [r for r in caplog.records if r.levelno >= logging.WARNING] == []


def test_a_model_of_embeddings_is_refused(tmp_path: Path) -> None:
    file, _ = make_gguf("qwen3", "F16", tmp_path, metadata=lambda w: w.add_causal_attention(False))
    with pytest.raises(UnsupportedModel, match=r"qwen3\.attention\.causal: expected true"):
        gguf_config(file)


@pytest.mark.parametrize("key", ["llama.rope.scaling.factor", "llama.rope.scale_linear"])
def test_a_factor_without_a_type_scales_positions_linearly(key: str, tmp_path: Path) -> None:
    file, _ = make_gguf("llama", "F16", tmp_path, metadata=lambda w: w.add_float32(key, 4.0))
    rope = gguf_config(file)["rope_parameters"]
    assert rope == {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}


def test_yarn_has_the_attention_factor_and_the_length_of_the_file(tmp_path: Path) -> None:
    def metadata(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_yarn_attn_factor(1.5)

    file, _ = make_gguf("llama", "F16", tmp_path, metadata=metadata)
    rope = gguf_config(file)["rope_parameters"]
    assert rope["attention_factor"] == 1.5
    assert rope["original_max_position_embeddings"] == MAX_POSITIONS


@pytest.mark.parametrize("is_scaled", [False, True])
def test_a_factor_of_attention_multiplies_cosines_and_sines_of_any_type(
    is_scaled: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As in llama.cpp, which multiplies all rotated queries and keys by it."""

    def metadata(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_attn_factors(1.5)
        if is_scaled:
            writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
            writer.add_rope_scaling_factor(4.0)

    file, _ = make_gguf("llama", "F16", tmp_path, metadata=metadata)
    rope = gguf_config(file)["rope_parameters"]
    assert load(file).model.max_model_len
    assert "attn_factor" not in caplog.text
    config = {"max_position_embeddings": MAX_POSITIONS, "rope_parameters": rope}
    plain = {"rope_parameters": {k: v for k, v in rope.items() if k != "table_factor"}}
    found, expected = (
        RotaryTable(RotarySettings.from_config(c, 8), 50, torch.float64, torch.device("cpu")).cos
        for c in (config, config | plain)
    )
    torch.testing.assert_close(found, expected * 1.5)


def test_the_log_says_how_weights_are_stored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file, _ = make_gguf("llama", "Q5_K", tmp_path)
    with caplog.at_level(logging.INFO):
        loaded = load(file)
    assert loaded.weights == "Q5_K"
    assert " weights=Q5_K dtype=float32 " in caplog.text
