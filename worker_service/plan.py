"""A step's plan, with its sequences' sampling parameters, and its result inside the worker: numpy
columns, no protobuf.

`plan.proto` and `sampling.proto` give the meaning of every field; `service/wire.py` converts
messages into these and back. Nothing here imports torch.
"""

import hashlib
import time
from dataclasses import dataclass, field, fields
from enum import Enum, IntEnum, auto
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from worker_service.array_types import BoolArray, Float32Array, Int32Array


class ConstraintKind(Enum):
    """How a constraint is stated."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    GRAMMAR = "grammar"
    CHOICE = "choice"


class Thought(NamedTuple):
    """The wire's `Thought`: texts that begin and end what precedes a constrained text."""

    start: str
    """Empty: every output begins inside a thought."""
    ends: tuple[str, ...]
    other_starts: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Constraint:
    """The wire's `Constraint`; `sampling.proto` defines which tokens it allows."""

    kind: ConstraintKind
    texts: tuple[str, ...]
    """One text; several for a choice."""

    end_token_ids: Int32Array
    """Tokens that may end an output that matches."""

    last_token_ids: Int32Array
    """Tokens that may end an output that cannot continue."""

    thought: Thought | None = None
    """What may precede the text that must match; None: nothing."""


_FILTER = {"is_filter": True}
"""Marks a number that excludes improbable tokens, unless it has its default."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplerParams:
    """The wire's `SamplerParams`, with arrays for columns; `sampling.proto` explains each field."""

    temperature: float = 1.0
    """0 is greedy."""

    top_p: float = field(default=1.0, metadata=_FILTER)
    top_k: int = field(default=0, metadata=_FILTER)
    """0 considers all tokens."""

    min_p: float = field(default=0.0, metadata=_FILTER)
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0

    bias_token_ids: Int32Array = field(default_factory=lambda: np.empty(0, np.int32))
    """Tokens whose logits get `bias_values` added; no token twice."""

    bias_values: Float32Array = field(default_factory=lambda: np.empty(0, np.float32))

    seed: int = 0
    """64 bits, unsigned."""

    min_tokens: int = 0
    suppressed_token_ids: Int32Array = field(default_factory=lambda: np.empty(0, np.int32))
    """Tokens that are excluded until there are `min_tokens` output tokens."""

    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token sequences that must not be completed; none is empty."""

    num_logprobs: int | None = None
    """Most probable tokens reported in addition to the sampled one; None: no log probabilities."""

    num_prompt_logprobs: int | None = None
    """The same for prompt tokens."""

    num_candidates: int | None = None
    """Tokens reported for the core to choose among; None: the worker chooses."""

    constraint: Constraint | None = None
    """What the output must match; None: anything."""

    @property
    def has_filters(self) -> bool:
        """Whether improbable tokens are excluded."""
        return any(getattr(self, name) != neutral for name, neutral in FILTERS.items())

    @property
    def has_penalties(self) -> bool:
        """Whether logits depend on which tokens occurred."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )

    @property
    def has_constraints(self) -> bool:
        """Whether some tokens' logits are changed or excluded for other reasons."""
        return bool(
            len(self.bias_token_ids)
            or self.bad_words
            or (self.min_tokens and len(self.suppressed_token_ids))
        )


FILTERS: dict[str, float] = {
    parameter.name: getattr(SamplerParams(), parameter.name)
    for parameter in fields(SamplerParams)
    if parameter.metadata.get("is_filter")
}
"""The parameters that are filters, by the value that excludes no token: an integer for an integer
parameter."""


class PoolingType(Enum):
    """Which tokens' hidden states make a vector."""

    LAST = auto()
    MEAN = auto()
    CLS = auto()
    ALL = auto()
    """One vector per token."""


class PoolingHead(Enum):
    """What is computed from the pooled hidden states."""

    UNSPECIFIED = auto()
    """A vector."""
    CLASSIFIER = auto()
    """Logits of labels."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolingParams:
    """The wire's `PoolingParams`."""

    type: PoolingType
    normalize: bool = False
    dimensions: int = 0
    """0: all."""
    head: PoolingHead = PoolingHead.UNSPECIFIED
    second_text_start: int = 0
    """Position of the second text's first token; 0: there is none."""


class RowOutput(IntEnum):
    """What a row brings."""

    NOTHING = 0
    TOKEN = 1
    CANDIDATES = 2
    VECTOR = 3


