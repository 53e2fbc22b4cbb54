"""What a model computed of one batch; the next batch may overwrite it."""

from typing import NamedTuple

from torch import Tensor


class HeadOutput(NamedTuple):
    """Of the rows that are sampled from."""

    logits: Tensor
    """float32 [num_sampled, vocab_size]."""

    best: Tensor
    """int64 [num_sampled]: each row's largest logit's column, the first of equals."""

    largest: Tensor
    """float32 [num_sampled]: that logit; NaN, with any column, if the row has one."""


class Computed(NamedTuple):
    """Hidden states, and what the head made of some of them."""

    hidden: Tensor
    """[num_tokens, hidden_size]."""

    head: HeadOutput | None = None
    """None where the head is yet to be applied."""
