"""Documents as token ids, packed into windows of one size for training."""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from tokenizers import Tokenizer
from torch import Tensor

from tools.embedded_model.documents import Document
from tools.embedded_model.tokenizer import BOS, END, EOS, SPECIAL_TOKENS, turn_token


class Batch(NamedTuple):
    """Windows of several documents each; a window starts with a fresh document."""

    token_ids: Tensor
    """int64 [num_windows, window]."""
    is_learned: Tensor
    """bool [num_windows, window], true for tokens that the model must predict."""
    attention_mask: Tensor
    """bool [num_windows, 1, window, window], true where a token sees one of its own document."""


class Packer:
    """Turns a stream of documents into batches.

    A document that does not fit into the rest of its window is cut there and its tail is
    dropped, so that no window contains an answer without its question.
    """

    def __init__(self, tokenizer: Tokenizer, documents: Iterable[Document]) -> None:
        self._tokenizer = tokenizer
        self._encoded = map(self.encode, documents)
        self._special = {token: tokenizer.token_to_id(token) for token in SPECIAL_TOKENS}

    def batch(self, num_windows: int, window: int) -> Batch:
        """The next `num_windows` windows of `window` tokens each."""
        rows = [self._window(window) for _ in range(num_windows)]
        tokens = torch.tensor([[token for token, _ in row] for row in rows])
        learned = torch.tensor([[is_learned for _, is_learned in row] for row in rows])
        return Batch(tokens, learned, self._attention_mask(tokens))

    def _attention_mask(self, tokens: Tensor) -> Tensor:
        document = (tokens == self._special[BOS]).cumsum(dim=1)
        is_same = document[:, :, None] == document[:, None, :]
        return is_same.tril()[:, None]

    def _window(self, size: int) -> list[tuple[int, bool]]:
        row: list[tuple[int, bool]] = []
        while len(row) < size:
            row += next(self._encoded)
        return row[:size]

    def encode(self, document: Document) -> list[tuple[int, bool]]:
        """Token ids of a whole document, each with whether it is learned."""
        encoded = [(self._special[BOS], False)]
        for role, text in document.segments:
            token_ids = self._tokenizer.encode(text, add_special_tokens=False).ids
            if role.is_chat:
                encoded.append((self._special[turn_token(role)], False))
                token_ids.append(self._special[END])
            encoded += [(token_id, role.is_learned) for token_id in token_ids]
        return [*encoded, (self._special[EOS], True)]
