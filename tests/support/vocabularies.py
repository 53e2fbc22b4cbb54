"""Small vocabularies with texts, for constraints over models that have no tokenizer."""

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from worker_service.plan import Constraint, ConstraintKind, Thought

if TYPE_CHECKING:
    from worker_service.structured.grammars import Grammars

NUM_SPECIAL = 5
"""Tokens 0 to 4 have no text."""
END = 2
"""What ends an output."""

_PIECES = [*map(chr, range(32, 127)), "ab", "ba", "abc", "aa", "bb", '{"', '":', '"}', "10", " a"]


def token_texts(vocab_size: int) -> list[bytes]:
    """Texts by token id: printable characters, a few pieces, and nothing for all others."""
    texts = [b""] * NUM_SPECIAL + [piece.encode() for piece in _PIECES]
    return (texts + [b""] * vocab_size)[:vocab_size]


@lru_cache
def grammars(vocab_size: int) -> "Grammars":
    """Over `token_texts`."""
    from worker_service.structured.grammars import Grammars  # not on every machine with a GPU

    return Grammars(vocab_size, lambda: token_texts(vocab_size))


def text_of(token_ids: Sequence[int]) -> str:
    """The text of an output."""
    texts = token_texts(NUM_SPECIAL + len(_PIECES) + max(token_ids, default=0))
    return b"".join(texts[token_id] for token_id in token_ids).decode()


def constraint(
    kind: str,
    *texts: str,
    ends: Sequence[int] = (END,),
    lasts: Sequence[int] = (),
    thought: Thought | None = None,
) -> Constraint:
    """What an output must match, which `ends` may end."""
    return Constraint(
        kind=ConstraintKind(kind),
        texts=texts,
        end_token_ids=np.array(ends, np.int32),
        last_token_ids=np.array(lasts, np.int32),
        thought=thought,
    )
