"""A model's tokenizer: text and chats to token ids, and token ids to text.

Built from tokenizer.json and tokenizer_config.json as the `transformers` library reads them: an
explicit `add_bos_token` or `add_eos_token` in the configuration overrules tokenizer.json, special
tokens may be strings or objects, and tokens that only the configuration declares are added.

Of the library's methods only the batch methods release the interpreter's lock while they work:
long texts are encoded by them, in a thread. Before a text is encoded as a whole, its tokens are
counted piece by piece, so that a text far too long for the model costs little time and memory.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal, TypeAlias

import jinja2
from tokenizers import AddedToken, Encoding, Tokenizer, processors

from scheduler_service.errors import UnsupportedByModel
from scheduler_service.frontend.models.chat_template import ChatTemplate
from scheduler_service.frontend.output.detokenizer import Detokenizer, DetokenizerFactory

PIECE_CHARS = 1 << 16
"""Texts up to this length are encoded at once; the tokens of longer ones are counted in pieces of
this length first."""

CUT_TOKENS = 32
"""Maximum number of tokens that change where a text is cut, because the cut separates a word."""


Side: TypeAlias = Literal["left", "right"]
"""The end of a text that is cut off."""


class TooManyTokens(Exception):
    """A text has more tokens than allowed: `number`, or at least that many."""

    def __init__(self, number: int, *, is_exact: bool) -> None:
        self.number = number
        self.is_exact = is_exact


DEFAULT_TEMPLATE, TOOL_TEMPLATE = TEMPLATE_NAMES = ("default", "tool_use")
"""The chat templates that are used: without and, if there is one, with tools."""

STANDARD_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token")

END_TOKENS = ("eos_token", "eot_token", "eom_token")
"""Names of special tokens that end an answer."""


class ModelTokenizer:
    """The tokenizer of one served model."""

    def __init__(
        self,
        tokenizer_json: bytes,
        tokenizer_config: Mapping[str, Any] | None = None,
        chat_templates: Mapping[str, str] | None = None,
        added_tokens: Mapping[str, int] | None = None,
        template_variables: Mapping[str, Any] | None = None,
    ) -> None:
        """Raises ValueError for a malformed file.

        `chat_templates` are sources by name. One that cannot be used refuses chats.
        `template_variables` are those that requests do not set.
        `added_tokens`: ids by text, of an older model's added_tokens.json.
        """
        self.config = config = tokenizer_config or {}
        """tokenizer_config.json."""
        self.truncation_side: Side = "left" if config.get("truncation_side") == "left" else "right"
        """Where a text that is too long is cut by default."""
        self._tokenizer = _load_tokenizer(tokenizer_json)
        self._special_tokens = special_tokens(config)
        self.warnings: list[str] = []
        """What the files name and does not have the effect that their author expects."""
        self._add_tokens(added_tokens or {})
        _set_post_processor(self._tokenizer, config, self._special_tokens)
        self._detokenizers = DetokenizerFactory(self._tokenizer)
        self._templates: dict[str, ChatTemplate] = {}
        self.template_errors: dict[str, str] = {}
        """Why chat templates cannot be used, by name."""
        sources = chat_templates or {}
        self.template_source = sources.get(DEFAULT_TEMPLATE)
        """The chat template as the model's author wrote it; None without one."""
        self.tool_template_source = sources.get(TOOL_TEMPLATE, self.template_source)
        """The chat template for conversations with tools; None without one."""
        self._load_templates(sources, template_variables or {})
        self.end_token_ids = frozenset(self._end_token_ids())
        """Tokens that end an answer, as the files name them or the template writes them."""
        self.token_text = lru_cache(maxsize=65536)(self._detokenizers.token_text)
        """One token's text as it reads inside a text, with U+FFFD for broken characters."""

    def _add_tokens(self, older: Mapping[str, int]) -> None:
        """Add the tokens that the configuration declares, or else those of older files; others of
        the vocabulary, which it only names, become special. Tokens that have no id there cannot
        have one in the model."""
        added = self._tokenizer.get_added_tokens_decoder()
        names = dict.fromkeys((*self._special_tokens.values(), *extra_tokens(self.config)))
        if "added_tokens_decoder" in self.config:
            declared = declared_tokens(self.config)
        else:
            tokens = {i: AddedToken(text, special=text in names) for text, i in older.items()}
            declared = dict(sorted((tokens | added).items()))
        known = {token.content for token in (*added.values(), *declared.values())}
        wanted: list[tuple[int | None, AddedToken]] = [*declared.items()]
        wanted += [(None, AddedToken(text, special=True)) for text in names if text not in known]
        found, num_tokens = [], self._tokenizer.get_vocab_size(with_added_tokens=True)
        for token_id, token in wanted:
            has_id = self._tokenizer.token_to_id(token.content) is not None
            if has_id or token_id == num_tokens:
                num_tokens += not has_id
                token.special |= token.content in self._special_tokens.values()
                found.append(token)
            else:
                self.warnings.append(f"token {token.content!r} is not in the vocabulary")
        self._tokenizer.add_tokens(found)  # at once: every call reads all added tokens again

    def _load_templates(self, sources: Mapping[str, str], variables: Mapping[str, Any]) -> None:
        for name in TEMPLATE_NAMES:
            try:
                if name in sources:
                    constants = {**self._special_tokens, **variables}
                    self._templates[name] = ChatTemplate(sources[name], constants)
            except jinja2.TemplateSyntaxError as error:
                self.template_errors[name] = f"line {error.lineno}: {error.message}"
            except Exception as error:  # of Python's compiler, for one that is nested too deeply
                self.template_errors[name] = str(error)
        written = frozenset().union(*(template.variables for template in self._templates.values()))
        for name in sorted(written & set(STANDARD_TOKENS) - set(self._special_tokens)):
            self.warnings.append(f"the chat template writes {name}, which no file names")
        for name in sorted(set(variables) - written):
            self.warnings.append(f"chat_template_kwargs: the chat template does not read {name}")

    def _end_token_ids(self) -> Iterator[int]:
        """The ids of `END_TOKENS`, and of the special token that the template writes after an
        answer, unless it also writes it between a thought and the answer."""
        for name in END_TOKENS:
            token_id = self._tokenizer.token_to_id(self._special_tokens.get(name, ""))
            if token_id is not None:
                yield token_id
        if (template := self._templates.get(DEFAULT_TEMPLATE)) is not None:
            before, after = map(self._special_ids, template.answer_surroundings())
            if after and after[0] not in before:
                yield after[0]

    def _special_ids(self, text: str) -> list[int]:
        added = self._tokenizer.get_added_tokens_decoder()
        ids = self.encode(text, add_special_tokens=False)
        return [id for id in ids if id in added and added[id].special]

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
        """The last `num_tokens` token ids of a text."""
        ids = self._encode_part(text, num_tokens, "left", add_special_tokens).ids
        return list(ids[-num_tokens:])

    def encode_many(
        self, inputs: Sequence[tuple[str, ...]], *, add_special_tokens: bool
    ) -> list[Encoding]:
        """Encodings of inputs of one text or two, without offsets; other threads run meanwhile."""
        batch: Any = [texts if len(texts) == 2 else texts[0] for texts in inputs]
        return self._tokenizer.encode_batch_fast(batch, add_special_tokens=add_special_tokens)

    def encode_cut(
        self, texts: Sequence[str], num_tokens: int, *, side: Side, add_special_tokens: bool
    ) -> Encoding:
        """The encoding of a text, or of a pair, cut at one side to `num_tokens` tokens, with the
        special tokens around what is left. The longer one of a pair is cut first, as
        `transformers` does it. Raises ValueError if there is no room for a token of every text."""
        added = self.num_special_tokens(len(texts)) if add_special_tokens else 0
        room = num_tokens - added
        if room < len(texts):
            raise ValueError(f"expected at least {added + len(texts)}")
        parts = [self._encode_part(text, room, side, False) for text in texts]
        lengths = _cut_lengths([len(part) for part in parts], room)
        for part, length in zip(parts, lengths, strict=True):
            part.truncate(length, direction=side)
        first, second = parts if len(parts) == 2 else (parts[0], None)
        return self._tokenizer.post_process(first, second, add_special_tokens)

    def num_special_tokens(self, num_texts: int) -> int:
        """Special tokens around a text, or around the two of a pair."""
        return self._tokenizer.num_special_tokens_to_add(num_texts == 2)

    def _encode_part(
        self, text: str, num_tokens: int, side: Side, add_special_tokens: bool
    ) -> Encoding:
        """The encoding of a text, or of enough of it to have `num_tokens` tokens after a cut at
        `side`: of a long text only the other end, with so much more that the place where the text
        is cut does not change them."""
        num_chars = max(PIECE_CHARS, 8 * num_tokens)
        while num_chars < len(text):
            part = text[-num_chars:] if side == "left" else text[:num_chars]
            encoding = self._encode(part, add_special_tokens)
            if len(encoding) >= num_tokens + 2 * CUT_TOKENS:
                return encoding
            num_chars *= 4
        return self._encode(text, add_special_tokens)

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
        return self.encode_many([(text,)], add_special_tokens=add_special_tokens)[0]

    def chat_template(self, *, with_tools: bool) -> ChatTemplate:
        """The template of a conversation. Raises UnsupportedByModel if there is none."""
        has_own = TOOL_TEMPLATE in self._templates or TOOL_TEMPLATE in self.template_errors
        name = TOOL_TEMPLATE if with_tools and has_own else DEFAULT_TEMPLATE
        if (template := self._templates.get(name)) is not None:
            return template
        reason = "the model has no chat template (a worker's --chat-template gives it one)"
        if (error := self.template_errors.get(name)) is not None:
            reason = f"the model's chat template cannot be used: {error}"
        raise UnsupportedByModel(f"{reason}; texts and token ids work", reason="NO_CHAT_TEMPLATE")

    def bad_word_sequences(self, word: str) -> list[list[int]]:
        """The token sequences that spell a word at a text's start and after a space."""
        spellings = (word, " " + word.lstrip())
        sequences = (self.encode(text, add_special_tokens=False) for text in spellings)
        return [list(ids) for ids in dict.fromkeys(map(tuple, sequences)) if ids]

    def detokenizer(
        self,
        *,
        skip_special_tokens: bool,
        kept: Collection[str] = frozenset(),
        follows: Sequence[int] = (),
    ) -> Detokenizer:
        """A detokenizer at the start of a text, or of what comes after the tokens `follows`;
        special tokens in `kept` are not skipped."""
        return self._detokenizers.make(
            skip_special_tokens=skip_special_tokens, kept=kept, follows=follows
        )

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


