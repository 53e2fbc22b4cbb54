"""The kit's state of a sequence, and its rows in plans."""

import hashlib
from dataclasses import dataclass, field
from typing import Any

from conformance.assertions import Skipped
from conformance.cache_groups import NO_BLOCK
from conformance.generation import Sampled
from pagewire import columns
from pagewire.v1 import context_pb2, plan_pb2, pooling_pb2, sampling_pb2

NOTHING, TOKEN, CANDIDATES, VECTOR = range(4)
"""What a row brings."""

NUM_LOGPROBS = 4
"""Number of most probable tokens to report, so that a wrong context shows even if it leads to the
same token."""


def sampler_params(**fields: Any) -> sampling_pb2.SamplerParams:
    """Parameters without filters, penalties or exclusions, with some fields changed."""
    neutral = {
        "temperature": 1.0,
        "top_p": 1.0,
        "repetition_penalty": 1.0,
        "logprobs": NUM_LOGPROBS,
    }
    return sampling_pb2.SamplerParams(**(neutral | fields))


SALT, ADAPTER, MEDIA = (
    context_pb2.CONTEXT_KIND_SALT,
    context_pb2.CONTEXT_KIND_ADAPTER,
    context_pb2.CONTEXT_KIND_MEDIA,
)


def part(
    kind: context_pb2.ContextKind.ValueType, content: str, length: int = 0
) -> context_pb2.ContextPart:
    """A part of a context, from the first token on."""
    digest = hashlib.sha256(content.encode()).digest()
    return context_pb2.ContextPart(kind=kind, digest=digest, length=length)


GREEDY = sampler_params(temperature=0.0)


def block_table(group: int, table: list[int]) -> plan_pb2.BlockTable:
    """The message of a table, from its first block on."""
    first = next((i for i, block in enumerate(table) if block != NO_BLOCK), len(table))
    return plan_pb2.BlockTable(
        group=group, first_index=first, block_ids=columns.pack(table[first:])
    )


@dataclass(kw_only=True, eq=False, slots=True)
class Sequence:
    """One sequence of one step stream."""

    seq_id: int
    tokens: list[int]
    """Prompt and known output."""

    num_prompt_tokens: int
    num_computed_tokens: int = 0
    """Tokens whose KV is in the blocks once all sent plans are executed."""

    blocks: list[int] = field(default_factory=list)
    """Its table in the main group."""

    main_group: int = 0
    other_tables: dict[int, list[int]] = field(default_factory=dict)
    """Its tables in the other groups; NO_BLOCK where a block was released."""

    sampling: sampling_pb2.SamplerParams = field(default_factory=lambda: GREEDY)
    pooling: pooling_pb2.PoolingParams | None = None
    """How its hidden states become a vector; None: it generates tokens."""

    whole_prompt: bool = False
    """Whether all its tokens are computed in one row."""

    vector: list[float] | None = None
    """What its last row brought."""

    choice_index: int = 0
    prompt_logprobs_start: int = 0
    context: tuple[context_pb2.ContextPart, ...] = ()
    parent: "Sequence | None" = None
    num_own_tokens: int = 0
    """Number of a fork's tokens that follow its parent's."""

    num_pending: int = 0
    """Tokens being sampled by plans in flight, without drafts."""

    num_pending_drafts: int = 0
    """Maximum number of drafts that plans in flight may accept."""

    sampled: list[Sampled] = field(default_factory=list)
    """The tokens that its rows sampled on this stream, in order; -1 where a row failed."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens once all sent plans are executed."""
        return len(self.tokens) + self.num_pending

    @property
    def output(self) -> list[int]:
        """The tokens after the prompt."""
        return self.tokens[self.num_prompt_tokens :]

    @property
    def tables(self) -> dict[int, list[int]]:
        """Its tables by group."""
        return {self.main_group: self.blocks, **self.other_tables}

    def message(self) -> plan_pb2.NewSequence:
        """The message that adds it to a plan."""
        message = plan_pb2.NewSequence(
            seq_id=self.seq_id,
            choice_index=self.choice_index,
            tables=[
                block_table(group, table) for group, table in sorted(self.tables.items()) if table
            ],
            sampling=self.sampling if self.pooling is None else None,
            pooling=self.pooling,
            prompt_logprobs_start=self.prompt_logprobs_start,
        )
        if self.parent is not None:
            message.parent_seq_id = self.parent.seq_id
            own = self.tokens[len(self.tokens) - self.num_own_tokens :]
            message.token_ids = columns.pack(own)
        else:
            message.token_ids = columns.pack(self.tokens)
            message.num_prompt_tokens = self.num_prompt_tokens
            message.num_computed_tokens = self.num_computed_tokens
            message.context.extend(self.context)
        return message

    @property
    def output_kind(self) -> int:
        """What its rows bring, as in the plan's `output`."""
        if self.pooling is not None:
            return VECTOR
        return CANDIDATES if self.sampling.HasField("num_candidates") else TOKEN

    def row(
        self, num_tokens: int | None = None, *, brings: bool = True, lookahead: int = 0
    ) -> "Row":
        """A row that computes `num_tokens` tokens; by default all that are not computed. brings:
        False for a row without output."""
        if num_tokens is None:
            num_tokens = self.num_tokens - self.num_computed_tokens
            if self.pooling is not None and num_tokens == 0:
                raise Skipped("the worker generates nothing")
        if self.whole_prompt and num_tokens < self.num_tokens:
            raise Skipped("the worker computes prompts in one row")
        return Row(self, num_tokens, self.output_kind if brings else NOTHING, lookahead)


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a plan."""

    sequence: Sequence
    num_tokens: int
    output: int
    """What it brings: NOTHING, TOKEN, CANDIDATES or VECTOR."""

    lookahead: int = 0
    """Maximum number of drafts."""

    @property
    def samples(self) -> bool:
        """Whether it brings a token or candidates."""
        return self.output in (TOKEN, CANDIDATES)
