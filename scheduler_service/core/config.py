"""The scheduler's configuration, its tenants' limits, and the capacity of a worker group."""

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache

from scheduler_service.core.context import Context

MAX_COUNT = 2**31 - 1
"""Upper bound of limits, in the unit of each; messages to workers hold no more."""

MAX_LOOKAHEAD = 254
"""Maximum number of drafts of a row: a result has one byte for its tokens, one more than drafts."""


class PolicyName(StrEnum):
    """The order in which waiting requests are served."""

    FCFS = "fcfs"
    """First come, first served."""
    PRIORITY = "priority"
    """Lower priority numbers first; they preempt running requests with higher ones."""
    FAIR = "fair"
    """The tenant that has received the fewest tokens for its weight first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TenantConfig:
    """The weight and the limits of one tenant. None: no limit."""

    weight: float = 1.0
    """Share of the service relative to other tenants' weights, under the policy `fair`."""

    max_requests: int | None = None
    """Maximum number of live requests, waiting or running; more are refused."""

    max_queued_tokens: int | None = None
    """Maximum number of prompt tokens of its waiting requests; more are refused unless none of its
    requests waits."""

    max_kv_blocks: int | None = None
    """Maximum number of KV blocks that its requests in worker groups may need, each counted with
    its prompt and its maximum output. Further requests wait; one that alone needs more is
    refused."""

    max_loras: int | None = None
    """Maximum number of adapters that its live requests may have together; requests with further
    ones are refused."""

    def __post_init__(self) -> None:
        """Raise ValueError, naming the field, if a number is out of range."""
        if not 0 < self.weight < float("inf"):
            raise ValueError(f"weight: expected a number above 0, got {self.weight:g}")
        for name in ("max_requests", "max_queued_tokens", "max_kv_blocks", "max_loras"):
            limit = getattr(self, name)
            if limit is not None and limit < 1:
                raise ValueError(f"{name}: expected at least 1, got {limit}")


class WorkKind(StrEnum):
    """A kind of work that workers do for a model."""

    GENERATION = "generation"
    POOLING = "pooling"


class PoolingType(StrEnum):
    """Which tokens' hidden states make a vector."""

    LAST = "last"
    MEAN = "mean"
    CLS = "cls"
    ALL = "all"
    """One vector for each token."""


class PoolingHead(StrEnum):
    """What is computed from the pooled hidden states."""

    VECTOR = "vector"
    CLASSIFIER = "classifier"
    """The logits of the model's labels."""


class Role(StrEnum):
    """What a worker group is for, where others of its model are for the rest."""

    PREFILL = "prefill"
    """New requests; those whose prompts are computed go to others."""
    DECODE = "decode"
    """Requests that go on."""
    BOTH = "both"


class MoveKV(StrEnum):
    """When blocks of KV are copied from one worker group to another."""

    AUTO = "auto"
    ALWAYS = "always"
    NEVER = "never"


