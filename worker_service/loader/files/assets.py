"""The files of a model that frontends need: configuration, tokenizer, chat templates."""

import json
import logging
import tempfile
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from worker_service.gguf.header import is_gguf
from worker_service.gguf.tokenizer import tokenizer_assets
from worker_service.gguf.tokenizer_process import TokenizerProcess
from worker_service.loader.files.json_files import read_json
from worker_service.loader.gguf.config import gguf_config
from worker_service.loader.gguf.file import open_gguf

logger = logging.getLogger(__name__)

ASSET_NAMES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
)
_MORE_TEMPLATES = "additional_chat_templates/*.jinja"
_SENTENCE_PIECES, _TEKKEN = "tokenizer.model", "tekken.json"
_SAMPLE = "a b"
"""A text that is tokens in every vocabulary; the library makes an empty one where it finds no file
that it knows."""

_SLOW_TOKENIZER_FILES = (_SENTENCE_PIECES, "vocab.json", "vocab.txt", "spiece.model", "*.tiktoken")


def iter_assets(
    model_dir: Path, tokenizer: TokenizerProcess | None = None
) -> Iterator[tuple[str, bytes]]:
    """Yield (file name, content) of each file that frontends need and the model has.

    If a model has no `tokenizer.json` but the files of a slow tokenizer, `transformers` converts
    them if it can. A chat template in `tokenizer_config.json` stays there. Additional templates
    follow as `NAME.jinja`. For a GGUF file all assets are generated from its metadata; tokenizer:
    the process that does so, None: this one. Raises BadCheckpoint or UnsupportedModel.
    """
    if is_gguf(model_dir):
        yield "config.json", json.dumps(gguf_config(model_dir)).encode()
        files = None if tokenizer is None else tokenizer.files()
        if files is None:
            files = tokenizer_assets(model_dir, open_gguf(model_dir).metadata)
        yield from files.items()
        return
    for name in ASSET_NAMES:
        file = model_dir / name
        content = file.read_bytes() if file.is_file() else None
        if name == "tokenizer.json":
            content = _converted_tokenizer(model_dir) if content is None else content
            if content is not None and transformer_settings(model_dir).get("do_lower_case"):
                content = _in_lower_case(content)
        if content is not None:
            yield name, content
    for file in sorted(model_dir.glob(_MORE_TEMPLATES)):
        yield file.name, file.read_bytes()


def read_tokenizer(content: bytes) -> Tokenizer:
    """The tokenizer of a `tokenizer.json`. Raises ValueError if it cannot be used."""
    try:
        return Tokenizer.from_buffer(content)
    except Exception as error:  # the library's own has no class
        raise ValueError(error) from error


_TRANSFORMER_SETTINGS = "sentence_*_config.json"


def transformer_settings(model_dir: Path) -> Mapping[str, Any]:
    """The content of sentence-transformers' `sentence_bert_config.json`, or of its equivalent for
    another family; empty without one."""
    files = sorted(model_dir.glob(_TRANSFORMER_SETTINGS))
    return read_json(files[0]) if files else {}


def _in_lower_case(tokenizer: bytes) -> bytes:
    """A `tokenizer.json` that changes texts to lower case first."""
    content = json.loads(tokenizer)
    normalizers = [{"type": "Lowercase"}, content.get("normalizer")]
    content["normalizer"] = {"type": "Sequence", "normalizers": [*filter(None, normalizers)]}
    return json.dumps(content).encode()


def _converted_tokenizer(model_dir: Path) -> bytes | None:
    """A `tokenizer.json` converted from a slow tokenizer's files; None if there are none, or if
    `transformers` cannot convert them, which is logged."""
    if not any(any(model_dir.glob(pattern)) for pattern in _SLOW_TOKENIZER_FILES):
        if any(model_dir.glob(_TEKKEN)):
            logger.warning("%s is not read, only a tokenizer.json is", _TEKKEN)
        return None
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(model_dir, use_fast=True, trust_remote_code=False)
        if not tokenizer(_SAMPLE, add_special_tokens=False).input_ids:
            raise ValueError(f"what it finds in the files has no tokens for {_SAMPLE!r}")
    except Exception as error:  # tokenizers raise anything; the model can be served without one
        problem = str(error).splitlines()[:1]
        if (model_dir / _SENTENCE_PIECES).is_file() and find_spec("sentencepiece") is None:
            problem = [f"{_SENTENCE_PIECES} needs the package sentencepiece"]
        logger.warning("tokenizer cannot be converted to tokenizer.json error=%s", problem)
        return None
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        made = Path(folder) / "tokenizer.json"
        return made.read_bytes() if made.is_file() else None