_IS_SAMPLED = np.array([kind in (RowOutput.TOKEN, RowOutput.CANDIDATES) for kind in RowOutput])


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenLogprobs:
    """One sampled token's log probability, and those of the most probable tokens."""

    token_ids: npt.NDArray[np.int32]
    """The sampled token, then the most probable ones, most probable first."""

    logprobs: npt.NDArray[np.float32]
    rank: int
    """Rank of the sampled token; 1 is the most probable."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidates:
    """The tokens that may follow a sequence, from which the core chooses."""

    token_ids: npt.NDArray[np.int32]
    """Most probable first, the lowest id first among equals."""

    logprobs: npt.NDArray[np.float32]
    """After biases and penalties, not normalised again; all finite."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptLogprobs:
    """Log probabilities of some consecutive prompt tokens."""

    start: int
    """Position in the prompt of the first one, from 1."""

    token_ids: npt.NDArray[np.int32]
    """[num_tokens, 1 + number of most probable ones]; first the prompt's own."""

    logprobs: npt.NDArray[np.float32]
    """Log probabilities, in the same shape."""

    ranks: npt.NDArray[np.int32]
    """[num_tokens]: of the prompt's own tokens."""

    def followed_by(self, other: "PromptLogprobs") -> "PromptLogprobs":
        """These and those of the tokens that follow directly."""
        return PromptLogprobs(
            start=self.start,
            token_ids=np.concatenate([self.token_ids, other.token_ids]),
            logprobs=np.concatenate([self.logprobs, other.logprobs]),
            ranks=np.concatenate([self.ranks, other.ranks]),
        )


class ContextKind(Enum):
    """What a part of a context is."""

    SALT = auto()
    """Who may share KV, which it does not change."""
    ADAPTER = auto()
    MEDIA = auto()


@dataclass(frozen=True, kw_only=True, slots=True)
class ContextPart:
    """The wire's `ContextPart`; `context.proto` explains each field."""

    kind: ContextKind
    digest: bytes
    start: int
    length: int


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockTable:
    """The blocks of one sequence in one cache group."""

    group: int
    first_index: int
    """Entries before this one name no block."""

    block_ids: Int32Array


@dataclass(frozen=True, kw_only=True, slots=True)
class NewSequence:
    """A sequence that is new to the worker."""

    seq_id: int
    choice_index: int
    token_ids: Int32Array
    num_prompt_tokens: int
    num_computed_tokens: int
    tables: tuple[BlockTable, ...]
    sampling: SamplerParams
    parent_seq_id: int | None
    prompt_logprobs_start: int
    pooling: PoolingParams | None = None
    """How its hidden states become a vector; None: it generates tokens."""
    traceparent: str = ""
    context: tuple[ContextPart, ...] = ()
    """What its KV depends on besides tokens; empty in a fork."""

    @property
    def salt(self) -> int:
        """A 64-bit number for its salts, 0 if it has none. Nothing learned from a sequence may
        affect those of other numbers."""
        digests = sorted(part.digest for part in self.context if part.kind is ContextKind.SALT)
        if not digests:
            return 0
        return int.from_bytes(hashlib.blake2b(b"".join(digests), digest_size=8).digest())


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockLease:
    """Blocks that other workers may read, until the plan that ends the lease."""

    lease_id: int
    token: bytes
    block_ids: Int32Array
    """[n]: b for device block b, ~b for host block b."""

    keys: bytes
    """`KEY_BYTES` for each block."""

    timeout_ms: int


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockFetch:
    """Blocks to copy from another worker."""

    fetch_id: int
    addresses: tuple[str, ...]
    """One for each rank."""

    source_epoch: int
    lease_id: int
    token: bytes
    blocks: Int32Array
    """[n, 2]: block of the source, ~b for host block b; target device block."""

    keys: bytes
    """`KEY_BYTES` for each pair."""

    timeout_ms: int


