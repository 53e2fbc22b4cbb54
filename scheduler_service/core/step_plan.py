"""A step plan (vLLM's SchedulerOutput) and its result (ModelRunnerOutput), as the core sees them.

Plain lists, no protobuf: `scheduler_service/wire.py` converts them to messages and back.
`protos/pagewire/v1/plan.proto` defines the meaning of each field.
"""

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from scheduler_service.core.context import Context


class RowOutput(IntEnum):
    """What a row brings."""

    NOTHING = 0
    TOKEN = 1
    CANDIDATES = 2
    VECTOR = 3


SAMPLED = (RowOutput.TOKEN, RowOutput.CANDIDATES)
"""Outputs of rows that sample."""


@dataclass(slots=True, kw_only=True)
class BlockTable:
    """The blocks of one sequence in one cache group."""

    group: int
    first_index: int
    """Entries before this one name no block."""
    block_ids: list[int]


@dataclass(slots=True, kw_only=True)
class NewSequence:
    """A sequence that the worker has not seen, or has forgotten."""

    seq_id: int
    choice_index: int
    token_ids: list[int]
    num_prompt_tokens: int
    num_computed_tokens: int
    tables: list[BlockTable]
    sampling: Any = None
    """The request's `SamplerParams`, which the core does not read."""
    pooling: Any = None
    """The request's `PoolingParams`, which the core does not read; instead of `sampling`."""
    parent_seq_id: int | None = None
    prompt_logprobs_start: int = 0
    traceparent: str = ""
    """Parent of the worker's spans; empty if the request's trace is not recorded."""
    context: Context = ()
    """Empty in a fork, which has its parent's."""


@dataclass(slots=True, kw_only=True)
class BlockLease:
    """Blocks that workers of other groups may read, until a plan ends the lease."""

    lease_id: int
    token: bytes
    """16 bytes that a reader presents."""
    block_ids: list[int]
    """~b for host block b."""
    keys: bytes
    """16 bytes for each block: the identity of its contents."""
    timeout_ms: int


@dataclass(slots=True, kw_only=True)
class BlockFetch:
    """The copy of leased blocks of another worker group."""

    fetch_id: int
    addresses: list[str]
    """Of the source group's workers, by rank."""
    source_epoch: int
    lease_id: int
    token: bytes
    blocks: list[int]
    """Flat pairs of a block of the source, ~b for host block b, and a target device block."""
    keys: bytes
    """16 bytes for each pair."""
    timeout_ms: int


@dataclass(slots=True, kw_only=True)
class CachedBlocks:
    """What is found in some blocks; `plan.proto` explains the columns."""

    blocks: list[int]
    """Flat quintuples: block, group, number of units, whether they fill it, tokens of a tail."""
    keys: bytes


@dataclass(slots=True, kw_only=True)
class StepPlan:
    """The work of one worker group in one step.

    Flat lists of pairs and triples: `swap_out` is [device, host, device, host, ...],
    `swap_in` [host, device, ...], `copy` [source, target, ...], `block_updates`
    [seq_id, group, index, block, ...], `appended_tokens` [seq_id, token, ...], `saved_states`
    [seq_id, group, position, block, ...].
    """

    step_id: int
    forget_seq_ids: list[int] = field(default_factory=list)
    swap_out: list[int] = field(default_factory=list)
    swap_in: list[int] = field(default_factory=list)
    copy: list[int] = field(default_factory=list)
    new_sequences: list[NewSequence] = field(default_factory=list)
    block_updates: list[int] = field(default_factory=list)
    saved_states: list[int] = field(default_factory=list)
    seq_ids: list[int] = field(default_factory=list)
    num_tokens: list[int] | None = None
    """Tokens to compute per row; None: one in every row."""
    output: list[int] | None = None
    """What each row brings, a `RowOutput`; None: a token in every row."""
    lookahead: list[int] | None = None
    """The most drafts per row; None: 0 in every row."""
    appended_tokens: list[int] = field(default_factory=list)
    max_results: int = 1
    """Maximum number of steps, including this one, whose results may be sent together."""
    leases: list[BlockLease] = field(default_factory=list)
    ended_lease_ids: list[int] = field(default_factory=list)
    fetches: list[BlockFetch] = field(default_factory=list)
    cached_blocks: CachedBlocks | None = None
    uncached_blocks: list[int] = field(default_factory=list)
    key_seed: int | None = None
    withdrawn_step_id: int = 0


@dataclass(slots=True, kw_only=True)
class RowLogprobs:
    """Log probabilities of one sampled token; columns as on the wire."""

    token_ids: bytes
    logprobs: bytes
    sampled_rank: int


@dataclass(slots=True, kw_only=True)
class RowPromptLogprobs:
    """Log probabilities of the prompt tokens one row computed; columns as on the wire."""

    start: int
    width: int
    token_ids: bytes
    logprobs: bytes
    ranks: bytes


@dataclass(slots=True, kw_only=True)
class RowCandidates:
    """Candidates for a sequence's next token, the most probable first."""

    token_ids: list[int]
    logprobs: list[float]
    """Numbers that float32 can represent."""


@dataclass(frozen=True, slots=True)
class RowVectors:
    """The vectors of a row."""

    first_token: int
    """Index of the first one's token, if each token has a vector."""
    values: bytes
    """Float32 numbers as on the wire."""
    is_last: bool
    """Whether its sequence brings no others."""


@dataclass(slots=True, kw_only=True)
class RowError:
    """The reason why a row failed."""

    reason: str
    message: str


@dataclass(slots=True, kw_only=True)
class FetchResult:
    """The end of a fetch on one rank."""

    fetch_id: int
    failure: str = ""
    """Such as `TIMED_OUT`; empty: all blocks have arrived."""
    message: str = ""
    num_bytes: int = 0
    duration_us: int = 0
    transport: str = ""


@dataclass(slots=True, kw_only=True)
class StepResult:
    """The result of one step."""

    step_id: int
    token_ids: list[int]
    """The token of each sampling row, in row order; -1 where the row failed or has candidates."""
    logprobs: dict[int, RowLogprobs] = field(default_factory=dict)
    """Log probabilities of each row's first token, by row."""
    kept_logprobs: dict[int, list[RowLogprobs]] = field(default_factory=dict)
    """Log probabilities of each row's other tokens, in order, by row."""
    prompt_logprobs: dict[int, RowPromptLogprobs] = field(default_factory=dict)
    """By row."""
    candidates: dict[int, RowCandidates] = field(default_factory=dict)
    """By row."""
    vectors: dict[int, bytes] = field(default_factory=dict)
    """Float32 numbers as on the wire, by row."""
    errors: dict[int, RowError] = field(default_factory=dict)
    """By row."""
    num_sampled: list[int] | None = None
    """Number of tokens of each sampling row in `token_ids`; None: one in every row."""
    num_drafts: list[int] | None = None
    """Number of drafts computed with each sampling row; None: not reported, or none."""
    cache_ops_us: int = 0
    forward_us: int = 0
    sample_us: int = 0
    busy_us: int = 0
    """Worker time from the step's start to its result."""
    held_us: int = 0
    """How long the worker held it back, to send it together with later ones."""
    fetches: list[FetchResult] = field(default_factory=list)
    """Fetches that have ended since the last result."""
