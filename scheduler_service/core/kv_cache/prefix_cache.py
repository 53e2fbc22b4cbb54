"""The prefix cache: sequences that share a prefix share its KV blocks.

A block gets its key (see `prefix_keys.py`) once the result of the step that filled it is in. Plans
are executed in order, so an earlier use would find the right KV too, unless that step fails;
because of the wait, blocks that were never confirmed are never found. A sequence whose tokens are
mostly being computed for another one waits for it, so that among many simultaneous requests only
the first one computes a shared prefix. The last token of a sequence is always computed, for its
logits, even if all blocks are found; so nothing is ever written to a block with a key.
"""

from itertools import islice

from scheduler_service.core.kv_cache.block_manager import BlockManager
from scheduler_service.core.kv_cache.block_pool import BlockKey
from scheduler_service.core.kv_cache.prefix_keys import CacheableSequence, block_keys, root_key


class PrefixCache:
    """Finds the blocks that hold a sequence's first tokens."""

    def __init__(
        self, blocks: BlockManager, *, enabled: bool = True, isolate_tenants: bool = False
    ) -> None:
        """`enabled`: if False, nothing is found, and every sequence is computed in full."""
        self._enabled = enabled
        self._blocks = blocks
        self._block_size = blocks.block_size
        self._isolate_tenants = isolate_tenants
        self._unconfirmed: dict[CacheableSequence, None] = {}
        """Sequences whose first tokens were being computed when the last one was admitted."""

    def find(self, seq: CacheableSequence) -> list[int]:
        """The blocks that hold the longest cached prefix of a waiting sequence."""
        num_blocks = self._max_reusable_blocks(seq)
        return self._blocks.find(islice(self.keys(seq, num_blocks), num_blocks))

    def find_on_host(self, seq: CacheableSequence, num_found: int) -> list[int]:
        """The host blocks that hold what follows the first `num_found` blocks of a waiting
        sequence."""
        num_blocks = self._max_reusable_blocks(seq)
        keys = islice(self.keys(seq, num_blocks), num_found, num_blocks)
        return self._blocks.find_on_host(keys)

    def is_to_come(self, seq: CacheableSequence, num_found: int) -> bool:
        """Whether most of the tokens that a waiting sequence would compute after its first
        `num_found` blocks are being computed for another one, and will be found soon."""
        num_blocks = self._max_reusable_blocks(seq)
        if num_blocks <= num_found:
            return False
        keys = self.keys(seq, num_blocks)
        most_shared = 0
        for other in self._unconfirmed:
            if other.is_prefilling:
                others = other.prefix_keys[self._block_size]
                end, most = num_found, min(num_blocks, len(others))
                while end < most and keys[end] == others[end]:
                    end += 1
                most_shared = max(most_shared, end - num_found)
        num_missing = seq.num_known - num_found * self._block_size
        return 2 * most_shared * self._block_size > num_missing

    def expect(self, seq: CacheableSequence) -> None:
        """Record that a sequence is admitted: its first tokens will be computed."""
        self._unconfirmed = {other: None for other in self._unconfirmed if other.is_prefilling}
        self._unconfirmed[seq] = None

    def forget(self, seq: CacheableSequence) -> None:
        """Record that a sequence has lost its memory."""
        self._unconfirmed.pop(seq, None)

    def keys(self, seq: CacheableSequence, num_blocks: int) -> list[BlockKey]:
        """Keys of at least `num_blocks` blocks, whose tokens are known; each is hashed once."""
        size = self._block_size
        keys = seq.prefix_keys[size]
        if len(keys) < num_blocks:
            tokens = seq.known_tokens(len(keys) * size, num_blocks * size)
            keys += block_keys(keys[-1] if keys else self._root(seq), tokens, size)
        return keys

    def _max_reusable_blocks(self, seq: CacheableSequence) -> int:
        if not self._enabled:
            return 0
        return min(seq.num_known - 1, seq.max_reusable_tokens) // self._block_size

    def _root(self, seq: CacheableSequence) -> BlockKey:
        return root_key(seq.tenant_name.encode() if self._isolate_tenants else b"")
