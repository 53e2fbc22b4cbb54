"""The tokens that end a text, by a GGUF file."""

from collections.abc import Mapping
from functools import lru_cache

from worker_service.errors import BadCheckpoint
from worker_service.gguf.tokenizer import END_TOKENS
from worker_service.loader.gguf.file import Gguf
from worker_service.loader.gguf.metadata import Metadata

_CONTROL = 3

_END_NAMES = END_TOKENS.union(
    ("</s>", "<eos>", "<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]", "<|fim_repo|>"),
    ("<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>", "<|file_sep|>"),
)
"""With names that may also be text: those tokens end a text if the file says that they are
special."""


@lru_cache(maxsize=2)
def _end_places(gguf: Gguf) -> Mapping[str, int]:
    """The ids of the tokens of `_END_NAMES`, in order. They are looked for once in a file, since
    there may be hundreds of thousands of tokens and the configuration is read several times."""
    tokens = gguf.metadata["tokenizer.ggml.tokens"]
    return {token: place for place, token in enumerate(tokens) if token in _END_NAMES}


def eos_token_ids(meta: Metadata) -> list[int]:
    """The tokens that end a text."""
    keys = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
    ids = [token_id(meta, f"{key}_token_id") for key in keys]
    tokens = meta.settings.get("tokenizer.ggml.tokens")
    types = meta.settings.get("tokenizer.ggml.token_type")
    if isinstance(tokens, list) and isinstance(types, list) and len(types) == len(tokens):
        places = _end_places(meta.gguf)
        ids += [place for token, place in places.items() if token in END_TOKENS]
        ids += [place for place in places.values() if types[place] == _CONTROL]
        if {"<|return|>", "<|call|>", "<|end|>"} <= places.keys():
            # There `<|end|>` ends a message, of which a turn has several.
            ids = [token for token in ids if token != places["<|end|>"]]
    return list(dict.fromkeys(token for token in ids if token is not None))


def token_id(meta: Metadata, key: str) -> int | None:
    """A token of the tokenizer; None if the file names none."""
    found = meta.settings.get(f"tokenizer.ggml.{key}")
    if not isinstance(found, int | None):
        raise BadCheckpoint(
            f"{meta.path}: tokenizer.ggml.{key}: expected a token id, got {found!r}"
        )
    return found
