"""The simulated executor, as the engine drives it.

A step checks its plan against the memory model, samples, and takes the time of `CostModel`.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from worker_service.adapters.store import AdapterStore
from worker_service.array_types import Float32Array
from worker_service.cache_groups import CacheGroup
from worker_service.config import AdapterConfig, SimulationConfig
from worker_service.engine.executor import BlockCounts, FinishedStep, ModelFacts, WorkKind
from worker_service.errors import OutOfOrder
from worker_service.plan import (
    Candidates,
    KeptSequence,
    PoolingType,
    PromptLogprobs,
    RowErrorReason,
    RowOutput,
    StepPlan,
    StepResult,
    StepTimings,
    TokenLogprobs,
    monotonic_us,
)
from worker_service.pooling_facts import PoolingFacts
from worker_service.simulated.adapters import SimulatedAdapter, SimulatedAdapters
from worker_service.simulated.block_memory import SimulatedMemory
from worker_service.simulated.memory_model import MemoryModel
from worker_service.simulated.model import (
    VECTOR_SIZE,
    NextToken,
    pooled,
    prompt_logprobs,
    token_logprobs,
)
from worker_service.simulated.sequences import (
    Batch,
    Row,
    SimulatedSequenceTable,
    resolve_rows,
)

NO_TOKEN = -1


@dataclass(frozen=True, slots=True)
class RowResults:
    """A step's results so far; dictionaries by row."""

    tokens: list[int] = field(default_factory=list)
    """The token of each sampling row, in row order; NO_TOKEN if it failed or has candidates."""

    num_sampled: list[int] = field(default_factory=list)
    """Number of tokens of each sampling row."""

    num_drafts: list[int] = field(default_factory=list)
    """Drafts of each sampling row."""

    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    kept_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    """Log probabilities of a row's tokens after its first."""

    prompt_logprobs: dict[int, PromptLogprobs] = field(default_factory=dict)
    candidates: dict[int, Candidates] = field(default_factory=dict)
    vectors: dict[int, Float32Array] = field(default_factory=dict)
    errors: dict[int, RowErrorReason] = field(default_factory=dict)


