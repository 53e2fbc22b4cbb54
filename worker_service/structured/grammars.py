"""Constraints as grammars in llguidance's Lark dialect, compiled once and shared by sequences.

Compiling takes from a millisecond to about a second; frontends refuse constraints that take longer.
It runs on its own thread, from the arrival of a sequence, so that the prefill hides it.
Frontends check the same grammar text (`service_common/lark.py`).
"""

import json
import os
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from llguidance import LLExecutor, LLMatcher, LLTokenizer, TokenizerWrapper

from service_common import lark
from worker_service.sampling_params import Constraint, ConstraintKind


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
"""For masks. One takes microseconds to a few milliseconds."""

STACK_BYTES = 32 * 2**20
"""The compiler recurses; frontends check that a quarter of this suffices."""


class _Texts:
    """A tokenizer for llguidance."""

    bos_token_id = None

    def __init__(self, texts: Sequence[bytes]) -> None:
        """Adds one token, the end of sequence, which means that the output matches."""
        without = [token_id for token_id, text in enumerate(texts) if not text]
        self.eos_token_id = len(texts)
        self.special_token_ids = [*without, self.eos_token_id]
        self.tokens = [text or f"<[{token_id}]>".encode() for token_id, text in enumerate(texts)]
        self.tokens.append(b"<end>")

    def __call__(self, text: bytes) -> list[int]:
        """Tokens of a text: not needed, because no tokens are forced."""
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
        """A thread that computes masks while another computes the model."""

    def expect(self, constraint: Constraint) -> Future[LLMatcher]:
        """Start to compile a constraint, unless it is compiled or being compiled.

        The result is a matcher at the start of an output, to be copied; it has an error if the
        constraint cannot be compiled. Raises ValueError if it cannot be expressed as a grammar.
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
        return LLMatcher(self._tokenizer, text, log_level=0, limits=lark.LIMITS)


def _thread_with_a_large_stack() -> ThreadPoolExecutor:
    pool = ThreadPoolExecutor(1, thread_name_prefix="compile-constraints")
    before = threading.stack_size(STACK_BYTES)
    try:
        pool.submit(int).result()  # starts it
    finally:
        threading.stack_size(before)
    return pool
