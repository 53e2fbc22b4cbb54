"""Constraints as grammars in llguidance's Lark dialect, compiled once and shared by sequences.

Compiling takes from a millisecond to about a second; frontends refuse what takes longer. It happens
on a thread of its own, from the moment a sequence comes, so that a prefill hides it.

Frontends check the very same grammar text (`scheduler_service/frontend/structured/lark.py`): what
they accept is what is compiled here. A test compares the two.
"""

import json
import os
import re
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from worker_service.sampling_params import Constraint, ConstraintKind

NO_FORCING = '\n%llguidance {"no_forcing": true}\n'
"""Otherwise llguidance allows, where only one text can follow, no token of it but the tokenizer's
own next one; the contract allows all that begin it."""

WHITE_SPACE = r"(?: |\r?\n[ \t]{0,32})"
"""Between the parts of a JSON text: as compact, spaced and indented ones have it. Bounded, so that
no model writes white space for ever."""


def to_lark(kind: ConstraintKind, texts: Sequence[str]) -> str:
    """The grammar. Raises ValueError for a schema that is no JSON object or boolean."""
    if kind is ConstraintKind.GRAMMAR:
        return texts[0] + NO_FORCING
    if kind is ConstraintKind.JSON_SCHEMA:
        return f"start: %json {_schema(texts[0])}{NO_FORCING}"
    pattern = texts[0] if kind is ConstraintKind.REGEX else "|".join(map(_literal, texts))
    return f"start: /{_between_slashes(pattern)}/{NO_FORCING}"


def _schema(text: str) -> str:
    """Serialized again, so that the grammar gets exactly one JSON value."""
    schema = json.loads(text)
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise ValueError("expected a JSON object or true")
    return json.dumps({**schema, "x-guidance": {"whitespace_pattern": WHITE_SPACE}})


def _literal(text: str) -> str:
    """A regular expression for one text."""
    return re.sub(r"[\\.+*?()|\[\]{}^$]", r"\\\g<0>", text)


_IN_SLASHES = {"/": r"\/", "\n": r"\n", "\r": r"\r"}


def _between_slashes(pattern: str) -> str:
    """The pattern as it stands between slashes, on one line."""
    return re.sub(
        r"\\.|[/\n\r]",
        lambda found: _IN_SLASHES.get(found[0][-1], found[0]),
        pattern,
        flags=re.DOTALL,
    )


MAX_CACHED = 32
"""Compiled constraints kept after their last sequence has gone, the latest used."""

MAX_THREADS = 8
"""For masks. One takes microseconds to a few milliseconds."""

STACK_BYTES = 32 * 2**20
"""The compiler recurses; frontends check that a quarter of this suffices."""

LIMITS = LLParserLimits(
    max_items_in_row=2000,
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_lexer_states=20_000,
    max_grammar_size=200_000,
    precompute_large_lexemes=False,
    verbose_errors=False,
)
"""Bounds on what one constraint may cost, to compile and for each token: frontends check with the
same. Nothing is computed in advance over the whole vocabulary, whose size they do not mind."""


class _Texts:
    """What llguidance needs to know of a tokenizer."""

    bos_token_id = None

    def __init__(self, texts: Sequence[bytes]) -> None:
        """One token more than there are: its end of sequence stands for "the output matches"."""
        without = [token_id for token_id, text in enumerate(texts) if not text]
        self.eos_token_id = len(texts)
        self.special_token_ids = [*without, self.eos_token_id]
        self.tokens = [text or f"<[{token_id}]>".encode() for token_id, text in enumerate(texts)]
        self.tokens.append(b"<end>")

    def __call__(self, text: bytes) -> list[int]:
        """Tokens of a text: of no use where no tokens are forced."""
        return []


class Grammars:
    """Makes matchers. All methods may be called from any thread."""

    def __init__(self, token_texts: Sequence[bytes]) -> None:
        """token_texts: by token id, as many as there are logits; empty for a token without."""
        self.vocab_size = len(token_texts)
        texts = _Texts(token_texts)
        self._tokenizer = LLTokenizer(TokenizerWrapper(texts), eos_token=texts.eos_token_id)
        self._compiled: OrderedDict[str, Future[LLMatcher]] = OrderedDict()
        self._lock = threading.Lock()
        self._compiler = _thread_with_a_large_stack()
        num_threads = max(1, min(MAX_THREADS, (os.cpu_count() or 2) // 2))
        self.executor = LLExecutor(num_threads)
        """Computes the masks of several matchers at once."""
        self.beside = ThreadPoolExecutor(1, thread_name_prefix="token-masks")
        """A thread for masks, beside the one that computes the model."""

    def expect(self, constraint: Constraint) -> Future[LLMatcher]:
        """Begin to compile a constraint, unless it is there or on its way.

        Of a matcher at the start of an output, to be copied; one with an error if the constraint
        cannot be compiled. Raises ValueError if it cannot even be put into a grammar.
        """
        text = to_lark(constraint.kind, constraint.texts)
        with self._lock:
            future = self._compiled.get(text)
            if future is None:
                future = self._compiled[text] = self._compiler.submit(self._compile, text)
                if len(self._compiled) > MAX_CACHED:
                    self._compiled.popitem(last=False)
            else:
                self._compiled.move_to_end(text)
            return future

    def _compile(self, text: str) -> LLMatcher:
        return LLMatcher(self._tokenizer, text, log_level=0, limits=LIMITS)


def _thread_with_a_large_stack() -> ThreadPoolExecutor:
    pool = ThreadPoolExecutor(1, thread_name_prefix="compile-constraints")
    before = threading.stack_size(STACK_BYTES)
    try:
        pool.submit(int).result()  # starts it
    finally:
        threading.stack_size(before)
    return pool
