"""The prefix cache: sequences that share a prefix share its KV blocks.

The KV of a token depends on all tokens before it. So a full block has a key that stands for its
tokens and all before them: a 128-bit hash of the previous block's key and its own tokens.

A block gets its key once the result of the step that filled it is in. Plans are executed in order,
so an earlier use would find the right KV too, unless that step fails; because of the wait, blocks
that were never confirmed are never found. A sequence whose tokens are mostly being computed for
another one waits for it, so that among many simultaneous requests only the first one computes a
shared prefix. The last token of a sequence is always computed, for its logits, even if all blocks
are found; so nothing is ever written to a block with a key.
"""

from array import array
from collections.abc import Iterable
from itertools import islice

import xxhash

from scheduler_service.core.kv_cache.block_manager import BlockManager
from scheduler_service.core.kv_cache.block_pool import BlockKey
from scheduler_service.core.sequence import Sequence, SequenceStatus

_TOKEN = "i"  # int32
_TOKEN_BYTES = array(_TOKEN).itemsize


def root_key(salt: bytes = b"") -> BlockKey:
    """The parent of the first block's key; sequences with different salts share nothing."""
    return xxhash.xxh3_128_digest(salt)


def block_keys(parent: BlockKey, tokens: Iterable[int], block_size: int) -> list[BlockKey]:
    """The keys of the blocks that these tokens fill, which follow the block with key `parent`."""
    data = array(_TOKEN, tokens).tobytes()
    num_bytes = block_size * _TOKEN_BYTES
    keys = []
    for start in range(0, len(data), num_bytes):
        parent = xxhash.xxh3_128_digest(parent + data[start : start + num_bytes])
        keys.append(parent)
    return keys


class PrefixCache:
    """Finds the blocks that hold a sequence's first tokens, and offers its own blocks to others."""

    def __init__(
        self, blocks: BlockManager, *, enabled: bool = True, isolate_tenants: bool = False
    ) -> None:
        """`enabled`: if False, nothing is found, and every sequence is computed in full."""
        self._enabled = enabled
        self._blocks = blocks
        self._block_size = blocks.block_size
        self._isolate_tenants = isolate_tenants
        self._unconfirmed: dict[Sequence, None] = {}
        """Sequences whose first tokens were being computed when the last one was admitted."""

    def find(self, seq: Sequence) -> list[int]:
        """The blocks that hold the longest known start of a waiting sequence."""
        num_blocks = self._most_reusable_blocks(seq)
        return self._blocks.find(islice(self._keys(seq, num_blocks), num_blocks))

    def find_on_host(self, seq: Sequence, num_found: int) -> list[int]:
        """The host blocks that hold what follows the first `num_found` blocks of a waiting
        sequence."""
        num_blocks = self._most_reusable_blocks(seq)
        keys = islice(self._keys(seq, num_blocks), num_found, num_blocks)
        return self._blocks.find_on_host(keys)

    def is_to_come(self, seq: Sequence, num_found: int) -> bool:
        """Whether most of the tokens that a waiting sequence would compute after its first
        `num_found` blocks are being computed for another one, and will be found soon."""
        num_blocks = self._most_reusable_blocks(seq)
        if num_blocks <= num_found:
            return False
        keys = self._keys(seq, num_blocks)
        most_shared = 0
        for other in filter(_is_unconfirmed, self._unconfirmed):
            others = other.block_keys.get(self._block_size, [])
            end, most = num_found, min(num_blocks, len(others))
            while end < most and keys[end] == others[end]:
                end += 1
            most_shared = max(most_shared, end - num_found)
        num_missing = seq.num_known - num_found * self._block_size
        return 2 * most_shared * self._block_size > num_missing

    def note_admission(self, seq: Sequence) -> None:
        """Record that a sequence starts to run: its first tokens will be computed."""
        self._unconfirmed = dict.fromkeys(filter(_is_unconfirmed, self._unconfirmed))
        self._unconfirmed[seq] = None

    def note_departure(self, seq: Sequence) -> None:
        """Record that a running sequence moves to another worker group."""
        self._unconfirmed.pop(seq, None)

    def note_arrival(self, seq: Sequence) -> None:
        """Offer blocks that were swapped in for a running sequence, and are on the device now."""
        self._offer(seq, seq.num_computed)

    def note_prefill(self, seq: Sequence, num_tokens: int, is_last: bool) -> None:
        """Offer a running sequence's first tokens: the step that computed them has succeeded."""
        seq.confirm_prefill(is_complete=is_last)
        self._offer(seq, num_tokens)

    def note_decodes(self, seq: Sequence) -> None:
        """Offer the full blocks of a running sequence that fills another one, or leaves."""
        if seq.is_prefilled:
            self._offer(seq, seq.num_known - 1)  # the last known token was sampled, not computed

    def forget(self, seq: Sequence) -> None:
        """Withdraw all blocks that a failed sequence may have computed."""
        seq.confirm_prefill(is_complete=False)
        self._blocks.forget_keys(seq.block_keys.get(self._block_size, []))

    def _most_reusable_blocks(self, seq: Sequence) -> int:
        if not self._enabled:
            return 0
        return min(seq.num_known - 1, _most_reusable(seq)) // self._block_size

    def _offer(self, seq: Sequence, num_tokens: int) -> None:
        first, num_blocks = seq.num_offered_blocks, num_tokens // self._block_size
        if self._enabled and num_blocks > first:
            keys = self._keys(seq, num_blocks)[first:num_blocks]
            self._blocks.set_keys(seq.seq_id, first, keys)
            seq.offer_blocks(num_blocks)

    def _keys(self, seq: Sequence, num_blocks: int) -> list[BlockKey]:
        """Keys of at least `num_blocks` blocks, whose tokens are known; each is hashed once."""
        size = self._block_size
        keys = seq.block_keys.get(size)
        if keys is None:
            keys = seq.block_keys[size] = []
        if len(keys) < num_blocks:
            tokens = seq.known_tokens(len(keys) * size, num_blocks * size)
            keys += block_keys(keys[-1] if keys else self._root(seq), tokens, size)
        return keys

    def _root(self, seq: Sequence) -> BlockKey:
        return root_key(seq.seq_group.tenant.name.encode() if self._isolate_tenants else b"")


def _is_unconfirmed(seq: Sequence) -> bool:
    """Whether an admitted sequence's first tokens are still being computed in the batch."""
    return seq.status is SequenceStatus.RUNNING and not seq.is_prefilled


def _most_reusable(seq: Sequence) -> int:
    """Maximum number of tokens that may come from the cache. If prompt log probabilities are still
    to be reported, computation must begin at the logits of the first of them."""
    seq_group = seq.seq_group
    num_reported = seq_group.prompt_logprobs_start
    if seq_group.request.wants_prompt_logprobs and num_reported < seq_group.num_prompt_tokens:
        return max(0, num_reported - 1)
    return seq.num_known