KEY_BYTES = 16
"""Size of the key of a block's contents, and of a lease's token."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CachedEntry:
    """The core's record of what is in some blocks; `plan.proto` explains it."""

    blocks: tuple[int, ...]
    """~b for host block b."""

    rows: bytes
    """The blocks' part of the column."""

    keys: bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptSequence:
    """What the caches hold of a sequence; `worker_service.proto` explains it."""

    seq_id: int
    token_ids: Int32Array
    context: tuple[ContextPart, ...]
    tables: tuple[BlockTable, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPlan:
    """The operations and rows of one step, including columns that the message omits."""

    epoch: int
    step_id: int
    forget_seq_ids: Int32Array
    swap_out: Int32Array
    """[n, 2]: device block, host block."""

    swap_in: Int32Array
    """[n, 2]: host block, device block."""

    copy: Int32Array
    """[n, 2]: source and target device block."""

    new_sequences: tuple[NewSequence, ...]
    block_updates: Int32Array
    """[n, 4]: sequence id, cache group, index in its table of the group, device block."""

    saved_states: Int32Array = field(default_factory=lambda: np.empty((0, 4), np.int32))
    """[n, 4]: sequence id, cache group, position, device block of the copy."""

    seq_ids: Int32Array
    """[num_rows]."""

    num_tokens: Int32Array
    """[num_rows]."""

    output: Int32Array
    """[num_rows]: what each row brings, a `RowOutput`."""

    lookahead: Int32Array
    """[num_rows]: the most drafts of each row."""

    appended_tokens: Int32Array
    """[n, 2]: sequence id, token."""

    leases: tuple[BlockLease, ...] = ()
    ended_lease_ids: Int32Array = field(default_factory=lambda: np.empty(0, np.int32))
    fetches: tuple[BlockFetch, ...] = ()
    cached_blocks: tuple[CachedEntry, ...] = ()
    uncached_blocks: Int32Array = field(default_factory=lambda: np.empty(0, np.int32))
    """~b for host block b."""

    key_seed: int | None = None
    withdrawn_step_id: int = 0
    received_us: int = 0
    """The worker's monotonic clock when the plan arrived."""

    max_results: int = 0
    """Maximum number of results in one message, this step's included."""

    @property
    def samples(self) -> BoolArray:
        """[num_rows]: rows that bring a token or candidates."""
        sampled: BoolArray = _IS_SAMPLED[self.output]
        return sampled


class RowErrorReason(Enum):
    """Why a row failed."""

    NON_FINITE_LOGITS = auto()
    NO_CANDIDATES = auto()
    CONSTRAINT = auto()


ROW_ERROR_MESSAGES = {
    RowErrorReason.NON_FINITE_LOGITS: "the model's logits or vectors held NaN or infinity",
    RowErrorReason.NO_CANDIDATES: "the request's own constraints excluded every token",
    RowErrorReason.CONSTRAINT: (
        "the structured output's constraint has grown too complex, or the output does not follow it"
    ),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTimings:
    """A step's times and durations in microseconds; the first three on the monotonic clock."""

    received_us: int
    started_us: int
    finished_us: int
    cache_ops_us: int
    forward_us: int
    sample_us: int


class FetchFailure(Enum):
    """Why a fetch failed."""

    UNREACHABLE = auto()
    DENIED = auto()
    DIGEST_MISMATCH = auto()
    TIMED_OUT = auto()
    STALLED = auto()
    MALFORMED = auto()
    INTERNAL = auto()


@dataclass(frozen=True, kw_only=True, slots=True)
class FetchResult:
    """The end of a fetch."""

    fetch_id: int
    failure: FetchFailure | None = None
    """None: all blocks are in their targets."""

    message: str = ""
    num_bytes: int = 0
    duration_us: int = 0
    transport: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """The result of one step. Dictionaries are by row and in row order."""

    epoch: int
    step_id: int
    token_ids: Int32Array
    """The tokens of each sampling row, in row order; -1 where the row failed or has candidates."""

    num_sampled: Int32Array | None = None
    """[num_sampling]: number of tokens of each sampling row; None: one in every row."""

    num_drafts: Int32Array | None = None
    """[num_sampling]: drafts of each sampling row; None: none."""

    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    kept_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    """Log probabilities of the tokens after a row's first, in order."""

    prompt_logprobs: dict[int, PromptLogprobs] = field(default_factory=dict)
    candidates: dict[int, Candidates] = field(default_factory=dict)
    vectors: dict[int, Float32Array] = field(default_factory=dict)
    errors: dict[int, RowErrorReason] = field(default_factory=dict)
    timings: StepTimings
    fetches: tuple[FetchResult, ...] = ()
    """Fetches that have ended since the last result."""


def monotonic_us() -> int:
    """The worker's monotonic clock, in microseconds."""
    return time.monotonic_ns() // 1000
