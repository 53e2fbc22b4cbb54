"""The whole core under random arrivals, ends, losses and delays, against symbolic workers.

Every plan is checked against the memory model as it is executed; every request must get exactly
the tokens of an undisturbed run; and the core's life, run again from its recording, must be the
same.
"""

from contextlib import suppress
from dataclasses import replace
from random import Random
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from scheduler_service.core import (
    BeamParams,
    ContextKind,
    ContextPart,
    EarlyStopping,
    PolicyName,
    SchedulerConfig,
    TenantConfig,
)
from scheduler_service.core.config import (
    CacheGroup,
    CacheLifetime,
    KeptBlocks,
    MoveKV,
    PoolingHead,
    PoolingType,
    PreemptionMode,
    Role,
    WorkKind,
)
from scheduler_service.core.context import adapter_of
from scheduler_service.errors import (
    DeadlineExceeded,
    DeadlineUnreachable,
    InvalidArgument,
    PromptTooLong,
    QueueFull,
    RequestTakenOver,
    TenantLimit,
    UnknownAdapter,
    UnknownModel,
    UnsupportedByModel,
)
from tests.support.core_driver import ALL_REQUESTS, MODEL, CoreDriver, make_capacity
from tests.support.inspections import check_inspection
from tests.support.recorded import Recorder
from tests.support.records import RequestRecord
from tests.support.symbolic_worker import VECTOR_SIZE, Sampling

WINDOW, CHUNK, STATE = CacheLifetime.WINDOW, CacheLifetime.CHUNK, CacheLifetime.STATE
FIXED = CacheLifetime.FIXED
ALL = CacheGroup(block_tokens=4)
CACHE_GROUPS = {
    "all": (ALL,),
    "window": (CacheGroup(lifetime=WINDOW, block_tokens=4, span=9),),
    "window and all": (
        CacheGroup(lifetime=WINDOW, block_tokens=4, span=6),
        CacheGroup(block_tokens=8),
    ),
    "all and chunk": (
        CacheGroup(block_tokens=12),
        CacheGroup(lifetime=CHUNK, block_tokens=4, span=8),
    ),
    "chunk within a block": (ALL, CacheGroup(lifetime=CHUNK, block_tokens=8, span=12)),
    "state": (CacheGroup(lifetime=STATE, num_blocks=2),),
    "all and state": (ALL, CacheGroup(lifetime=STATE, num_blocks=1)),
    "states and windows": (
        CacheGroup(lifetime=STATE, num_blocks=1),
        CacheGroup(lifetime=WINDOW, block_tokens=4, span=6),
        CacheGroup(lifetime=STATE, num_blocks=2),
        CacheGroup(block_tokens=8),
    ),
    "all and source": (ALL, CacheGroup(lifetime=FIXED, block_tokens=4)),
    "sources and others": (
        CacheGroup(lifetime=FIXED, block_tokens=8),
        CacheGroup(lifetime=WINDOW, block_tokens=4, span=6),
        CacheGroup(lifetime=STATE, num_blocks=1),
        CacheGroup(lifetime=FIXED, block_tokens=3),
    ),
    "every kind": (
        CacheGroup(lifetime=FIXED, block_tokens=5),
        CacheGroup(lifetime=WINDOW, block_tokens=4, span=6),
        CacheGroup(lifetime=STATE, num_blocks=2),
        CacheGroup(block_tokens=8),
        CacheGroup(lifetime=CHUNK, block_tokens=4, span=8),
    ),
    "none": (),
    "three": (
        CacheGroup(block_tokens=16),
        CacheGroup(lifetime=WINDOW, block_tokens=4, span=1),
        CacheGroup(lifetime=WINDOW, block_tokens=8, span=17),
    ),
}
"""The kinds of cache that a core must serve."""
MAX_MODEL_LEN = 48
SMALL, LARGE = 9, 24
"""Blocks of the two kinds of worker groups."""

