"""The tokenizer of a GGUF file, converted to the files from which frontends build tokenizers."""

import json
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from json.encoder import encode_basestring
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from worker_service.errors import BadCheckpoint, UnsupportedModel

logger = logging.getLogger(__name__)

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACES
_LLAMA3 = _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _TAIL
_QWEN2 = _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _TAIL
_QWEN35 = (
    _CONTRACTION
    + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|"
    + _SPACES
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _cased_words(ending: str, digits: str) -> str:
    """Split between words in lower case and a following capital. ending: pattern of the end of
    words; digits: of a piece of a number."""
    words = (f"{_UPPER}*{_LOWER}+{ending}", f"{_UPPER}+{_LOWER}*{ending}")
    return "|".join(rf"[^\r\n\p{{L}}\p{{N}}]?{word}" for word in words) + (
        rf"|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
    )


_GPT4O = _cased_words(f"{_CONTRACTION}?", r"\p{N}{1,3}")
_CJK = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_ASIAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|" + _SPACES
)
_SPARK = _DEEPSEEK3.removesuffix(r"[\r\n]*|" + _SPACES) + r"|[\r\n]|\s+(?!\S)|\s+"
_YOUTU = (
    "[\uac00-\ud7a3\u3131-\u318e]+"
    "|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f\ufe30-\ufe4f]+"
    "|[\u3105-\u312f]+|" + _CJK
)
"""Korean letters, punctuation of East Asian texts, Bopomofo, Chinese and Japanese letters."""
_JAIS2 = (
    _LLAMA3.removesuffix(r"|\s+(?!\S)|\s+")
    + "".join(rf"|\s{{{count}}}(?!\S)" for count in (512, 256, 128, 64, 32, 16, 8, 4, "1,2"))
    + r"|\s"
)
_NO_HAN_UPPER, _NO_HAN_LOWER = (f"{cased[:-1]}&&[^\\p{{Han}}]]" for cased in (_UPPER, _LOWER))
_KIMI = (
    rf"\p{{Han}}+|[^\r\n\p{{L}}\p{{N}}]?{_NO_HAN_UPPER}*{_NO_HAN_LOWER}+{_CONTRACTION}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_NO_HAN_UPPER}+{_NO_HAN_LOWER}*{_CONTRACTION}?|\p{{N}}{{1,3}}"
) + _TAIL
_LONG_NUMBERS = r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))"
"""Threes of digits, of which the first may be fewer."""
_ASIAN_LETTERS = (
    "[\u4e00-\u9fff\u3400-\u4dbf\uf900-\ufaff\u3040-\u30ff\uff65-\uff9f\u2f00-\u2fdf\u0e40-\u0eff"
    "\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+"
)
_LINES = r"[^\n]+|\n+"
_SENTENCES = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"

