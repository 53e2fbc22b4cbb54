"""States: written in place, copied for forks, and saved where others can continue from them."""

from collections.abc import Sequence

import pytest

from scheduler_service.core import BeamParams, EarlyStopping, PolicyName, SchedulerConfig, StepPlan
from scheduler_service.core.config import CacheGroup, CacheLifetime, PreemptionMode
from scheduler_service.core.kv_cache.alloc_status import AllocStatus
from scheduler_service.core.kv_cache.usage import CacheGroupUsage
from tests.support.blocks import KnownSequence, device_blocks, make_manager
from tests.support.core_driver import CoreDriver, make_capacity
from tests.support.symbolic_worker import Sampling

ALL = CacheGroup(block_tokens=4)
STATE = CacheGroup(lifetime=CacheLifetime.STATE, num_blocks=3)
PROMPT = [(3 * i * i + i) % 31 for i in range(40)]


class Life:
    """A core of one worker group, and the plans that it has made."""

    def __init__(
        self,
        *groups: CacheGroup,
        num_gpu_blocks: int = 128,
        num_cpu_blocks: int = 0,
        num_speculative_tokens: int = 0,
        **config: object,
    ) -> None:
        values = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "watermark": 0.0} | config
        self.driver = CoreDriver(SchedulerConfig(**values))  # type: ignore[arg-type]
        capacity = make_capacity(
            num_gpu_blocks=num_gpu_blocks,
            num_cpu_blocks=num_cpu_blocks,
            cache_groups=groups or (ALL, STATE),
            max_model_len=4000,
            num_speculative_tokens=num_speculative_tokens,
        )
        self.driver.add_worker_group(capacity)
        self.plans: list[StepPlan] = []
        self.driver.on_plan = lambda _, plan: self.plans.append(plan)

    def ask(self, prompt: Sequence[int], max_tokens: int = 1, **changes: object) -> list[int]:
        """A request from beginning to end; returns its first choice's tokens."""
        self.plans.clear()
        self.record = self.driver.submit(
            prompt=list(prompt),
            max_tokens=max_tokens,
            **changes,  # type: ignore[arg-type]
        )
        self.driver.run_until_idle()
        self.driver.core.check()
        assert self.record.finished is not None
        return self.record.choices[0].tokens

    @property
    def num_found(self) -> int:
        return self.record.cached_tokens

    def chunks(self) -> list[int]:
        """The tokens of the rows of prompts, in plans with one sequence."""
        return [plan.num_tokens[0] for plan in self.plans if plan.num_tokens is not None]

    def saves(self) -> list[int]:
        """Positions at which states of prompts are saved."""
        return list(dict.fromkeys(at for plan in self.plans for at in plan.saved_states[2::4]))


def test_a_prompt_is_found_at_its_last_unit() -> None:
    life = Life()
    life.ask(PROMPT)
    assert life.chunks() == [40], "a state is saved within a row"
    assert life.saves() == [36]
    life.ask(PROMPT)
    assert life.num_found == 36


def test_states_of_a_long_prompt_are_saved_every_512_tokens_where_others_may_branch_off() -> None:
    life = Life(max_num_batched_tokens=1200, num_gpu_blocks=2000)
    prompt = [i * i % 29 for i in range(1100)]
    life.ask(prompt)
    assert life.chunks() == [1100]
    assert life.saves() == [512, 1024, 1096]
    for num_equal, num_found in ((500, 0), (600, 512), (1100, 1100)):
        life.ask([*prompt[:num_equal], 1, 2, 3])
        assert life.num_found == num_found


WINDOW = CacheGroup(block_tokens=4, lifetime=CacheLifetime.WINDOW, span=8)


@pytest.mark.parametrize("groups", [(ALL, STATE), (ALL, WINDOW, STATE), (WINDOW, STATE)])
def test_the_third_prompt_with_one_beginning_computes_it_no_more(
    groups: tuple[CacheGroup, ...],
) -> None:
    life = Life(*groups, max_num_batched_tokens=1200, num_gpu_blocks=2000)
    system = [i * i % 29 for i in range(340)]
    found = []
    for number in range(4):
        life.ask([*system, *([number] * 60)])
        found.append(life.num_found)
    assert found == [0, 0, 340, 340]