TENANTS = {
    "heavy": TenantConfig(weight=3.0),
    "few": TenantConfig(max_requests=3, max_queued_tokens=40),
    "small": TenantConfig(max_kv_blocks=SMALL + 2, max_loras=2),
}
PARTS = [
    *(ContextPart(ContextKind.SALT, bytes([number]) * 32) for number in range(2)),
    ContextPart(ContextKind.MEDIA, bytes(32), length=6),
    ContextPart(ContextKind.MEDIA, bytes(32), start=6, length=13),
    ContextPart(ContextKind.MEDIA, bytes([1]) * 32, length=5),
]
ADAPTERS = {bytes([number]) * 32: f"adapter {number}" for number in range(1, 6)}
"""Names by digest."""
REFUSALS = (
    UnknownAdapter,
    UnknownModel,
    DeadlineExceeded,
    DeadlineUnreachable,
    InvalidArgument,
    PromptTooLong,
    QueueFull,
    TenantLimit,
    UnsupportedByModel,
)

GROUP_EVENTS = ["join", "join", "lose", "reconnect", "fail", "drain", "drain", "part"]
REQUEST_EVENTS = ["cancel", "abort", "stop", "stop", "expire", "again", "again"]
ADAPTER_EVENTS = ["set_adapters", "lose_adapters"]
CORE_EVENTS = ["lose_core", "lose_core_slowly"]
EVENTS = [*GROUP_EVENTS, *REQUEST_EVENTS, *CORE_EVENTS, "lose_frontend", *ADAPTER_EVENTS]


def part_of(adapter: bytes | None) -> tuple[ContextPart, ...]:
    return () if adapter is None else (ContextPart(ContextKind.ADAPTER, adapter),)


SOME_ADAPTER = st.sampled_from([*[None] * len(ADAPTERS), *ADAPTERS])


def make_prompt(length: int, num_shared: int, seed: int) -> list[int]:
    """A prompt that begins like one in two others, for `num_shared` tokens."""
    family = seed % 2
    shared = [(family * 7 + k * k) % 32 for k in range(num_shared)]
    return (shared + [(seed * 5 + k) % 32 for k in range(length)])[:length]