_BY_SPLITS: dict[tuple[str, ...], str] = {
    (_GPT2,): "gpt-2 phi-2 mpt olmo jais trillion granite-docling gigachat a.x-4.0 mellum exaone4"
    " roberta-bpe modern-bert jina-v1-en jina-es jina-de jina-v2-es jina-v2-de jina-v2-code",
    (r"\p{N}", _GPT2): "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2",
    (_LLAMA3,): "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 smaug-bpe dbrx"
    " jina-v5-nano glm4 glm5 chatglm-bpe",
    (_QWEN2,): "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2",
    (_QWEN35,): "qwen35",
    (_cased_words("", r"\p{N}"),): "tekken",
    (_GPT4O,): "gpt-4o llama4 kanana2 minimax-m2 talkie granite-embed-multi-97m",
    (r"\d{1,3}(?=(?:\d{3})*\b)", _GPT4O): "tiny_aya cohere2moe",
    (r"\p{N}{1,3}", _CJK, _DEEPSEEK3): "deepseek-v3 hunyuan-dense joyai-llm hy_v4",
    (_LONG_NUMBERS, _ASIAN_LETTERS, _DEEPSEEK3): "afmoe",
    (r"\p{N}{1,3}", _CJK, _SPARK, r"\p{N}"): "spark2_5",
    (_YOUTU, _cased_words(f"{_CONTRACTION}?", r"\p{N}")): "youtu",
    (_JAIS2,): "jais-2",
    (_KIMI,): "kimi-k2",
    ("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _ASIAN, r"\p{N}"): "deepseek-coder",
    (
        "[\r\n]",
        r"\s?[\p{Lu}\p{Ll}\p{Lt}]+",
        "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
        r"\s+$",
        _ASIAN,
        r"\p{N}",
    ): "deepseek-llm",
    (r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]"): "falcon",
    (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"): "default",
    (r"\p{N}{1,3}", _LLAMA3.replace("{1,3}", "+")): "minicpm5",
    (_SENTENCES,): "poro-chat bloom gpt3-finnish",
    (_SENTENCES, r"\p{N}"): "viking",
    (
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    ): "bailingmoe bailingmoe2 llada-moe",
    (
        _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}\r\n]+|" + _SPACES,
    ): "seed-coder",
    (r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _TAIL,): "ufakzeka",
    (_LINES, _QWEN2): "laguna",
    (
        _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
    ): "exaone-moe",
    (r"\p{N}+", r"(?=(\d{3})+(?!\d))"): "superbpe",
    (_LINES,): "gemma4 sarvam-moe granite-embed-multi-311m",
}
PRE_TOKENIZERS = {name: splits for splits, names in _BY_SPLITS.items() for name in names.split()}
"""By `tokenizer.ggml.pre`: the regular expressions that split text, one after the other."""

_STARTS_WITH_BOS = (
    *("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"),
    *("tekken", "jina-v5-nano"),
)
"""Pre-tokenizers that start every text with a BOS token, unless the file says otherwise."""

_COMPOSED = ("qwen2", "deepseek-r1-qwen", "qwen35", "modern-bert")
"""Pre-tokenizers of models whose texts are composed (NFC) first."""

_SPACES_ARE_LETTERS = ("gemma4", "sarvam-moe", "granite-embed-multi-311m")
"""Pre-tokenizers of vocabularies of letters, not of bytes, of which spaces are one."""

_KEEPS_NEWLINES = ("gemma4", "granite-embed-multi-311m")
"""Those with which a run of newlines that is a token is not merged from parts. They start every
text with a BOS token, whatever the file says."""

_IGNORE_MERGES = {*_STARTS_WITH_BOS, "glm4", "glm5", "minicpm5", "youtu", "granite-embed-multi-97m"}
"""Pre-tokenizers with which a word that is a token is not merged from parts."""

END_TOKENS = frozenset(
    (
        *("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>"),
        *("<|end_of_text|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<end_of_utterance>"),
        *("<|return|>", "<|call|>", "<|calls|>", "<|flush|>", "<turn|>", "<|tool_response>"),
        *("[e~[", "<\uff5cend▁of▁sentence\uff5c>"),
    )
)
"""Tokens that end a turn or a text wherever a vocabulary has them, as in llama.cpp: files often
name only one of several. They are special even if a file says that they are not."""
IntArray = npt.NDArray[np.int64]
_HASH_BASE = 0x9E3779B97F4A7C15
"""Any large odd number."""

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6
_ENCODERS = ("bert", "nomic-bert", "modern-bert")
"""Architectures of models whose texts are between two special tokens."""

_BEGINNINGS = ("cls_token_id", "bos_token_id"), ("[CLS]", "<s>")
_ENDS = ("seperator_token_id", "eos_token_id"), ("[SEP]", "</s>")
"""Keys of these, spelled as in files, and the tokens if a file has no such key."""

_MERGES = b'"merges":['
"""Where the merges of a `tokenizer.json` begin; its tokens have no quotes that are not escaped."""

_CAPITAL = re.compile("(##)?[A-Z]")
_KEEP_SPACE_AFTER = ("<unk>", "<s>", "<|endoftext|>")
"""The special tokens of Phi-3 that keep the white space after them."""

