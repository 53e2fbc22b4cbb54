"""The state of one request: its sequences, and the frontend that gets its outputs.

A `SequenceGroup` is one request, a `Sequence` one choice of it, or one beam of a beam search. Its
`Strategy` says how its result comes about.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from typing import ClassVar

from scheduler_service.core.context import Context, adapter_of, num_source_tokens
from scheduler_service.core.kv_cache.prefix_keys import PrefixKeys
from scheduler_service.core.placement import Placement, WorkerLosses
from scheduler_service.core.progress import Growth, Prefill
from scheduler_service.core.request import EngineOutputs, Request
from scheduler_service.core.request_timing import (
    RequestClock,
    RequestEvent,
    RequestPhase,
)
from scheduler_service.core.step_plan import RowOutput
from scheduler_service.core.tenants import TenantUsage


@dataclass(slots=True, eq=False)
class Frontend:
    """One attached frontend."""

    frontend_id: str
    outbox: EngineOutputs = field(default_factory=EngineOutputs)
    sequences: dict[int, Sequence] = field(default_factory=dict)
    """Sequences of its live requests by handle, ended ones included."""

    def pop_outbox(self) -> EngineOutputs:
        """The outputs so far; later ones go to a fresh outbox."""
        outbox, self.outbox = self.outbox, EngineOutputs()
        return outbox


class SequenceStatus(IntEnum):
    """The state of a sequence; all states from FINISHED_STOPPED on are final."""

    WAITING = 0
    """Waiting for a place in a batch, initially or after a preemption or a worker's loss."""
    RUNNING = 1
    """It is in a worker group's batch, with KV on the device."""
    SWAPPED = 2
    """Preempted, with its KV in host memory."""
    FINISHED_STOPPED = 3
    """Ended by a stop token, or by its frontend's stop string."""
    FINISHED_LENGTH_CAPPED = 4
    """Ended by max_tokens or the model's length."""
    FINISHED_ABORTED = 5
    """Ended by its client, its frontend or its deadline."""
    FINISHED_IGNORED = 6
    """Never started: it could never fit."""
    FINISHED_ERROR = 7
    """Ended by an error of its own."""

    @property
    def is_finished(self) -> bool:
        """Whether this state is final."""
        return self >= SequenceStatus.FINISHED_STOPPED


# Looked up once, because each row asks, and an attribute of an enum is slow.
_RUNNING = SequenceStatus.RUNNING