class CoreMachine(RuleBasedStateMachine):
    """Random life around one core."""

    driver: CoreDriver
    roles: tuple[Role, ...] = (Role.BOTH,)
    """Of the worker groups, by turns."""

    @initialize(
        pipeline_depth=st.integers(1, 3),
        max_num_seqs=st.integers(2, 6),
        extra_tokens=st.sampled_from([0, 0, 1, 3, 12]),
        enable_chunked_prefill=st.booleans(),
        watermark=st.sampled_from([0.0, 0.01, 0.2]),
        blocks=st.sampled_from([SMALL, LARGE]),
        enable_prefix_caching=st.sampled_from([True, True, True, False]),
        preemption_mode=st.sampled_from([*PreemptionMode, PreemptionMode.SWAP]),
        host_blocks=st.sampled_from([0, 4, 12, 100, 100]),
        policy=st.sampled_from(PolicyName),
        isolate_tenants=st.booleans(),
        num_speculative_tokens=st.sampled_from([0, 1, 3, 9]),
        max_speculative_seqs=st.sampled_from([1, 3, 8]),
        cache=st.sampled_from(["all", *CACHE_GROUPS]),
        max_loras=st.sampled_from([1, 2, len(ADAPTERS)]),
        move_kv=st.sampled_from([*MoveKV, MoveKV.ALWAYS]),
        has_records=st.booleans(),
    )
    def start(
        self,
        *,
        max_num_seqs: int,
        extra_tokens: int,
        blocks: int,
        host_blocks: int,
        num_speculative_tokens: int,
        cache: str,
        max_loras: int = 2,
        has_records: bool = False,
        **config: Any,
    ) -> None:
        """`config`: other fields of SchedulerConfig."""
        self.max_loras = max_loras
        self.has_records = has_records
        self.cache_groups = {MODEL: CACHE_GROUPS[cache]}
        self.host_blocks = host_blocks
        self.num_groups = 0
        self.num_speculative_tokens = num_speculative_tokens
        room = extra_tokens if config["enable_chunked_prefill"] else MAX_MODEL_LEN
        self.recorder = Recorder()
        self.driver = CoreDriver(
            SchedulerConfig(
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max_num_seqs + room,
                max_queue_requests=12,
                tenants=TENANTS,
                **config,
            ),
            self.recorder.make_core,
        )
        self.driver.set_adapters(ADAPTERS)
        self.add_worker_group(blocks)

    # Worker groups.

    def add_worker_group(self, num_gpu_blocks: int, model: str = MODEL) -> None:
        cache_groups = self.cache_groups[model]
        capacity = make_capacity(
            f"g{self.num_groups}",
            model=model,
            num_gpu_blocks=num_gpu_blocks if cache_groups else 0,
            num_cpu_blocks=self.host_blocks if cache_groups else 0,
            cache_groups=cache_groups,
            max_model_len=MAX_MODEL_LEN,
            num_speculative_tokens=self.num_speculative_tokens,
            whole_prompt=not cache_groups,
            max_loras=self.max_loras,
            kept=KeptBlocks() if self.has_records else None,
            work_kinds=frozenset(WorkKind if cache_groups else {WorkKind.POOLING}),
            kv_layout=(("layout", "symbolic"),) if cache_groups else (),
            role=self.roles[self.num_groups % len(self.roles)],
            addresses=(f"w{self.num_groups}",),
            epoch=self.num_groups + 1,
        )
        self.num_groups += 1
        self.driver.add_worker_group(capacity)

    def group_ids(self) -> list[str]:
        return list(self.driver.links)

    def busy_first(self) -> list[str]:
        """All groups; those with requests come first."""
        requests = self.driver.core.inspect(ALL_REQUESTS).requests
        busy = {request.worker_group_id for request in requests}
        return sorted(self.group_ids(), key=lambda group_id: group_id not in busy)

    # Requests.

    @rule(
        count=st.integers(1, 4),
        length=st.integers(1, 40),
        num_shared=st.sampled_from([0, 5, 8, 12, 21, 40, 40]),
        seed=st.integers(0, 1000),
        max_tokens=st.integers(1, 40),
        n=st.sampled_from([1, 1, 2, 3, 5]),
        num_stop_tokens=st.sampled_from([0, 0, 1, 3]),
        frontend_id=st.sampled_from(["f0", "f1"]),
        logprobs=st.booleans(),
        fails_at=st.sampled_from([None] * 7 + [0, 3]),
        timeout=st.sampled_from([None, None, 0.1, 5.0]),
        tenant=st.sampled_from(["", *TENANTS]),
        context=st.lists(st.sampled_from(PARTS), max_size=2, unique=True).map(tuple),
        adapter=SOME_ADAPTER,
        priority=st.integers(-1, 1),
        max_hold_us=st.sampled_from([0, 3_000, 100_000, 100_000]),
    )
    def submit(
        self,
        *,
        count: int,
        length: int,
        num_shared: int,
        seed: int,
        num_stop_tokens: int,
        logprobs: bool,
        fails_at: int | None,
        priority: int,
        context: tuple[ContextPart, ...] = (),
        adapter: bytes | None,
        **fields: Any,
    ) -> None:
        for i in range(count):
            sampling = Sampling(
                seed=seed + i,
                fails_at=fails_at,
                logprobs=logprobs,
                prompt_logprobs=logprobs and seed % 4 == 0,
            )
            with suppress(*REFUSALS):
                self.driver.submit(
                    prompt=make_prompt(1 + (length + 7 * i) % 40, num_shared, seed),
                    sampling=sampling,
                    stop_token_ids=frozenset(range(num_stop_tokens)),
                    priority=priority + i % 2,
                    context=context + part_of(adapter if i % 2 == 0 else None),
                    **fields,
                )

    @rule(
        count=st.integers(1, 2),
        length=st.integers(1, 30),
        seed=st.integers(0, 1000),
        max_tokens=st.integers(1, 24),
        width=st.integers(1, 5),
        num_choices=st.integers(1, 5),
        length_penalty=st.sampled_from([0.0, 1.0, 2.0, -1.0]),
        early_stopping=st.sampled_from(list(EarlyStopping)),
        num_stop_tokens=st.sampled_from([0, 1, 3]),
        logprobs=st.booleans(),
        fails_at=st.sampled_from([None] * 7 + [0, 3]),
        context=st.sampled_from([(), (), (PARTS[2],), (PARTS[3], PARTS[4])]),
        adapter=SOME_ADAPTER,
    )
    def search(
        self,
        *,
        count: int,
        length: int,
        seed: int,
        max_tokens: int,
        num_choices: int,
        num_stop_tokens: int,
        logprobs: bool,
        fails_at: int | None,
        context: tuple[ContextPart, ...],
        adapter: bytes | None,
        model: str = MODEL,
        **beams: Any,
    ) -> None:
        params = BeamParams(num_logprobs=2 if logprobs else None, **beams)
        for i in range(count):
            sampling = Sampling(seed=seed + i, fails_at=fails_at, prompt_logprobs=seed % 4 == 0)
            with suppress(*REFUSALS):
                self.driver.submit(
                    prompt=make_prompt(1 + (length + 7 * i) % 30, 8, seed),
                    max_tokens=max_tokens,
                    n=min(num_choices, params.width),
                    sampling=sampling,
                    stop_token_ids=frozenset(range(num_stop_tokens)),
                    beam_search=params,
                    context=context + part_of(adapter),
                    model=model,
                )

    @rule(
        count=st.integers(1, 3),
        length=st.integers(1, 40),
        num_shared=st.sampled_from([0, 8, 21, 40]),
        seed=st.integers(0, 1000),
        type=st.sampled_from([*PoolingType, PoolingType.ALL]),
        head=st.sampled_from([PoolingHead.VECTOR, *PoolingHead]),
        dimensions=st.sampled_from([0, 1, VECTOR_SIZE]),
        timeout=st.sampled_from([None, None, 0.1, 5.0]),
        tenant=st.sampled_from(["", *TENANTS]),
        adapter=SOME_ADAPTER,
        priority=st.integers(-1, 1),
    )
    def pool(
        self,
        *,
        count: int,
        length: int,
        num_shared: int,
        seed: int,
        timeout: float | None,
        adapter: bytes | None,
        **fields: Any,
    ) -> None:
        fields["context"] = part_of(adapter)
        deadline = None if timeout is None else self.driver.now + timeout
        for i in range(count):
            prompt = make_prompt(1 + (length + 7 * i) % MAX_MODEL_LEN, num_shared, seed)
            with suppress(*REFUSALS):
                self.driver.submit_pooled(prompt, deadline=deadline, **fields)

    @rule(pick=st.integers(0, 1000), num_more=st.integers(1, 8), max_tokens=st.integers(1, 12))
    def follow_up(self, pick: int, num_more: int, max_tokens: int) -> None:
        """A chat's next turn: all that was said before, and more."""
        done = [record for record in self.driver.records.values() if record.finished is not None]
        if not done:
            return
        record = done[pick % len(done)]
        choice = record.choices[pick % len(record.choices)]
        prompt = [*record.request.prompt_token_ids, *choice.tokens, *range(num_more)]
        with suppress(*REFUSALS):
            self.driver.submit(
                prompt=prompt,
                max_tokens=max_tokens,
                sampling=Sampling(seed=pick % 3),
                context=record.request.context,
                model=record.request.model,
            )

    # What disturbs them.

    def live(self) -> list[RequestRecord]:
        return [record for record in self.driver.records.values() if record.is_live]

    @rule(
        event=st.sampled_from(EVENTS),
        pick=st.integers(0, 1000),
    )
    def disturb(self, event: str, pick: int) -> None:
        driver = self.driver
        groups = self.group_ids()
        models = [*self.cache_groups]
        if event == "join" and driver.late:
            driver.rejoin()
        elif event == "join" and len(groups) < 3 * len(models):
            self.add_worker_group([SMALL, LARGE][pick % 2], models[pick // 2 % len(models)])
        elif event == "lose" and groups:
            driver.lose_worker_group(groups[pick % len(groups)])
        elif event == "reconnect" and groups:
            driver.reconnect(self.busy_first()[0])
        elif event == "fail" and groups:
            driver.fail_worker_group(self.busy_first()[0 if pick % 4 else -1])
        elif event == "drain" and groups:
            self.drain(groups[pick % len(groups)], waits=pick % 3 == 0)
        elif event == "part":
            for group_id in groups:
                if driver.core.is_drained(group_id):
                    driver.lose_worker_group(group_id)
        elif event == "lose_core":
            driver.lose_core()
        elif event == "lose_core_slowly":
            driver.lose_core(late=[g for i, g in enumerate(groups) if pick >> i & 1])
        elif event == "lose_frontend":
            driver.remove_frontend(f"f{pick % 2}")
        elif event in ADAPTER_EVENTS:
            model = models[pick // 32 % len(models)]
            self.set_adapters(model, pick, keeps_used=event == "set_adapters")
        elif event == "expire":
            driver.expire([0.0, 0.01, 1.0][pick % 3])
        elif live := self.live():
            self.end(event, live[pick % len(live)], pick)

    def set_adapters(self, model: str, pick: int, *, keeps_used: bool) -> None:
        """Some are loaded, others unloaded, except for those of live requests; or one of these is
        lost, too, and its requests end, but no others."""
        self.driver.collect()
        live = [(record, adapter_of(record.request.context)) for record in self.live()]
        used = [d for record, d in live if d is not None and record.request.model == model]
        chosen = {d: name for i, (d, name) in enumerate(ADAPTERS.items()) if pick >> i & 1}
        if keeps_used:
            chosen |= {d: ADAPTERS[d] for d in used}
        elif used:
            chosen.pop(used[pick % len(used)], None)
        self.driver.set_adapters(chosen, model)
        self.driver.collect()
        for record, adapter in live:
            is_lost = adapter in used and adapter not in chosen
            is_lost &= record.request.model == model
            assert isinstance(record.error, UnknownAdapter) == is_lost
            assert record.is_live != is_lost

    def drain(self, group_id: str, *, waits: bool) -> None:
        """When its steps have ended, nothing is left that others can hold as well, except for
        blocks that they want to copy."""
        driver = self.driver
        driver.drain_worker_group(group_id)
        if waits:
            while driver.deliver(group_id):
                driver.collect()
            driver.schedule(group_id)  # ends requests that have outgrown every cache
            driver.collect()
            groups = {
                group.worker_group_id: group for group in driver.core.snapshot().worker_groups
            }
            here = groups[group_id]
            others = [g for g in groups.values() if g.model == here.model and not g.draining]
            if any(group.num_gpu_blocks >= here.num_gpu_blocks for group in others):
                assert here.num_running_sequences == 0
                is_source = driver.config.move_kv is not MoveKV.NEVER
                assert driver.core.is_drained(group_id) or is_source

    def end(self, event: str, record: RequestRecord, pick: int) -> None:
        if event == "cancel":
            self.driver.cancel(record)
        elif event == "abort":
            self.driver.abort(record)
        elif event == "again":
            self.try_again(record, pick)
        elif event == "stop":
            index = pick % len(record.choices)
            num_tokens = pick % (len(record.choices[index].tokens) + 1)
            self.driver.stop_choice(record, index, num_tokens)

    def try_again(self, record: RequestRecord, pick: int) -> None:
        """Its client has lost its frontend; then, late, comes what the former try has left."""
        driver = self.driver
        former = replace(record.request, frontend_id="late", handle=10**6)
        try:
            later = driver.try_again(record, f"f{pick % 2}", most_received=pick % 9)
        except REFUSALS:
            assert not record.is_live, "the former try was refused, too"
            return
        if later.is_live:
            with pytest.raises(RequestTakenOver):
                driver.core.submit(former, driver.now)
        driver.core.check()

    # Steps.

    @precondition(lambda self: self.driver.links)
    @rule(num_moves=st.integers(1, 80), seed=st.integers(0, 1000))
    def run(self, num_moves: int, seed: int) -> None:
        """Plans leave and results arrive in any order that the wire allows, of groups that have
        work."""
        rng, driver = Random(seed), self.driver
        for _ in range(num_moves):
            if driver.is_at_rest:
                driver.collect()
                driver.check_rest()
                break
            answering = [group_id for group_id, link in driver.links.items() if link.results]
            if answering and (not driver.work or rng.random() < 0.5):
                driver.deliver(rng.choice(answering))
            else:
                driver.schedule(rng.choice([*driver.work]))
        driver.collect()

    @invariant()
    def holds(self) -> None:
        self.driver.core.check()
        check_inspection(self.driver.core)

    def outwait(self, wait_s: float) -> None:
        """Lost groups do not come back in time: nothing waits for them where others serve."""
        driver = self.driver
        driver.expire(wait_s)
        driver.run_until_idle()
        groups = driver.core.snapshot().worker_groups
        draining = {group.model for group in groups if group.draining}
        served = {group.model for group in groups} - draining
        for record in self.live():
            adapter = adapter_of(record.request.context)
            is_missing = adapter is not None and adapter not in driver.adapters.get(
                record.request.model, {}
            )
            assert record.request.model not in served or is_missing, "it waits without end"

    def teardown(self) -> None:
        if not hasattr(self, "driver") or self.driver.has_failed:
            return
        self.driver.run_until_idle()
        wait_s = self.driver.config.max_outgrown_wait_s
        assert wait_s is not None
        if len(self.driver.records) % 2:
            self.outwait(wait_s)
        self.driver.rejoin()
        for model in self.cache_groups:
            self.add_worker_group(LARGE, model)
        self.driver.run_until_idle()
        # What was accepted while no group was there may fit none, and has waited for others.
        self.driver.expire(wait_s)
        self.driver.collect()
        self.driver.check_empty()
        self.recorder.check()


CHUNKED: dict[str, Any] = {
    "enable_chunked_prefill": True,
    "watermark": 0.0,
    "isolate_tenants": False,
    "max_speculative_seqs": 8,
}


class CrowdedMachine(CoreMachine):
    """Few blocks for many requests that fit alone: much is swapped, most of it comes back."""

    @initialize(
        pipeline_depth=st.integers(1, 3),
        max_num_seqs=st.integers(4, 8),
        extra_tokens=st.sampled_from([0, 3, 12]),
        preemption_mode=st.sampled_from([PreemptionMode.SWAP, PreemptionMode.AUTO]),
        host_blocks=st.sampled_from([6, 12, 100]),
        enable_prefix_caching=st.booleans(),
        policy=st.sampled_from(PolicyName),
        num_speculative_tokens=st.sampled_from([0, 2, 5]),
        cache=st.sampled_from(["all", *CACHE_GROUPS]),
    )
    def start(self, **values: Any) -> None:
        super().start(blocks=SMALL, **CHUNKED, **values)

    @rule(
        count=st.integers(1, 4),
        length=st.integers(1, 12),
        num_shared=st.sampled_from([0, 5, 8]),
        seed=st.integers(0, 1000),
        adapter=SOME_ADAPTER,
        max_tokens=st.integers(4, 20),
        n=st.sampled_from([1, 1, 2, 3]),
        tenant=st.sampled_from(["", "heavy", "few"]),
        priority=st.integers(-1, 1),
        max_hold_us=st.sampled_from([0, 100_000, 100_000]),
    )
    def submit(self, count: int, length: int, **values: Any) -> None:
        for i in range(count):
            super().submit(
                count=1,
                length=1 + (length + 5 * i) % 12,
                num_stop_tokens=0,
                frontend_id="f0",
                logprobs=False,
                fails_at=None,
                timeout=None,
                **values,
            )


class UnlikeMachine(CoreMachine):
    """Small groups and a large one from the start: what outgrows the small ones moves, or waits."""

    @initialize(
        pipeline_depth=st.integers(1, 3),
        max_num_seqs=st.integers(2, 4),
        preemption_mode=st.sampled_from(PreemptionMode),
        host_blocks=st.sampled_from([0, 12]),
        enable_prefix_caching=st.booleans(),
        policy=st.sampled_from(PolicyName),
        small=st.sampled_from([5, 7, SMALL]),
        num_speculative_tokens=st.sampled_from([0, 2, 5]),
        cache=st.sampled_from(["all", *CACHE_GROUPS]),
    )
    def start(self, small: int, **values: Any) -> None:
        super().start(blocks=small, extra_tokens=12, **CHUNKED, **values)
        self.add_worker_group(LARGE)
        self.add_worker_group(small)

    @rule(
        count=st.integers(2, 5),
        length=st.integers(1, 20),
        seed=st.integers(0, 1000),
        adapter=SOME_ADAPTER,
        n=st.sampled_from([1, 1, 2, 3]),
        logprobs=st.booleans(),
        timeout=st.sampled_from([None, None, None, 5.0]),
        max_hold_us=st.sampled_from([0, 3_000, 100_000, 100_000]),
        priority=st.integers(-1, 1),
    )
    def submit(self, **values: Any) -> None:
        fixed = {"num_shared": 8, "max_tokens": 40, "num_stop_tokens": 0, "frontend_id": "f0"}
        super().submit(tenant="", fails_at=None, **fixed, **values)


class MovingMachine(CoreMachine):
    """Equal groups that lose requests to each other, or give them away: their blocks move, too."""

    @initialize(
        pipeline_depth=st.integers(1, 3),
        max_num_seqs=st.integers(2, 6),
        extra_tokens=st.sampled_from([3, 12, 24]),
        preemption_mode=st.sampled_from(PreemptionMode),
        host_blocks=st.sampled_from([0, 12, 100]),
        policy=st.sampled_from(PolicyName),
        num_speculative_tokens=st.sampled_from([0, 2, 5]),
        cache=st.sampled_from(["all", *CACHE_GROUPS]),
        roles=st.sampled_from([(Role.BOTH,), (Role.PREFILL, Role.DECODE), tuple(Role)]),
    )
    def start(self, roles: tuple[Role, ...], **values: Any) -> None:
        self.roles = roles
        caching = {"enable_prefix_caching": True, "move_kv": MoveKV.ALWAYS}
        super().start(blocks=LARGE, **caching, **CHUNKED, **values)
        self.add_worker_group(LARGE)
        self.add_worker_group(LARGE)

    @rule(
        count=st.integers(1, 4),
        length=st.integers(16, 40),
        num_shared=st.sampled_from([16, 21, 40]),
        seed=st.integers(0, 1000),
        max_tokens=st.integers(4, 40),
        n=st.sampled_from([1, 1, 2, 3]),
        tenant=st.sampled_from(["", "heavy"]),
        context=st.lists(st.sampled_from(PARTS), max_size=2, unique=True).map(tuple),
        adapter=SOME_ADAPTER,
        timeout=st.sampled_from([None, None, 5.0]),
        max_hold_us=st.sampled_from([0, 3_000, 100_000]),
        fails_at=st.sampled_from([None, None, None, 0, 7]),
    )
    def submit(self, **values: Any) -> None:
        fixed = {"num_stop_tokens": 0, "frontend_id": "f0", "logprobs": False, "priority": 0}
        super().submit(**fixed, **values)

    @rule(
        pick=st.integers(0, 1000),
        event=st.sampled_from(["drain", "part", "lose", "reconnect", "fail", "join"]),
    )
    def move(self, pick: int, event: str) -> None:
        """Groups come and go more often than in other lives."""
        self.disturb(event, pick)

    @rule(count=st.integers(4, 8), seed=st.integers(0, 1000), num_steps=st.integers(4, 24))
    def crowd(self, count: int, seed: int, num_steps: int) -> None:
        """A group joins when the others are short of memory, and gets requests of theirs."""
        for i in range(count):
            with suppress(*REFUSALS):
                self.driver.submit(prompt=make_prompt(16 + i, 3, seed + i), max_tokens=30)
        for _ in range(num_steps):
            for group_id in self.group_ids():
                self.driver.step(group_id)
        if len(self.group_ids()) < 4:
            self.add_worker_group(LARGE)
        for _ in range(num_steps):
            for group_id in self.group_ids():
                self.driver.step(group_id)


OTHER = "n"
MODELS = st.sampled_from([MODEL, MODEL, OTHER])


class SharedMachine(CoreMachine):
    """Two models, whose requests share tenants and their limits, adapters and the core."""

    @initialize(
        pipeline_depth=st.integers(1, 3),
        max_num_seqs=st.integers(2, 6),
        extra_tokens=st.sampled_from([3, 12]),
        blocks=st.sampled_from([SMALL, LARGE]),
        preemption_mode=st.sampled_from(PreemptionMode),
        host_blocks=st.sampled_from([0, 12, 100]),
        enable_prefix_caching=st.sampled_from([True, True, False]),
        policy=st.sampled_from(PolicyName),
        num_speculative_tokens=st.sampled_from([0, 2, 5]),
        max_loras=st.sampled_from([1, 2, len(ADAPTERS)]),
        move_kv=st.sampled_from(MoveKV),
        has_records=st.booleans(),
        cache=st.sampled_from(["all", *CACHE_GROUPS]),
        other_cache=st.sampled_from(["all", "none", *CACHE_GROUPS]),
    )
    def start(self, other_cache: str, blocks: int, **values: Any) -> None:
        super().start(blocks=blocks, **CHUNKED, **values)
        self.cache_groups[OTHER] = CACHE_GROUPS[other_cache]
        self.driver.set_adapters(ADAPTERS, OTHER)
        self.add_worker_group(blocks, OTHER)

    @rule(
        count=st.integers(1, 4),
        model=MODELS,
        length=st.integers(1, 40),
        num_shared=st.sampled_from([0, 8, 21, 40]),
        seed=st.integers(0, 1000),
        max_tokens=st.integers(1, 40),
        n=st.sampled_from([1, 1, 2, 3]),
        timeout=st.sampled_from([None, None, 5.0]),
        tenant=st.sampled_from(["", *TENANTS, "small"]),
        adapter=SOME_ADAPTER,
        priority=st.integers(-1, 1),
        max_hold_us=st.sampled_from([0, 3_000, 100_000]),
        fails_at=st.sampled_from([None, None, None, 0, 3]),
        frontend_id=st.sampled_from(["f0", "f1"]),
    )
    def submit(self, **values: Any) -> None:
        super().submit(num_stop_tokens=0, logprobs=False, **values)

    @rule(
        count=st.integers(1, 2),
        model=MODELS,
        length=st.integers(1, 30),
        seed=st.integers(0, 1000),
        max_tokens=st.integers(1, 24),
        width=st.integers(2, 4),
        num_choices=st.integers(1, 3),
        early_stopping=st.sampled_from(list(EarlyStopping)),
        adapter=SOME_ADAPTER,
    )
    def search(self, **values: Any) -> None:
        fixed = {"num_stop_tokens": 1, "logprobs": False, "fails_at": None, "context": ()}
        super().search(length_penalty=1.0, **fixed, **values)

    @rule(
        count=st.integers(1, 3),
        model=MODELS,
        length=st.integers(1, 40),
        num_shared=st.sampled_from([0, 21, 40]),
        seed=st.integers(0, 1000),
        type=st.sampled_from([*PoolingType, PoolingType.ALL]),
        timeout=st.sampled_from([None, None, 5.0]),
        tenant=st.sampled_from(["", *TENANTS]),
        adapter=SOME_ADAPTER,
        priority=st.integers(-1, 1),
    )
    def pool(self, **values: Any) -> None:
        super().pool(**values)


NUM_QUICK = 20
"""Lives in the default run, the first of those of the long one."""


def machine_settings(max_examples: int) -> settings:
    return settings(
        max_examples=max_examples,
        stateful_step_count=40,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )


class TestCore(CoreMachine.TestCase):  # type: ignore[name-defined,misc]
    settings = machine_settings(NUM_QUICK)


class TestCrowdedCore(CrowdedMachine.TestCase):  # type: ignore[name-defined,misc]
    settings = machine_settings(NUM_QUICK)


class TestUnlikeGroups(UnlikeMachine.TestCase):  # type: ignore[name-defined,misc]
    settings = machine_settings(NUM_QUICK)


class TestMovingBlocks(MovingMachine.TestCase):  # type: ignore[name-defined,misc]
    settings = machine_settings(NUM_QUICK)


class TestSharedCore(SharedMachine.TestCase):  # type: ignore[name-defined,misc]
    settings = machine_settings(NUM_QUICK)


@pytest.mark.long
@pytest.mark.timeout(3600)
class TestCoreAtLength(CoreMachine.TestCase):  # type: ignore[name-defined,misc]
    settings = machine_settings(5000)


@pytest.mark.long
@pytest.mark.timeout(3600)
class TestCrowdedCoreAtLength(CrowdedMachine.TestCase):  # type: ignore[name-defined,misc]
    settings = machine_settings(2000)


@pytest.mark.long
@pytest.mark.timeout(3600)
class TestUnlikeGroupsAtLength(UnlikeMachine.TestCase):  # type: ignore[name-defined,misc]
    settings = machine_settings(1500)


@pytest.mark.long
@pytest.mark.timeout(3600)
class TestMovingBlocksAtLength(MovingMachine.TestCase):  # type: ignore[name-defined,misc]
    settings = machine_settings(2000)


@pytest.mark.long
@pytest.mark.timeout(3600)
class TestSharedCoreAtLength(SharedMachine.TestCase):  # type: ignore[name-defined,misc]
    settings = machine_settings(2000)
