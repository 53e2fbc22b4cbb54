"""Texts of tokens, and constraints as grammars in llguidance's Lark dialect, compiled once and
shared by sequences.

Compiling takes from a millisecond to about a second; frontends refuse constraints that take longer.
It runs on its own thread, from the arrival of a sequence, so that the prefill hides it.
Frontends check the same grammar text (`service_common/lark.py`).
"""

import json
import os
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache

from llguidance import LLExecutor, LLMatcher, LLTokenizer, TokenizerWrapper
from tokenizers import Tokenizer

from service_common import lark
from service_common.token_bytes import byte_level_bytes, decoder_steps
from worker_service.plan import Constraint, ConstraintKind, Thought
from worker_service.structured.thoughts import ThoughtTexts

NO_TEXT = b""
_BYTE_FALLBACK = re.compile("<0x([0-9A-Fa-f]{2})>")


def token_texts(tokenizer: Tokenizer, vocab_size: int) -> list[bytes]:
    """The text of each token, `vocab_size` of them.

    Byte-level tokens are sequences of bytes, byte-fallback tokens (`<0x0A>`) one byte. The text of
    any other token is what it adds to a text that ends with the same token, since decoders treat
    the first token of a text specially. Special tokens have no text, nor have ids beyond the
    tokenizer's: a model often has more logits than its vocabulary has tokens.
    """
    steps = decoder_steps(tokenizer)
    added = tokenizer.get_added_tokens_decoder()
    special = {token_id for token_id, token in added.items() if token.special}
    ids = range(min(vocab_size, tokenizer.get_vocab_size(with_added_tokens=True)))
    names = [tokenizer.id_to_token(token_id) or "" for token_id in ids]
    if steps == ["ByteLevel"]:
        texts = [byte_level_bytes(name) for name in names]
    else:
        texts = _decoded(tokenizer, names, has_byte_fallback="ByteFallback" in steps)
    for token_id in special.intersection(ids):
        texts[token_id] = NO_TEXT
    return texts + [NO_TEXT] * (vocab_size - len(texts))


def special_texts(tokenizer: Tokenizer) -> dict[int, bytes]:
    """The contents of special tokens, which thoughts may contain, by id."""
    added = tokenizer.get_added_tokens_decoder().items()
    return {token_id: token.content.encode() for token_id, token in added if token.special}


def _decoded(tokenizer: Tokenizer, names: Sequence[str], *, has_byte_fallback: bool) -> list[bytes]:
    """The text that each token adds to a text that ends with the same token."""

    def decode(repeats: int) -> list[str]:
        ids = [[token_id] * repeats for token_id in range(len(names))]
        texts: list[str] = tokenizer.decode_batch(ids, skip_special_tokens=False)
        return texts

    texts = [twice[len(once) :].encode() for once, twice in zip(decode(1), decode(2), strict=True)]
    if has_byte_fallback:
        for token_id, name in enumerate(names):
            if found := _BYTE_FALLBACK.fullmatch(name):
                texts[token_id] = bytes([int(found[1], 16)])
    return texts


def to_lark(kind: ConstraintKind, texts: Sequence[str]) -> str:
    """The grammar. Raises ValueError for a schema that is no JSON object or boolean."""
    if kind is ConstraintKind.GRAMMAR:
        return lark.grammar_to_lark(texts[0])
    if kind is ConstraintKind.REGEX:
        return lark.regex_to_lark(texts[0])
    if kind is ConstraintKind.CHOICE:
        return lark.choice_to_lark(texts)
    schema = json.loads(texts[0])
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise ValueError("expected a JSON object or true")
    return lark.schema_to_lark(schema)


MAX_CACHED = 32
"""Compiled constraints that are kept, the most recently used ones."""

MAX_THREADS = 8
"""Maximum number of threads for masks. One mask takes microseconds to a few milliseconds."""

PREPARE_AFTER_S = 5.0
"""When the vocabulary is prepared unless a constraint needs it earlier: of a large one it takes
seconds, in which the first requests would wait."""

STACK_BYTES = 32 * 2**20
"""The compiler recurses; frontends check that a quarter of this suffices."""

MAX_TEXT_BYTES = 1024
"""Length up to which llguidance takes the text of a token; it panics at a longer one."""


