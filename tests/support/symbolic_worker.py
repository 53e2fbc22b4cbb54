"""A worker that computes nothing and checks everything.

Its KV cache holds, for each slot, what a real one would hold numbers for: the key and value of one
token at one position, which depend on all tokens before it. Here that is a hash chained over the
tokens so far (`History`). Before a row reads a position it is compared with the sequence's own
history, so any wrong block table, stale block, lost copy or early reuse shows as `PlanError`, in
the step in which it happens. Each cache group holds something else. Only what a row attends to is
read: in a window or a chunk, nothing before its first token.

The sampled token is a hash too: of the history, the seed and the choice. `undisturbed` gives the
tokens that a request must get whatever happens to it on the way.
"""

import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from pagewire.columns import pack
from pagewire.v1.context_pb2 import ContextKind as ContextKindMessage
from pagewire.v1.context_pb2 import ContextPart as ContextPartMessage
from pagewire.v1.plan_pb2 import BlockTable
from pagewire.v1.pooling_pb2 import (
    POOLING_HEAD_CLASSIFIER,
    POOLING_TYPE_ALL,
    POOLING_TYPE_CLS,
    POOLING_TYPE_LAST,
    POOLING_TYPE_MEAN,
    PoolingParams,
)
from pagewire.v1.worker_service_pb2 import KeptSequence
from scheduler_service.core import (
    ContextPart,
    NewSequence,
    RowCandidates,
    RowError,
    RowLogprobs,
    RowPromptLogprobs,
    StepPlan,
    StepResult,
)
from scheduler_service.core.beam_search import BeamParams, BeamSearch
from scheduler_service.core.config import CacheGroup
from scheduler_service.core.context import ContextKind, adapter_of, num_source_tokens
from scheduler_service.core.step_plan import BlockFetch, BlockLease, FetchResult, RowOutput

History = bytes
"""Digest of all tokens up to and including one position."""

START: History = b""
Slot = tuple[int, int]
Content = tuple[History, int]
"""What a slot holds, and the step that computed it."""


