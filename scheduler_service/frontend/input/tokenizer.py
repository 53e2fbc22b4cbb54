"""A model's tokenizer: text and chats to token ids, and token ids to text.

Built from the files the worker holds (tokenizer.json, tokenizer_config.json, chat_template.jinja),
as the `transformers` library reads them: an explicit `add_bos_token` or `add_eos_token` in the
configuration overrules tokenizer.json, and special tokens may be strings or objects.

Of the library's methods only the batch methods release the interpreter's lock while they work:
long texts are encoded by them, in a thread. Before a text is encoded as a whole, its tokens are
counted piece by piece, so that a text far too long for the model costs little time and memory.
"""

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import jinja2
from tokenizers import Encoding, Tokenizer, processors

from scheduler_service.errors import UnsupportedByModel
from scheduler_service.frontend.input.chat_template import ChatTemplate
from scheduler_service.frontend.output.detokenizer import Detokenizer, DetokenizerFactory

PIECE_CHARS = 1 << 16
"""Texts up to this length are encoded at once; the tokens of longer ones are counted in pieces of
this length first."""

CUT_TOKENS = 32
"""Maximum number of tokens that change where a text is cut, because the cut separates a word."""


class TooManyTokens(Exception):
    """A text has more tokens than allowed: `number`, or at least that many."""

    def __init__(self, number: int, *, is_exact: bool) -> None:
        self.number = number
        self.is_exact = is_exact


SPECIAL_TOKEN_NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


class ModelTokenizer:
    """The tokenizer of one served model."""

    def __init__(
        self,
        tokenizer_json: bytes,
        tokenizer_config: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
    ) -> None:
        """Raises ValueError for a malformed file.

        `chat_template` is the content of chat_template.jinja; it takes precedence over the
        configuration's.
        """
        self.config = config = tokenizer_config or {}
        """tokenizer_config.json."""
        text = tokenizer_json.decode()
        self._tokenizer = _load_tokenizer(text)
        self._special_tokens = _special_tokens(config)
        _set_post_processor(self._tokenizer, config, self._special_tokens)
        self._detokenizers = DetokenizerFactory(self._tokenizer, json.loads(text).get("decoder"))
        source = chat_template or _configured_template(config, "default")
        self.template_source = source
        """The chat template as the model's author wrote it; None without one."""
        self._template = _chat_template(source, self._special_tokens)
        with_tools = None if chat_template else _configured_template(config, "tool_use")
        self.tool_template_source = with_tools or source
        """The chat template for conversations with tools; None without one."""
        self._tool_template = (
            self._template
            if self.tool_template_source == source
            else _chat_template(self.tool_template_source, self._special_tokens)
        )
        self.token_text = lru_cache(maxsize=65536)(self._detokenizers.token_text)
        """One token's text as it reads inside a text, with U+FFFD for broken characters."""

    def encode(
        self, text: str, *, add_special_tokens: bool = True, max_tokens: int | None = None
    ) -> list[int]:
        """Token ids of a text; raises TooManyTokens if there are more than `max_tokens`."""
        if max_tokens is not None and len(text) > max(PIECE_CHARS, 4 * max_tokens):
            self._check_length(text, max_tokens)
        encoding = self._encode(text, add_special_tokens)
        if max_tokens is not None and len(encoding) > max_tokens:
            raise TooManyTokens(len(encoding), is_exact=True)
        return list(encoding.ids)

    def encode_end(self, text: str, num_tokens: int, *, add_special_tokens: bool) -> list[int]:
        """The last `num_tokens` token ids of a text. Of a long text only the end is encoded, from
        far enough before the first of them that the cut does not change them."""
        num_chars = max(PIECE_CHARS, 8 * num_tokens)
        while num_chars < len(text):
            token_ids = self.encode(text[-num_chars:], add_special_tokens=add_special_tokens)
            if len(token_ids) >= num_tokens + 2 * CUT_TOKENS:
                return token_ids[-num_tokens:]
            num_chars *= 4
        return self.encode(text, add_special_tokens=add_special_tokens)[-num_tokens:]

    def _check_length(self, text: str, max_tokens: int) -> None:
        """Raise TooManyTokens once the pieces of a text so far have more than `max_tokens`."""
        number = 0
        for start in range(0, len(text), PIECE_CHARS):
            piece = self._encode(text[start : start + PIECE_CHARS], add_special_tokens=False)
            number += max(len(piece) - CUT_TOKENS, 0)
            if number > max_tokens:
                raise TooManyTokens(number, is_exact=False)

    def _encode(self, text: str, add_special_tokens: bool) -> Encoding:
        """A text's encoding, without offsets; other threads run meanwhile."""
        (encoding,) = self._tokenizer.encode_batch_fast(
            [text], add_special_tokens=add_special_tokens
        )
        return encoding

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """A conversation as a text in which the template has written the special tokens.

        Raises UnsupportedByModel without a template, InvalidArgument if it refuses the messages.
        """
        template = self._tool_template if tools else self._template
        if template is None:
            raise UnsupportedByModel("the model has no chat template", reason="NO_CHAT_TEMPLATE")
        return template.render(
            messages, add_generation_prompt=add_generation_prompt, tools=tools, variables=variables
        )

    def bad_word_sequences(self, word: str) -> list[list[int]]:
        """The token sequences that spell a word at a text's start and after a space."""
        spellings = (word, " " + word.lstrip())
        sequences = (self.encode(text, add_special_tokens=False) for text in spellings)
        return [list(ids) for ids in dict.fromkeys(map(tuple, sequences)) if ids]

    def detokenizer(
        self, *, skip_special_tokens: bool, kept: Collection[str] = frozenset()
    ) -> Detokenizer:
        """A detokenizer at the start of a text; special tokens in `kept` are not skipped."""
        return self._detokenizers.make(skip_special_tokens=skip_special_tokens, kept=kept)

    def decode(self, token_ids: Iterable[int], *, skip_special_tokens: bool) -> str:
        """Text of token ids."""
        detokenizer = self.detokenizer(skip_special_tokens=skip_special_tokens)
        return "".join(map(detokenizer.push, token_ids)) + detokenizer.flush()

    def has_token(self, text: str) -> bool:
        """Whether a text is a token of its own."""
        return self._tokenizer.token_to_id(text) is not None

    def token_name(self, token_id: int) -> str:
        """A token as the vocabulary writes it; empty for an id without one."""
        return self._tokenizer.id_to_token(token_id) or ""


