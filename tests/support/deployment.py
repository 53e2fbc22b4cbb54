"""A scheduler core, workers and frontend in one process, run through all that a configuration says.

Each tick, whoever is due arrives, leaves or dies; then each worker is asked for its oldest result,
after the core has planned ahead as far as it may. What crosses between them is bytes.
"""

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count

from scheduler_service import wire
from scheduler_service.core import (
    ContextKind,
    ContextPart,
    EngineOutputs,
    GeneratedTokens,
    Request,
    RowLogprobs,
    SchedulerCore,
    StepPlan,
    StepResult,
)
from scheduler_service.core.context import adapter_of
from scheduler_service.core.request import Generation
from scheduler_service.core.scheduler_stats import MoveReason
from scheduler_service.errors import NoCandidates
from tests.support.in_process import FRONTEND, MODEL, InProcessWorker
from tests.support.random_configurations import Configuration, Job, Loss
from worker_service.adapters.peft_format import ModelAdapter
from worker_service.models.interface import Model

MAX_TICKS = 5_000
NUM_STATES = 6
"""States that the blocks of a worker have room for beside the tokens of a configuration."""


@dataclass
class Choice:
    """What a client has received of one choice."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[RowLogprobs] = field(default_factory=list)
    finish: tuple[str, int | None] | None = None
    """Why it ended, and the stop token."""


@dataclass
class Received:
    """What a client has received of one request."""

    job: Job
    request: Request
    choices: list[Choice]
    prompt_logprobs: list[bytes] = field(default_factory=lambda: [b""] * 3)
    """Three columns: token ids, log probabilities, ranks."""
    cached_tokens: int = 0
    has_ended: bool = False
    is_cancelled: bool = False
    error: NoCandidates | None = None
    """Its own parameters left it no token to choose, as they do in any run."""

    def choice(self, handle: int) -> Choice:
        """The choice that goes by this handle."""
        return self.choices[handle - self.request.handle]


@dataclass
class Link:
    """A worker that is there, and its plans whose results nobody has asked for yet."""

    worker: InProcessWorker
    plans: deque[Callable[[], StepResult]] = field(default_factory=deque)
    adapters: dict[int, bytes | None] = field(default_factory=dict)
    """Digests by sequence."""


class Deployment:
    """One run of a configuration's jobs."""

    def __init__(
        self,
        configuration: Configuration,
        model: Model,
        prompts: list[list[int]],
        worker_type: Callable[..., InProcessWorker] = InProcessWorker,
        adapters: Sequence[ModelAdapter] = (),
    ) -> None:
        """`prompts` are those of the jobs, with what they follow. `adapters`: those of the jobs, by
        number; the model has slots for them."""
        self._adapters = adapters
        self._loaded: set[int] = set()
        """Adapters that the core and the workers have at present."""
        self.received: dict[int, Received] = {}
        """By job index."""
        self.disturbance: Counter[str] = Counter()
        """How often each thing happened that must make no difference."""
        self._configuration = configuration
        self._model = model
        self._prompts = prompts
        self._worker_type = worker_type
        self._handles = count(1, max(job.num_choices for job in configuration.jobs))
        self._by_handle: dict[int, Received] = {}
        self._core = SchedulerCore(configuration.scheduler)
        self._links: dict[int, Link] = {}
        self._absent_until: dict[int, int] = {}
        self._draining: dict[int, int] = {}
        """Workers that were asked to stop, and how long they are to be absent."""
        least = min(worker.num_gpu_blocks for worker in configuration.workers)
        self._outgrown_length = least * configuration.block_size + 1
        """Tokens of a sequence that has just outgrown the smallest worker."""
        for index in range(len(configuration.workers)):
            self._join(index)

    def run(self) -> list[Received]:
        """The outcome of each job, in their order."""
        for tick in range(MAX_TICKS):
            if len(self.received) == len(self._prompts) and not self._open():
                self._check_rest()
                return [self.received[index] for index in range(len(self._prompts))]
            self._befall(tick)
            self._collect()
            self._load_adapters(self._used_adapters())
            for index in list(self._links):
                self._step(index)
        raise AssertionError(f"not done after {MAX_TICKS} ticks: {self._open()}")

    # What happens to it.

    def _befall(self, tick: int) -> None:
        for loss in self._configuration.losses:
            if loss.at == tick:
                self._lose(loss)
        for drain in self._configuration.drains:
            if drain.at == tick and drain.worker in self._links:
                self.disturbance["drained workers"] += bool(self._open())
                self._core.drain_worker_group(str(drain.worker), now=0.0)
                self._draining[drain.worker] = drain.absence
        for index in [i for i in self._draining if self._core.is_drained(str(i))]:
            del self._links[index]
            self._core.remove_worker_group(str(index), now=0.0)
            self._absent_until[index] = tick + self._draining.pop(index)
        for index in [i for i, until in self._absent_until.items() if until <= tick]:
            del self._absent_until[index]
            self._join(index)
        for index, job in enumerate(self._configuration.jobs):
            if index not in self.received and self._is_due(job, tick):
                self._submit(index, job)
        for received in self._open():
            self._leave_or_stop(received)

    def _is_due(self, job: Job, tick: int) -> bool:
        if job.follows is not None:
            parent = self.received.get(job.follows)
            return parent is not None and parent.has_ended
        return job.arrives_at <= tick

    def _used_adapters(self) -> set[int]:
        adapters = {received.job.adapter for received in self._open()}
        return {adapter for adapter in adapters if adapter is not None}

    def _load_adapters(self, numbers: set[int]) -> None:
        """Load these adapters everywhere, and unload all others."""
        if numbers == self._loaded:
            return
        self.disturbance["loaded adapters"] += len(numbers - self._loaded)
        self.disturbance["unloaded adapters"] += len(self._loaded - numbers)
        self._loaded = numbers
        for link in self._links.values():
            self._load_on(link.worker)
        self._announce_adapters()

    def _load_on(self, worker: InProcessWorker) -> None:
        if worker.adapters is not None:
            adapters = [self._adapters[number] for number in sorted(self._loaded)]
            for adapter in adapters:
                worker.adapters.add(adapter)
            worker.adapters.retain({adapter.info.digest for adapter in adapters})

    def _announce_adapters(self) -> None:
        digests = {self._adapters[n].info.digest.hex(): str(n) for n in sorted(self._loaded)}
        self._core.set_adapters(MODEL, digests, now=0.0, is_settling=False)

    def _context(self, job: Job) -> tuple[ContextPart, ...]:
        if job.adapter is None:
            return ()
        self._load_adapters(self._used_adapters() | {job.adapter})
        return (ContextPart(ContextKind.ADAPTER, self._adapters[job.adapter].info.digest),)

    def _submit(self, index: int, job: Job) -> None:
        request = Request(
            frontend_id=FRONTEND,
            handle=next(self._handles),
            request_id=str(index),
            model=MODEL,
            prompt_token_ids=self._prompts[index],
            tenant=job.tenant,
            priority=job.priority,
            context=self._context(job),
            work=Generation(
                num_choices=job.num_choices,
                num_speculative_tokens=job.num_speculative_tokens,
                max_hold_us=job.max_hold_us,
                max_tokens=job.max_tokens,
                stop_token_ids=job.stop_token_ids,
                sampling=job.sampling,
                beam_search=job.beam_search,
                min_tokens=job.sampling.min_tokens,
                wants_logprobs=_wants_logprobs(job),
                wants_prompt_logprobs=job.sampling.HasField("prompt_logprobs"),
            ),
        )
        received = Received(job, request, [Choice() for _ in range(job.num_choices)])
        self.received[index] = received
        for handle in range(request.handle, request.handle + job.num_choices):
            self._by_handle[handle] = received
        self._core.submit(request, now=0.0)

    def _leave_or_stop(self, received: Received) -> None:
        """Disconnect its client, or let a stop string appear, if it is time."""
        job, handle = received.job, received.request.handle
        num_first, last = len(received.choices[0].token_ids), received.choices[-1]
        if job.cancelled_after is not None and num_first >= job.cancelled_after:
            self.disturbance["cancels"] += 1
            received.is_cancelled = received.has_ended = True
            self._core.cancel(FRONTEND, handle, now=0.0)
        elif (
            job.stopped_after is not None
            and last.finish is None
            and len(last.token_ids) >= job.stopped_after
        ):
            self.disturbance["stop strings"] += 1
            del last.token_ids[job.stopped_after :], last.logprobs[job.stopped_after :]
            last.finish = ("stop string", None)
            handle += job.num_choices - 1
            self._core.stop_choice(FRONTEND, handle, job.stopped_after, now=0.0)

    def _join(self, index: int) -> None:
        memory = self._configuration.workers[index]
        block_size = self._configuration.block_size
        groups = self._model.kv_cache_spec.groups(block_size)
        tokens = [group.block_tokens for group in groups if group.has_tokens]
        num_each = sum(-(-block_size // num_tokens) for num_tokens in tokens)
        num_more = NUM_STATES * sum(group.num_blocks for group in groups)
        slots = {"max_loras": max_loras} if (max_loras := self._configuration.max_loras) else {}
        worker = self._worker_type(
            self._model,
            num_gpu_blocks=memory.num_gpu_blocks * num_each + num_more,
            num_cpu_blocks=memory.num_cpu_blocks * num_each + num_more,
            block_size=block_size,
            **slots,
        )
        self._load_on(worker)
        self._links[index] = Link(worker)
        self._announce(index, worker)

    def _announce(self, index: int, worker: InProcessWorker) -> None:
        role = self._configuration.workers[index].role
        self._core.add_worker_group(replace(worker.capacity(str(index)), role=role), now=0.0)

    def _lose(self, loss: Loss) -> None:
        if loss.worker is None:
            self._lose_core()
        elif loss.worker in self._links:
            link = self._links.pop(loss.worker)
            self._draining.pop(loss.worker, None)
            self.disturbance["lost workers"] += bool(self._open())
            self.disturbance["lost steps"] += len(link.plans)
            self._core.remove_worker_group(str(loss.worker), now=0.0)
            self._absent_until[loss.worker] = loss.at + loss.absence

    def _lose_core(self) -> None:
        """Workers join the new core, and the frontend submits again what is open. The core cannot
        know of workers that are absent: they are back as well."""
        self.disturbance["lost cores"] += bool(self._open())
        self._note_end_of_core()
        self._core = SchedulerCore(self._configuration.scheduler)
        self._announce_adapters()
        for index, link in self._links.items():
            while link.plans:
                link.plans.popleft()()
            link.worker.lose_core()
            self.disturbance["kept sequences"] += len(link.worker.kept_sequences)
            self._announce(index, link.worker)
        for index in self._absent_until:
            self._join(index)
        self._absent_until, self._draining = {}, {}
        for received in self._open():
            received.request.work.generated = {
                index: GeneratedTokens(
                    token_ids=list(choice.token_ids), finished=choice.finish is not None
                )
                for index, choice in enumerate(received.choices)
                if choice.token_ids
            }
            self._core.submit(received.request, now=0.0)

    # Steps.

    def _step(self, index: int) -> bool:
        """Send a worker what can be planned, and receive a result; returns whether one was due."""
        link = self._links[index]
        while (plan := self._core.schedule(str(index), now=0.0)) is not None:
            self._note_plan(plan, link)
            message = wire.encode_plan(plan, epoch=1)
            link.plans.append(link.worker.send(message.SerializeToString()))
        if not link.plans:
            return False
        result = link.plans.popleft()()
        failed = [fetch for fetch in result.fetches if fetch.failure]
        self.disturbance["fetches"] += len(result.fetches) - len(failed)
        self.disturbance["failed fetches"] += len(failed)
        self.disturbance["kept drafts"] += sum(result.num_sampled or ()) - len(
            result.num_sampled or ()
        )
        self.disturbance["kept log probabilities"] += sum(map(len, result.kept_logprobs.values()))
        self._core.update(str(index), result, now=0.0)
        self.disturbance["wasted tokens"] += len(result.token_ids)
        self._collect()
        return True

    def _note_plan(self, plan: StepPlan, link: Link) -> None:
        new = plan.new_sequences
        self._note_adapters(plan, link)
        self.disturbance["steps"] += 1
        self.disturbance["leased blocks"] += sum(len(lease.block_ids) for lease in plan.leases)
        self.disturbance["plans sent ahead"] += bool(link.plans)
        self.disturbance["plans sent together"] += plan.max_results > 1
        self.disturbance["rows with drafts"] += sum(map(bool, plan.lookahead or ()))
        self.disturbance["swapped-out blocks"] += len(plan.swap_out) // 2
        self.disturbance["swapped-in blocks"] += len(plan.swap_in) // 2
        self.disturbance["copied blocks"] += len(plan.copy) // 2
        self.disturbance["chunks"] += (plan.output or []).count(0)
        self.disturbance["forks"] += sum(s.parent_seq_id is not None for s in new)
        self.disturbance["recomputed answers"] += sum(
            len(s.token_ids) > s.num_prompt_tokens > 0 for s in new
        )
        self.disturbance["constraints taken up again"] += sum(
            len(s.token_ids) > s.num_prompt_tokens > 0 and s.sampling.HasField("constraint")
            for s in new
        )
        self.disturbance["outgrown workers"] += sum(
            len(s.token_ids) == self._outgrown_length and s.num_prompt_tokens > 0 for s in new
        )

    def _note_adapters(self, plan: StepPlan, link: Link) -> None:
        for seq in plan.new_sequences:
            parent = seq.parent_seq_id
            inherited = None if parent is None else link.adapters.get(parent)
            link.adapters[seq.seq_id] = inherited or adapter_of(seq.context)
        found = {link.adapters[seq_id] for seq_id in plan.seq_ids}
        self.disturbance["steps with adapters and without"] += len(found) > 1 and None in found
        self.disturbance["steps with several adapters"] += len(found - {None}) > 1

    def _note_end_of_core(self) -> None:
        snapshot = self._core.snapshot()
        self.disturbance["preemptions"] += snapshot.num_preemptions
        for model in snapshot.models:
            self.disturbance["given away"] += model.totals.num_moved[MoveReason.REBALANCE]

    def _open(self) -> list[Received]:
        return [received for received in self.received.values() if not received.has_ended]

    def _check_rest(self) -> None:
        """Nobody is there any more, and nothing is left of anybody."""
        self._note_end_of_core()
        while any(self._step(index) for index in self._links):  # leases and copies end, too
            pass
        self._core.check()
        for group in self._core.snapshot().worker_groups:
            assert group.num_free_gpu_blocks == group.num_gpu_blocks
            assert group.num_free_cpu_blocks == group.num_cpu_blocks

    # What the frontend hears.

    def _collect(self) -> None:
        for outbox in self._core.pop_outboxes().values():
            self._read(outbox)

    def _read(self, outbox: EngineOutputs) -> None:
        self.disturbance["wasted tokens"] -= len(outbox.token_ids)
        for handle, token in zip(outbox.token_handles, outbox.token_ids, strict=True):
            self._by_handle[handle].choice(handle).token_ids.append(token)
        for handle, logprobs in outbox.logprobs:
            self._by_handle[handle].choice(handle).logprobs.append(logprobs)
        for handle, update in outbox.prompt_logprobs:
            received = self._by_handle[handle]
            known = received.prompt_logprobs
            # A core that takes the request over sends the first ones again.
            skipped = len(known[2]) - 4 * (update.start - 1)
            assert skipped >= 0, "log probabilities of a prompt are missing"
            widths = update.width, update.width, 1
            columns = zip((update.token_ids, update.logprobs, update.ranks), widths, strict=True)
            added = [column[width * skipped :] for column, width in columns]
            received.prompt_logprobs = [a + b for a, b in zip(known, added, strict=True)]
        for ended in outbox.choices_finished:
            choice = self._by_handle[ended.handle].choice(ended.handle)
            assert choice.finish is None, "a choice ended twice"
            choice.finish = (ended.reason, ended.stop_token_id)
        for finished in outbox.requests_finished:
            received = self._by_handle[finished.handle]
            assert not received.has_ended, "a request ended twice"
            received.has_ended = True
            received.cached_tokens = finished.cached_tokens
            self.disturbance["cached tokens"] += finished.cached_tokens
            self.disturbance["beam searches"] += received.job.beam_search is not None
            self.disturbance["constraints"] += received.job.sampling.HasField("constraint")
        for handle, error in outbox.requests_failed:
            if not isinstance(error, NoCandidates):
                raise error
            received = self._by_handle[handle]
            received.error, received.has_ended = error, True


def _wants_logprobs(job: Job) -> bool:
    if job.beam_search is not None:
        return job.beam_search.num_logprobs is not None
    return job.sampling.HasField("logprobs")