@pytest.mark.parametrize(("num_tokens", "num_steps"), [(17, 1), (600, 1), (1024, 1), (2500, 3)])
@pytest.mark.parametrize("enable_prefix_caching", [True, False])
@pytest.mark.parametrize("groups", [(ALL, STATE), (STATE,), (ALL,)])
def test_a_prompt_takes_as_many_steps_whether_or_not_states_are_saved(
    groups: tuple[CacheGroup, ...], enable_prefix_caching: bool, num_tokens: int, num_steps: int
) -> None:
    life = Life(
        *groups,
        max_num_batched_tokens=1024,
        num_gpu_blocks=2000,
        enable_prefix_caching=enable_prefix_caching,
    )
    life.ask([i * i % 29 for i in range(num_tokens)])
    assert len(life.plans) == num_steps


@pytest.mark.parametrize(("num_equal", "saves"), [(64, [64, 100]), (60, [96])])
def test_no_state_is_saved_that_would_spare_the_next_prompt_little(
    num_equal: int, saves: list[int]
) -> None:
    life = Life(max_num_batched_tokens=1200, num_gpu_blocks=2000)
    system = [i * i % 29 for i in range(num_equal)]
    life.ask([*system, *([1] * 40)])
    life.ask([*system, *([2] * 40)])
    assert life.saves() == saves


NUM_SHARED = 2000
SYSTEM = [(7 * i * i + i) % 31 for i in range(NUM_SHARED)]


