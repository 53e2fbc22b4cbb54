"""The files of a model that frontends need."""

import logging
import tempfile
from collections.abc import Iterator
from pathlib import Path

logger = logging.getLogger(__name__)

ASSET_NAMES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)
_SLOW_TOKENIZER_FILES = ("tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "*.tiktoken")


def iter_assets(model_dir: Path) -> Iterator[tuple[str, bytes]]:
    """(file name, content) of each file a frontend needs and the model has.

    A model that has no `tokenizer.json` but the files of an older tokenizer gets one made from
    them, if `transformers` can. A chat template within `tokenizer_config.json` stays there.
    """
    for name in ASSET_NAMES:
        file = model_dir / name
        if file.is_file():
            yield name, file.read_bytes()
        elif name == "tokenizer.json":
            converted = _converted_tokenizer(model_dir)
            if converted is not None:
                yield name, converted


def _converted_tokenizer(model_dir: Path) -> bytes | None:
    """A `tokenizer.json` made from an older tokenizer's files; None if there are none, or if
    `transformers` cannot convert them."""
    if not any(any(model_dir.glob(pattern)) for pattern in _SLOW_TOKENIZER_FILES):
        return None
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(model_dir, use_fast=True, trust_remote_code=False)
    except Exception as error:  # whatever a tokenizer's own code raises; the model can be served
        logger.warning("no tokenizer.json could be made error=%s", str(error).splitlines()[:1])
        return None
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        made = Path(folder) / "tokenizer.json"
        return made.read_bytes() if made.is_file() else None
