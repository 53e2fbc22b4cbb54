"""Drives a scheduler core with symbolic workers, and holds it to its promises.

The driver replaces everything around the core: it executes plans, returns results on request,
and reads outboxes as frontends do, checking as it goes that accepted requests end once, that
choices get the tokens of an undisturbed run, and that timings add up.
"""

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from pagewire.v1.pooling_pb2 import POOLING_HEAD_CLASSIFIER, PoolingParams
from scheduler_service.core import (
    ContextPart,
    EngineOutputs,
    InspectionDetail,
    Request,
    SchedulerConfig,
    SchedulerCore,
    StepPlan,
    StepResult,
    WorkerGroupCapacity,
)
from scheduler_service.core.beam_search import BeamParams
from scheduler_service.core.config import CacheGroup, PoolingHead, PoolingType, WorkKind
from scheduler_service.core.context import adapter_of
from scheduler_service.core.request import Generation, Pooling
from scheduler_service.errors import PagewireError, RequestAborted, RequestTakenOver
from tests.support.block_records import BlockRecords
from tests.support.promises import Promises, num_cache_tokens
from tests.support.records import ChoiceRecord, RequestRecord, resumed
from tests.support.symbolic_worker import (
    NUM_LABELS,
    VECTOR_SIZE,
    Sampling,
    SymbolicWorker,
    logprobs_of,
)

MODEL = "m"
ALL_REQUESTS = InspectionDetail(include_requests=True, max_requests=10_000)


@dataclass
class WorkerLink:
    """A worker, and its results that are still on the wire."""

    capacity: WorkerGroupCapacity
    worker: SymbolicWorker
    results: deque[StepResult] = field(default_factory=deque)
    records: BlockRecords | None = None
    """What it records of its caches, if its capacity says that it does."""


GENERATION_FIELDS = {field.name for field in fields(Generation)}


def make_request(**changes: object) -> Request:
    """A small one of frontend f0."""
    values: dict[str, object] = {
        "frontend_id": "f0",
        "handle": 1,
        "request_id": "r1",
        "model": "m",
        "prompt_token_ids": [1, 2, 3, 4, 5],
        "max_tokens": 4,
        "sampling": Sampling(seed=1),
    }
    values |= changes
    work = {name: values.pop(name) for name in GENERATION_FIELDS & values.keys()}
    return Request(work=Generation(**work), **values)  # type: ignore[arg-type]


def make_capacity(
    group_id: str = "g0", *, block_size: int = 4, **changes: object
) -> WorkerGroupCapacity:
    """A small worker group, by default of one cache group."""
    values: dict[str, object] = {
        "worker_group_id": group_id,
        "model": MODEL,
        "num_gpu_blocks": 16,
        "num_cpu_blocks": 0,
        "cache_groups": (CacheGroup(block_tokens=block_size),),
        "max_model_len": 64,
        "vocab_size": 32,
        "work_kinds": frozenset(WorkKind),
        "vector_size": VECTOR_SIZE,
        "pooling_types": frozenset(PoolingType),
        "num_labels": NUM_LABELS,
        "classifier_type": PoolingType.ALL,
    }
    values |= changes
    if WorkKind.POOLING not in values["work_kinds"]:  # type: ignore[operator]
        values |= {"vector_size": 0, "pooling_types": frozenset(), "num_labels": 0}
    return WorkerGroupCapacity(**values)  # type: ignore[arg-type]


SMALL_CONFIG = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=16)


def make_driver(capacity: WorkerGroupCapacity | None = None, **changes: object) -> "CoreDriver":
    """A core of a small configuration, or one with changes, and one worker group."""
    driver = CoreDriver(replace(SMALL_CONFIG, **changes))  # type: ignore[arg-type]
    driver.add_worker_group(capacity or make_capacity())
    return driver