def followers() -> list[list[int]]:
    """64 prompts that share 2,000 tokens and then differ."""
    return [
        [*SYSTEM, k % 31, k // 31, *[(k * j + j * j) % 31 for j in range(40)]] for k in range(64)
    ]


def num_computed_again(life: Life, prompts: list[list[int]]) -> int:
    """Tokens of prefills beyond those of each prompt's own part."""
    life.driver.core.check()
    num_own = sum(len(prompt) - NUM_SHARED for prompt in prompts)
    return life.driver.core.snapshot().num_prefill_tokens - num_own


WIDE = {"num_gpu_blocks": 4000, "max_num_seqs": 64, "max_num_batched_tokens": 2048}


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("groups", [(CacheGroup(block_tokens=64), STATE), (STATE,)])
def test_what_requests_share_that_arrive_together_is_computed_once(
    groups: tuple[CacheGroup, ...], depth: int
) -> None:
    life = Life(*groups, pipeline_depth=depth, **WIDE)  # type: ignore[arg-type]
    prompts = followers()
    records = [life.driver.submit(prompt=prompt, max_tokens=4) for prompt in prompts]
    life.driver.run_until_idle()
    assert all(len(record.choices[0].tokens) == 4 for record in records)
    assert num_computed_again(life, prompts) <= NUM_SHARED + 16 * len(prompts)


@pytest.mark.parametrize(("is_together", "budget"), [(False, 2048), (True, 256)])
@pytest.mark.parametrize("groups", [(CacheGroup(block_tokens=64), STATE), (STATE,)])
def test_what_requests_share_is_computed_at_most_twice_whenever_they_come(
    groups: tuple[CacheGroup, ...], budget: int, is_together: bool
) -> None:
    config = WIDE | {"max_num_batched_tokens": budget}
    life = Life(*groups, **config)  # type: ignore[arg-type]
    prompts = followers()
    for prompt in prompts:
        life.driver.submit(prompt=prompt, max_tokens=4)
        if not is_together:
            life.driver.run_until_idle()
    life.driver.run_until_idle()
    assert num_computed_again(life, prompts) <= 2 * NUM_SHARED + 16 * len(prompts)


@pytest.mark.parametrize("groups", [(CacheGroup(block_tokens=64), STATE), (STATE,)])
def test_a_chat_of_eight_turns_computes_at_most_16_tokens_of_a_turn_twice(
    groups: tuple[CacheGroup, ...],
) -> None:
    life = Life(*groups, **WIDE | {"num_gpu_blocks": 400})  # type: ignore[arg-type]
    history: list[int] = []
    for turn in range(8):
        message = [(turn * j + j * j) % 31 for j in range(300)]
        history += message
        answer = life.ask(history, max_tokens=57 + turn)
        assert len(history) - life.num_found <= len(message) + 16
        history += [*answer, 3]  # the template ends a turn


def test_the_next_turn_continues_exactly_where_the_last_one_ended() -> None:
    life = Life()
    prompt = PROMPT[:13]
    for length in (5, 6, 7, 8):
        prompt = [*prompt, *life.ask(prompt, max_tokens=length), 1, 2]
        life.ask(prompt)
        assert life.num_found == len(prompt) - 3, "all tokens but the last were computed"


def test_a_state_that_runs_ahead_of_known_tokens_is_not_found() -> None:
    life = Life(pipeline_depth=3)
    tokens = life.ask(PROMPT[:13], max_tokens=30, stop_token_ids=frozenset(range(16)))
    life.ask([*PROMPT[:13], *tokens, 1, 2])
    assert life.num_found <= 13 + len(tokens)


@pytest.mark.parametrize("lifetime", [CacheLifetime.WINDOW, CacheLifetime.CHUNK])
def test_what_a_chunk_ends_with_is_not_kept_with_a_state(lifetime: CacheLifetime) -> None:
    """A sequence is preempted that has released its chunk, and got no memory for the next one."""
    ending = CacheGroup(block_tokens=4, lifetime=lifetime, span=1)
    state = CacheGroup(lifetime=CacheLifetime.STATE, num_blocks=1)
    life = Life(ending, ALL, state, num_gpu_blocks=8, preemption_mode=PreemptionMode.RECOMPUTE)
    life.ask(PROMPT[:5], max_tokens=8, n=2)
    assert life.driver.core.snapshot().num_preemptions > 0


def test_a_state_is_saved_every_32_decoded_tokens_and_two_of_a_sequence_are_kept() -> None:
    life = Life(max_results=1)
    life.ask(PROMPT, max_tokens=300)
    saved = [plan for plan in life.plans if plan.copy]
    assert len(saved) == 9, "every 32 tokens of 300"
    saves = life.driver.core.snapshot().worker_groups[0]
    assert saves.num_free_gpu_blocks == saves.num_gpu_blocks


def test_without_a_prefix_cache_prompts_are_not_cut_and_nothing_is_saved() -> None:
    life = Life(enable_prefix_caching=False)
    life.ask(PROMPT, max_tokens=200)
    assert life.chunks() == [40]
    assert life.saves() == []
    assert not any(plan.copy for plan in life.plans)


def test_states_are_saved_without_chunked_prefill_too() -> None:
    life = Life(enable_chunked_prefill=False, max_num_batched_tokens=4003)
    life.ask(PROMPT)
    assert life.saves() == [36]


@pytest.mark.parametrize("num_choices", [2, 4])
def test_forks_get_copies_in_the_plan_after_the_prompt_and_the_last_owner_keeps_the_state(
    num_choices: int,
) -> None:
    life = Life(CacheGroup(block_tokens=8), STATE, enable_prefix_caching=False)
    life.ask(PROMPT, max_tokens=4, n=num_choices)
    forking, copying = life.plans[:2]
    assert not forking.copy
    states = [new.tables[1].block_ids for new in forking.new_sequences]
    assert states == [states[0]] * num_choices
    copied = [source for source in copying.copy[::2] if source in states[0]]
    assert len(copied) == (num_choices - 1) * STATE.num_blocks


def test_the_only_fork_gets_the_state_of_a_parent_that_has_ended() -> None:
    life = Life(enable_prefix_caching=False, pipeline_depth=1)
    record = life.driver.submit(prompt=PROMPT, max_tokens=5, n=2)
    life.driver.schedule("g0")
    life.driver.deliver("g0")
    life.driver.stop_choice(record, 0, 1)
    plan = life.driver.schedule("g0")
    assert plan is not None
    assert plan.copy == []
    life.driver.run_until_idle()
    life.driver.core.check()


def test_forks_are_admitted_with_their_states_or_one_after_the_other() -> None:
    for num_blocks, num_first in ((10 + 4 * 3 + 5, 4), (10 + 2 * 3 + 2, 2)):
        life = Life(num_gpu_blocks=num_blocks, enable_prefix_caching=False)
        life.ask(PROMPT[:39], max_tokens=2, n=4)
        first = life.plans[0].new_sequences
        assert len(first) == num_first
        assert [len(choice.tokens) for choice in life.record.choices] == [2] * 4


def test_a_choice_that_is_ahead_is_placed_again_without_the_states_of_all_forks() -> None:
    """There is room for the prompt and a fork's state, but not for the first choice beside one."""
    life = Life(num_gpu_blocks=4 + 3 + 1)
    driver = life.driver
    record = driver.submit(prompt=PROMPT[:4], max_tokens=10, n=4)
    while len(record.choices[0].tokens) < 5:
        driver.step("g0")
    assert not record.choices[-1].tokens
    driver.lose_core()
    driver.run_until_idle()
    assert record.finished is not None


def test_saved_states_have_at_most_a_quarter_of_the_blocks() -> None:
    life = Life(num_gpu_blocks=32)
    for number in range(6):
        life.ask([number, *PROMPT[:8]])
        life.driver.submit(prompt=[30], max_tokens=1)
        life.driver.schedule("g0")  # a plan after the end
        states = life.driver.core.snapshot().worker_groups[0].cache_groups[1]
        assert states.num_cached <= 32 // 4 // STATE.num_blocks == 2
        life.driver.run_until_idle()


@pytest.mark.parametrize("num_cpu_blocks", [0, 200])
def test_states_leave_by_last_use_to_the_host_if_there_is_one(num_cpu_blocks: int) -> None:
    life = Life(num_gpu_blocks=64, num_cpu_blocks=num_cpu_blocks)
    popular, others = PROMPT[:9], [[number, *PROMPT[:8]] for number in range(12)]
    assert 64 // 4 // STATE.num_blocks == 5
    life.ask(popular)
    for other in others:
        life.ask(other)
        life.ask([*popular, 1, 2, 3, other[0]])
        assert life.num_found >= 8, "it was used last, though saved first"
    life.ask(others[0])
    assert life.num_found == (8 if num_cpu_blocks else 0)


def test_of_states_that_were_used_equally_long_ago_the_one_that_costs_most_stays() -> None:
    life = Life(STATE, num_gpu_blocks=400, max_num_batched_tokens=1200)
    long = [i * i % 29 for i in range(500)]
    shorts = [[i % 31, i // 31, *PROMPT[:20]] for i in range(40)]
    assert len(shorts) > 400 // 4 // STATE.num_blocks
    for prompt in [long, *shorts]:
        life.ask(prompt)
    life.ask([*long, 1])
    assert life.num_found == 496, "the last whole unit"
    life.ask(shorts[0])
    assert life.num_found == 0


def test_where_a_state_was_evicted_the_one_after_it_costs_more() -> None:
    cache = make_manager(64, 0, CacheGroup(lifetime=CacheLifetime.STATE, num_blocks=1))
    prompt = KnownSequence(1, [i % 7 for i in range(4097)])
    cache.admission.admit(prompt, cache.prefixes.match(prompt))
    cache.end_plan(1, has_rows=True)
    for start in range(0, 4096, 512):
        cache.prefixes.offer(prompt, start)
        cache.extend_prompt(prompt, start, start + 512)
        cache.end_plan(start + 2, has_rows=True)
    cache.extend_prompt(prompt, 4096, 4097)
    cache.end_plan(5000, has_rows=True)
    cache.prefixes.offer(prompt, 4097)
    found: list[list[int]] = []
    for number in range(24):
        asked = {end: KnownSequence(0, [*prompt.tokens[:end], 9]) for end in range(512, 4097, 512)}
        found.append(
            [end for end, seq in asked.items() if cache.prefixes.match(seq).num_tokens == end]
        )
        other = KnownSequence(number + 3, [number + 10] * 1025)
        cache.admission.admit(other, cache.prefixes.match(other))
        for start in (0, 512, 1024):
            cache.extend_prompt(other, start, min(1025, start + 512))
            cache.end_plan(1, has_rows=True)
        cache.prefixes.offer(other, 1025)
        cache.free(other)
    kept = list(dict.fromkeys(map(tuple, found)))
    assert kept[0] == tuple(range(512, 4097, 512))
    assert (1024, 2048, 3072, 4096) in kept
    assert kept[-2:] == [(2048, 4096), (4096,)], "thinned out evenly, not from one end"


def test_a_state_that_left_the_device_comes_back_from_the_host_as_a_whole() -> None:
    life = Life(num_gpu_blocks=32, num_cpu_blocks=200, preemption_mode=PreemptionMode.RECOMPUTE)
    prompts = [[number, *PROMPT[:20]] for number in range(6)]
    for prompt in prompts:
        life.ask(prompt)
    life.ask(prompts[0])
    assert life.num_found == 20
    moved = [plan for plan in life.plans if plan.swap_in]
    assert len(moved) == 1
    assert len(moved[0].swap_in) // 2 == 20 // 4 + STATE.num_blocks


def test_status_counts_states_saved_states_and_the_tokens_that_each_group_had() -> None:
    life = Life(num_cpu_blocks=64)

    def usage() -> list[CacheGroupUsage]:
        return life.driver.core.snapshot().worker_groups[0].cache_groups

    life.ask(PROMPT)
    tokens, states = usage()
    assert (tokens.lifetime, tokens.block_tokens, tokens.num_state_blocks) == ("growing", 4, 0)
    assert (states.lifetime, states.block_tokens, states.num_state_blocks) == ("state", 0, 3)
    assert tokens.num_used_blocks == states.num_used_blocks == 0
    assert tokens.num_cached == len(PROMPT) // 4
    assert states.num_cached == 2, "at the last boundary, and at the end"
    assert tokens.num_queried_tokens == len(PROMPT)
    assert tokens.num_found_tokens == states.num_found_tokens == 0
    life.ask([*PROMPT[:30], 1, 2])
    tokens, states = usage()
    assert tokens.num_queried_tokens == states.num_queried_tokens == len(PROMPT) + 32
    assert tokens.num_found_tokens == 28, "whole units"
    assert states.num_found_tokens == life.num_found == 0, "no state was saved there"
    for number in range(3):
        life.driver.submit(prompt=[number, *PROMPT[:14]], max_tokens=9)
    life.driver.step("g0")
    tokens, states = usage()
    assert states.num_used_blocks == 3 * STATE.num_blocks
    assert tokens.num_used_blocks == 3 * 4


def test_what_a_failed_request_has_computed_is_not_continued() -> None:
    life = Life()
    failed = life.driver.submit(
        prompt=PROMPT[:21], max_tokens=9, sampling=Sampling(seed=0, fails_at=3)
    )
    life.driver.run_until_idle()
    assert failed.error is not None
    life.ask([*PROMPT[:21], *failed.choices[0].tokens, 1])
    assert life.num_found == 0


def test_after_drafts_the_state_of_the_last_accepted_token_is_continued() -> None:
    life = Life(num_speculative_tokens=4, pipeline_depth=1)
    tokens = life.ask(PROMPT[:13], max_tokens=24)
    life.ask([*PROMPT[:13], *tokens, 1])
    assert life.num_found == 13 + 24 - 1


def test_swapped_out_states_come_back_with_their_sequences() -> None:
    life = Life(num_gpu_blocks=24, num_cpu_blocks=64, preemption_mode=PreemptionMode.SWAP)
    records = [life.driver.submit(prompt=PROMPT[: 20 + i], max_tokens=20) for i in range(3)]
    life.driver.run_until_idle()
    assert any(plan.swap_in for plan in life.plans)
    assert all(len(record.choices[0].tokens) == 20 for record in records)


def test_a_prompt_that_is_cut_at_a_boundary_has_one_row_in_a_step() -> None:
    life = Life(num_gpu_blocks=24, policy=PolicyName.PRIORITY)
    life.driver.submit(prompt=PROMPT, max_tokens=20, priority=1)
    life.driver.schedule("g0")
    urgent = life.driver.submit(prompt=[9, *PROMPT], max_tokens=2, priority=0)
    life.driver.run_until_idle()
    assert urgent.finished is not None
    assert all(len(plan.seq_ids) == len(set(plan.seq_ids)) for plan in life.plans)


def test_a_beam_search_continues_from_a_copy_of_the_state_that_it_finds() -> None:
    life = Life()
    life.ask(PROMPT)
    beams = BeamParams(width=2, length_penalty=1.0, early_stopping=EarlyStopping.NEVER)
    life.ask(PROMPT, max_tokens=4, beam_search=beams)
    assert life.num_found == 36
    assert len(life.plans[0].copy) == 2 * STATE.num_blocks


@pytest.mark.parametrize(("num_spare", "num_copied"), [(0, 0), (1, 1), (2, 2)])
def test_states_that_beams_find_are_kept_until_they_are_copied_or_used_in_place(
    num_spare: int, num_copied: int
) -> None:
    state = CacheGroup(lifetime=CacheLifetime.STATE, num_blocks=1)
    cache = make_manager(8 + num_spare, 0, state)
    beams = [KnownSequence(number, [number] * 21) for number in (1, 2)]
    states = []
    for beam in beams:
        earlier = KnownSequence(beam.seq_id + 2, beam.tokens[:17], next_position=16)
        cache.admission.admit(earlier, cache.prefixes.match(earlier))
        cache.tables.end_prompt(earlier)
        states += device_blocks(cache, earlier)
        cache.free(earlier)
    others = [KnownSequence(number, [number]) for number in range(5, 11)]
    for other in others:
        assert cache.admission.can_admit(1, cache.prefixes.match(other)) is AllocStatus.OK
        cache.admission.admit(other, cache.prefixes.match(other))
    starts = cache.admission.start_jointly(beams, lambda seq, other: 0)
    assert [start.num_tokens for start in starts] == [16, 16]
    assert cache.admission.can_admit_jointly(starts) is AllocStatus.OK
    copy = cache.admission.admit_jointly(starts).copy
    assert copy[::2] == states[:num_copied]
    in_place = [device_blocks(cache, beam)[0] for beam in beams[num_copied:]]
    assert in_place == states[num_copied:]
    cache.end_plan(1, has_rows=True)
    cache.check([*others, *beams])
