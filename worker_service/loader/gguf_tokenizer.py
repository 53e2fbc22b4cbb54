"""The tokenizer of a GGUF file, converted to the files from which frontends build tokenizers."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from worker_service.errors import BadCheckpoint, UnsupportedModel

_DIGITS = "digits"
_GPT2 = "gpt2"
_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _TAIL
_QWEN2 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _TAIL
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_WORD_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_GPT4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    + _WORD_ENDING
    + r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    + _WORD_ENDING
    + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PRE_TOKENIZERS = {
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo"), _GPT2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r"), _DIGITS),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "smaug-bpe", "dbrx"), _LLAMA3),
    **dict.fromkeys(("qwen2",), _QWEN2),
    **dict.fromkeys(("tekken",), _TEKKEN),
    **dict.fromkeys(("gpt-4o",), _GPT4O),
}
"""By `tokenizer.ggml.pre`: a kind of pre-tokenizer, or the regular expression that splits text."""

_IGNORE_MERGES = ("llama-bpe", "llama3", "llama-v3", "tekken")
"""Pre-tokenizers with which a word that is a token is not merged from parts. They also start every
text with a BOS token."""

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6
_KEEP_SPACE_AFTER = ("<unk>", "<s>", "<|endoftext|>")
"""The special tokens of Phi-3 that keep the white space after them."""

_NAMED = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}


def tokenizer_assets(path: Path, metadata: Mapping[str, Any]) -> dict[str, bytes]:
    """Content of `tokenizer.json`, `tokenizer_config.json` and the chat template, by file name.

    path: of the GGUF file, for error messages. Empty for a file without a tokenizer. Raises
    UnsupportedModel if the kind of tokenizer is unknown, BadCheckpoint if its data is invalid.
    """
    if metadata.get("tokenizer.ggml.model", "none") in ("none", "no_vocab"):
        return {}
    tokenizer, config = _Vocabulary(path, metadata).build()
    assets = {
        "tokenizer.json": tokenizer.to_str().encode(),
        "tokenizer_config.json": json.dumps(config).encode(),
    }
    template = metadata.get("tokenizer.chat_template")
    if isinstance(template, str):
        assets["chat_template.jinja"] = template.encode()
    return assets


class _Vocabulary:
    def __init__(self, path: Path, metadata: Mapping[str, Any]) -> None:
        self._path = path
        self._metadata = metadata
        self._tokens: list[str] = self._list("tokens", str)
        self._types: list[int] = self._list("token_type", int)
        self._ids = {token: token_id for token_id, token in enumerate(self._tokens)}
        if len(self._ids) < len(self._tokens) or len(self._types) != len(self._tokens):
            raise BadCheckpoint(
                f"{path}: tokenizer.ggml.tokens: expected distinct tokens, one for each entry of"
                f" tokenizer.ggml.token_type, got {len(self._tokens)} tokens, of which"
                f" {len(self._ids)} are distinct, and {len(self._types)} types"
            )

    def build(self) -> tuple[Tokenizer, dict[str, Any]]:
        """Return the tokenizer and the content of `tokenizer_config.json`."""
        kind = self._metadata["tokenizer.ggml.model"]
        if kind == "gpt2":
            tokenizer, begins = self._byte_level()
        elif kind == "llama":
            tokenizer, begins = self._sentence_piece()
        else:
            raise UnsupportedModel(
                f"{self._path}: tokenizer.ggml.model: expected gpt2 or llama, got {kind!r}"
            )
        # As in llama.cpp: the file does not say which tokens strip the white space after them.
        is_phi3 = kind == "llama" and self._metadata.get("general.architecture") == "phi3"
        added = [
            AddedToken(
                token,
                special=kind == _CONTROL,
                normalized=False,
                rstrip=is_phi3 and token not in _KEEP_SPACE_AFTER,
            )
            for token, kind in zip(self._tokens, self._types, strict=True)
            if kind in (_CONTROL, _USER_DEFINED)
        ]
        tokenizer.add_tokens(added)
        config: dict[str, Any] = {
            "add_bos_token": self._get("add_bos_token", begins),
            "add_eos_token": self._get("add_eos_token", False),
            "clean_up_tokenization_spaces": False,
        }
        for name, key in _NAMED.items():
            token_id = self._get(key)
            if token_id is None:
                continue
            if not isinstance(token_id, int) or not 0 <= token_id < len(self._tokens):
                raise BadCheckpoint(
                    f"{self._path}: tokenizer.ggml.{key}: expected a number below"
                    f" {len(self._tokens)}, got {token_id!r}"
                )
            config[name] = self._tokens[token_id]
        return tokenizer, config

    def _byte_level(self) -> tuple[Tokenizer, bool]:
        pre = self._get("pre", "")
        if pre not in PRE_TOKENIZERS:
            raise UnsupportedModel(
                f"{self._path}: tokenizer.ggml.pre: expected one of {', '.join(PRE_TOKENIZERS)},"
                f" got {pre!r}"
            )
        merges = [self._merge(merge) for merge in self._list("merges", str)]
        ignore = pre in _IGNORE_MERGES
        tokenizer = Tokenizer(models.BPE(self._ids, merges, ignore_merges=ignore))
        split = PRE_TOKENIZERS[pre]
        splits: list[Any] = []
        if split == _DIGITS:
            splits = [pre_tokenizers.Digits(individual_digits=True)]
        elif split != _GPT2:
            splits = [pre_tokenizers.Split(Regex(split), "isolated")]
        byte_level = pre_tokenizers.ByteLevel(
            add_prefix_space=False, use_regex=split in (_GPT2, _DIGITS)
        )
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
        if split == _QWEN2:
            tokenizer.normalizer = normalizers.NFC()
        tokenizer.decoder = decoders.ByteLevel()
        return tokenizer, ignore

    def _merge(self, merge: str) -> tuple[str, str]:
        left, _, right = merge[1:].partition(" ")
        left = merge[:1] + left
        if not (left in self._ids and right in self._ids and left + right in self._ids):
            raise BadCheckpoint(
                f"{self._path}: tokenizer.ggml.merges: expected two tokens that merge into a third,"
                f" got {merge!r}"
            )
        return left, right

    def _sentence_piece(self) -> tuple[Tokenizer, bool]:
        scores: list[float] = self._list("scores", float)
        if len(scores) != len(self._tokens):
            raise BadCheckpoint(
                f"{self._path}: tokenizer.ggml.scores: expected {len(self._tokens)}, got"
                f" {len(scores)}"
            )
        normal = {
            token: score
            for token, score, kind in zip(self._tokens, scores, self._types, strict=True)
            if kind in (_NORMAL, _USER_DEFINED)  # Gemma's runs of spaces are the latter
        }
        # By the score of the merged token, then by the scores of its parts; the sort is stable.
        merges = [
            (token[:cut], token[cut:], score)
            for token, score in normal.items()
            for cut in range(1, len(token))
            if token[:cut] in normal and token[cut:] in normal
        ]
        merges.sort(key=lambda merge: (-merge[2], -normal[merge[0]], -normal[merge[1]]))
        unknown = self._get("unknown_token_id", 0)
        has_unknown = isinstance(unknown, int) and 0 <= unknown < len(self._tokens)
        model = models.BPE(
            self._ids,
            [(left, right) for left, right, _ in merges],
            unk_token=self._tokens[unknown] if has_unknown else None,
            fuse_unk=True,
            byte_fallback=_BYTE in self._types,
        )
        tokenizer = Tokenizer(model)
        prefix = self._get("add_space_prefix", True)
        spaces = normalizers.Replace(" ", "▁")
        steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        if prefix:
            tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces])
            steps.append(decoders.Strip(" ", 1, 0))
        else:
            tokenizer.normalizer = spaces
        tokenizer.decoder = decoders.Sequence(steps)
        return tokenizer, True

    def _get(self, key: str, default: Any = None) -> Any:
        return self._metadata.get(f"tokenizer.ggml.{key}", default)

    def _list(self, key: str, kind: type) -> list[Any]:
        value = self._get(key)
        if not isinstance(value, list) or not all(isinstance(item, kind) for item in value):
            raise BadCheckpoint(
                f"{self._path}: tokenizer.ggml.{key}: expected a list of {kind.__name__}"
            )
        return value