class PreemptionMode(StrEnum):
    """The fate of the KV blocks of a request that is preempted because memory ran out."""

    AUTO = "auto"
    """The cheaper of the two by the worker group's measured rates; see `preemption.py`."""
    SWAP = "swap"
    """They are moved to host memory, as long as it has free blocks."""
    RECOMPUTE = "recompute"
    """They are freed and recomputed later."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerConfig:
    """Limits and switches of the scheduler core, validated on construction."""

    max_num_seqs: int = 256
    """Maximum number of sequences in a worker group's batch; a request with n choices takes n
    places. Each has a token in every step, so there are at most max_num_batched_tokens."""

    max_num_batched_tokens: int = 2048
    """Maximum number of tokens computed in one step."""

    max_step_ms: float = 250.0
    """Longest step, in milliseconds, in which prompts are computed with running sequences on a CPU:
    a limit on the pause of their streams. Chunks of prompts are chosen by measured step times; they
    have at least 16 tokens. 0: as large as max_num_batched_tokens allows."""

    enable_chunked_prefill: bool = True
    """Compute long prompts in chunks, together with running sequences. Without it, a step must have
    capacity for the longest prompt in addition to a full batch."""

    enable_prefix_caching: bool = True
    """Reuse the KV blocks of prompts and outputs that share a prefix, as long as nothing else needs
    the memory."""

    preemption_mode: PreemptionMode = PreemptionMode.AUTO
    """What happens to a request's KV blocks when memory runs out: swap moves them to host memory,
    recompute drops them, auto chooses the cheaper."""

    move_kv: MoveKV = MoveKV.AUTO
    """When what another worker group has computed of a request is copied from it: auto if that is
    faster than to compute it, as far as measured; always or never."""

    watermark: float = 0.01
    """Share of a worker group's blocks kept free when admitting, so that running sequences can
    grow."""

    pipeline_depth: int = 2
    """Maximum number of steps planned before the result of the first one has arrived."""

    max_speculative_seqs: int = 16
    """Maximum number of decoding sequences in a batch for which a worker may draft tokens
    speculatively; it drafts as many as are worth their time, and none in a larger batch. 0:
    never."""

    max_results: int = 8
    """Maximum number of steps whose plans and results are sent together, if all requests of a batch
    allow their tokens to be held; one more may then be planned before the first result has arrived.
    1: each is sent alone."""

    max_queue_requests: int = 4096
    """Maximum number of waiting requests; more are refused."""

    max_queue_tokens: int = 4_194_304
    """Maximum number of prompt tokens of all waiting requests; more are refused unless the queue is
    empty."""

    queue_retry_delay_s: float = 1.0
    """Retry delay reported to a refused request while no queue throughput has been measured."""

    policy: PolicyName = PolicyName.FCFS
    """Order of service: by arrival, by priority, or in fair shares for tenants."""

    default_tenant: TenantConfig = field(default_factory=TenantConfig)
    """Weight and limits of each tenant that is not in `tenants`."""

    tenants: Mapping[str, TenantConfig] = field(default_factory=dict)
    """Weights and limits of tenants by name."""

    isolate_tenants: bool = True
    """Share no KV blocks between tenants, so that none can find, or infer from response times, what
    others have sent. Without names of tenants there is only one."""

    max_worker_losses: int = 2
    """Fail a request after this many workers, and half of those that it lost, died in steps that it
    had to itself. Losses in steps with other requests never fail it."""

    lease_seed: int = 0
    """Makes the tokens of leases unguessable, for workers, too; 64 bits."""

    key_seed: int = 0
    """Makes the prefix cache's keys different from those of other cores, so that nobody can find
    out which tokens have equal keys; 64 bits. Workers keep it: a core adopts that of a group that
    has kept more blocks than have been cached since."""

    max_outgrown_wait_s: float | None = 120.0
    """Seconds that requests which outgrew all other worker groups, or which a former core accepted
    and none fits, wait for a lost one to return before they fail. Choose more than a worker takes
    to restart. None: no limit."""

    def __post_init__(self) -> None:
        """Raise ValueError, naming the flag, if a number is out of range."""
        minima = {
            "max_num_seqs": 1,
            "max_num_batched_tokens": 1,
            "pipeline_depth": 1,
            "max_results": 1,
            "max_speculative_seqs": 0,
            "max_queue_requests": 1,
            "max_queue_tokens": 1,
            "max_worker_losses": 1,
        }
        for name, minimum in minima.items():
            if not minimum <= (limit := getattr(self, name)) <= MAX_COUNT:
                raise ValueError(f"{name}: expected {minimum} to {MAX_COUNT}, got {limit}")
        max_num_seqs = min(self.max_num_seqs, self.max_num_batched_tokens)
        object.__setattr__(self, "max_num_seqs", max_num_seqs)
        if self.move_kv not in tuple(MoveKV):
            expected = ", ".join(MoveKV)
            raise ValueError(f"move_kv: expected one of {expected}, got {self.move_kv}")
        if self.preemption_mode not in tuple(PreemptionMode):
            expected = ", ".join(PreemptionMode)
            raise ValueError(
                f"preemption_mode: expected one of {expected}, got {self.preemption_mode}"
            )
        if not 0 <= self.max_step_ms <= MAX_COUNT:
            raise ValueError(f"max_step_ms: expected 0 to {MAX_COUNT}, got {self.max_step_ms:g}")
        if not 0 <= self.watermark < 1:
            raise ValueError(f"watermark: expected 0 to below 1, got {self.watermark:g}")
        if not self.queue_retry_delay_s > 0:
            raise ValueError(f"queue_retry_delay_s must be above 0, is {self.queue_retry_delay_s}")
        wait_s = self.max_outgrown_wait_s
        if wait_s is not None and not 0 <= wait_s <= MAX_COUNT:
            raise ValueError(
                f"max_outgrown_wait: expected 0 to {MAX_COUNT} seconds, got {wait_s:g}"
            )

    @property
    def max_steps_ahead(self) -> int:
        """Upper bound of the steps of a group planned before the first one's result arrives."""
        return max(self.pipeline_depth, self.max_results + 1)


