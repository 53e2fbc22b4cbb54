"""Texts and pairs of texts to token ids, many of them together."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from tokenizers import Encoding

from pagewire.columns import pack
from scheduler_service.errors import InvalidArgument, PagewireError, PromptTooLong
from scheduler_service.frontend.input.processor import check_token_ids
from scheduler_service.frontend.models.chat_template import PairTemplate
from scheduler_service.frontend.models.frontend_model import FrontendModel
from scheduler_service.frontend.models.tokenizer import PIECE_CHARS, Side, TooManyTokens

MAX_SLICE_CHARS = 1 << 17
"""Most characters of several texts that are tokenized together, some tens of milliseconds."""


class Input(NamedTuple):
    """What becomes the tokens of one text at the core."""

    field: str
    """Its path in the request."""
    texts: tuple[str, ...] = ()
    """One text, or two that the model reads together; token ids instead if empty."""
    fields: tuple[str, ...] = ()
    """The paths of the texts."""
    token_ids: Sequence[int] = ()
    prefix: str = ""
    """A prompt of the model or the client, which precedes the text."""
    error: PagewireError | None = None
    """Why it cannot be one."""


class EncodedInput(NamedTuple):
    """The tokens of an input."""

    token_ids: bytes
    """An int32 column."""
    num_tokens: int
    second_text_start: int = 0
    """As in PoolingParams."""


Encoded: TypeAlias = EncodedInput | PagewireError


def slice_of(inputs: Sequence[Input]) -> int:
    """How many of the first inputs are tokenized together: at least one."""
    num_chars = 0
    for count, item in enumerate(inputs):
        num_chars += sum(map(len, item.texts))
        if num_chars > MAX_SLICE_CHARS:
            return max(1, count)
    return len(inputs)


@dataclass(frozen=True, kw_only=True, slots=True)
class InputEncoder:
    """How the inputs of a call become tokens of its model."""

    model: FrontendModel
    max_tokens: int
    """Most tokens of an input, special tokens included."""
    truncates: bool
    """Whether longer ones are cut; they fail otherwise."""
    side: Side | None
    """The end that is cut; None: the tokenizer's."""
    adds_special_tokens: bool
    template: PairTemplate | None = None
    """Makes one text of a pair; None: the tokenizer joins them."""
    instruction: str | None = None

    def encode(self, inputs: Sequence[Input]) -> list[Encoded]:
        """The tokens or the error of each input; takes some microseconds per token."""
        results: dict[int, Encoded] = {}
        texts: dict[int, tuple[str, ...]] = {}
        for place, item in enumerate(inputs):
            try:
                if item.error is not None:
                    raise item.error
                if item.texts:
                    texts[place] = self._prepared(item)
                else:
                    results[place] = self._given(item)
            except PagewireError as error:
                results[place] = error
        if texts:
            results |= zip(texts, self._encode_texts(inputs, texts), strict=True)
        return [results[place] for place in range(len(inputs))]

    def _prepared(self, item: Input) -> tuple[str, ...]:
        """The texts that are tokenized. Those that are far too long are refused before they cost
        much."""
        texts = item.texts
        for text, field in zip(texts, item.fields, strict=True):
            if not text:
                raise InvalidArgument(field, "expected a text that is not empty")
        tokenizer = self.model.require_tokenizer(item.field)
        if len(texts) == 2 and self.template is not None:
            try:
                texts = (self.template.render(*texts, self.instruction),)
            except ValueError as error:
                raise InvalidArgument(item.field, str(error)) from error
        elif item.prefix:
            texts = (item.prefix + texts[0],)
        for text in texts if not self.truncates else ():
            if len(text) > PIECE_CHARS:
                try:
                    tokenizer.encode(text, max_tokens=self.max_tokens)
                except TooManyTokens as error:
                    raise self._too_long(item, error.number, is_exact=error.is_exact) from error
        return texts

    def _encode_texts(
        self, inputs: Sequence[Input], texts: dict[int, tuple[str, ...]]
    ) -> Iterator[Encoded]:
        tokenizer = self.model.require_tokenizer("inputs")
        # Of those that are to be cut, the long ones are encoded only as far as they are needed.
        batch = {
            place: parts
            for place, parts in texts.items()
            if not self.truncates or sum(map(len, parts)) <= PIECE_CHARS
        }
        encodings = tokenizer.encode_many(
            list(batch.values()), add_special_tokens=self.adds_special_tokens
        )
        found = dict(zip(batch, encodings, strict=True))
        for place, parts in texts.items():
            encoding = found.get(place)
            try:
                if encoding is None or len(encoding) > self.max_tokens:
                    encoding = self._cut(inputs[place], parts, encoding)
                yield self._encoded(inputs[place], encoding, is_pair=len(parts) == 2)
            except PagewireError as error:
                yield error

    def _cut(self, item: Input, texts: tuple[str, ...], encoding: Encoding | None) -> Encoding:
        if not self.truncates:
            assert encoding is not None
            raise self._too_long(item, len(encoding))
        tokenizer = self.model.require_tokenizer(item.field)
        try:
            return tokenizer.encode_cut(
                texts,
                self.max_tokens,
                side=self.side or tokenizer.truncation_side,
                add_special_tokens=self.adds_special_tokens,
            )
        except ValueError as error:
            expected = f"{error} with the model's special tokens, got {self.max_tokens}"
            raise InvalidArgument("options.truncate_prompt_tokens", expected) from error

    def _encoded(self, item: Input, encoding: Encoding, *, is_pair: bool) -> EncodedInput:
        ids = encoding.ids
        if not ids:
            raise InvalidArgument(item.field, "expected a text of at least one token; it has none")
        if (token_id := max(ids)) >= self.model.info.vocab_size:
            name = self.model.require_tokenizer(item.field).token_name(token_id)
            has = f"contains the token {name!r}, which the model does not have"
            raise InvalidArgument(item.field, has)
        sequences = encoding.sequence_ids if is_pair else ()
        second = sequences.index(1) if 1 in sequences else 0
        return EncodedInput(pack(ids), len(ids), second)

    def _given(self, item: Input) -> EncodedInput:
        """Token ids of the client's."""
        ids = item.token_ids
        if not ids:
            raise InvalidArgument(f"{item.field}.ids", "expected at least one token id")
        if len(ids) > self.max_tokens:
            if not self.truncates:
                raise self._too_long(item, len(ids))
            is_left = self.side == "left"
            ids = ids[-self.max_tokens :] if is_left else ids[: self.max_tokens]
        check_token_ids(f"{item.field}.ids", ids, self.model.info.vocab_size)
        return EncodedInput(pack(ids), len(ids))

    def _too_long(self, item: Input, number: int, *, is_exact: bool = True) -> PromptTooLong:
        at_least = "" if is_exact else "at least "
        return PromptTooLong(
            f"{item.field}: expected at most {self.max_tokens} tokens, which is the model's limit, "
            f"got {at_least}{number}; options.truncate_prompt_tokens = -1 cuts longer ones",
            details={
                "field": item.field,
                "num_prompt_tokens": number,
                "max_text_tokens": self.max_tokens,
            },
        )
