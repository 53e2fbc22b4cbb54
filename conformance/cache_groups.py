"""What the kit has to know of a model's cache groups."""

from collections.abc import Sequence as Items

from pagewire.v1 import model_pb2

NO_BLOCK = -1
"""Stands in a table for a block that was released: no token to come sees what it holds."""


def has_tokens(group: model_pb2.CacheGroup) -> bool:
    """Whether a group's blocks hold tokens of their sequence."""
    holds_others = (model_pb2.CACHE_LIFETIME_STATE, model_pb2.CACHE_LIFETIME_FIXED)
    return group.lifetime not in holds_others


def first_visible(group: model_pb2.CacheGroup, position: int) -> int:
    """The first position that the token at `position` sees."""
    if group.lifetime == model_pb2.CACHE_LIFETIME_WINDOW:
        return max(0, position - group.span + 1)
    if group.lifetime == model_pb2.CACHE_LIFETIME_CHUNK:
        return position // group.span * group.span
    return 0


def main_group(groups: Items[model_pb2.CacheGroup]) -> int:
    """Index of the group whose blocks the cases name: the first that keeps all tokens, or else the
    first."""
    lifetimes = [group.lifetime for group in groups]
    growing = model_pb2.CACHE_LIFETIME_GROWING
    return lifetimes.index(growing) if growing in lifetimes else 0