def _cut_lengths(lengths: list[int], room: int) -> list[int]:
    """Lengths of one text or two that fit into `room`, the longer one cut first."""
    if sum(lengths) <= room:
        return lengths
    if len(lengths) == 1:
        return [room]
    shorter = min(min(lengths), room // 2)
    is_first_shorter = lengths[0] <= lengths[1]
    return [shorter, room - shorter] if is_first_shorter else [room - shorter, shorter]


def _load_tokenizer(content: bytes) -> Tokenizer:
    try:
        tokenizer = Tokenizer.from_buffer(content)
    # The library raises bare `Exception` for any error in the file.
    except Exception as error:
        raise ValueError(f"tokenizer.json: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def token_text(token: Any) -> str | None:
    """The text of a token, which is a text or an object with `content`; None for anything else."""
    content = token.get("content") if isinstance(token, Mapping) else token
    return content if isinstance(content, str) else None


def special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Special tokens by name: all settings whose names end with `_token`, and the tokens that
    `extra_special_tokens` names."""
    found = {name: token for name, token in config.items() if name.endswith("_token")}
    for key in ("extra_special_tokens", "model_specific_special_tokens"):
        if isinstance(config.get(key), Mapping):
            found |= config[key]
    texts = {name: token_text(token) for name, token in found.items()}
    return {name: text for name, text in texts.items() if text}


def extra_tokens(config: Mapping[str, Any]) -> list[str]:
    """Special tokens without names."""
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens")
    texts = map(token_text, extra if isinstance(extra, list) else ())
    return [text for text in texts if text]


def declared_tokens(config: Mapping[str, Any]) -> dict[int, AddedToken]:
    """The added tokens that the configuration declares, by ascending id. Raises ValueError."""
    try:
        tokens = {
            int(token_id): AddedToken(**{k: v for k, v in token.items() if k != "__type"})
            for token_id, token in (config.get("added_tokens_decoder") or {}).items()
        }
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"added_tokens_decoder: expected tokens by id: {error}") from error
    return dict(sorted(tokens.items()))


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
