"""Deployments and workloads drawn at random, each reproducible by its number.

A configuration is everything that should make no difference to a request's tokens (memory, chunks,
pipelining, neighbours, losses) together with requests whose tokens it should make no difference to.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random

from pagewire.columns import pack
from pagewire.v1 import sampling_pb2
from scheduler_service.core.beam_search import BeamParams, EarlyStopping
from scheduler_service.core.config import MoveKV, PolicyName, PreemptionMode, Role, SchedulerConfig
from tests.support import vocabularies

MODELS = (
    "embedded",
    "llama",
    "mistral",
    "qwen3",
    "opt",
    "gpt2",
    "gemma2",
    "qwen3_moe",
    "embedded-int4",
    "embedded-kv",
    "gemma2-kv",
    "llama-w8a8",
    "embedded-fp8",
    "llama-nf4",
    "gemma2-nf4",
    "llama4",
    "flint",
    "mimo_v2_flash",
)
"""The embedded model, as it is, with rounded weights and with keys and values in int8, and families
of tests/support/checkpoints.py, some as checkpoints in NF4 or with 8-bit activations."""

FIRST_TOKEN_ID, END_TOKEN_ID = 5, 250
"""Tokens of prompts, stops and biases are from here; all vocabularies are larger."""

CONSTRAINTS = (
    ("regex", "[a-z ]{0,60}"),
    ("regex", "(?:ab|ba|[A-F]){4,9}!"),
    ("json_schema", '{"type": "array", "items": {"type": "integer"}, "minItems": 3}'),
    ("json_schema", '{"type": "object", "additionalProperties": {"enum": ["a", 1, null]}}'),
    ("grammar", 'start: "(" start ")" | start "+" start | /[0-9]{1,3}/'),
    ("choice", "yes|yes, of course|no|never, ever"),
)
"""What outputs may have to match; some soon end and some go on."""

ROOMY_TOKENS = 1024
"""As many as any of these models allows."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One request, and what its client does."""

    tokens: tuple[int, ...]
    """Its prompt; where it follows another, what it adds to that one's prompt and first answer."""
    follows: int | None = None
    """The job whose conversation it continues, and after whose end it arrives."""
    arrives_at: int = 0
    """Tick at the earliest."""
    num_choices: int = 1
    max_tokens: int
    stop_token_ids: frozenset[int] = frozenset()
    sampling: sampling_pb2.SamplerParams
    tenant: str = ""
    priority: int = 0
    adapter: int | None = None
    """Its adapter, by number; None: the model alone."""
    max_hold_us: int = 0
    """How long its tokens may wait for others."""
    num_speculative_tokens: int | None = None
    """Most drafts of a row; None: as many as the worker makes."""
    beam_search: BeamParams | None = None
    """Search for the best choices instead of sampling them; they come all at the end."""
    cancelled_after: int | None = None
    """Its client disconnects at this many tokens of the first choice."""
    stopped_after: int | None = None
    """A stop string appears in its last choice at this many tokens."""


@dataclass(frozen=True, kw_only=True)
class Worker:
    """A worker group's memory, and what it is for."""

    num_gpu_blocks: int
    num_cpu_blocks: int
    role: Role = Role.BOTH


@dataclass(frozen=True, kw_only=True)
class Loss:
    """The sudden death of a worker, or of the core."""

    at: int
    """Tick."""
    worker: int | None
    """Which worker; None for the core."""
    absence: int
    """Ticks until a dead worker is back, with empty caches; a core is back at once."""