@dataclass(slots=True, eq=False)
class Sequence:
    """One choice of a request: its tokens, and where it is; its parts say how far it is.

    Invariants, with known = prompt + output tokens:
    known <= growth.length <= growth.max_length; its rows in flight bring at most growth.length -
    known tokens, and exactly as many without drafts; the computation of a decoding sequence's first
    growth.length - 1 tokens is planned.
    """

    seq_group: SequenceGroup
    choice_index: int
    handle: int
    """The handle that its frontend gave it."""
    stop_token_ids: frozenset[int]
    order: tuple[tuple[int, ...], int]
    """Place among running sequences: its group's rank, then the choice; the last is preempted."""
    growth: Growth
    prefill: Prefill = field(default_factory=Prefill)
    seq_id: int = 0
    """Id for workers and logs, assigned when its request is accepted."""
    status: SequenceStatus = SequenceStatus.WAITING
    output_token_ids: list[int] = field(default_factory=list)
    max_output_tokens: int = 0
    """Output tokens at which it ends; set when its group is placed in a worker group."""
    prefix_keys: PrefixKeys = field(default_factory=PrefixKeys)
    """By which the KV cache finds its first tokens."""
    forks: list[Sequence] = field(default_factory=list)
    """Choices that start from this one's last prompt token, or idle sequences of a beam search.
    Until they fork from it they are RUNNING, that is, they have places in the batch, but the
    worker does not know them."""
    suspect_length: int = 0
    """The length at which it has passed the steps in which workers died."""
    num_prompt_tokens: int = field(init=False)
    """Number of tokens of its prompt. This and what follows is the group's, kept here so that a
    token does not touch the group."""
    frontend: Frontend = field(init=False)
    tenant: TenantUsage = field(init=False)

    def __post_init__(self) -> None:
        self.num_prompt_tokens = self.seq_group.num_prompt_tokens
        self.frontend = self.seq_group.frontend
        self.tenant = self.seq_group.tenant

    @property
    def num_known(self) -> int:
        """Number of tokens whose values are known."""
        return self.num_prompt_tokens + len(self.output_token_ids)

    @property
    def num_confirmed(self) -> int:
        """While it decodes: its first tokens whose KV is computed, by results that are in. The last
        known token was sampled, not computed."""
        if not self.prefill.is_complete:
            return 0
        return self.num_prompt_tokens + len(self.output_token_ids) - 1

    @property
    def is_prefilling(self) -> bool:
        """Whether it is in the batch, and its first tokens are still being computed."""
        return self.status is SequenceStatus.RUNNING and not self.prefill.is_complete

    @property
    def max_reusable_tokens(self) -> int:
        """Maximum number of tokens that may come from the cache. If prompt log probabilities are
        still to be reported, computation must begin at the logits of the first of them."""
        seq_group = self.seq_group
        if not seq_group.strategy.reuses_prefixes:
            return 0
        num_reported = seq_group.prompt_logprobs_start
        if seq_group.request.work.wants_prompt_logprobs and num_reported < self.num_prompt_tokens:
            return max(0, num_reported - 1)
        return self.num_known

    @property
    def context(self) -> Context:
        """What its KV depends on besides its tokens."""
        return self.seq_group.context

    @property
    def num_in_flight(self) -> int:
        """Number of sampled tokens whose values are in flight; the most if there are drafts."""
        return self.growth.length - self.num_known

    def known_tokens(self, start: int, end: int) -> list[int]:
        """The values of its tokens from `start` to `end`, exclusive."""
        first, last = start - self.num_prompt_tokens, end - self.num_prompt_tokens
        if first >= 0:
            return self.output_token_ids[first:last]
        output = self.output_token_ids[: max(0, last)]
        return [*self.seq_group.request.prompt_token_ids[start:end], *output]

    def num_common_tokens(self, other: Sequence) -> int:
        """In how many first tokens it equals another sequence of its group, which is as long."""
        num_tokens = self.num_prompt_tokens
        for token, others in zip(self.output_token_ids, other.output_token_ids, strict=True):
            if token != others:
                break
            num_tokens += 1
        return num_tokens

    def live_forks(self) -> list[Sequence]:
        """The forks that are still in the batch."""
        return [fork for fork in self.forks if fork.status is SequenceStatus.RUNNING]

    # Transitions. No other module assigns a sequence's fields.

    def register(self, seq_id: int) -> None:
        """Set the number by which workers and logs identify it: its request is accepted."""
        self.seq_id = seq_id

    def limit_output(self, max_tokens: int) -> None:
        """Set the limit on output tokens that holds in its worker group."""
        self.max_output_tokens = max_tokens
        self.growth.limit(self.num_prompt_tokens + max_tokens)

    def enter_batch(self) -> None:
        """Take a place in the batch."""
        self.status = SequenceStatus.RUNNING
        self.seq_group.num_running += 1

    def start_prefill(self, step_id: int, num_computed: int) -> None:
        """Begin to compute what the prefix cache did not provide."""
        self.prefill.start(step_id, num_computed)
        if not self.seq_group.has_begun:
            self.seq_group.has_begun = True
            self.seq_group.num_cached_tokens = min(num_computed, self.num_prompt_tokens)

    def append_sampled(self, token: int) -> None:
        """Add the value of a token that is counted in `length`."""
        self.output_token_ids.append(token)

    def truncate(self, num_tokens: int) -> None:
        """Keep the first output tokens only."""
        del self.output_token_ids[num_tokens:]

    def hold_forks(self, forks: list[Sequence]) -> None:
        """Set the sequences that will fork from this one, or that hold no beam."""
        self.forks = forks

    def release_forks(self) -> list[Sequence]:
        """Remove and return the forks that are still in the batch."""
        forks, self.forks = self.live_forks(), []
        return forks

    def fork_from(self, parent: Sequence, step_id: int) -> None:
        """Share the tokens that the parent has computed."""
        self.prefill.start(step_id, parent.prefill.num_computed)
        self.prefix_keys = parent.prefix_keys.fork()
        self.suspect_length = max(self.suspect_length, parent.suspect_length)

    def fork_beam(self, parent: Sequence, token: int, step_id: int) -> None:
        """Continue the parent's beam with another token."""
        self.fork_from(parent, step_id)
        self.prefill.confirm(is_complete=parent.prefill.is_complete)
        self.output_token_ids = [*parent.output_token_ids, token]
        self.growth.restart(self.num_known)

    def drop_beam(self) -> None:
        """Give up the beam; only the prompt is left."""
        self.output_token_ids = []
        self.prefix_keys = PrefixKeys()
        self.prefill.confirm(is_complete=False)
        self.growth.restart(self.num_known)

    def swap_out(self) -> None:
        """Leave the batch for host memory."""
        self._leave_batch(SequenceStatus.SWAPPED)

    def preempt(self) -> None:
        """Leave the batch or host memory, to be recomputed."""
        self._leave_batch(SequenceStatus.WAITING)

    def restart(self) -> None:
        """Wait to be recomputed, without the tokens in flight: the worker is lost."""
        self.suspect(self.growth.length)
        self.preempt()
        self.growth.restart(self.num_known)

    def suspect(self, length: int) -> None:
        """Record that workers may die in the steps that compute it up to a length."""
        self.suspect_length = max(self.suspect_length, length)

    def finish(self, status: SequenceStatus) -> None:
        """Set a final status; the sequence must not be in the batch."""
        assert status.is_finished
        assert self.status in (SequenceStatus.WAITING, SequenceStatus.SWAPPED)
        self.status = status

    def _leave_batch(self, status: SequenceStatus) -> None:
        self.seq_group.num_running -= self.status is SequenceStatus.RUNNING
        self.status = status
        if self.seq_group.strategy.is_lockstep:
            self.seq_group.strategy.leave_batch()
            self.growth.restart(self.num_known)  # the next tokens are chosen again
        self.prefill.reset()
        self.growth.release()
        self.forks = []