class SimulatedRunner:
    """Implements `worker_service.engine.executor.Runner` without computing anything."""

    def __init__(
        self,
        config: SimulationConfig,
        *,
        groups: Sequence[CacheGroup],
        num_gpu_blocks: int,
        num_cpu_blocks: int,
        max_drafts: int = 0,
        adapters: AdapterStore[SimulatedAdapter] | None = None,
        memory: MemoryModel | None = None,
    ) -> None:
        """max_drafts: most drafts of a row; 0 adds none. adapters: those that a sequence may have;
        None: any. memory: caches of an older epoch with these sizes."""
        self._config = config
        self._max_drafts = max_drafts
        self._adapters = adapters
        self._groups = groups
        self.sizes = (num_gpu_blocks, num_cpu_blocks)
        self.memory = memory or MemoryModel(
            num_gpu_blocks=num_gpu_blocks, num_cpu_blocks=num_cpu_blocks, groups=groups
        )
        self.block_memory = (
            SimulatedMemory(self.memory, num_gpu_blocks, num_cpu_blocks) if num_gpu_blocks else None
        )
        self.reset()

    def kept_sequences(self) -> list[KeptSequence]:
        """What the caches hold of the sequences."""
        return self._table.kept()

    def reset(self) -> None:
        """Forget all sequences; the contents of the caches stay."""
        if self._adapters is not None:
            self._adapters.release_all()
        self.memory.forget_sequences()
        self._table = SimulatedSequenceTable(
            self.memory,
            vocab_size=self._config.vocab_size,
            max_model_len=self._config.max_model_len,
            num_labels=self._config.num_labels,
            adapters=self._adapters,
        )

    def launch(self, plan: StepPlan) -> FinishedStep:
        """Execute the plan synchronously."""
        return FinishedStep(self.execute(plan))

    def execute(self, plan: StepPlan) -> StepResult:
        """Execute the plan. Raises InvalidPlan, after which the runner must be reset."""
        started_us = monotonic_us()
        self._move_blocks(plan)
        _wait_until(started_us + self._config.cost.swap_us(len(plan.swap_out) + len(plan.swap_in)))
        cache_done_us = monotonic_us()
        self._admit(plan)
        batch = resolve_rows(
            plan,
            self._table,
            groups=self._groups,
            max_model_len=self._config.max_model_len,
        )
        outcome = RowResults()
        self._report_prompts(batch, outcome)
        drafts = self._draft(batch)
        self._compute(batch)
        self._write_drafts(batch, drafts)
        num_tokens = int(plan.num_tokens.sum()) + sum(map(len, drafts.values()))
        compute_us = self._config.cost.compute_us(len(plan.seq_ids), num_tokens)
        _wait_until(cache_done_us + compute_us)
        forward_done_us = monotonic_us()
        self._sample(batch, drafts, outcome)
        for row in batch.rows:
            self.memory.release_unseen(row.sequence)
        finished_us = monotonic_us()
        return StepResult(
            epoch=plan.epoch,
            step_id=plan.step_id,
            token_ids=np.array(outcome.tokens, np.int32),
            num_sampled=np.array(outcome.num_sampled, np.int32) if drafts else None,
            num_drafts=np.array(outcome.num_drafts, np.int32) if drafts else None,
            logprobs=outcome.logprobs,
            kept_logprobs=outcome.kept_logprobs,
            prompt_logprobs=outcome.prompt_logprobs,
            candidates=outcome.candidates,
            vectors=outcome.vectors,
            errors=outcome.errors,
            timings=StepTimings(
                received_us=plan.received_us,
                started_us=started_us,
                finished_us=finished_us,
                cache_ops_us=cache_done_us - started_us,
                forward_us=forward_done_us - cache_done_us,
                sample_us=finished_us - forward_done_us,
            ),
        )

    def _move_blocks(self, plan: StepPlan) -> None:
        for lease_id in plan.ended_lease_ids.tolist():
            self.memory.leases.end(lease_id)
        self._table.forget(plan.forget_seq_ids)
        self.memory.swap_out(plan.swap_out.tolist())
        self.memory.swap_in(plan.swap_in.tolist())
        self.memory.copy(plan.copy.tolist())
        for index, lease in enumerate(plan.leases):
            field = f"leases[{index}].block_ids"
            self.memory.begin_lease(lease.lease_id, lease.block_ids.tolist(), field)
        for index, fetch in enumerate(plan.fetches):
            self.memory.check_fetch(fetch.blocks.tolist(), f"fetches[{index}].blocks")

    def _admit(self, plan: StepPlan) -> None:
        for index, new in enumerate(plan.new_sequences):
            self._table.add(new, f"new_sequences[{index}]")
        self._table.append_chosen(plan.appended_tokens)
        self._table.update_blocks(plan.block_updates)

    def _compute(self, batch: Batch) -> None:
        """Attend over what was computed before this step, and only then write this step's KV."""
        for row in batch.rows:
            self.memory.check_use(row.sequence, row.index)
        computing = [row for row in batch.rows if row.is_computed]
        for row in computing:
            self.memory.read(row.sequence, row.index)
        for row in computing:
            forks = batch.forks.get(row.sequence.seq_id, ())
            self.memory.write(row.sequence, row.end, row.index, forks)
        for save in batch.saves:
            self.memory.save_state(*save)
        for row in batch.rows:
            if (parent := batch.parents.get(row.sequence.seq_id)) is not None:
                row.sequence.num_computed = parent.sequence.num_computed
                self.memory.read(row.sequence, row.index, states=False)

    def _report_prompts(self, batch: Batch, outcome: RowResults) -> None:
        """Log probabilities of the prompt tokens that the rows' positions predict."""
        for row in batch.rows:
            sequence = row.sequence
            num_top = sequence.sampling.num_prompt_logprobs
            if num_top is None or not row.is_computed:
                continue
            start = max(sequence.num_computed + 1, sequence.prompt_logprobs_start)
            end = min(row.end + 1, sequence.num_prompt_tokens)
            if start < end:
                outcome.prompt_logprobs[row.index] = prompt_logprobs(
                    sequence, start, end, self._config.vocab_size, num_top
                )

    def _draft(self, batch: Batch) -> dict[int, list[int]]:
        """Drafts by row: what will be sampled, except for every fourth token or so."""
        drafts = {}
        for row in batch.rows:
            num_drafts = min(row.lookahead, self._max_drafts)
            if num_drafts and row.sequence.may_draft:
                drafts[row.index] = row.sequence.drafts(num_drafts, self._config.vocab_size)
        return drafts

    def _write_drafts(self, batch: Batch, drafts: dict[int, list[int]]) -> None:
        """Write the drafts' KV after the rows' own, all of which may turn out to be wrong."""
        for index, tokens in drafts.items():
            sequence = batch.rows[index].sequence
            computed = sequence.num_computed
            sequence.extend(tokens)
            self.memory.write(sequence, computed + len(tokens), index, states=False)
            sequence.truncate(computed)

    def _sample(self, batch: Batch, drafts: dict[int, list[int]], outcome: RowResults) -> None:
        for row in batch.rows:
            num_before = len(outcome.tokens)
            if row.sequence.failure is not None:
                outcome.errors[row.index] = row.sequence.failure
            elif row.output == RowOutput.VECTOR:
                params = row.sequence.pooling
                assert params is not None, "its output says so"
                start = row.sequence.num_computed - row.num_tokens
                vectors = pooled(row.sequence, params, start, self._config.num_labels)
                outcome.vectors[row.index] = vectors
            elif row.samples:
                self._sample_row(row, drafts.get(row.index, []), outcome)
            if row.samples:
                if len(outcome.tokens) == num_before:
                    outcome.tokens.append(NO_TOKEN)
                outcome.num_sampled.append(len(outcome.tokens) - num_before)
                outcome.num_drafts.append(len(drafts.get(row.index, ())))

    def _sample_row(self, row: Row, drafts: list[int], outcome: RowResults) -> None:
        """Sample a token after the row's last one, and one after each draft that was right."""
        sequence, vocab_size = row.sequence, self._config.vocab_size
        if sequence.sampling.num_candidates is not None:
            distribution = NextToken(sequence.histories[-1], vocab_size)
            outcome.candidates[row.index] = sequence.offer(distribution)
            return
        num_top = sequence.sampling.num_logprobs
        for place, draft in enumerate([*drafts, NO_TOKEN]):
            distribution = NextToken(sequence.histories[-1], vocab_size)
            token = sequence.next_token(distribution)
            if token is None:
                if place == 0:  # else its next row fails
                    sequence.failure = outcome.errors[row.index] = RowErrorReason.NO_CANDIDATES
                return
            if place > 0:
                sequence.num_computed = sequence.num_checked = len(sequence.tokens)
                self.memory.accept(sequence, row.index)
            if num_top is not None:
                entry = token_logprobs(distribution, token, min(num_top, vocab_size))
                if place == 0:
                    outcome.logprobs[row.index] = entry
                else:
                    outcome.kept_logprobs.setdefault(row.index, []).append(entry)
            sequence.extend((token,))
            outcome.tokens.append(token)
            if token != draft:
                return