@dataclass(frozen=True, kw_only=True)
class Drain:
    """A worker that is stopped."""

    at: int
    """Tick."""
    worker: int
    absence: int
    """Ticks from its end until another is there in its place."""


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """One deployment with its workload."""

    number: int
    model: str
    block_size: int
    """Of all workers, and of the undisturbed run: attention sums over blocks, so that the last bits
    of a log probability depend on it."""
    scheduler: SchedulerConfig
    workers: tuple[Worker, ...]
    losses: tuple[Loss, ...]
    drains: tuple[Drain, ...]
    jobs: tuple[Job, ...]
    max_loras: int = 0
    """Adapters in a worker at a time; 0: no job has one."""

    def describe(self) -> str:
        """All but its jobs, for people."""
        return (
            f"configuration {self.number}: model={self.model} block_size={self.block_size} "
            f"{self.scheduler} {self.workers} {self.losses} {self.drains} "
            f"max_loras={self.max_loras} "
            f"with {len(self.jobs)} jobs"
        )

    def undisturbed(self, job: Job) -> "Configuration":
        """The same model with `job` alone: roomy, uncached, in one piece, one step at a time."""
        alone = replace(
            job,
            follows=None,
            arrives_at=0,
            cancelled_after=None,
            stopped_after=None,
            max_hold_us=0,
        )
        return Configuration(
            number=self.number,
            model=self.model,
            block_size=self.block_size,
            scheduler=SchedulerConfig(
                enable_prefix_caching=False, max_num_batched_tokens=4096, pipeline_depth=1
            ),
            workers=(Worker(num_gpu_blocks=ROOMY_TOKENS // self.block_size, num_cpu_blocks=0),),
            losses=(),
            drains=(),
            jobs=(alone,),
            max_loras=min(self.max_loras, 1),
        )


def with_speculation(drawn: Configuration) -> Configuration:
    """The same with requests of which most can have drafts: without log probabilities of prompts,
    and some with fewer drafts or none; and with budgets and batches that leave room for drafts in
    most steps."""
    draw = Random(-1 - drawn.number)
    jobs = []
    for job in drawn.jobs:
        sampling = sampling_pb2.SamplerParams()
        sampling.CopyFrom(job.sampling)
        if draw.random() < 0.8:
            sampling.ClearField("prompt_logprobs")
        num_drafts = draw.choice((None, None, None, None, 2, 0))
        jobs.append(replace(job, sampling=sampling, num_speculative_tokens=num_drafts))
    scheduler = replace(
        drawn.scheduler,
        max_num_batched_tokens=drawn.scheduler.max_num_batched_tokens + draw.choice((0, 8, 40)),
        max_speculative_seqs=draw.choice((2, 4, 16)),
    )
    return replace(drawn, jobs=tuple(jobs), scheduler=scheduler)


def with_adapters(drawn: Configuration, num_adapters: int) -> Configuration:
    """The same with adapters of most jobs, more of them than slots or not; a job that follows
    another one may have another adapter."""
    draw = Random(-1_000_000 - drawn.number)
    chosen = draw.sample(range(num_adapters), draw.choice((2, 3, num_adapters)))
    jobs = tuple(replace(job, adapter=draw.choice((None, *chosen))) for job in drawn.jobs)
    return replace(drawn, jobs=jobs, max_loras=draw.choice((1, 2, 3, num_adapters)))


def draw_configuration(number: int, max_model_lens: dict[str, int]) -> Configuration:
    """Configuration `number`; `max_model_lens` are those of `MODELS`."""
    draw = Random(number)
    model = MODELS[number % len(MODELS)]
    jobs = _draw_jobs(draw)
    block_size = draw.choice((1, 2, 4, 4, 8, 16))
    num_blocks = _most_blocks(jobs, block_size)
    scheduler = _draw_scheduler(draw, max_model_lens[model])
    workers = tuple(_draw_worker(draw, num_blocks) for _ in range(draw.choice((1, 1, 1, 2))))
    losses = _draw_losses(draw)
    if draw.random() < 0.35:
        workers = (*workers, _draw_small_worker(draw, num_blocks))
    return Configuration(
        number=number,
        model=model,
        block_size=block_size,
        scheduler=scheduler,
        workers=workers,
        losses=losses,
        drains=_draw_drains(draw, workers),
        jobs=jobs,
    )


def _draw_scheduler(draw: Random, max_model_len: int) -> SchedulerConfig:
    max_num_seqs = draw.choice((3, 4, 6, 16))
    chunked = draw.random() < 0.75
    longest_step = max_model_len + max_num_seqs
    budget = draw.choice((max_num_seqs, 8, 16, 40)) if chunked else longest_step
    return SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max(max_num_seqs, budget),
        enable_chunked_prefill=chunked,
        enable_prefix_caching=draw.random() < 0.7,
        watermark=draw.choice((0.0, 0.01, 0.1, 0.3)),
        pipeline_depth=draw.choice((1, 2, 2, 3)),
        policy=draw.choice(tuple(PolicyName)),
        isolate_tenants=draw.random() < 0.2,
        preemption_mode=draw.choice((*PreemptionMode, PreemptionMode.SWAP)),
        move_kv=MoveKV.ALWAYS,
    )


def _draw_worker(draw: Random, num_blocks: Sequence[int]) -> Worker:
    """Blocks from just enough for the longest sequence up to enough for one of each job."""
    least, most = max(num_blocks), sum(num_blocks)
    roominess = draw.choice((0.0, 0.0, 0.1, 0.2, 0.4, 1.0))
    return Worker(
        num_gpu_blocks=least + round(roominess * (most - least)),
        num_cpu_blocks=round(draw.choice((0.0, 0.5, 1.0, 2.0)) * least),
    )


def _draw_small_worker(draw: Random, num_blocks: Sequence[int]) -> Worker:
    """One that the longest sequences outgrow; it is the last of several."""
    longest = max(num_blocks)
    num_gpu_blocks = max(1, round(draw.choice((0.3, 0.5, 0.8)) * longest))
    return Worker(num_gpu_blocks=num_gpu_blocks, num_cpu_blocks=draw.choice((0, longest)))


def _draw_drains(draw: Random, workers: Sequence[Worker]) -> tuple[Drain, ...]:
    """None, or up to two, of the last worker: what outgrows it does not wait for one that left."""
    return tuple(
        Drain(at=draw.randint(4, 40), worker=len(workers) - 1, absence=draw.choice((0, 8)))
        for _ in range(draw.choice((0, 0, 1, 2)))
    )


def _draw_losses(draw: Random) -> tuple[Loss, ...]:
    """None, or up to two: a request that was on three workers at their deaths would fail."""
    return tuple(
        Loss(
            at=draw.randint(4, 60),
            worker=draw.choice((0, 0, 1, None)),
            absence=draw.choice((0, 5)),
        )
        for _ in range(draw.choice((0, 1, 1, 2)))
    )


def _draw_jobs(draw: Random) -> tuple[Job, ...]:
    stems = [_draw_tokens(draw, draw.randint(6, 40)) for _ in range(3)]
    jobs: list[Job] = []
    has_beams = draw.random() < 0.3  # they need memory for all at once: not in every workload
    for index in range(draw.randint(6, 12)):
        follows = draw.randrange(index) if index and draw.random() < 0.25 else None
        if follows is not None and _depth(jobs, follows) > 1:
            follows = None  # conversations of at most three turns, or they get slow
        job = _draw_job(draw, stems, follows)
        jobs.append(_with_beams(draw, job) if has_beams and draw.random() < 0.3 else job)
    return tuple(jobs)


def _draw_job(draw: Random, stems: Sequence[tuple[int, ...]], follows: int | None) -> Job:
    own = _draw_tokens(draw, draw.choice((0, 1, 2, 5, 11)))
    stem = draw.choice(stems)[: draw.choice((1, 7, 16, 40))] if follows is None else ()
    max_tokens = draw.randint(1, 24)
    num_choices = draw.choice((1, 1, 1, 2, 3))
    has_stops = draw.random() < 0.3
    stops = frozenset(_draw_tokens(draw, 12)) if has_stops else frozenset()
    min_tokens = draw.randint(1, 5) if draw.random() < 0.3 else 0
    sampling = _draw_sampling(draw, stops, min_tokens)
    if draw.random() < 0.3:
        stops |= {vocabularies.END}
        _constrain(draw, sampling, stops)
    return Job(
        tokens=(stem + own) or (FIRST_TOKEN_ID,),
        follows=follows,
        arrives_at=draw.choice((0, 0, draw.randint(1, 40))),
        num_choices=num_choices,
        max_tokens=max_tokens,
        stop_token_ids=stops,
        sampling=sampling,
        tenant=draw.choice(("", "a", "b")),
        priority=draw.choice((0, 0, 1, -1)),
        cancelled_after=draw.randint(0, max_tokens) if draw.random() < 0.12 else None,
        stopped_after=draw.randint(1, max_tokens) if draw.random() < 0.12 else None,
        max_hold_us=draw.choice((0, 100_000, 100_000, 100_000)),
    )


def _with_beams(draw: Random, job: Job) -> Job:
    """The same request for beam search."""
    width = draw.choice((2, 3))
    num_logprobs = draw.choice((None, 0, 2))
    stops = job.stop_token_ids
    return replace(
        job,
        num_choices=draw.randint(1, width),
        stopped_after=None,
        sampling=sampling_pb2.SamplerParams(
            top_p=1.0,
            repetition_penalty=draw.choice((1.0, 1.2)),
            min_tokens=job.sampling.min_tokens,
            suppressed_token_ids=job.sampling.suppressed_token_ids,
            num_candidates=max(width + len(stops), num_logprobs or 0),
            constraint=job.sampling.constraint if job.sampling.HasField("constraint") else None,
        ),
        beam_search=BeamParams(
            width=width,
            length_penalty=draw.choice((0.0, 1.0, 2.0, -1.0)),
            early_stopping=draw.choice(tuple(EarlyStopping)),
            num_logprobs=num_logprobs,
        ),
    )


def _draw_sampling(
    draw: Random, stops: frozenset[int], min_tokens: int
) -> sampling_pb2.SamplerParams:
    params = sampling_pb2.SamplerParams(
        temperature=draw.choice((0.0, 0.0, 0.7, 1.0, 1.5)),
        top_p=draw.choice((1.0, 0.9, 0.5)),
        top_k=draw.choice((0, 0, 5, 40)),
        min_p=draw.choice((0.0, 0.0, 0.05)),
        repetition_penalty=draw.choice((1.0, 1.0, 1.2)),
        presence_penalty=draw.choice((0.0, 0.0, 0.5)),
        frequency_penalty=draw.choice((0.0, 0.0, 0.4)),
        seed=draw.getrandbits(53),
        min_tokens=min_tokens,
        suppressed_token_ids=pack(sorted(stops)) if min_tokens else b"",
    )
    if draw.random() < 0.2:
        for token_id in _draw_tokens(draw, 3):
            params.logit_bias.add(token_id=token_id, bias=draw.choice((-3.0, 2.0)))
    if draw.random() < 0.2:
        for length in (1, 2):
            params.bad_words.add(token_ids=pack(_draw_tokens(draw, length)))
    if draw.random() < 0.6:
        params.logprobs = draw.choice((0, 1, 3))
    if draw.random() < 0.2:
        params.prompt_logprobs = draw.choice((0, 2))
    return params


def _constrain(draw: Random, sampling: sampling_pb2.SamplerParams, stops: frozenset[int]) -> None:
    """Constrain the output, in the texts of tests/support/vocabularies.py."""
    kind, text = draw.choice(CONSTRAINTS)
    sampling.suppressed_token_ids = b""
    del sampling.bad_words[:]  # a text may have one spelling only
    constraint = sampling_pb2.Constraint(end_token_ids=pack(sorted(stops)))
    if kind == "choice":
        constraint.choice.choices.extend(text.split("|"))
    else:
        setattr(constraint, kind, text)
    of_thought = Random(sampling.seed)  # its draws leave the rest of a configuration as it was
    if of_thought.random() < 0.3:
        constraint.thought.start = of_thought.choice(("", "a"))
        constraint.thought.ends.extend((of_thought.choice((" ", ":", "ab")), "}"))
    sampling.constraint.CopyFrom(constraint)


def _draw_tokens(draw: Random, count: int) -> tuple[int, ...]:
    return tuple(draw.randrange(FIRST_TOKEN_ID, END_TOKEN_ID) for _ in range(count))


def _depth(jobs: Sequence[Job], index: int) -> int:
    """Turns before this one in its conversation."""
    follows = jobs[index].follows
    return 0 if follows is None else 1 + _depth(jobs, follows)


def _most_blocks(jobs: Sequence[Job], block_size: int) -> list[int]:
    """For each job the most blocks without which it cannot go on alone: of one sequence, since the
    others can wait for it; of all beams, since they go on together."""
    widths = [job.beam_search.width if job.beam_search else 1 for job in jobs]
    return [
        width * -(-num_tokens // block_size)
        for width, num_tokens in zip(widths, _most_tokens(jobs), strict=True)
    ]


def _most_tokens(jobs: Sequence[Job]) -> list[int]:
    """For each job the most tokens whose KV one of its sequences needs: all but the last."""
    lengths: list[int] = []
    for job in jobs:
        before = 0 if job.follows is None else lengths[job.follows] + 1
        lengths.append(before + len(job.tokens) + job.max_tokens - 1)
    return lengths