_NAMED = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}


def tokenizer_assets(path: Path, metadata: Mapping[str, Any]) -> dict[str, bytes]:
    """Content of `tokenizer.json`, `tokenizer_config.json` and the chat templates, by file name.

    path: of the GGUF file, for error messages. Empty for a file without a tokenizer. Raises
    UnsupportedModel if the kind of tokenizer is unknown, BadCheckpoint if its data is invalid.
    """
    if metadata.get("tokenizer.ggml.model", "none") in ("none", "no_vocab"):
        return {}
    tokenizer, config = _Vocabulary(path, metadata).build()
    assets = {
        "tokenizer.json": tokenizer.encode(),
        "tokenizer_config.json": json.dumps(config).encode(),
    }
    for key, template in metadata.items():
        setting, _, name = key.partition(".chat_template")
        if setting == "tokenizer" and (not name or name[0] == ".") and isinstance(template, str):
            assets[f"{name[1:] or 'chat_template'}.jinja"] = template.encode()
    return assets


def without_merges(tokenizer: bytes) -> bytes:
    """A `tokenizer.json` of `tokenizer_assets` that cannot encode, but decodes like the original:
    of a large vocabulary it is read in a quarter of the time."""
    before, merges, after = tokenizer.rpartition(_MERGES)
    return before + merges + after[after.rindex(b"]") :] if merges else tokenizer