class _Texts:
    """A tokenizer for llguidance."""

    bos_token_id = None

    def __init__(self, texts: Sequence[bytes]) -> None:
        """Adds one token, the end of sequence, which means that the output matches. Tokens with
        texts that are too long are as those without: no constrained output has them."""
        texts = [text if len(text) <= MAX_TEXT_BYTES else NO_TEXT for text in texts]
        without = [token_id for token_id, text in enumerate(texts) if not text]
        self.eos_token_id = len(texts)
        self.special_token_ids = [*without, self.eos_token_id]
        self.tokens = [text or f"<[{token_id}]>".encode() for token_id, text in enumerate(texts)]
        self.tokens.append(b"<end>")

    def __call__(self, text: bytes) -> list[int]:
        """Tokens of a text: not needed, because no tokens are forced."""
        return []


class _Vocabulary:
    """The texts of tokens, for constraints."""

    def __init__(self, texts: Sequence[bytes]) -> None:
        self.texts = texts
        wrapped = _Texts(texts)
        # Two calls, for each holds Python's lock, of a large vocabulary for half a second, and no
        # heartbeat is sent meanwhile.
        whole = LLTokenizer(TokenizerWrapper(wrapped), eos_token=wrapped.eos_token_id, slices=[])
        self.tokenizer = whole.with_slices(LLTokenizer.general_slices())


class Grammars:
    """Makes matchers. All methods may be called from any thread.

    The vocabulary is prepared on the thread that compiles, once a constraint needs it.
    """

    def __init__(
        self,
        vocab_size: int,
        token_texts: Callable[[], Sequence[bytes]],
        special_texts: Callable[[], Mapping[int, bytes]] = dict,
    ) -> None:
        """vocab_size: number of logits; token_texts: returns as many texts, by token id, which are
        empty for tokens without; special_texts: returns those of some of the tokens without, in
        a thought."""
        self.vocab_size = vocab_size
        self.thought = lru_cache(MAX_CACHED)(self._prepare_thought)
        """Prepares a kind of thought, in tens of milliseconds the first time."""
        self._special_texts = special_texts
        self._compiled: OrderedDict[str, Future[LLMatcher]] = OrderedDict()
        self._lock = threading.Lock()
        self._compiler = _thread_with_a_large_stack()
        self._token_texts = token_texts
        self._preparation: Future[_Vocabulary] | None = None
        """None before it has begun."""
        timer = threading.Timer(PREPARE_AFTER_S, self._prepare_in_advance)
        timer.daemon = True
        timer.start()
        num_threads = max(1, min(MAX_THREADS, (os.cpu_count() or 2) // 2))
        self.executor = LLExecutor(num_threads)
        """Computes the masks of several matchers at once."""
        self.mask_thread = ThreadPoolExecutor(1, thread_name_prefix="token-masks")
        """A thread that computes masks while another computes the model."""

    def expect(self, constraint: Constraint) -> Future[LLMatcher]:
        """Start to compile a constraint, unless it is compiled or being compiled.

        The result is a matcher at the start of an output, to be copied; it has an error if the
        constraint cannot be compiled. Raises ValueError if it cannot be expressed as a grammar.
        """
        text = to_lark(constraint.kind, constraint.texts)
        self._prepare()
        with self._lock:
            future = self._compiled.get(text)
            if future is None:
                future = self._compiled[text] = self._compiler.submit(self._compile, text)
                if len(self._compiled) > MAX_CACHED:
                    self._compiled.popitem(last=False)
            else:
                self._compiled.move_to_end(text)
            return future

    def _prepare(self) -> None:
        """Begin to prepare the vocabulary, unless that has begun."""
        with self._lock:
            if self._preparation is None:
                self._preparation = self._compiler.submit(self._make_vocabulary)

    def _prepare_in_advance(self) -> None:
        with suppress(RuntimeError):  # the process is ending
            self._prepare()

    def _make_vocabulary(self) -> _Vocabulary:
        return _Vocabulary(self._token_texts())

    def _vocabulary(self) -> _Vocabulary:
        """Waits for it. Raises what its preparation has raised."""
        assert self._preparation is not None, "begun with the first constraint"
        return self._preparation.result()

    def _compile(self, text: str) -> LLMatcher:
        return LLMatcher(self._vocabulary().tokenizer, text, log_level=0, limits=lark.LIMITS)

    def _prepare_thought(self, thought: Thought) -> ThoughtTexts:
        texts, special = self._vocabulary().texts, self._special_texts()
        return ThoughtTexts(
            [text or special.get(token, b"") for token, text in enumerate(texts)], thought
        )


def _thread_with_a_large_stack() -> ThreadPoolExecutor:
    pool = ThreadPoolExecutor(1, thread_name_prefix="compile-constraints")
    before = threading.stack_size(STACK_BYTES)
    try:
        pool.submit(int).result()  # starts it
    finally:
        threading.stack_size(before)
    return pool
