"""The process that makes a GGUF file's tokenizer gives what this process would make."""

import logging
import os
import signal
from collections.abc import Callable
from pathlib import Path

import gguf
import pytest
from tokenizers import Tokenizer

from tests.support.gguf_files import write
from worker_service.errors import UnsupportedModel
from worker_service.gguf.header import read_metadata
from worker_service.gguf.tokenizer import tokenizer_assets, without_merges
from worker_service.gguf.tokenizer_process import TokenizerProcess
from worker_service.structured.grammars import special_texts, token_texts

TOKENS = ["<unk>", "a", "b", "ab", "<|im_end|>"]


def make_file(folder: Path, more: Callable[[gguf.GGUFWriter], None] = lambda _: None) -> Path:
    """A file of nothing but a tokenizer."""
    file = folder / "tokenizer.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_token_list(TOKENS)
    writer.add_token_types([2, 1, 1, 1, 3])
    writer.add_token_merges(["a b"])
    writer.add_tokenizer_model("gpt2")
    more(writer)
    write(writer)
    return file


def test_the_files_are_those_that_this_process_would_make(tmp_path: Path) -> None:
    file = make_file(tmp_path, lambda writer: writer.add_tokenizer_pre("qwen2"))
    files = TokenizerProcess(file).files()
    assert files == tokenizer_assets(file, read_metadata(file))
    assert files.keys() == {"tokenizer.json", "tokenizer_config.json"}


def test_its_warnings_are_in_this_process_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = make_file(tmp_path)
    assert TokenizerProcess(file).files()
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "tokenizer.ggml.pre is missing" in record.getMessage()


def test_its_errors_are_raised_here(tmp_path: Path) -> None:
    file = make_file(tmp_path, lambda writer: writer.add_tokenizer_pre("of another age"))
    with pytest.raises(UnsupportedModel, match=r"tokenizer\.ggml\.pre: expected one of"):
        TokenizerProcess(file).files()


def test_a_process_that_is_killed_has_no_files(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    process = TokenizerProcess(make_file(tmp_path))
    os.kill(process.pid, signal.SIGKILL)
    assert process.files() is None
    assert "has ended exit_code=-9" in caplog.text


def test_a_tokenizer_without_merges_decodes_as_before() -> None:
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": ["a", "b", "ab", '"merges":[', "]]", "<end>"],
        "tokenizer.ggml.token_type": [1, 1, 1, 4, 1, 3],
        "tokenizer.ggml.merges": ["a b"],
    }
    content = tokenizer_assets(Path("x.gguf"), metadata)["tokenizer.json"]
    whole, decoding = map(Tokenizer.from_buffer, (content, without_merges(content)))
    assert [tokenizer.encode("ab").ids for tokenizer in (whole, decoding)] == [[2], [0, 1]]
    assert token_texts(decoding, 6) == token_texts(whole, 6)
    assert special_texts(decoding) == special_texts(whole) == {5: b"<end>"}


def test_a_tokenizer_that_has_no_merges_stays_as_it_is() -> None:
    content = b'{"model":{"type":"WordPiece","vocab":{"[UNK]":0}}}'
    assert without_merges(content) == content
