"""Answers of the KV cache to requests for memory."""

from enum import Enum


class AllocStatus(Enum):
    """Whether memory can be allocated."""

    OK = "ok"
    LATER = "later"
    """After other sequences have freed some."""
    NEVER = "never"
    """Not even if all of it were free."""