class _Vocabulary:
    def __init__(self, path: Path, metadata: Mapping[str, Any]) -> None:
        self._path = path
        self._metadata = metadata
        self._tokens: list[str] = self._list("tokens", str)
        self._types: list[int] = self._list("token_type", int)
        if metadata["tokenizer.ggml.model"] == "bert" and len(self._types) == len(self._tokens):
            self._tokens = [*map(_piece, self._tokens, self._types)]
        self._ids = {token: token_id for token_id, token in enumerate(self._tokens)}
        self._merges: Iterable[tuple[int, int]] | None = None
        """Of a tokenizer that merges pairs of these tokens."""
        self._added: list[AddedToken] = []
        if len(self._ids) < len(self._tokens) or len(self._types) != len(self._tokens):
            raise BadCheckpoint(
                f"{path}: tokenizer.ggml.tokens: expected distinct tokens, one for each entry of"
                f" tokenizer.ggml.token_type, got {len(self._tokens)} tokens, of which"
                f" {len(self._ids)} are distinct, and {len(self._types)} types"
            )

    def build(self) -> tuple[str, dict[str, Any]]:
        """Return the contents of `tokenizer.json` and `tokenizer_config.json`."""
        kind = self._metadata["tokenizer.ggml.model"]
        if kind == "gpt2":
            tokenizer, begins = self._merged_pairs(self._pre_tokenizer())
        elif kind == "gemma4":
            tokenizer, begins = self._merged_pairs("gemma4")
        elif kind == "llama":
            tokenizer, begins = self._sentence_piece()
        elif kind == "bert":
            tokenizer, begins = self._word_piece(), True
        elif kind == "t5":
            tokenizer, begins = self._unigram(), True
        else:
            raise UnsupportedModel(
                f"{self._path}: tokenizer.ggml.model: expected gpt2, gemma4, llama, bert or"
                f" t5, got {kind!r}"
            )
        # As in llama.cpp: the file does not say which tokens strip the white space after them.
        is_phi3 = kind == "llama" and self._metadata.get("general.architecture") == "phi3"
        self._added += [
            AddedToken(
                token,
                special=kind == _CONTROL or token in END_TOKENS,
                normalized=False,
                rstrip=is_phi3 and token not in _KEEP_SPACE_AFTER,
            )
            for token, kind in zip(self._tokens, self._types, strict=True)
            if kind in (_CONTROL, _USER_DEFINED) or token in END_TOKENS
        ]
        config: dict[str, Any] = {"clean_up_tokenization_spaces": False}
        if self._metadata.get("general.architecture") in _ENCODERS:
            tokenizer.post_processor = self._between_tokens()
        else:
            always = kind == "gemma4" or self._get("pre") in _KEEPS_NEWLINES
            config["add_bos_token"] = always or self._get("add_bos_token", begins)
            config["add_eos_token"] = self._get("add_eos_token", False)
        for name, key in _NAMED.items():
            if (token := self._token(key)) is not None:
                config[name] = token
        return self._written(tokenizer), config

    def _written(self, tokenizer: Tokenizer) -> str:
        """The content of `tokenizer.json`. One that merges pairs, which has none of them yet, gets
        them as text: the library would take a second to read a large vocabulary and write it."""
        if self._merges is None:
            tokenizer.add_tokens(self._added)
            return tokenizer.to_str()
        content = json.loads(tokenizer.to_str())
        added = {self._ids[token.content]: token for token in self._added[::-1] if token.content}
        content["added_tokens"] = [
            {"id": token_id, "content": token.content, "single_word": False, "lstrip": False}
            | {"rstrip": token.rstrip, "normalized": False, "special": token.special}
            for token_id, token in sorted(added.items())
        ]
        content["model"] |= {"vocab": {}, "merges": []}
        names = [encode_basestring(token) for token in self._tokens]
        vocab = ",".join([f"{name}:{token_id}" for token_id, name in enumerate(names)])
        merges = ",".join([f"[{names[left]},{names[right]}]" for left, right in self._merges])
        before, after = json.dumps(content, ensure_ascii=False).rsplit(
            '"vocab": {}, "merges": []', 1
        )
        return f'{before}"vocab":{{{vocab}}},{_MERGES.decode()}{merges}]{after}'

    def _pre_tokenizer(self) -> str:
        pre = self._get("pre")
        if pre is None:  # files of before April 2024
            pre = "default"
            logger.warning(
                "%s: tokenizer.ggml.pre is missing, so text is split as by `default`, which may not"
                " be how the model was trained: convert it again",
                self._path,
            )
        if not isinstance(pre, str) or pre not in PRE_TOKENIZERS:
            raise UnsupportedModel(
                f"{self._path}: tokenizer.ggml.pre: expected one of {', '.join(PRE_TOKENIZERS)},"
                f" got {pre!r}"
            )
        return pre

    def _merged_pairs(self, pre: str) -> tuple[Tokenizer, bool]:
        """A tokenizer that merges pairs in the order of the file. pre: its pre-tokenizer."""
        self._merges = [self._merge(merge) for merge in self._list("merges", str)]
        splits = [pre_tokenizers.Split(Regex(split), "isolated") for split in PRE_TOKENIZERS[pre]]
        if pre in _SPACES_ARE_LETTERS:
            tokenizer = self._of_letters(has_prefix=False)
            tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits])
            if pre in _KEEPS_NEWLINES:
                runs = [token for token in self._tokens if token and not token.strip("\n")]
                self._added += [AddedToken(run, normalized=False) for run in runs]
            return tokenizer, False
        tokenizer = Tokenizer(models.BPE(ignore_merges=pre in _IGNORE_MERGES))
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
        if pre in _COMPOSED:
            tokenizer.normalizer = normalizers.NFC()
        tokenizer.decoder = decoders.ByteLevel()
        return tokenizer, pre in _STARTS_WITH_BOS

    def _merge(self, merge: str) -> tuple[int, int]:
        left, _, right = merge[1:].partition(" ")
        left = merge[:1] + left
        if not (left in self._ids and right in self._ids and left + right in self._ids):
            raise BadCheckpoint(
                f"{self._path}: tokenizer.ggml.merges: expected two tokens that merge into a third,"
                f" got {merge!r}"
            )
        return self._ids[left], self._ids[right]

    def _sentence_piece(self) -> tuple[Tokenizer, bool]:
        scores = np.array(self._scores(), np.float64)
        kinds = np.array(self._types)
        # Gemma's runs of spaces are the latter.
        normal = np.flatnonzero((kinds == _NORMAL) | (kinds == _USER_DEFINED))
        left, right, merged = merges_of([self._tokens[i] for i in normal.tolist()])
        left, right, merged = normal[left], normal[right], normal[merged]
        # By the score of the merged token, then by the scores of its parts; the sort is stable.
        order = np.lexsort([-scores[right], -scores[left], -scores[merged]])
        self._merges = zip(left[order].tolist(), right[order].tolist(), strict=True)
        return self._of_letters(has_prefix=self._get("add_space_prefix", True)), True

    def _of_letters(self, *, has_prefix: bool) -> Tokenizer:
        """A tokenizer that merges letters, of which spaces are one, and writes others as bytes."""
        unknown = self._get("unknown_token_id", 0)
        has_unknown = isinstance(unknown, int) and 0 <= unknown < len(self._tokens)
        model = models.BPE(
            unk_token=self._tokens[unknown] if has_unknown else None,
            fuse_unk=True,
            byte_fallback=_BYTE in self._types,
        )
        tokenizer = Tokenizer(model)
        spaces = normalizers.Replace(" ", "▁")
        steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        if has_prefix:
            tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces])
            steps.append(decoders.Strip(" ", 1, 0))
        else:
            tokenizer.normalizer = spaces
        tokenizer.decoder = decoders.Sequence(steps)
        return tokenizer

    def _scores(self) -> list[float]:
        scores: list[float] = self._list("scores", float)
        if len(scores) != len(self._tokens):
            raise BadCheckpoint(
                f"{self._path}: tokenizer.ggml.scores: expected {len(self._tokens)}, got"
                f" {len(scores)}"
            )
        return scores

    def _word_piece(self) -> Tokenizer:
        """BERT's tokenizer. Files do not say whether text becomes lower case: it does if no token
        begins with a capital letter."""
        words = zip(self._tokens, self._types, strict=True)
        is_cased = any(kind == _NORMAL and _CAPITAL.match(token) for token, kind in words)
        tokenizer = Tokenizer(models.WordPiece(self._ids, unk_token=self._unknown()))
        tokenizer.normalizer = normalizers.BertNormalizer(lowercase=not is_cased)
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        tokenizer.decoder = decoders.WordPiece()
        return tokenizer

    def _unigram(self) -> Tokenizer:
        """XLM-R's tokenizer."""
        scores = zip(self._tokens, self._scores(), strict=True)
        unknown = self._ids[self._unknown()]
        tokenizer = Tokenizer(models.Unigram([*scores], unk_id=unknown, byte_fallback=False))
        if self._get("precompiled_charsmap"):
            characters = bytes(byte & 255 for byte in self._list("precompiled_charsmap", int))
            try:
                tokenizer.normalizer = normalizers.Precompiled(characters)
            except Exception as error:  # the library's own has no class
                raise BadCheckpoint(
                    f"{self._path}: tokenizer.ggml.precompiled_charsmap: {error}"
                ) from error
        metaspace = pre_tokenizers.Metaspace()
        words = pre_tokenizers.WhitespaceSplit()
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, metaspace])
        tokenizer.decoder = decoders.Metaspace()
        return tokenizer

    def _unknown(self) -> str:
        """The token for what the vocabulary does not have."""
        default = (
            self._types.index(_UNKNOWN) if _UNKNOWN in self._types else self._ids.get("[UNK]", 0)
        )
        return self._token("unknown_token_id") or self._tokens[default]

    def _first_of(self, keys: Sequence[str], tokens: Sequence[str]) -> str | None:
        found = (*map(self._token, keys), *(token for token in tokens if token in self._ids))
        return next((token for token in found if token is not None), None)

    def _token(self, key: str) -> str | None:
        """The token whose id is the value of a key, if there is one. Ids beyond the vocabulary were
        dropped when the file was read."""
        token_id = self._get(key)
        if not isinstance(token_id, int | None):
            raise BadCheckpoint(
                f"{self._path}: tokenizer.ggml.{key}: expected a token id, got {token_id!r}"
            )
        return None if token_id is None else self._tokens[token_id]

    def _between_tokens(self) -> processors.TemplateProcessing:
        """Puts a text, or two, between special tokens. RoBERTa and XLM-R have two of them between
        texts, and no types of tokens."""
        begin, end = (self._first_of(*names) for names in (_BEGINNINGS, _ENDS))
        if begin is None or end is None:
            raise BadCheckpoint(
                f"{self._path}: tokenizer.ggml.bos_token_id: expected the special tokens before and"
                " after a text, or tokens [CLS] and [SEP]"
            )
        is_roberta = begin == "<s>"
        second = f"{end} $B {end}" if is_roberta else f"$B:1 {end}:1"
        return processors.TemplateProcessing(
            single=f"{begin} $A {end}",
            pair=f"{begin} $A {end} {second}",
            special_tokens=[(token, self._ids[token]) for token in dict.fromkeys((begin, end))],
        )

    def _get(self, key: str, default: Any = None) -> Any:
        return self._metadata.get(f"tokenizer.ggml.{key}", default)

    def _list(self, key: str, kind: type) -> list[Any]:
        value = self._get(key)
        if not isinstance(value, list) or not all(isinstance(item, kind) for item in value):
            raise BadCheckpoint(
                f"{self._path}: tokenizer.ggml.{key}: expected a list of {kind.__name__}"
            )
        return value


