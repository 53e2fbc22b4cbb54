"""How much memory windows save: the core alone, with the cache of Gemma 3 270M.

15 layers have windows of 512 tokens and 3 attend to all. Blocks are of equal bytes, so those of the
windows have a fifth of the tokens of the others. A model without windows keeps all tokens in both.
"""

from collections.abc import Callable
from dataclasses import replace
from random import Random

from scheduler_service.core import SchedulerConfig, SchedulerCore, StepPlan, StepResult
from scheduler_service.core.config import CacheGroup, CacheLifetime
from scheduler_service.core.kv_cache.alloc_status import AllocStatus
from scheduler_service.core.kv_cache.manager import KVCacheManager
from scheduler_service.core.request import EngineOutputs
from tests.support.blocks import KnownSequence
from tests.support.core_driver import make_capacity, make_request

LENGTH = 4096
"""Tokens of a sequence at its end."""
WINDOW = 512


WINDOWS = (
    CacheGroup(block_tokens=5 * 16),
    CacheGroup(lifetime=CacheLifetime.WINDOW, block_tokens=16, span=WINDOW),
)


WITHOUT = tuple(CacheGroup(block_tokens=group.block_tokens) for group in WINDOWS)
"""Layers of the same shapes that keep all tokens."""


class Server:
    """A core whose worker answers at once, with the same token."""

    def __init__(self, groups: tuple[CacheGroup, ...], num_blocks: int) -> None:
        config = SchedulerConfig(max_num_seqs=1000, pipeline_depth=1, watermark=0.0)
        self.core = SchedulerCore(config)
        capacity = make_capacity(
            num_gpu_blocks=num_blocks,
            cache_groups=groups,
            max_model_len=LENGTH + 1,
            vocab_size=100_000,
        )
        self.core.add_worker_group(capacity, 0.0)
        self.num_requests = 0
        self.num_cached = 0

    def submit(self, prompt: list[int], max_tokens: int) -> None:
        self.num_requests += 1
        request = make_request(
            handle=self.num_requests,
            request_id=f"r{self.num_requests}",
            prompt_token_ids=prompt,
            max_tokens=max_tokens,
        )
        self.core.submit(request, 0.0)

    def run(self, on_step: Callable[[StepPlan], None] = lambda plan: None) -> None:
        """Serve all requests."""
        while (plan := self.core.schedule("g0", 0.0)) is not None:
            on_step(plan)
            count = len(plan.seq_ids) if plan.output is None else sum(plan.output)
            self.core.update("g0", StepResult(step_id=plan.step_id, token_ids=[7] * count), 0.0)
            for outbox in self.core.pop_outboxes().values():
                self._read(outbox)
        self.core.check()

    def _read(self, outbox: EngineOutputs) -> None:
        assert not outbox.requests_failed
        self.num_cached += sum(request.cached_tokens for request in outbox.requests_finished)


def mean_running(groups: tuple[CacheGroup, ...], num_blocks: int, num_requests: int) -> float:
    """The rows of a step, over a stream of requests."""
    server = Server(groups, num_blocks)
    for index in range(num_requests):
        server.submit([index, *[7] * (LENGTH - 512)], max_tokens=512)
    running: list[int] = []
    server.run(lambda plan: running.append(len(plan.seq_ids)))
    busy = running[len(running) // 4 : -len(running) // 4]
    return sum(busy) / len(busy)


def hit_share(groups: tuple[CacheGroup, ...], num_blocks: int) -> float:
    """The share of prompt tokens that are found, where conversations take turns."""
    rng = Random(1)
    server = Server(groups, num_blocks)
    prompts = [[index, *[7] * 2047] for index in range(16)]
    num_tokens = 0
    for _ in range(160):
        prompt = prompts[min(int(rng.expovariate(0.25)), 15)]
        if len(prompt) > LENGTH - 128:
            del prompt[2048:]
        num_tokens += len(prompt)
        server.submit(list(prompt), max_tokens=32)
        server.run()
        prompt += [7] * 32 + [rng.randrange(1000) for _ in range(96)]
    return server.num_cached / num_tokens


def num_that_fit(groups: tuple[CacheGroup, ...], num_blocks: int) -> int:
    """Sequences of `LENGTH` tokens that decode together, each admitted after the others."""
    config = SchedulerConfig(watermark=0.0)
    capacity = replace(
        make_capacity(num_gpu_blocks=num_blocks, cache_groups=groups, max_model_len=LENGTH),
        max_chunk_tokens=config.max_num_batched_tokens,
    )
    cache = KVCacheManager(config, capacity)
    count = 0
    while True:
        seq = KnownSequence(count, [count, *[7] * (LENGTH - 1)])
        hit = cache.prefixes.match(seq)
        if cache.admission.can_admit(LENGTH, hit) is not AllocStatus.OK:
            return count
        cache.admission.admit(seq, hit)
        for start in range(0, LENGTH, config.max_num_batched_tokens):
            end = start + config.max_num_batched_tokens
            assert cache.extend_prompt(seq, start, end) is not None
        cache.tables.end_prompt(seq)
        seq.next_position = LENGTH - 40  # where windows end within a block, as most do
        cache.released.slide(seq, seq.next_position)
        count += 1


def blocks_for(groups: tuple[CacheGroup, ...], count: int) -> int:
    """Blocks of `count` sequences that keep all tokens."""
    return count * sum(group.max_blocks(LENGTH, 0) for group in groups)


def test_three_times_as_many_sequences_decode_in_the_same_memory() -> None:
    num_blocks = blocks_for(WINDOWS, 100)
    assert num_that_fit(WINDOWS, num_blocks) >= 3.4 * num_that_fit(WITHOUT, num_blocks)


def test_a_stream_of_requests_has_more_rows_in_each_step() -> None:
    num_blocks = blocks_for(WINDOWS, 12)
    rows = mean_running(WINDOWS, num_blocks, num_requests=80)
    assert rows >= 2.4 * mean_running(WITHOUT, num_blocks, num_requests=40)


def test_as_much_is_found_in_a_quarter_of_the_memory_of_all_conversations() -> None:
    num_blocks = blocks_for(WINDOWS, 4)
    expected = hit_share(WITHOUT, num_blocks)
    assert 0.5 < 0.9 * expected < hit_share(WINDOWS, num_blocks)