def deliver_all(
    sampled: list[Sequence], token_ids: list[int]
) -> tuple[int, list[tuple[Sequence, int | None]]]:
    """Append sampled tokens and put them into the outboxes. Returns their number, and the sequences
    that they end, each with its stop token, or None if it has all its tokens.

    Tokens of sequences that ended while the step was in flight are dropped. A preempted sequence's
    tokens count: its KV was intact when they were sampled. This is `Sequence.append_sampled`
    without a call for each token.
    """
    ended: list[tuple[Sequence, int | None]] = []
    num_dropped = 0
    for seq, token in zip(sampled, token_ids, strict=True):
        if seq.status is not _RUNNING and seq.status.is_finished:
            num_dropped += 1
            continue
        output, outbox = seq.output_token_ids, seq.frontend.outbox
        output.append(token)
        outbox.token_handles.append(seq.handle)
        outbox.token_ids.append(token)
        if token in seq.stop_token_ids:
            ended.append((seq, token))
        elif len(output) >= seq.max_output_tokens:
            ended.append((seq, None))
    return len(token_ids) - num_dropped, ended


class Strategy:
    """How the result of a request comes about from its sequences: the part of its state that only
    this kind of work has. `scheduling/strategy.py` plans its steps and processes their results."""

    is_lockstep: ClassVar[bool] = False
    """Whether its sequences advance and leave the batch only together."""
    output: ClassVar[RowOutput] = RowOutput.TOKEN
    """What the last row of a prefill brings."""
    brings_all: bool = False
    """Whether the other rows of a prefill bring the same, for their tokens."""
    vector_bytes: int = 0
    """Bytes of a vector of its worker group."""
    reuses_prefixes: bool = True
    """Whether tokens may come from the prefix cache."""
    streams: ClassVar[bool] = True
    """Whether each token that a sequence samples is delivered at once."""

    def start(self, sequences: list[Sequence]) -> None:
        """Begin with these sequences, none of which is in a batch."""

    def active(self, seq_group: SequenceGroup) -> Iterable[Sequence]:
        """The unfinished sequences without idle ones."""
        return seq_group.unfinished()

    def leave_batch(self) -> None:
        """Forget the step in progress: the group leaves the batch."""


