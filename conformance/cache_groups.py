"""What the kit has to know of a model's cache groups."""

from collections.abc import Sequence as Items

from conformance.assertions import Skipped
from pagewire.v1 import context_pb2, model_pb2

NO_BLOCK = -1
"""Stands in a table for a block that was released: no token to come sees what it holds."""


def has_tokens(group: model_pb2.CacheGroup) -> bool:
    """Whether a group's blocks hold tokens of their sequence."""
    holds_others = (model_pb2.CACHE_LIFETIME_STATE, model_pb2.CACHE_LIFETIME_FIXED)
    return group.lifetime not in holds_others


def num_blocks(
    group: model_pb2.CacheGroup, num_tokens: int, context: Items[context_pb2.ContextPart] = ()
) -> int:
    """Blocks of a sequence of `num_tokens` tokens, none of them released."""
    if group.lifetime == model_pb2.CACHE_LIFETIME_STATE:
        return group.num_blocks
    if group.lifetime == model_pb2.CACHE_LIFETIME_FIXED:
        media = (part for part in context if part.kind == context_pb2.CONTEXT_KIND_MEDIA)
        num_tokens = sum(part.length for part in media)
    return -(-num_tokens // group.block_tokens)


def first_visible(group: model_pb2.CacheGroup, position: int) -> int:
    """The first position that the token at `position` sees."""
    if group.lifetime == model_pb2.CACHE_LIFETIME_WINDOW:
        return max(0, position - group.span + 1)
    if group.lifetime == model_pb2.CACHE_LIFETIME_CHUNK:
        return position // group.span * group.span
    return 0


def block_tokens(groups: Items[model_pb2.CacheGroup]) -> int:
    """Tokens per block of the main group. Raises Skipped without groups."""
    if not groups:
        raise Skipped("the model has no cache groups")
    return groups[main_group(groups)].block_tokens


def main_group(groups: Items[model_pb2.CacheGroup]) -> int:
    """Index of the group whose blocks the cases name: the first that keeps all tokens, or else the
    first."""
    lifetimes = [group.lifetime for group in groups]
    growing = model_pb2.CACHE_LIFETIME_GROWING
    return lifetimes.index(growing) if growing in lifetimes else 0