class CoreDriver:
    """A core, its workers and its frontends."""

    def __init__(
        self,
        config: SchedulerConfig,
        make_core: Callable[[SchedulerConfig], SchedulerCore] = SchedulerCore,
    ) -> None:
        self.config = config
        self._make_core = make_core
        self.core = make_core(config)
        self.now = 1000.0
        self.links: dict[str, WorkerLink] = {}
        self.late: list[WorkerLink] = []
        """Workers of a core that has died, which have not joined the next one."""
        self.records: dict[tuple[str, int], RequestRecord] = {}
        self.next_handle = 1
        self.num_steps = 0
        self.has_failed = False
        """Whether a plan was wrong; nothing can be expected any more."""
        self.promises = Promises(config, lambda: [link.capacity for link in self.links.values()])
        self.adapters: dict[str, dict[bytes, str]] = {}
        """Names by digest, of the adapters that the workers have, by model."""
        self.on_plan: Callable[[str, StepPlan], None] = lambda group_id, plan: None
        self.work: dict[str, None] = {}
        """The groups that may have a plan, as the service knows it: the others do not plan."""

    def _follow_up(self, *group_ids: str) -> None:
        """After a call into the core: these groups may have a plan, and those that it names."""
        named = [*group_ids, *sorted(self.core.pop_woken())]
        self.work |= {group_id: None for group_id in named if group_id in self.links}

    # Worker groups.

    def add_worker_group(
        self, capacity: WorkerGroupCapacity, former: WorkerLink | None = None
    ) -> None:
        """A worker joins. `former`: to the core that has died, with what is in its caches now."""
        self.collect()
        records = None if former is None else former.records
        if records is not None:
            assert former is not None
            capacity = replace(capacity, kept=records.kept(former.worker.kept_sequences()))
        elif capacity.kept is not None:
            records = BlockRecords(capacity.num_gpu_blocks, capacity.num_cpu_blocks)
            records.records.key_seed = capacity.kept.key_seed
        self.core.add_worker_group(capacity, self.now)
        capacity = replace(capacity, max_chunk_tokens=self.config.max_num_batched_tokens)
        worker = SymbolicWorker(
            num_gpu_blocks=capacity.num_gpu_blocks,
            num_cpu_blocks=capacity.num_cpu_blocks,
            cache_groups=capacity.cache_groups,
            max_num_seqs=self.config.max_num_seqs,
            max_num_batched_tokens=self.config.max_num_batched_tokens,
            max_model_len=capacity.max_model_len,
            max_loras=capacity.max_loras,
            epoch=capacity.epoch,
            peers=self._worker_at,
        )
        if former is not None and records is not None:
            worker.inherit(former.worker)
        self.links[capacity.worker_group_id] = WorkerLink(capacity, worker, records=records)
        self._follow_up(*self.links)
        self.promises.max_model_lens[capacity.model] = capacity.max_model_len
        self.promises.workers.append(capacity)

    def _worker_at(self, address: str) -> SymbolicWorker | None:
        """The worker that has this address, unless it is lost."""
        for link in self.links.values():
            if address in link.capacity.addresses:
                return link.worker
        return None

    def lose_worker_group(self, group_id: str) -> None:
        """A worker dies, and with it the results that are on the wire."""
        del self.links[group_id]
        self.work.pop(group_id, None)
        self.core.remove_worker_group(group_id, self.now)
        self._follow_up(*self.links)

    def reconnect(self, group_id: str) -> None:
        """A worker's stream breaks, and it joins again, with what is in its caches."""
        self.collect()
        link = self.links[group_id]
        self.lose_worker_group(group_id)
        self.add_worker_group(replace(link.capacity, epoch=link.capacity.epoch + 1), link)

    def fail_worker_group(self, group_id: str) -> None:
        """Scheduling a group has raised an error that is not declared: its requests fail, and no
        others."""
        self.collect()
        live = {r.request.request_id: r for r in self.records.values() if r.is_live}
        requests = self.core.inspect(ALL_REQUESTS).requests
        assert {request.request_id for request in requests} == live.keys()
        del self.links[group_id]
        self.work.pop(group_id, None)
        self.core.fail_worker_group(group_id, "ZeroDivisionError: drawn", self.now)
        self._follow_up(*self.links)
        self.collect()
        for request in requests:
            error = live[request.request_id].error
            if request.worker_group_id == group_id:
                assert error is not None
                assert error.reason == "SCHEDULER_FAULT"
            else:
                assert error is None

    def drain_worker_group(self, group_id: str) -> None:
        """A worker is to get nothing new, and to give away what it has."""
        self.core.drain_worker_group(group_id, self.now)
        self._follow_up(*self.links)

    def set_adapters(self, adapters: dict[bytes, str], model: str = MODEL) -> None:
        """The workers have these adapters from now on: names by digest."""
        self.adapters[model] = adapters
        by_digest = {digest.hex(): name for digest, name in adapters.items()}
        self.core.set_adapters(model, by_digest, self.now, is_settling=False)
        self._follow_up()

    def lose_core(self, late: Collection[str] = ()) -> None:
        """The core dies: workers join a new one, frontends submit their open requests again. The
        groups that are `late` join when `rejoin` is called."""
        self.collect()
        self.config = replace(self.config, key_seed=self.config.key_seed + 1)
        self.core = self._make_core(self.config)
        for model, adapters in self.adapters.items():
            self.set_adapters(adapters, model)
        links, self.links, self.work = self.links, {}, {}
        self.late += [link for group_id, link in links.items() if group_id in late]
        for group_id, link in links.items():
            if group_id not in late:
                self.add_worker_group(link.capacity, link)
        for record in self.records.values():
            if record.is_live:
                self._submit_again(record)

    def rejoin(self) -> None:
        """Worker groups that are late join, with what is in their caches."""
        late, self.late = self.late, []
        for link in late:
            self.add_worker_group(link.capacity, link)

    def _submit_again(self, record: RequestRecord) -> None:
        request = record.request
        request.work = resumed(request.work, record.choices)
        request.was_accepted = record.accepted
        request.num_worker_losses = record.num_losses
        request.num_lone_worker_losses = record.num_recent_lone_losses
        request.waited_us += round((self.now - record.submitted) * 1e6)
        record.accepted = False
        record.submitted = self.now
        record.num_prompt_logprobs = 0
        try:
            self.core.submit(request, self.now)
            self._follow_up()
        except PagewireError as error:
            record.error = error
        self.collect()

    # Requests.

    def submit(
        self,
        *,
        prompt: list[int],
        max_tokens: int,
        n: int = 1,
        sampling: Sampling | None = None,
        stop_token_ids: frozenset[int] = frozenset(),
        frontend_id: str = "f0",
        request_id: str | None = None,
        model: str = MODEL,
        timeout: float | None = None,
        beam_search: BeamParams | None = None,
        tenant: str = "",
        context: tuple[ContextPart, ...] = (),
        priority: int = 0,
        min_tokens: int = 0,
        max_hold_us: int = 0,
        num_speculative_tokens: int | None = None,
        was_accepted: bool = False,
    ) -> RequestRecord:
        """Submit a request. Raises what the core raises; it is then not recorded. was_accepted: by
        a former core."""
        handle = self.next_handle
        self.next_handle += n
        sampling = replace(sampling or Sampling(seed=handle), max_tokens=max_tokens)
        if beam_search is not None:
            sampling = replace(sampling, num_candidates=beam_search.width + len(stop_token_ids))
        request = Request(
            frontend_id=frontend_id,
            handle=handle,
            request_id=request_id or f"r{handle}",
            model=model,
            prompt_token_ids=prompt,
            tenant=tenant,
            context=context,
            priority=priority,
            deadline=None if timeout is None else self.now + timeout,
            fingerprint=b"of this request",
            was_accepted=was_accepted,
            work=Generation(
                max_tokens=max_tokens,
                sampling=sampling,
                num_choices=n,
                min_tokens=min_tokens,
                stop_token_ids=stop_token_ids,
                wants_logprobs=sampling.logprobs,
                wants_prompt_logprobs=sampling.prompt_logprobs,
                beam_search=beam_search,
                max_hold_us=max_hold_us,
                num_speculative_tokens=num_speculative_tokens,
            ),
        )
        self.core.submit(request, self.now)
        self._follow_up()
        record = RequestRecord(request, self.now, [ChoiceRecord() for _ in range(n)])
        self.records[frontend_id, handle] = record
        return record

    def try_again(
        self, record: RequestRecord, frontend_id: str, most_received: int
    ) -> RequestRecord:
        """Its client tries again with what it has of each choice, `most_received` tokens at most,
        while its frontend still has the former try, ended or not. Raises what the core raises."""
        self.collect()
        handle = self.next_handle
        choices = [choice.received(most_received) for choice in record.choices]
        request = replace(
            record.request,
            frontend_id=frontend_id,
            handle=handle,
            attempt=record.request.attempt + 1,
            work=resumed(record.request.work, choices),
            was_accepted=False,
            waited_us=0,
            num_worker_losses=0,
            num_lone_worker_losses=0,
        )
        was_live = record.is_live
        self.core.submit(request, self.now)
        self._follow_up()
        self.next_handle += request.work.num_choices
        later = RequestRecord(
            request,
            self.now,
            choices,
            num_losses=record.num_losses,
            num_lone_losses=record.num_lone_losses,
            num_recent_lone_losses=record.num_recent_lone_losses,
        )
        self.records[frontend_id, handle] = later
        self.collect()
        assert isinstance(record.error, RequestTakenOver) or not was_live
        return later

    def submit_pooled(
        self,
        prompt: Sequence[int],
        type: PoolingType,
        *,
        dimensions: int = 0,
        head: PoolingHead = PoolingHead.VECTOR,
        **fields: Any,
    ) -> RequestRecord:
        """Submit a request for a vector. Raises what the core raises; it is then not recorded."""
        handle = self.next_handle
        self.next_handle += 1
        params = PoolingParams(type=f"POOLING_TYPE_{type.name}", dimensions=dimensions)
        if head is PoolingHead.CLASSIFIER:
            params.head = POOLING_HEAD_CLASSIFIER
        work = Pooling(type=type, head=head, dimensions=dimensions, pooling=params)
        values = {"frontend_id": "f0", "request_id": f"r{handle}", "model": MODEL}
        values |= {"fingerprint": b"of this request"} | fields
        request = Request(handle=handle, prompt_token_ids=prompt, work=work, **values)
        self.core.submit(request, self.now)
        self._follow_up()
        record = RequestRecord(request, self.now, [ChoiceRecord()])
        self.records[request.frontend_id, handle] = record
        self.collect()
        return record

    def cancel(self, record: RequestRecord) -> None:
        """Its client goes away."""
        self.collect()
        if record.is_live:
            record.cancelled = True
            self.core.cancel(record.request.frontend_id, record.request.handle, self.now)
            self._follow_up()

    def abort(self, record: RequestRecord) -> None:
        """Somebody ends it by its id."""
        self.collect()
        if record.is_live:
            self.core.abort(record.request.tenant, record.request.request_id, self.now)
            self._follow_up()
            self.collect()
            assert isinstance(record.error, RequestAborted)

    def stop_choice(self, record: RequestRecord, index: int, num_tokens: int) -> None:
        """A stop string appears in a choice."""
        self.collect()
        choice = record.choices[index]
        work = record.request.work
        if isinstance(work, Pooling) or work.beam_search is not None:
            return  # has no stop strings
        if record.is_live and choice.finish_reason is None and len(choice.tokens) >= num_tokens:
            choice.stopped_by_frontend = True
            del choice.tokens[num_tokens:]
            handle = record.request.handle + index
            self.core.stop_choice(record.request.frontend_id, handle, num_tokens, self.now)
            self._follow_up()

    def remove_frontend(self, frontend_id: str) -> None:
        """A frontend goes away."""
        self.collect()
        for record in self.records.values():
            if record.request.frontend_id == frontend_id and record.is_live:
                record.cancelled = True
        self.core.remove_frontend(frontend_id, self.now)
        self._follow_up()

    # Steps.

    def schedule(self, group_id: str) -> StepPlan | None:
        """Plan and execute a group's next step; its result stays on the wire."""
        self.work.pop(group_id, None)
        plan = self.core.schedule(group_id, self.now)
        self._follow_up(*([] if plan is None else [group_id]))
        if plan is not None:
            self.on_plan(group_id, plan)
            link = self.links[group_id]
            self.has_failed = True
            link.results.append(link.worker.execute(plan))
            if link.records is not None:
                link.records.execute(plan)
                if link.results[-1].errors:
                    link.records.records.add_failure(plan.step_id)
            self.has_failed = False
            self.num_steps += 1
        return plan

    def deliver(self, group_id: str) -> bool:
        """Bring a group's oldest result to the core; False if none is on the wire."""
        link = self.links[group_id]
        if not link.results:
            return False
        self.now += 0.001
        link.worker.num_results_taken += 1
        self.core.update(group_id, link.results.popleft(), self.now)
        self._follow_up(group_id)
        return True

    def step(self, group_id: str, times: int = 1) -> None:
        """Steps whose results come in before the next is planned."""
        for _ in range(times):
            self.schedule(group_id)
            self.deliver(group_id)
            self.collect()

    def expire(self, seconds: float) -> None:
        """Let time pass."""
        self.now += seconds
        self.core.expire(self.now)
        self._follow_up()

    @property
    def is_at_rest(self) -> bool:
        """Whether no group plans, or computes, until something else happens."""
        return not self.work and not any(link.results for link in self.links.values())

    def run_until_idle(self, max_rounds: int = 2_000) -> None:
        """Step the groups that have work until none has any."""
        for _ in range(max_rounds):
            for group_id in [*self.work]:
                self.schedule(group_id)
            for group_id in self.links:
                self.deliver(group_id)
            self.collect()
            if self.is_at_rest:
                self.check_rest()
                return
        raise AssertionError("the core does not come to rest")

    def check_rest(self) -> None:
        """Nothing is running, and what waits fits no group that takes anything; of what has begun,
        groups that drain take what no other can."""
        status = self.core.snapshot()
        assert status.num_running == status.num_swapped == 0
        all_worker_groups = {group.worker_group_id for group in status.worker_groups}
        open_worker_groups = {
            group.worker_group_id for group in status.worker_groups if not group.draining
        }
        for record in self.records.values():
            has_begun = any(choice.tokens for choice in record.choices)
            groups = all_worker_groups if has_begun else open_worker_groups
            for group_id in groups if record.is_live else ():
                capacity = self.links[group_id].capacity
                prompt = len(record.request.prompt_token_ids)
                longest = prompt + max(len(choice.tokens) for choice in record.choices)
                if record.request.work.beam_search is not None:  # none of its tokens are reported
                    longest = capacity.max_model_len * record.request.work.beam_search.width
                fits = prompt < capacity.max_model_len and longest <= num_cache_tokens(
                    record, capacity
                )
                if adapter_of(record.request.context) is not None:
                    fits &= capacity.max_loras > 0
                assert not fits or capacity.model != record.request.model, "it waits for nothing"

    # What frontends see.

    def collect(self) -> None:
        """Read all outboxes."""
        for frontend_id, outbox in self.core.pop_outboxes().items():
            self.read(frontend_id, outbox)

    def read(self, frontend_id: str, outbox: EngineOutputs) -> None:
        """Read one outbox."""
        for handle in outbox.accepted:
            record = self.records[frontend_id, handle]
            assert not record.accepted, "accepted twice"
            record.accepted = True
        for handle, update in outbox.prompt_logprobs:
            record = self.records[frontend_id, handle]
            assert update.start == record.num_prompt_logprobs + 1, "prompt logprobs have a gap"
            count = len(update.ranks) // 4
            assert count > 0, "an empty update"
            tokens = [
                int.from_bytes(update.token_ids[4 * i : 4 * i + 4], "little") for i in range(count)
            ]
            prompt = record.request.prompt_token_ids
            assert tokens == list(prompt[update.start : update.start + count])
            assert len(update.logprobs) == len(update.token_ids)
            record.num_prompt_logprobs += count
        new_tokens = self._read_tokens(frontend_id, outbox)
        for handle in outbox.worker_losses:
            self.records[frontend_id, handle].num_losses += 1
        for handle in outbox.lone_worker_losses:
            record = self.records[frontend_id, handle]
            record.num_lone_losses += 1
            record.num_recent_lone_losses += 1
        for handle, logprobs in outbox.logprobs:
            choice = self._choice(frontend_id, handle)[1]
            if (frontend_id, handle) in new_tokens:
                token = new_tokens[frontend_id, handle].popleft()
                if self._choice(frontend_id, handle)[0].request.work.beam_search is None:
                    assert logprobs == logprobs_of(token)
                assert logprobs.token_ids[:4] == token.to_bytes(4, "little")
                choice.num_logprobs += 1
        for handle, first_token, values in outbox.vectors:
            self.records[frontend_id, handle].add_vectors(first_token, values)
        for finished in outbox.choices_finished:
            record, choice = self._choice(frontend_id, finished.handle)
            assert not record.is_live or choice.finish_reason is None, "finished twice"
            choice.finish_reason = finished.reason
            is_stop = finished.stop_token_id is not None
            assert is_stop == (finished.reason == "stop")
            if is_stop and record.is_live:
                assert choice.tokens[-1] == finished.stop_token_id
        for request_finished in outbox.requests_finished:
            record = self.records[frontend_id, request_finished.handle]
            if record.is_live:
                record.finished = request_finished.timings
                record.cached_tokens = request_finished.cached_tokens
                self.promises.check_finished(record, self.now)
        for handle, error in outbox.requests_failed:
            record = self.records[frontend_id, handle]
            if record.is_live:
                assert isinstance(error, PagewireError)
                record.error = error
                self.promises.check_failed(record)

    def _read_tokens(
        self, frontend_id: str, outbox: EngineOutputs
    ) -> dict[tuple[str, int], deque[int]]:
        new: dict[tuple[str, int], deque[int]] = {}
        for handle, token in zip(outbox.token_handles, outbox.token_ids, strict=True):
            record, choice = self._choice(frontend_id, handle)
            assert record.accepted
            if record.is_live:
                assert not choice.stopped_by_frontend, "a token after the choice's end"
                assert choice.finish_reason is None, "a token after the choice's end"
                choice.tokens.append(token)
                record.num_recent_lone_losses = 0
                new.setdefault((frontend_id, handle), deque()).append(token)
        return new

    def _choice(self, frontend_id: str, handle: int) -> tuple[RequestRecord, ChoiceRecord]:
        first = max(h for f, h in self.records if f == frontend_id and h <= handle)
        record = self.records[frontend_id, first]
        return record, record.choices[handle - first]

    def check_empty(self) -> None:
        """Assert that nothing is left of any request."""
        self.collect()
        self.core.check()
        for record in self.records.values():
            assert record.accepted or record.error is not None
            assert not record.is_live, f"{record.request.request_id} never ended"
        snapshot = self.core.snapshot()
        assert snapshot.num_waiting == snapshot.num_running == snapshot.num_swapped == 0
        assert self.core.next_deadline() is None
        for group in snapshot.worker_groups:
            assert group.num_free_gpu_blocks == group.num_gpu_blocks
            assert group.num_free_cpu_blocks == group.num_cpu_blocks
            assert group.num_running_sequences == 0