class PlanError(AssertionError):
    """A plan breaks the contract or the memory model."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """What stands for SamplerParams."""

    seed: int
    vocab_size: int = 32
    max_tokens: int = 2**31
    """Output tokens that the worker must not be asked to exceed; real parameters lack it."""
    fails_at: int | None = None
    """Output position at which the logits are not finite."""
    logprobs: bool = False
    prompt_logprobs: bool = False
    num_candidates: int | None = None
    """Tokens reported for the core to choose among; None: the worker chooses."""


def extend(history: History, token: int) -> History:
    """The history one token later."""
    return blake2b(history + token.to_bytes(4, "little"), digest_size=8).digest()


def next_token(history: History, choice_index: int, sampling: Sampling) -> int:
    """The token sampled after a history."""
    key = f"{sampling.seed}/{choice_index}".encode()
    digest = blake2b(history, key=key, digest_size=4).digest()
    return int.from_bytes(digest, "little") % sampling.vocab_size


def undisturbed(
    prompt: Iterable[int],
    choice_index: int,
    sampling: Sampling,
    stop_token_ids: frozenset[int],
    max_output_tokens: int,
) -> list[int]:
    """The output tokens of one choice of a request that runs alone on a worker without limits.

    Ends before the token that fails, if one does.
    """
    history = START
    for token in prompt:
        history = extend(history, token)
    output: list[int] = []
    while len(output) < max_output_tokens and len(output) != sampling.fails_at:
        token = next_token(history, choice_index, sampling)
        output.append(token)
        if token in stop_token_ids:
            break
        history = extend(history, token)
    return output


def candidates(history: History, sampling: Sampling) -> RowCandidates:
    """What may follow a history. Log probabilities are coarse, so that there are many ties."""
    assert sampling.num_candidates is not None
    key = f"{sampling.seed}".encode()
    digest = blake2b(history, key=key, digest_size=64).digest()
    scored = sorted((digest[token], token) for token in range(min(sampling.vocab_size, 64)))
    best = scored[: sampling.num_candidates]
    return RowCandidates(
        token_ids=[token for _, token in best],
        logprobs=[-(1 + badness // 8) / 8 for badness, _ in best],
    )


def undisturbed_beams(
    prompt: Iterable[int],
    sampling: Sampling,
    params: BeamParams,
    stop_token_ids: frozenset[int],
    max_output_tokens: int,
) -> list[list[int]] | None:
    """The best sequences of a beam search that runs alone on a worker without limits; None if it
    fails."""
    search = BeamSearch(params, stop_token_ids, max_output_tokens)
    start = START
    for token in prompt:
        start = extend(start, token)
    while not search.is_done:
        if search.num_tokens == sampling.fails_at:
            return None
        rows = []
        for beam in search.beams:
            history = start
            for step in beam.path.steps() if beam.path is not None else ():
                history = extend(history, step.token)
            rows.append(candidates(history, sampling))
        search.advance(rows)
    return [[step.token for step in finished.path.steps()] for finished in search.finished]


@dataclass
class WorkerSequence:
    """A sequence as the worker knows it."""

    seq_id: int
    choice_index: int
    sampling: Sampling
    num_prompt_tokens: int
    prompt_logprobs_start: int
    tokens: list[int]
    histories: list[History]
    """Per token."""
    tables: list[dict[int, int]]
    """By group: blocks by their index."""
    num_computed: int
    context: tuple[ContextPart, ...] = ()
    pooling: PoolingParams | None = None
    reads_source: bool = False

    @property
    def media(self) -> bytes:
        """What an encoder reads."""
        return b"".join(part.packed() for part in self.context if part.kind is ContextKind.MEDIA)

    def content(self, position: int) -> History:
        """What the slot of a position holds: the history and the parts that affect it, salts too,
        and with a source all media. Tokens depend on the history alone."""
        parts = sorted(part for part in self.context if part.start <= position)
        content = self.histories[position] + b"".join(part.packed() for part in parts)
        return content + self.media if self.reads_source else content

    @property
    def brings_all(self) -> bool:
        """Whether every row brings the vectors of its tokens."""
        return self.pooling is not None and self.pooling.type == POOLING_TYPE_ALL

    @property
    def output(self) -> RowOutput:
        """What its last row brings."""
        if self.pooling is not None:
            return RowOutput.VECTOR
        has_candidates = self.sampling.num_candidates is not None
        return RowOutput.CANDIDATES if has_candidates else RowOutput.TOKEN

    def used(self, groups: Sequence[CacheGroup]) -> Iterable[int]:
        """Its blocks, without those that none of its rows to come reads."""
        for group, table in zip(groups, self.tables, strict=True):
            first = 0
            if group.has_tokens:
                first = group.first_needed(self.num_computed) // group.block_tokens
            yield from (block for index, block in table.items() if index >= first)

    def append(self, token: int) -> None:
        """One token more."""
        last = self.histories[-1] if self.histories else START
        self.histories.append(extend(last, token))
        self.tokens.append(token)


def require(condition: bool, message: str) -> None:
    """Raise PlanError with the message unless the condition holds."""
    if not condition:
        raise PlanError(message)


def grouped(column: Sequence[int], width: int) -> list[tuple[int, ...]]:
    """A flat column as tuples."""
    require(len(column) % width == 0, f"a column of {width}s has {len(column)} entries")
    return [tuple(column[i : i + width]) for i in range(0, len(column), width)]


def _linear_us(num_prefill_tokens: int, num_prefill_pairs: int) -> int:
    return 1000 + 100 * num_prefill_tokens


@dataclass
class SymbolicWorker:
    """Executes plans in order; raises PlanError at the first that is wrong."""

    num_gpu_blocks: int
    cache_groups: tuple[CacheGroup, ...]
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int = 2**31
    num_cpu_blocks: int = 0
    max_loras: int = 0
    sequences: dict[int, WorkerSequence] = field(default_factory=dict)
    cache: dict[Slot, Content] = field(default_factory=dict)
    """What slots hold; it stays when a block comes free, until somebody writes there."""
    host: dict[Slot, Content] = field(default_factory=dict)
    """The same of host memory."""
    arriving: set[int] = field(default_factory=set)
    """Blocks that this step swaps in: the worker may do so beside its rows."""
    leaving: dict[int, set[int]] = field(default_factory=dict)
    """Blocks that this step swaps out, and who had them."""
    peers: Callable[[str], "SymbolicWorker | None"] = lambda address: None
    """The workers that are there, by address."""
    epoch: int = 0
    leases: dict[int, BlockLease] = field(default_factory=dict)
    """By number; those that were begun and not ended."""
    last_lease_id: int = 0
    """Of the lease that began last; the core numbers them."""
    fetches: dict[int, tuple[BlockFetch, int]] = field(default_factory=dict)
    """By number; those whose end was not reported, and the step whose result reports it."""
    step_us: Callable[[int, int], int] = _linear_us
    """Duration of a step with this many prompt tokens, and pairs of one and one that it sees."""
    num_steps: int = 0
    num_results_taken: int = 0
    """Steps whose results the core has; whoever brings them counts them here."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step."""
        require(plan.step_id == self.num_steps + 1, f"step {plan.step_id} is out of order")
        self.num_steps += 1
        moves = plan.leases or plan.ended_lease_ids or plan.fetches or self.fetches
        require(bool(plan.seq_ids or plan.swap_out or plan.swap_in or moves), "nothing to do")
        self._end_leases(plan)
        self._forget(plan.forget_seq_ids)
        self._swap(plan)
        self._copy(plan)
        self._begin_leases(plan)
        self._begin_fetches(plan)
        self._replace(plan)
        forks = {new.seq_id for new in plan.new_sequences if new.parent_seq_id is not None}
        for new in plan.new_sequences:
            self._learn(new)
        self._check_adapters()
        self._append_chosen(plan.appended_tokens)
        self._update_blocks(plan)
        rows = self._rows(plan, forks)
        starts = self._write(rows, plan, forks)
        self._save_states(plan, rows, starts)
        self._read(rows, starts)
        lookahead = self._write_drafts(plan, rows)
        result = self._result(plan, rows, starts, lookahead)
        result.fetches = self._end_fetches(plan)
        return result

    def _end_leases(self, plan: StepPlan) -> None:
        for lease_id in plan.ended_lease_ids:
            require(lease_id in self.leases, f"lease {lease_id} is unknown")
            del self.leases[lease_id]

    def _begin_leases(self, plan: StepPlan) -> None:
        for lease in plan.leases:
            require(lease.lease_id not in self.leases, f"lease {lease.lease_id} begins again")
            require(len(lease.keys) == 16 * len(lease.block_ids), "a lease lacks keys")
            require(len(set(lease.block_ids)) == len(lease.block_ids), "a block is leased twice")
            for block in lease.block_ids:
                slots = self._slots(block)
                require(bool(slots), f"block {block} is leased, which nobody has written")
                last = max(step for _, step in slots.values())
                is_late = last <= self.num_results_taken
                require(is_late, f"block {block} is leased before the result of step {last}")
                require(block not in self._targets, f"block {block} is leased before it arrived")
            self.leases[lease.lease_id] = lease
            self.last_lease_id = lease.lease_id

    def _begin_fetches(self, plan: StepPlan) -> None:
        for fetch in plan.fetches:
            require(fetch.fetch_id not in self.fetches, f"fetch {fetch.fetch_id} begins again")
            targets = fetch.blocks[1::2]
            require(len(set(targets)) == len(targets), "a fetch writes a block twice")
            for block in targets:
                self._check_block(block)
                require(not self._owners(block), f"a fetch into block {block} in use")
                self._check_may_write(block)
                self._poison(block)
            self.fetches[fetch.fetch_id] = fetch, self.num_steps + fetch.token[0] % 4

    @property
    def _targets(self) -> set[int]:
        """Blocks to which a fetch may write."""
        return {block for fetch, _ in self.fetches.values() for block in fetch.blocks[1::2]}

    def _check_may_write(self, block: int) -> None:
        """A row, a cache operation or another fetch writes to a block, ~b for host block b."""
        leased = any(block in lease.block_ids for lease in self.leases.values())
        require(not leased, f"block {block} is written while it is leased")
        require(block not in self._targets, f"block {block} is written beside a fetch")

    def _slots(self, block: int) -> dict[int, Content]:
        """What a block holds, ~b for host block b, by offset."""
        contents, index = (self.cache, block) if block >= 0 else (self.host, ~block)
        slots = {offset: contents.get((index, offset)) for offset in self._offsets}
        return {offset: content for offset, content in slots.items() if content is not None}

    def _end_fetches(self, plan: StepPlan) -> list[FetchResult]:
        """Those that end with this step: all, if it has nothing else to do. Some fail."""
        is_idle = not plan.seq_ids
        ended = [fetch for fetch, end in self.fetches.values() if is_idle or end <= self.num_steps]
        results = []
        for fetch in ended:
            if self._waits_for_lease(fetch):
                continue
            del self.fetches[fetch.fetch_id]
            failure = self._copy_from_source(fetch)
            results.append(FetchResult(fetch_id=fetch.fetch_id, failure=failure))
        return results

    def _waits_for_lease(self, fetch: BlockFetch) -> bool:
        """Whether the source's plan with the lease is still on its way; some fetches give up."""
        source = self.peers(fetch.addresses[0])
        if source is None or (source.epoch, source.last_lease_id) >= (
            fetch.source_epoch,
            fetch.lease_id,
        ):
            return False
        require(source.epoch == fetch.source_epoch, "a fetch from an epoch that has not begun")
        return fetch.token[2] % 4 > 0

    def _copy_from_source(self, fetch: BlockFetch) -> str:
        """Why it fails; empty if it does not. What fails has written some blocks."""
        source = self.peers(fetch.addresses[0])
        if source is None or source.epoch != fetch.source_epoch:
            return "UNREACHABLE"
        lease = source.leases.get(fetch.lease_id)
        if lease is None:
            return "DENIED"
        require(lease.token == fetch.token, f"fetch {fetch.fetch_id} has another's token")
        keys = dict(zip(lease.block_ids, grouped([*lease.keys], 16), strict=True))
        wanted = zip(grouped(fetch.blocks, 2), grouped([*fetch.keys], 16), strict=True)
        for (block, target), key in wanted:
            require(keys.get(block) == key, f"block {block} is not leased with this key")
            for offset, (history, _) in source._slots(block).items():
                self.cache[target, offset] = history, self.num_steps
            if fetch.token[1] % 4 == 0:
                return "TIMED_OUT"
        return ""

    def inherit(self, former: "SymbolicWorker") -> None:
        """Begin with the contents of these caches, except for what was written by steps whose
        results the core never got: they may have been written at any time, or not at all."""
        for slots, others in ((self.cache, former.cache), (self.host, former.host)):
            for slot, (history, step) in others.items():
                if step <= former.num_results_taken:
                    slots[slot] = (history, 0)

    def kept_sequences(self) -> list[KeptSequence]:
        """What it reports of its sequences when its core has died: without the tokens of steps
        whose results the core never got."""
        return [
            self._kept(seq)
            for seq in self.sequences.values()
            if seq.pooling is None
            and len(seq.tokens) - seq.num_prompt_tokens != seq.sampling.fails_at
        ]

    def _kept(self, seq: WorkerSequence) -> KeptSequence:
        end, tables = seq.num_computed, []
        for number, group in enumerate(self.cache_groups):
            if not group.has_tokens:
                continue
            needed = group.first_needed(seq.num_computed)
            # Of a block that it reports, the next core finds all tokens.
            for position in range(needed - needed % group.block_tokens, end):
                if not self._is_confirmed(self._slot(seq, number, position)):
                    end = position
                    break
        for number, (group, table) in enumerate(zip(self.cache_groups, seq.tables, strict=True)):
            first = 0
            if group.has_tokens:
                first = group.first_needed(seq.num_computed) // group.block_tokens
            blocks = [block for index, block in sorted(table.items()) if index >= first]
            is_whole = group.has_tokens or all(self._is_confirmed((block, 0)) for block in blocks)
            if is_whole and (end == seq.num_computed or not group.is_state):
                column = pack(blocks)
                tables.append(BlockTable(group=number, first_index=first, block_ids=column))
        return KeptSequence(
            seq_id=seq.seq_id,
            token_ids=pack(seq.tokens[:end]),
            context=[
                ContextPartMessage(
                    kind=ContextKindMessage.ValueType(part.kind),
                    digest=part.digest,
                    start=part.start,
                    length=part.length,
                )
                for part in seq.context
            ],
            tables=tables,
        )

    def _is_confirmed(self, slot: Slot) -> bool:
        content = self.cache.get(slot)
        return content is not None and content[1] <= self.num_results_taken

    def _forget(self, seq_ids: list[int]) -> None:
        for seq_id in seq_ids:
            require(seq_id in self.sequences, f"cannot forget unknown sequence {seq_id}")
            del self.sequences[seq_id]

    def _swap(self, plan: StepPlan) -> None:
        out, back = grouped(plan.swap_out, 2), grouped(plan.swap_in, 2)
        self.leaving = {source: set(self._owners(source)) for source, _ in out}
        self.arriving = {target for _, target in back}
        for source, target in out:
            self._check_block(source)
            require(0 <= target < self.num_cpu_blocks, f"host block {target} does not exist")
        self._move(out, self.cache, self.host, "swap_out")
        for source, target in back:
            require(0 <= source < self.num_cpu_blocks, f"host block {source} does not exist")
            self._check_block(target)
            require(not self._owners(target), f"swap_in into block {target} in use")
        self._move(back, self.host, self.cache, "swap_in")

    def _move(
        self,
        pairs: list[tuple[int, ...]],
        sources: dict[Slot, Content],
        targets: dict[Slot, Content],
        what: str,
    ) -> None:
        """All reads before all writes: a batched copy may do them in any order."""
        blocks = [target for _, target in pairs]
        require(len(blocks) == len(set(blocks)), f"{what} into one block twice")
        contents = {
            (target, offset): sources.get((source, offset))
            for source, target in pairs
            for offset in self._offsets
        }
        for source, target in pairs:
            is_written = any(contents[target, offset] for offset in self._offsets)
            require(is_written, f"{what} from block {source}, which nobody has written")
            self._check_may_write(~target if targets is self.host else target)
        for slot, content in contents.items():
            targets.pop(slot, None)
            if content is not None:
                targets[slot] = content

    @property
    def _offsets(self) -> range:
        """Places in a block of any group. A state is in the first one."""
        return range(max([1, *(group.block_tokens for group in self.cache_groups)]))

    def _copy(self, plan: StepPlan) -> None:
        pairs = grouped(plan.copy, 2)
        updated = {block for _, _, _, block in grouped(plan.block_updates, 4)}
        coming = {block for new in plan.new_sequences for block in _blocks(new)}
        for source, target in pairs:
            self._check_block(source)
            self._check_block(target)
            for block in (source, target):
                require(block not in self.arriving, f"copy of block {block} that is on its way")
            require(not self._owners(target), f"copy into block {target} in use")
            is_given = target in updated | coming or bool(self.arriving)  # introduced later
            is_given |= self._holds_state(source)  # which is saved, or given to a beam to come
            require(is_given, f"copy into block {target} that nobody gets")
        self._move(pairs, self.cache, self.cache, "copy")

    def _learn(self, new: NewSequence) -> None:
        seq_id = new.seq_id
        require(seq_id not in self.sequences, f"sequence {seq_id} is known already")
        require(0 < seq_id < 2**31, f"sequence id {seq_id} is out of range")
        blocks = _blocks(new)
        for block in blocks:
            self._check_block(block)
        require(len(blocks) == len(set(blocks)), f"{seq_id} has a block twice")
        seq = WorkerSequence(
            seq_id=seq_id,
            choice_index=new.choice_index,
            sampling=new.sampling or Sampling(seed=0),
            pooling=new.pooling,
            num_prompt_tokens=new.num_prompt_tokens,
            prompt_logprobs_start=new.prompt_logprobs_start,
            tokens=[],
            histories=[],
            tables=self._tables(new),
            num_computed=new.num_computed_tokens,
            context=new.context,
            reads_source=any(group.is_fixed for group in self.cache_groups),
        )
        if new.parent_seq_id is not None:
            self._inherit(seq, new)
        else:
            require(0 < new.num_prompt_tokens <= len(new.token_ids), "a prompt is needed")
            is_reused = new.num_computed_tokens > 0 and new.pooling is not None
            reuses = not is_reused or new.pooling.type == POOLING_TYPE_LAST
            require(reuses, f"{seq_id} is pooled over tokens that were computed before")
            self._check_exclusive(seq)
        for token in new.token_ids:
            seq.append(token)
        if new.parent_seq_id is None:
            self._check_computed(seq)
        self.sequences[seq_id] = seq

    def _check_adapters(self) -> None:
        """No sequence loses its adapter's slot to another one."""
        adapters = {adapter_of(seq.context) for seq in self.sequences.values()} - {None}
        require(len(adapters) <= self.max_loras, f"{len(adapters)} adapters at a time")

    def _tables(self, new: NewSequence) -> list[dict[int, int]]:
        numbers = [table.group for table in new.tables]
        require(numbers == [*range(len(self.cache_groups))], f"{new.seq_id} has tables {numbers}")
        return [dict(enumerate(table.block_ids, table.first_index)) for table in new.tables]

    def _inherit(self, seq: WorkerSequence, new: NewSequence) -> None:
        assert new.parent_seq_id is not None
        parent = self.sequences.get(new.parent_seq_id)
        require(parent is not None, f"parent {new.parent_seq_id} is unknown")
        assert parent is not None
        require(new.num_prompt_tokens == new.num_computed_tokens == 0, "a fork has numbers")
        seq.tokens = list(parent.tokens)
        seq.histories = list(parent.histories)
        seq.num_prompt_tokens = parent.num_prompt_tokens
        require(new.context == (), "a fork has a context")
        seq.context = parent.context
        seq.num_computed = parent.num_computed

    def _check_exclusive(self, seq: WorkerSequence) -> None:
        """Blocks that hold no computed prefix must be nobody else's."""
        for group, table in zip(self.cache_groups, seq.tables, strict=True):
            if not group.has_tokens and seq.num_computed:
                continue  # what a row then writes to is checked
            first = -(-seq.num_computed // max(1, group.block_tokens))
            for block in (block for index, block in table.items() if index >= first):
                unused = not self._owners(block)
                self._check_may_write(block)
                require(unused, f"block {block} is given to {seq.seq_id} while in use")
                self._poison(block)

    def _poison(self, block: int) -> None:
        """Forget what a block holds: its new owner must write before it reads."""
        for offset in self._offsets:
            self.cache.pop((block, offset), None)

    def _check_computed(self, seq: WorkerSequence) -> None:
        """What a sequence need not compute must be in its blocks, and the core must know it."""
        require(seq.num_computed < len(seq.tokens), f"{seq.seq_id} has no logits to come")
        last = 0
        for number, group in enumerate(self.cache_groups):
            if group.is_state and seq.num_computed:
                last = max(last, self._read_state(seq, number))
            if group.is_fixed and seq.num_computed:
                last = max(last, self._read_source(seq, number))
            positions = range(group.first_needed(seq.num_computed), seq.num_computed)
            for position in positions if group.has_tokens else ():
                slot = self._slot(seq, number, position)
                history, step = self.cache.get(slot, (None, 0))
                require(
                    history == _kv(number, seq.content(position)),
                    f"{seq.seq_id} finds something else at position {position}, block {slot[0]}",
                )
                last = max(last, step)
        require(
            last <= self.num_results_taken, f"{seq.seq_id} reuses step {last} before its result"
        )

    def _append_chosen(self, column: list[int]) -> None:
        pairs = grouped(column, 2)
        require(len({seq_id for seq_id, _ in pairs}) == len(pairs), "a sequence gets two tokens")
        for seq_id, token in pairs:
            require(seq_id in self.sequences, f"a token for unknown sequence {seq_id}")
            seq = self.sequences[seq_id]
            is_chosen = seq.sampling.num_candidates is not None
            require(is_chosen, f"{seq_id} gets its tokens from the worker")
            require(seq.num_computed == len(seq.tokens), f"{seq_id} gets a token too early")
            seq.append(token)

    def _replace(self, plan: StepPlan) -> None:
        """Give up the blocks that have been copied: new sequences may have them."""
        for seq_id, group, index, _ in grouped(plan.block_updates, 4):
            if seq_id in self.sequences and group < len(self.cache_groups):
                self.sequences[seq_id].tables[group].pop(index, None)

    def _update_blocks(self, plan: StepPlan) -> None:
        seen = set()
        parents = {new.seq_id: new.parent_seq_id for new in plan.new_sequences}
        for seq_id, group, index, block in grouped(plan.block_updates, 4):
            require(0 <= group < len(self.cache_groups), f"there is no group {group}")
            self._check_block(block)
            require(not self.cache_groups[group].is_fixed, f"the source of {seq_id} changes")
            seq = self.sequences.get(seq_id)
            require(seq is not None, f"block update for unknown sequence {seq_id}")
            assert seq is not None
            entry = seq_id, group, index
            require(entry not in seen, f"entry {index} of {seq_id} is set twice")
            seen.add(entry)
            table = seq.tables[group]
            follows = index in table or index - 1 in table or not table
            require(index >= 0 and follows, f"entry {index} of {seq_id} leaves a gap")
            owners = [owner for owner in self._owners(block) if parents.get(owner) != seq_id]
            require(not owners, f"block {block} is given to {seq_id} while in use")
            self._check_may_write(block)
            table[index] = block
            if block not in plan.copy[1::2]:
                self._poison(block)

    def _rows(self, plan: StepPlan, forks: set[int]) -> list[tuple[WorkerSequence, int, int]]:
        """(sequence, number of tokens, what it brings) per row."""
        count = len(plan.seq_ids)
        num_tokens = [1] * count if plan.num_tokens is None else plan.num_tokens
        output = [1] * count if plan.output is None else plan.output
        require(count == len(num_tokens) == len(output), "the batch's columns differ in length")
        require(count <= self.max_num_seqs, f"{count} rows")
        require(sum(num_tokens) <= self.max_num_batched_tokens, f"{sum(num_tokens)} tokens")
        require(count == len(set(plan.seq_ids)), "a sequence has two rows")
        unknown = set(plan.seq_ids) - self.sequences.keys()
        require(not unknown, f"rows of unknown sequences {unknown}")
        place = {seq_id: row for row, seq_id in enumerate(plan.seq_ids)}
        for new in plan.new_sequences:
            require(new.seq_id in place, f"new sequence {new.seq_id} has no row")
            if new.parent_seq_id in place:
                later = place[new.seq_id] > place[new.parent_seq_id]
                require(later, f"fork {new.seq_id} comes before its parent")
        for seq_id, num, brings in zip(plan.seq_ids, num_tokens, output, strict=True):
            require(num > 0 or (seq_id in forks and brings), f"row of {seq_id} computes nothing")
            seq = self.sequences[seq_id]
            expected, may_bring_nothing = seq.output, not seq.brings_all
            require(
                brings == expected or (may_bring_nothing and not brings),
                f"row of {seq_id} brings {brings}, not {expected}",
            )
            is_complete = num == len(seq.tokens)
            require(bool(self.cache_groups) or is_complete, f"{seq_id} is computed in parts")
        sequences = [self.sequences[seq_id] for seq_id in plan.seq_ids]
        return list(zip(sequences, num_tokens, output, strict=True))

    def _write(
        self, rows: list[tuple[WorkerSequence, int, int]], plan: StepPlan, forks: set[int]
    ) -> list[int]:
        """Write each row's tokens to their slots; per row the first position."""
        parents = {new.seq_id: new.parent_seq_id for new in plan.new_sequences}
        starts = []
        for seq, num_tokens, sample in rows:
            sharers = {fork for fork in forks if parents[fork] == seq.seq_id} | {seq.seq_id}
            if seq.seq_id in forks and num_tokens == 0:
                seq.num_computed = self.sequences[parents[seq.seq_id] or 0].num_computed
            start, end = seq.num_computed, seq.num_computed + num_tokens
            starts.append(start)
            require(end <= len(seq.tokens), f"{seq.seq_id} computes tokens that it does not have")
            is_early = sample and end < len(seq.tokens) and not seq.brings_all
            require(not is_early, f"{seq.seq_id} samples in mid-prompt")
            for number, group in enumerate(self.cache_groups):
                if group.is_state and 0 < start < end:
                    self._read_state(seq, number)
                if group.is_fixed and start == 0 < end:
                    for slot, content in self._source(seq, number):
                        self._write_at(seq, slot, content, sharers)
                if group.is_fixed and start < end:
                    self._read_source(seq, number)
            for position in range(start, end):
                self._write_slot(seq, position, seq.content(position), sharers)
            if end > start:
                self._write_states(seq, end, sharers)
            seq.num_computed = end
        return starts

    def _write_drafts(
        self, plan: StepPlan, rows: list[tuple[WorkerSequence, int, int]]
    ) -> list[int]:
        """Write as many drafts as each row may have, all of them wrong until they are kept."""
        lookahead = [0] * len(rows) if plan.lookahead is None else plan.lookahead
        require(plan.lookahead is None or any(lookahead), "a lookahead column says nothing")
        require(len(lookahead) == len(rows), "the batch's columns differ in length")
        num_tokens = sum(num_tokens for _, num_tokens, _ in rows) + sum(lookahead)
        require(num_tokens <= self.max_num_batched_tokens, f"{num_tokens} tokens with drafts")
        for (seq, num, sample), num_drafts in zip(rows, lookahead, strict=True):
            require(0 <= num_drafts <= 255, f"{seq.seq_id} has {num_drafts} drafts")
            params = seq.sampling
            may_draft = sample and num > 0 and params.num_candidates is None
            may_draft &= not params.prompt_logprobs
            require(not num_drafts or may_draft, f"{seq.seq_id} cannot have drafts")
            for position in range(seq.num_computed, seq.num_computed + num_drafts):
                self._write_slot(seq, position, b"draft", {seq.seq_id})
        return lookahead

    def _write_slot(
        self, seq: WorkerSequence, position: int, history: History, sharers: set[int]
    ) -> None:
        for number, group in enumerate(self.cache_groups):
            if group.has_tokens:
                slot = self._slot(seq, number, position)
                self._write_at(seq, slot, _kv(number, history), sharers)

    def _write_at(
        self, seq: WorkerSequence, slot: Slot, content: History, sharers: set[int]
    ) -> None:
        block, _ = slot
        owners = self._owners(block)
        shared = f"{seq.seq_id} writes to block {block}, shared by {owners}"
        require(sharers.issuperset(owners), shared)
        require(block not in self.arriving, f"{seq.seq_id} writes to {block} too early")
        had = seq.seq_id in self.leaving.get(block, ())
        require(not had, f"{seq.seq_id} writes to block {block}, which is swapped out")
        self._check_may_write(block)
        self.cache[slot] = content, self.num_steps

    def _write_states(self, seq: WorkerSequence, end: int, sharers: set[int]) -> None:
        """A state depends on all tokens before it; so its blocks hold the last one's content."""
        for number, group in enumerate(self.cache_groups):
            for index in range(group.num_blocks):
                content = _kv(number, bytes([index]) + seq.content(end - 1))
                self._write_at(seq, (seq.tables[number][index], 0), content, sharers)

    def _save_states(
        self, plan: StepPlan, rows: list[tuple[WorkerSequence, int, int]], starts: list[int]
    ) -> None:
        """Write states that rows pass to blocks that nobody has."""
        saved = grouped(plan.saved_states, 4)
        blocks = [block for *_, block in saved]
        require(len(blocks) == len(set(blocks)), "a state is saved into one block twice")
        moved = {*plan.copy, *plan.swap_in[1::2]}
        spans = {
            seq.seq_id: (seq, range(start + 1, start + num_tokens + 1))
            for (seq, num_tokens, _), start in zip(rows, starts, strict=True)
        }
        places: dict[tuple[int, int, int], list[int]] = {}
        for seq_id, number, position, block in saved:
            self._check_block(block)
            self._check_may_write(block)
            require(not self._owners(block), f"a state is saved into block {block} in use")
            require(block not in moved, f"a state is saved into block {block}, which is moved")
            places.setdefault((seq_id, number, position), []).append(block)
        for (seq_id, number, position), blocks in places.items():
            seq, reached = spans[seq_id]
            require(position in reached, f"the row of {seq_id} does not reach {position}")
            group = self.cache_groups[number]
            require(group.is_state and len(blocks) == group.num_blocks, "a part of a state")
            for index, block in enumerate(blocks):
                self._poison(block)
                content = _kv(number, bytes([index]) + seq.content(position - 1))
                self.cache[block, 0] = content, self.num_steps

    def _source(self, seq: WorkerSequence, number: int) -> Iterable[tuple[Slot, History]]:
        """Where a sequence has its source, and what it is."""
        tokens, length = self.cache_groups[number].block_tokens, num_source_tokens(seq.context)
        table = seq.tables[number]
        wanted = [*range(-(-length // tokens))]
        require([*table] == wanted, f"{seq.seq_id} has entries {[*table]} for {length} tokens")
        for place in range(length):
            content = _kv(number, seq.media + place.to_bytes(2, "little"))
            yield (table[place // tokens], place % tokens), content

    def _read_source(self, seq: WorkerSequence, number: int) -> int:
        """Check a sequence's source; returns the step that computed it."""
        last = 0
        for (block, offset), wanted in self._source(seq, number):
            require(block not in self.arriving, f"{seq.seq_id} reads {block} too early")
            found, step = self.cache.get((block, offset), (None, 0))
            require(found == wanted, f"{seq.seq_id} finds another source in block {block}")
            last = max(last, step)
        return last

    def _read_state(self, seq: WorkerSequence, number: int) -> int:
        """Check the state after a sequence's computed tokens; returns the step that computed it."""
        last = 0
        for index in range(self.cache_groups[number].num_blocks):
            block = seq.tables[number].get(index, -1)
            require(block not in self.arriving, f"{seq.seq_id} reads state {block} too early")
            found, step = self.cache.get((block, 0), (None, 0))
            wanted = _kv(number, bytes([index]) + seq.content(seq.num_computed - 1))
            where = f"position {seq.num_computed}, block {block}"
            require(found == wanted, f"{seq.seq_id} finds another state at {where}")
            last = max(last, step)
        return last

    def _holds_state(self, block: int) -> bool:
        content, _ = self.cache.get((block, 0), (b"", 0))
        return bool(content) and self.cache_groups[content[0]].is_state

    def _read(self, rows: list[tuple[WorkerSequence, int, int]], starts: list[int]) -> None:
        """Attend over each row's context."""
        for (seq, num_tokens, _), start in zip(rows, starts, strict=True):
            for number, group in enumerate(self.cache_groups if num_tokens else ()):
                positions = range(group.first_needed(start), seq.num_computed)
                for position in positions if group.has_tokens else ():
                    block, offset = self._slot(seq, number, position)
                    require(block not in self.arriving, f"{seq.seq_id} reads {block} too early")
                    wanted = _kv(number, seq.content(position))
                    require(
                        self.cache.get((block, offset), (None,))[0] == wanted,
                        f"{seq.seq_id} reads position {position} from block {block}, which holds "
                        "something else",
                    )

    def _slot(self, seq: WorkerSequence, number: int, position: int) -> Slot:
        """Where a group has a token."""
        index, offset = divmod(position, self.cache_groups[number].block_tokens)
        table = seq.tables[number]
        require(index in table, f"{seq.seq_id} has no block for position {position}")
        return table[index], offset

    def _result(
        self,
        plan: StepPlan,
        rows: list[tuple[WorkerSequence, int, int]],
        starts: list[int],
        lookahead: list[int],
    ) -> StepResult:
        counts = [(start, row[1]) for start, row in zip(starts, rows, strict=True) if row[1] > 1]
        num_pairs = sum(count * start + count * (count + 1) // 2 for start, count in counts)
        result = StepResult(
            step_id=plan.step_id,
            token_ids=[],
            forward_us=900,
            sample_us=60,
            busy_us=self.step_us(sum(count for _, count in counts), num_pairs),
        )
        num_sampled: list[int] = []
        num_drafts: list[int] = []
        for row, (seq, num_tokens, sample) in enumerate(rows):
            if seq.sampling.prompt_logprobs:
                self._report_prompt(result, row, seq, starts[row], starts[row] + num_tokens)
            if seq.pooling is not None and sample:
                end = starts[row] + num_tokens
                result.vectors[row] = vectors_of(seq.histories, seq.pooling, starts[row], end)
            if not sample or seq.pooling is not None:
                continue
            num_sampled.append(1)
            num_drafts.append(lookahead[row])
            position = len(seq.tokens) - seq.num_prompt_tokens
            last = position + lookahead[row]
            require(last < seq.sampling.max_tokens, f"{seq.seq_id} exceeds max_tokens")
            num_tokens = len(seq.tokens) + lookahead[row]
            require(num_tokens < self.max_model_len, f"{seq.seq_id} exceeds the model")
            if position == seq.sampling.fails_at:
                result.token_ids.append(-1)
                result.errors[row] = RowError(reason="NON_FINITE_LOGITS", message="not finite")
                seq.append(0)
                continue
            if seq.sampling.num_candidates is not None:
                result.token_ids.append(-1)
                result.candidates[row] = candidates(seq.histories[-1], seq.sampling)
                continue
            token = next_token(seq.histories[-1], seq.choice_index, seq.sampling)
            seq.append(token)
            result.token_ids.append(token)
            if seq.sampling.logprobs:
                result.logprobs[row] = logprobs_of(token)
            num_kept = self._keep_drafts(seq, lookahead[row], result.token_ids)
            num_sampled[-1] += num_kept
            if seq.sampling.logprobs and num_kept:
                kept = result.token_ids[-num_kept:]
                result.kept_logprobs[row] = [logprobs_of(token) for token in kept]
        if plan.lookahead is not None:
            result.num_sampled, result.num_drafts = num_sampled, num_drafts
        return result

    def _keep_drafts(self, seq: WorkerSequence, num_drafts: int, token_ids: list[int]) -> int:
        """Sample after the drafts that are right: from none to all of them, by the history."""
        num_kept = seq.histories[-1][0] % (num_drafts + 1)
        for index in range(num_kept):
            position = len(seq.tokens) - seq.num_prompt_tokens
            if position == seq.sampling.fails_at:
                return index
            self._write_slot(seq, seq.num_computed, seq.content(seq.num_computed), {seq.seq_id})
            seq.num_computed += 1
            self._write_states(seq, seq.num_computed, {seq.seq_id})
            token = next_token(seq.histories[-1], seq.choice_index, seq.sampling)
            seq.append(token)
            token_ids.append(token)
        return num_kept

    def _report_prompt(
        self, result: StepResult, row: int, seq: WorkerSequence, start: int, end: int
    ) -> None:
        """Logits at positions [start, end) predict the tokens at [start + 1, end + 1)."""
        first = max(start + 1, seq.prompt_logprobs_start)
        last = min(end + 1, seq.num_prompt_tokens)
        if first < last:
            column = b"".join(seq.tokens[i].to_bytes(4, "little") for i in range(first, last))
            result.prompt_logprobs[row] = RowPromptLogprobs(
                start=first, width=1, token_ids=column, logprobs=column, ranks=column
            )

    def _owners(self, block: int) -> list[int]:
        groups = self.cache_groups
        return [seq.seq_id for seq in self.sequences.values() if block in seq.used(groups)]

    def _check_block(self, block: int) -> None:
        require(0 <= block < self.num_gpu_blocks, f"block {block} does not exist")


VECTOR_SIZE = 4
NUM_LABELS = 3


def vector_bytes(pooling: PoolingParams) -> int:
    """Size of a vector."""
    size = NUM_LABELS if pooling.head == POOLING_HEAD_CLASSIFIER else VECTOR_SIZE
    return 4 * (pooling.dimensions or size)


def vectors_of(histories: Sequence[History], pooling: PoolingParams, start: int, end: int) -> bytes:
    """What stands for the vectors of a row that computes some of a sequence's tokens: numbers that
    depend on all tokens that their type pools."""
    pooled = {
        POOLING_TYPE_LAST: [histories[-1:]],
        POOLING_TYPE_MEAN: [histories],
        POOLING_TYPE_CLS: [histories[:1]],
        POOLING_TYPE_ALL: [[history] for history in histories[start:end]],
    }[pooling.type]
    return b"".join(_vector(b"".join(states), pooling) for states in pooled)


def _vector(states: bytes, pooling: PoolingParams) -> bytes:
    digest = blake2b(states, digest_size=VECTOR_SIZE, person=bytes([pooling.head])).digest()
    size = vector_bytes(pooling)
    return (struct.pack(f"<{VECTOR_SIZE}f", *digest) * size)[:size]


def undisturbed_vector(prompt: Iterable[int], pooling: PoolingParams) -> bytes:
    """The vector of a request that runs alone."""
    histories = [START]
    for token in prompt:
        histories.append(extend(histories[-1], token))
    return vectors_of(histories[1:], pooling, 0, len(histories) - 1)


def _kv(group: int, history: History) -> History:
    """What a group holds of a token."""
    return bytes([group]) + history


def _blocks(new: NewSequence) -> list[int]:
    return [block for table in new.tables for block in table.block_ids]


def logprobs_of(token: int) -> RowLogprobs:
    """What stands for a token's log probabilities."""
    column = token.to_bytes(4, "little")
    return RowLogprobs(token_ids=column, logprobs=column, sampled_rank=1)