def _load_tokenizer(text: str) -> Tokenizer:
    try:
        tokenizer = Tokenizer.from_str(text)
    # The library raises bare `Exception` for any error in the file.
    except Exception as error:
        raise ValueError(f"tokenizer.json: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Special tokens by name; a token is its text or an object with `content`."""
    found: dict[str, str] = {}
    for name in SPECIAL_TOKEN_NAMES:
        token = config.get(name)
        content = token.get("content") if isinstance(token, Mapping) else token
        if isinstance(content, str):
            found[name] = content
    return found


def _set_post_processor(
    tokenizer: Tokenizer, config: Mapping[str, Any], special_tokens: Mapping[str, str]
) -> None:
    """Add special tokens around texts as the configuration says, if it says anything."""
    if "add_bos_token" not in config and "add_eos_token" not in config:
        return
    before, after = (
        special_tokens[name]
        if config.get(f"add_{name}")
        and name in special_tokens
        and tokenizer.token_to_id(special_tokens[name]) is not None
        else None
        for name in ("bos_token", "eos_token")
    )
    around = [token for token in (before, after) if token is not None]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[*([before] if before else []), "$A", *([after] if after else [])],
        special_tokens=[(token, tokenizer.token_to_id(token)) for token in dict.fromkeys(around)],
    )


def _configured_template(config: Mapping[str, Any], name: str) -> str | None:
    """The configuration's template; of several named ones, the one with this name."""
    template = config.get("chat_template")
    try:
        if isinstance(template, list):
            named = {entry["name"]: entry["template"] for entry in template}
            template = named.get(name)
    except (TypeError, KeyError):
        raise ValueError("chat_template: expected entries with name and template") from None
    if template is not None and not isinstance(template, str):
        raise ValueError("chat_template: expected a text or a list of named ones")
    return template


def _chat_template(source: str | None, special_tokens: Mapping[str, str]) -> ChatTemplate | None:
    if source is None:
        return None
    try:
        return ChatTemplate(source, special_tokens)
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(f"chat template, line {error.lineno}: {error.message}") from error
