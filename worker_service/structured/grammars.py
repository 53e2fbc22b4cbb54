"""Compiled constraints over one vocabulary, shared by all sequences that have them, and the threads
that compile them and compute masks.

Compiling takes from a millisecond to about a second; frontends refuse what takes longer. It happens
on a thread of its own, from the moment a sequence comes, so that a prefill hides it.
"""

import os
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from worker_service.structured.constraint import Constraint
from worker_service.structured.lark import to_lark

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