class CacheLifetime(StrEnum):
    """How long a cache group keeps what a token adds; `model.proto` defines each."""

    GROWING = "growing"
    WINDOW = "window"
    CHUNK = "chunk"
    STATE = "state"
    FIXED = "fixed"


_UNLIMITED = 2**31
"""Tokens that a sequence of windows alone may have."""

# Looked up once, because steps ask, and an attribute of an enum is slow.
_SPANNING = _WINDOW, _CHUNK = CacheLifetime.WINDOW, CacheLifetime.CHUNK


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheGroup:
    """Layers that keep what their tokens add to the cache for the same time."""

    lifetime: CacheLifetime = CacheLifetime.GROWING
    block_tokens: int = 0
    """Tokens per block; 0 in a group of states."""
    span: int = 0
    """Tokens of a window, the last one included, or of a chunk; 0 elsewhere."""
    num_blocks: int = 0
    """Blocks of a sequence in a group of states; 0 elsewhere."""

    def __post_init__(self) -> None:
        """Raise ValueError, naming the field, if a number does not suit the lifetime."""
        for name, is_needed in (
            ("block_tokens", not self.is_state),
            ("span", self.lifetime in _SPANNING),
            ("num_blocks", self.is_state),
        ):
            value = getattr(self, name)
            if (value < 1) if is_needed else (value != 0):
                expected = "at least 1" if is_needed else "0"
                raise ValueError(
                    f"{name} of a {self.lifetime} cache group must be {expected}, is {value}"
                )

    @property
    def is_state(self) -> bool:
        """Whether its layers keep states."""
        return self.lifetime is CacheLifetime.STATE

    @property
    def is_growing(self) -> bool:
        """Whether it keeps all tokens."""
        return self.lifetime is CacheLifetime.GROWING

    @property
    def is_fixed(self) -> bool:
        """Whether its layers attend to an encoder's output."""
        return self.lifetime is CacheLifetime.FIXED

    @property
    def has_tokens(self) -> bool:
        """Whether its blocks hold the tokens of a sequence."""
        return self.is_growing or self.span > 0

    def first_needed(self, position: int) -> int:
        """The first token that a row at `position`, or any after it, reads."""
        if self.lifetime is _WINDOW:
            return position - self.span + 1 if position >= self.span else 0
        if self.lifetime is _CHUNK:
            return position // self.span * self.span
        return 0

    def max_blocks(self, num_tokens: int, max_chunk: int, num_source_tokens: int = 0) -> int:
        """Most blocks that a sequence of `num_tokens` tokens has at a time, if its prompt is
        computed in chunks of up to `max_chunk` tokens; 0: at once. `num_source_tokens`: of the
        encoder's output that it attends to."""
        if self.is_state:
            return self.num_blocks
        if self.is_fixed:
            return -(-num_source_tokens // self.block_tokens)
        num_blocks = -(-num_tokens // self.block_tokens)
        if not self.span or not max_chunk:
            return num_blocks
        return min(num_blocks, -(-(self.span - 1 + max_chunk) // self.block_tokens) + 1)


RECORD_WIDTH = 5
"""Numbers of a block in `CachedBlocks.blocks`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptSequence:
    """What a group's caches still hold of a sequence of an earlier core."""

    token_ids: list[int]
    """Its first tokens, those whose KV is there."""
    context: Context
    tables: dict[int, tuple[int, list[int]]]
    """By cache group: index of the first block, and the blocks from there on."""
    is_exact: bool = True
    """Whether states are those after exactly these tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptBlocks:
    """What a group's workers have recorded of earlier caches, which they still hold."""

    key_seed: int | None = None
    """Of the keys; None if they have recorded nothing."""
    blocks: list[int] = field(default_factory=list)
    """As in `CachedBlocks`: what all ranks have."""
    keys: bytes = b""
    stale: list[int] = field(default_factory=list)
    """First blocks of entries that some ranks have, or all have differently."""
    sequences: list[KeptSequence] = field(default_factory=list)
    """Those that the last core had there."""

    @property
    def num_records(self) -> int:
        """Number of recorded blocks."""
        return len(self.blocks) // RECORD_WIDTH


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerGroupCapacity:
    """The model and the KV blocks of one worker group, as its worker reported them."""

    worker_group_id: str
    model: str
    num_gpu_blocks: int
    num_cpu_blocks: int
    cache_groups: tuple[CacheGroup, ...]
    """Plans name them by their index. None: nothing of a sequence is kept, and there are no
    blocks."""
    max_model_len: int
    """Maximum number of tokens of prompt and output together."""
    vocab_size: int
    """Token ids are below this."""
    num_speculative_tokens: int = 0
    """Maximum number of drafts that the workers add to a row; 0: no speculation."""
    arithmetic: str = ""
    """Identity of the workers' arithmetic: groups compute the same bits only if theirs are equal.
    Empty if the workers do not report it."""
    max_chunk_tokens: int = 0
    """Most tokens of a prompt that are computed in a step; 0: all. The core sets it: windows need
    memory for a chunk at a time."""
    work_kinds: frozenset[WorkKind] = frozenset({WorkKind.GENERATION})
    """What its workers do."""
    vector_size: int = 0
    """Numbers in a pooled vector; 0 if they pool none."""
    pooling_types: frozenset[PoolingType] = frozenset()
    """Which tokens' hidden states they make vectors of."""
    num_labels: int = 0
    """Labels that their head has a logit for; 0 if they classify nothing."""
    classifier_type: PoolingType = PoolingType.LAST
    """Which tokens' hidden states get labels."""
    whole_prompt: bool = False
    """Whether a prompt must be computed in one row, and no cached prefix can be reused."""
    max_loras: int = 0
    """Maximum number of adapters that the sequences of its workers may have together; 0: none."""
    kv_layout: tuple[tuple[str, str], ...] = ()
    """What the contents of blocks depend on, by name, besides arithmetic and cache groups: groups
    can copy each other's if all are equal. Empty if the workers copy none."""
    addresses: tuple[str, ...] = ()
    """Where its workers listen for each other, by rank."""
    epoch: int = 0
    """Of its step stream."""
    role: Role = Role.BOTH
    kept: KeptBlocks | None = None
    """None if its workers record nothing. Dropped once the group has been added."""

    def __post_init__(self) -> None:
        """Raise ValueError, naming the field, if a number is out of range."""
        self._check_cache()
        if self.vocab_size < 1:
            raise ValueError(f"vocab_size must be at least 1, is {self.vocab_size}")
        if not 0 <= self.num_speculative_tokens <= MAX_LOOKAHEAD:
            raise ValueError(
                f"num_speculative_tokens must be 0 to {MAX_LOOKAHEAD}, "
                f"is {self.num_speculative_tokens}"
            )
        if (WorkKind.POOLING in self.work_kinds) != (self.vector_size + self.num_labels > 0):
            kinds = ", ".join(sorted(self.work_kinds))
            raise ValueError(
                f"vector_size or num_labels must be above 0 with the work kind pooling, and else "
                f"both 0, are {self.vector_size} and {self.num_labels} with {kinds}"
            )
        if (self.vector_size > 0) != bool(self.pooling_types):
            types = ", ".join(sorted(self.pooling_types)) or "none"
            raise ValueError(
                f"pooling_types must be set with a vector_size, and only then, are {types} with "
                f"{self.vector_size}"
            )
        if self.whole_prompt and WorkKind.GENERATION in self.work_kinds:
            raise ValueError("whole_prompt must be false with the work kind generation, is true")
        if self.max_loras < 0:
            raise ValueError(f"max_loras must be at least 0, is {self.max_loras}")
        if self.max_model_len < 2:
            raise ValueError(f"max_model_len must be at least 2, is {self.max_model_len}")

    def _check_cache(self) -> None:
        """Raise ValueError unless there are blocks for the cache groups, and for nothing else."""
        num_blocks = {name: getattr(self, name) for name in ("num_gpu_blocks", "num_cpu_blocks")}
        minima = dict.fromkeys(num_blocks, 0)
        if self.cache_groups:
            minima["num_gpu_blocks"] = max(1, self.num_state_blocks)
        elif not self.whole_prompt:
            raise ValueError("cache_groups must not be empty unless whole_prompt is true")
        elif any(num_blocks.values()):
            raise ValueError(f"without cache_groups there must be no blocks, are {num_blocks}")
        for name, minimum in minima.items():
            if num_blocks[name] < minimum:
                raise ValueError(f"{name} must be at least {minimum}, is {num_blocks[name]}")
        if self.cache_groups and all(group.is_fixed for group in self.cache_groups):
            needed = ", ".join(lifetime for lifetime in CacheLifetime if lifetime != "fixed")
            found = ", ".join(group.lifetime for group in self.cache_groups)
            raise ValueError(f"cache_groups must include one of {needed}, are {found}")

    @property
    def _kv_facts(self) -> tuple[tuple[str, object], ...]:
        facts = ("arithmetic", self.arithmetic), ("cache groups", self.cache_groups)
        return *self.kv_layout, *facts

    def stores_like(self, other: "WorkerGroupCapacity") -> bool:
        """Whether a block of it has the bits that one of another group has for the same tokens, so
        that either can read the other's."""
        return bool(self.kv_layout) and self._kv_facts == other._kv_facts

    def kv_differences(self, other: "WorkerGroupCapacity") -> list[str]:
        """Names of what must be equal where both copy blocks, and is not."""
        theirs = dict(other._kv_facts)
        return [name for name, value in self._kv_facts if theirs[name] != value]

    @property
    def is_on_cpu(self) -> bool:
        """Whether the workers compute on a CPU, as their arithmetic says."""
        return self.arithmetic.startswith("cpu/")

    @property
    def block_size(self) -> int:
        """Tokens per block of the first group that keeps all tokens, or of the first one; 0 without
        groups."""
        growing = (group for group in self.cache_groups if group.is_growing)
        sizes = [group.block_tokens for group in (*growing, *self.cache_groups)]
        return next(iter(sizes), 0)

    @property
    def num_cache_tokens(self) -> int:
        """Tokens of the longest sequence that fits in the device's blocks, without a source."""
        return self.num_cache_tokens_beside(0)

    @property
    def reads_sources(self) -> bool:
        """Whether the model attends to an encoder's output, the *source* of a sequence."""
        return any(group.is_fixed for group in self.cache_groups)

    @property
    def num_state_blocks(self) -> int:
        """Blocks of a sequence's states."""
        return sum(group.num_blocks for group in self.cache_groups)

    def num_cache_tokens_beside(self, num_source_tokens: int, num_states: int = 0) -> int:
        """Tokens of the longest sequence that fits together with its source, and with the states of
        `num_states` other sequences; below 0 if these alone do not fit."""
        num_blocks = self.num_gpu_blocks - num_states * self.num_state_blocks
        sizes = num_blocks, self.cache_groups, self.max_chunk_tokens
        return _longest_sequence(*sizes, num_source_tokens if self.reads_sources else 0)

    @property
    def size(self) -> tuple[int, tuple[CacheGroup, ...], int]:
        """Equal for worker groups that can hold the same requests."""
        return self.num_gpu_blocks, self.cache_groups, self.max_model_len

    def kv_quota(self, num_tokens: int, num_source_tokens: int) -> int:
        """What a sequence of `num_tokens` tokens counts against `TenantConfig.max_kv_blocks`: the
        most blocks that it has at a time."""
        return _max_blocks(self.cache_groups, num_tokens, self.max_chunk_tokens, num_source_tokens)


def _max_blocks(
    groups: tuple[CacheGroup, ...], num_tokens: int, max_chunk: int, num_source_tokens: int = 0
) -> int:
    return sum(group.max_blocks(num_tokens, max_chunk, num_source_tokens) for group in groups)


@lru_cache(maxsize=1024)
def _longest_sequence(
    num_blocks: int, groups: tuple[CacheGroup, ...], max_chunk: int, num_source_tokens: int
) -> int:
    """Most tokens that need no more than `num_blocks` blocks; they need more with every token, up
    to the limit of windows."""

    def num_needed(num_tokens: int) -> int:
        return _max_blocks(groups, num_tokens, max_chunk, num_source_tokens)

    return bisect_right(range(_UNLIMITED + 1), num_blocks, key=num_needed) - 1


def check_capacity(config: SchedulerConfig, capacity: WorkerGroupCapacity) -> None:
    """Raise ValueError if the group's longest prompt could never be computed.

    Without chunked prefill a prompt is computed in one step, together with up to max_num_seqs - 1
    decodes; if these two did not fit together, a long prompt would wait until the batch has
    drained. Where all prompts are computed at once, nothing decodes, and a prompt that is longer
    than a step is refused.
    """
    if config.enable_chunked_prefill or capacity.whole_prompt:
        return
    needed = capacity.max_model_len + config.max_num_seqs - 1
    if config.max_num_batched_tokens < needed:
        raise ValueError(
            f"with chunked prefill off, max_num_batched_tokens must be at least {needed} "
            f"(max_model_len {capacity.max_model_len} + max_num_seqs {config.max_num_seqs} - 1), "
            f"is {config.max_num_batched_tokens}"
        )