@dataclass(slots=True, eq=False)
class SequenceGroup:
    """One request: sequences that share a prompt."""

    request: Request
    strategy: Strategy
    tenant: TenantUsage
    frontend: Frontend
    rank: tuple[int, ...]
    """The policy's order of groups; the lowest is served first, and no two are equal."""
    clock: RequestClock
    sequences: list[Sequence] = field(default_factory=list)
    """One per choice, in order; in a beam search one per beam."""
    num_unfinished: int = 0
    num_running: int = 0
    """Sequences that are RUNNING."""
    placement: Placement = field(default_factory=Placement)
    losses: WorkerLosses = field(default_factory=WorkerLosses)
    prompt_logprobs_start: int = 0
    """Prompt position up to which log probabilities were delivered; 0: none yet."""
    num_cached_tokens: int = 0
    """Prompt tokens that were found in the prefix cache when it was first in a batch."""
    has_begun: bool = False
    """Whether it has ever been in a batch."""
    error: Exception | None = None
    """The error with which it failed, if it did."""
    num_prompt_tokens: int = field(init=False)
    """Tokens of the prompt."""
    num_source_tokens: int = field(init=False)
    """Tokens of its source, to which its tokens attend if the model has an encoder."""
    adapter: bytes | None = field(init=False)
    """Digest of its adapter; None without one."""

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.request.prompt_token_ids)
        self.num_source_tokens = num_source_tokens(self.request.context)
        self.adapter = adapter_of(self.request.context)

    @property
    def context(self) -> Context:
        """What the KV of its tokens depends on besides its tokens, its tenant's part included."""
        return self.tenant.context + self.request.context

    @property
    def max_hold_us(self) -> int:
        """How long its results may be held back."""
        return self.request.work.max_hold_us if self.strategy.streams else 0

    @property
    def longest(self) -> Sequence:
        """Its unfinished sequence with the most known tokens; the first if several have."""
        if len(self.sequences) == 1:
            return self.sequences[0]
        return max(self.unfinished(), key=lambda seq: seq.num_known)

    @property
    def max_known_tokens(self) -> int:
        """Known tokens of its longest unfinished sequence, which a worker must be able to hold."""
        return self.longest.num_known

    @property
    def has_output(self) -> bool:
        """Whether its longest unfinished sequence has output tokens."""
        return self.max_known_tokens > self.num_prompt_tokens

    @property
    def is_before_loss(self) -> bool:
        """Whether it has not yet passed the point that it had reached when a worker died."""
        return any(seq.num_known < seq.suspect_length for seq in self.active())

    @property
    def is_suspect(self) -> bool:
        """Whether several workers died at the same point of it, which it has not yet passed. It is
        then computed in steps of its own."""
        return self.losses.num_repeated > 1 and self.is_before_loss

    @property
    def stays_where_it_began(self) -> bool:
        """Whether it goes to no other worker group when its prompt is computed."""
        return self.is_suspect or self.strategy.is_lockstep or self.request.work.max_tokens == 1

    def choices(self) -> list[Sequence]:
        """The sequences for which its frontend has handles."""
        return self.sequences[: self.request.work.num_choices]

    def record_event(self, event: RequestEvent, now_us: int) -> None:
        """Add an event to its timeline, with the number of tokens of its longest sequence."""
        num_tokens = max(len(seq.output_token_ids) for seq in self.sequences)
        self.clock.timeline.add(event, now_us, self.num_prompt_tokens + num_tokens)

    @property
    def num_joint(self) -> int:
        """How many of its sequences must be on the device together."""
        return len(self.sequences) if self.strategy.is_lockstep else 1

    def unfinished(self) -> Iterator[Sequence]:
        """Its sequences that have not ended."""
        return (seq for seq in self.sequences if not seq.status.is_finished)

    def active(self) -> Iterable[Sequence]:
        """Its unfinished sequences without idle ones."""
        return self.strategy.active(self)

    def set_sequences(self, sequences: list[Sequence]) -> None:
        """Set all its sequences, which stay the same while it is live. Without any at its end, the
        reference cycles are broken, so that memory is freed without the garbage collector."""
        self.sequences = sequences
        self.num_unfinished = len(self.waiting())
        self.strategy.start(sequences)

    def end(self, seq: Sequence, status: SequenceStatus) -> None:
        """End one of its sequences, which must not be running."""
        seq.finish(status)
        self.num_unfinished -= 1
        self.placement.refusals.clear()  # the router asks again: its other sequences may find room

    def waiting(self) -> list[Sequence]:
        """Its sequences that are waiting for a place in a batch."""
        return [seq for seq in self.sequences if seq.status is SequenceStatus.WAITING]

    def running(self) -> list[Sequence]:
        """Its sequences in the batch."""
        return [seq for seq in self.sequences if seq.status is SequenceStatus.RUNNING]

    def swapped(self) -> list[Sequence]:
        """Its sequences whose KV is in host memory."""
        return [seq for seq in self.sequences if seq.status is SequenceStatus.SWAPPED]

    def check(self) -> None:
        """Assert the invariants of a live group and its sequences."""
        assert self.num_unfinished == len(list(self.unfinished())) > 0
        assert self.num_running == len(self.running())
        assert (self.clock.phase is RequestPhase.RUNNING) == (self.num_running > 0)
        assert not (self.num_running and self.swapped()), "swapped out and in only together"
        for seq in self.unfinished():
            assert seq.num_in_flight >= 0
            assert len(seq.output_token_ids) <= self.request.work.max_tokens
            assert not seq.forks or seq.status is SequenceStatus.RUNNING


def request_number(seq_group: SequenceGroup) -> int:
    """The number of an accepted request: its first sequence's."""
    return seq_group.sequences[0].seq_id