def _wait_until(end_us: float) -> None:
    """Let the time pass that such work takes."""
    left_us = end_us - monotonic_us()
    if left_us > 0:
        time.sleep(left_us / 1e6)


class SimulatedExecutor:
    """Implements `worker_service.engine.executor.Executor`."""

    def __init__(
        self,
        config: SimulationConfig,
        block_size: int,
        max_drafts: int = 0,
        adapters: AdapterConfig | None = None,
    ) -> None:
        """max_drafts: most drafts of a row; 0 adds none. adapters: without --enable-lora, sequences
        may name any adapter, which is not loaded."""
        self._config = config
        self._groups = config.groups(block_size)
        self.adapters = SimulatedAdapters(adapters or AdapterConfig(), generates=bool(self._groups))
        self._max_drafts = max_drafts
        self._last: SimulatedRunner | None = None

    def load(self) -> ModelFacts:
        """Facts of a model that is determined by the size of its vocabulary."""
        config = self._config
        return ModelFacts(
            architecture="Simulated",
            fingerprint=f"simulated-{config.vocab_size}-{config.eos_token_id}",
            max_model_len=config.max_model_len,
            vocab_size=config.vocab_size,
            eos_token_ids=(config.eos_token_id,),
            bos_token_id=None,
            dtype="none",
            cache_groups=self._groups,
            block_bytes=0,
            num_parameters=0,
            batch_invariant=True,
            structured_output=False,  # its tokens have no text
            device="simulated",
            attention_backend="",
            arithmetic="simulated/1",
            work_kinds=tuple(WorkKind) if self._groups else (WorkKind.POOLING,),
            pooling=PoolingFacts(
                vector_size=VECTOR_SIZE,
                types=tuple(PoolingType),
                labels=tuple(f"label {number}" for number in range(config.num_labels)),
                scores_pairs=config.num_labels == 1,
            ),
            whole_prompt=not self._groups,
            num_speculative_tokens=self._max_drafts,
        )

    def profile_blocks(self, *, max_num_seqs: int, max_num_batched_tokens: int) -> BlockCounts:
        """The configured numbers."""
        if not self._groups:
            return BlockCounts(num_gpu_blocks=0, num_cpu_blocks=0)
        return BlockCounts(
            num_gpu_blocks=self._config.num_gpu_blocks, num_cpu_blocks=self._config.num_cpu_blocks
        )

    def make_runner(self, num_gpu_blocks: int, num_cpu_blocks: int, epoch: int) -> SimulatedRunner:
        """A runner over the present caches if they have these sizes, else over empty ones."""
        last, sizes = self._last, (num_gpu_blocks, num_cpu_blocks)
        self._last = SimulatedRunner(
            self._config,
            groups=self._groups,
            num_gpu_blocks=num_gpu_blocks,
            num_cpu_blocks=num_cpu_blocks,
            max_drafts=self._max_drafts,
            memory=last.memory if last is not None and last.sizes == sizes else None,
            adapters=self.adapters.store,
        )
        return self._last

    def check_device(self) -> None:
        """Nothing to check: there is no device."""

    def interrupt(self, epoch: int) -> None:
        """Nothing to interrupt: there are no other ranks."""

    def assets(self) -> Iterator[tuple[str, bytes]]:
        """None: there is no tokenizer, prompts are token ids."""
        return iter(())

    def start_profile(self) -> None:
        """Refused: there is no device to trace."""
        raise OutOfOrder("a simulated worker has nothing to profile")

    def stop_profile(self) -> str:
        """Refused: no profile is ever running."""
        raise OutOfOrder("no profile is running")