def merges_of(tokens: Sequence[str]) -> tuple[IntArray, IntArray, IntArray]:
    """Of all pairs of tokens that are another one together: indexes of the first, the second and
    that one, int64 [num_pairs], ordered by the last and the length of the first.

    Parts are compared by polynomial hashes modulo 2^64, since a vocabulary has a million of them.
    """
    lengths = np.array([len(token) for token in tokens], np.int64)
    text = np.frombuffer("".join(tokens).encode("utf-32-le"), np.uint32).astype(np.uint64)
    powers, inverses = (
        np.cumprod(np.append(np.uint64(1), np.full(len(text), base, np.uint64)), dtype=np.uint64)
        for base in (_HASH_BASE, pow(_HASH_BASE, -1, 1 << 64))
    )
    sums = np.append(np.uint64(0), np.cumsum(text * powers[:-1], dtype=np.uint64))

    def hashes(starts: IntArray, ends: IntArray) -> npt.NDArray[np.uint64]:
        found: npt.NDArray[np.uint64] = (sums[ends] - sums[starts]) * inverses[starts]
        return found

    ends = np.cumsum(lengths)
    starts = ends - lengths
    all_hashes = hashes(starts, ends)
    by_hash = np.argsort(all_hashes)
    ordered = all_hashes[by_hash]

    def look_up(first: IntArray, last: IntArray) -> IntArray:
        """The tokens that these ranges of the text are; -1 for others."""
        wanted = hashes(first, last)
        places = np.minimum(np.searchsorted(ordered, wanted), len(ordered) - 1)
        found = by_hash[places]
        is_found = (ordered[places] == wanted) & (lengths[found] == last - first)
        return np.where(is_found, found, -1)

    merged = np.repeat(np.arange(len(tokens)), np.maximum(lengths - 1, 0))
    num_before = np.append(0, np.cumsum(np.maximum(lengths - 1, 0)))[merged]
    cuts = starts[merged] + 1 + np.arange(len(merged)) - num_before
    left = look_up(starts[merged], cuts)
    merged, cuts, left = (part[left >= 0] for part in (merged, cuts, left))
    right = look_up(cuts, ends[merged])
    return left[right >= 0], right[right >= 0], merged[right >= 0]


def _piece(token: str, kind: int) -> str:
    """A token as BERT's vocabulary has it: files mark the beginnings of words instead of what
    continues them."""
    if kind == _CONTROL:
        return token
    return token[1:] if token.startswith("▁") else f"##{token}"
