"""The part of a model that a rank holds, as plain numbers.

Ranks are numbered stage by stage: with tensor_parallel_size 2 and pipeline_parallel_size 2

    stage 0 (first layers)   rank 0   rank 1
    stage 1 (last layers)    rank 2   rank 3

Within a stage every rank computes its shard of each layer; rank 2, the first of the last stage,
samples.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from worker_service.errors import InvalidOption


@dataclass(frozen=True, slots=True)
class Shard:
    """A rank's range of something that several ranks divide."""

    start: int
    size: int
    total: int

    @classmethod
    def full(cls, total: int) -> "Shard":
        """All of it, for one rank."""
        return cls(0, total, total)

    def times(self, factor: int) -> "Shard":
        """The same range where each unit is `factor` elements wide."""
        return Shard(self.start * factor, self.size * factor, self.total * factor)

    def within(self, offset: int, total: int) -> "Shard":
        """The same range where it begins at `offset` of something larger."""
        return Shard(offset + self.start, self.size, total)

    @property
    def is_full(self) -> bool:
        """Whether this rank has all of it."""
        return self.size == self.total


def consecutive(shards: Sequence[Shard]) -> list[Shard]:
    """The same rows where those of all parts follow each other in one tensor."""
    total, start, found = sum(shard.total for shard in shards), 0, []
    for shard in shards:
        found.append(shard.within(start, total))
        start += shard.total
    return found


MAX_RANKS = 4096
"""Upper bound of each size of a group."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """A rank's position among the ranks that share one copy of a model."""

    tensor_parallel_size: int = 1
    """Ranks that share each layer."""

    pipeline_parallel_size: int = 1
    """Stages over which the layers are divided."""

    rank: int = 0

    def __post_init__(self) -> None:
        for name in ("tensor_parallel_size", "pipeline_parallel_size"):
            if not 1 <= (size := getattr(self, name)) <= MAX_RANKS:
                raise InvalidOption(f"{name}: expected 1 to {MAX_RANKS}, got {size}")
        if not 0 <= self.rank < self.world_size:
            sizes = f"{self.tensor_parallel_size} x {self.pipeline_parallel_size} ranks"
            raise InvalidOption(
                f"rank: expected 0 to {self.world_size - 1} with {sizes}, got {self.rank}"
            )

    @property
    def world_size(self) -> int:
        """Ranks in the group."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def tensor_rank(self) -> int:
        """Position among the ranks of its stage."""
        return self.rank % self.tensor_parallel_size

    @property
    def stage(self) -> int:
        """The pipeline stage of this rank."""
        return self.rank // self.tensor_parallel_size

    @property
    def is_first_stage(self) -> bool:
        """Whether this rank has the embedding."""
        return self.stage == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank has the LM head."""
        return self.stage == self.pipeline_parallel_size - 1

    @property
    def sampler(self) -> int:
        """The rank that samples."""
        return self.world_size - self.tensor_parallel_size

    @property
    def samples(self) -> bool:
        """Whether this rank samples."""
        return self.rank == self.sampler

    def even_shard(self, total: int, what: str) -> Shard:
        """This rank's part of `total` units. Raises InvalidOption unless all parts are equal."""
        size, rest = divmod(total, self.tensor_parallel_size)
        if rest:
            raise InvalidOption(
                f"tensor_parallel_size: {self.tensor_parallel_size} ranks cannot share the"
                f" model's {total} {what} evenly; expected a divisor of {total}"
            )
        return Shard(self.tensor_rank * size, size, total)

    def kv_head_shard(self, num_kv_heads: int) -> Shard:
        """This rank's key and value heads; where there are fewer than ranks, several hold one."""
        return self.shared_shard(num_kv_heads, "key and value heads")

    def shared_shard(self, total: int, what: str) -> Shard:
        """This rank's part of `total` units; where there are fewer than ranks, several hold one.
        Raises InvalidOption unless all parts are equal."""
        num_ranks = self.tensor_parallel_size
        if total >= num_ranks:
            return self.even_shard(total, what)
        if num_ranks % total:
            raise InvalidOption(
                f"tensor_parallel_size: {num_ranks} ranks cannot share the model's {total} {what};"
                f" expected a multiple or a divisor of {total}"
            )
        return Shard(self.tensor_rank * total // num_ranks, 1, total)

    def vocab_rows(self, vocab_size: int) -> int:
        """Rows of the vocabulary's matrices on every rank; the last ones' may be padding."""
        return -(-vocab_size // self.tensor_parallel_size)

    def vocab_shard(self, vocab_size: int) -> Shard:
        """This rank's token ids."""
        rows = self.vocab_rows(vocab_size)
        start = min(self.tensor_rank * rows, vocab_size)
        return Shard(start, min(rows, vocab_size - start), vocab_size)

    def layer_range(self, num_layers: int) -> range:
        """This rank's layers; the first stages have one more where they do not divide evenly."""
        size, rest = divmod(num_layers, self.pipeline_parallel_size)
        if size == 0:
            raise InvalidOption(
                f"pipeline_parallel_size: expected at most {num_layers}, the model's layers,"
                f" got {self.pipeline_parallel_size}"
            )
        start = self.stage * size + min(self.stage, rest)
        return range(start, start + size + (self.stage < rest))
