"""Choices and beams of models with states: admitted or refused by arithmetic, never stranded.

Each choice has a state of its own as soon as it differs: a pool that holds all of them while they
share their prompt may hold few of them later.
"""

from itertools import product

import pytest

from scheduler_service.core import BeamParams, EarlyStopping, SchedulerConfig
from scheduler_service.core.config import CacheGroup, CacheLifetime, PreemptionMode
from scheduler_service.errors import GenerationFailed, PagewireError, PromptTooLong
from tests.support.core_driver import CoreDriver, RequestRecord, make_capacity

NUM_CHOICES, WIDTH = 16, 4
BLOCK_TOKENS, STATE_BLOCKS = 8, 3
PROMPT, MAX_TOKENS = [(3 * i * i + i) % 31 for i in range(21)], 15
LONGEST = len(PROMPT) + MAX_TOKENS - 1
"""Tokens that are stored: the last one is not."""
TOKENS = CacheGroup(block_tokens=BLOCK_TOKENS)
STATE = CacheGroup(lifetime=CacheLifetime.STATE, num_blocks=STATE_BLOCKS)
HYBRID, RECURRENT = (TOKENS, STATE), (STATE,)

SETTINGS = [
    {"preemption_mode": mode, "pipeline_depth": depth, "enable_prefix_caching": caches}
    for mode, depth, caches in (
        (PreemptionMode.RECOMPUTE, 1, True),
        (PreemptionMode.RECOMPUTE, 3, False),
        (PreemptionMode.SWAP, 2, True),
        (PreemptionMode.AUTO, 2, False),
    )
]


def num_blocks_of(groups: tuple[CacheGroup, ...], num_sequences: int, num_shared: int = 0) -> int:
    """Blocks of sequences of the longest length, of which `num_shared` tokens are shared."""
    own = STATE_BLOCKS
    shared = 0
    if TOKENS in groups:
        shared = num_shared // BLOCK_TOKENS
        own += -(-LONGEST // BLOCK_TOKENS) - shared
    return shared + num_sequences * own


def driver(groups: tuple[CacheGroup, ...], num_blocks: int, **config: object) -> CoreDriver:
    values = {"max_num_seqs": 20, "max_num_batched_tokens": 32, "watermark": 0.0} | config
    made = CoreDriver(SchedulerConfig(**values))  # type: ignore[arg-type]
    has_host = config.get("preemption_mode") is not PreemptionMode.RECOMPUTE
    made.add_worker_group(
        make_capacity(
            num_gpu_blocks=num_blocks,
            num_cpu_blocks=4 * num_blocks if has_host else 0,
            cache_groups=groups,
            max_model_len=64,
        )
    )
    return made


def outcome(made: CoreDriver, **request: object) -> RequestRecord | PagewireError:
    """A request's record, at rest beside two others; or why it was refused."""
    others = [
        made.submit(prompt=[number, *PROMPT[1:]], max_tokens=MAX_TOKENS) for number in (30, 29)
    ]
    try:
        record = made.submit(prompt=PROMPT, max_tokens=MAX_TOKENS, **request)  # type: ignore[arg-type]
    except PagewireError as error:
        return error
    made.run_until_idle(10_000)
    made.core.check()
    assert all(len(other.choices[0].tokens) == MAX_TOKENS for other in others)
    assert not record.is_live, "it is stranded"
    return record.error or record


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("groups", [HYBRID, RECURRENT])
def test_choices_finish_wherever_one_of_them_fits(
    groups: tuple[CacheGroup, ...], settings: dict[str, object]
) -> None:
    one, every = num_blocks_of(groups, 1), num_blocks_of(groups, NUM_CHOICES, len(PROMPT))
    sizes = {one, one + 1, one + STATE_BLOCKS, 2 * one, every // 2, every - 1, every, every + 9}
    for num_blocks in sorted(sizes):
        record = outcome(driver(groups, num_blocks, **settings), n=NUM_CHOICES)
        assert isinstance(record, RequestRecord), f"{num_blocks} blocks: {record}"
        assert [len(choice.tokens) for choice in record.choices] == [MAX_TOKENS] * NUM_CHOICES


@pytest.mark.parametrize("settings", SETTINGS)
def test_choices_are_refused_or_cut_off_where_none_fits(settings: dict[str, object]) -> None:
    longest_prompt = -(-len(PROMPT) // BLOCK_TOKENS) + STATE_BLOCKS
    for num_blocks, n in product((longest_prompt - 1, longest_prompt), (1, NUM_CHOICES)):
        made = driver(HYBRID, num_blocks, **settings)
        if num_blocks < longest_prompt:
            with pytest.raises(PromptTooLong):
                made.submit(prompt=PROMPT, max_tokens=MAX_TOKENS, n=n)
            continue
        record = made.submit(prompt=PROMPT, max_tokens=MAX_TOKENS, n=n)
        made.run_until_idle(10_000)
        made.core.check()
        assert isinstance(record.error, GenerationFailed)


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("groups", [HYBRID, RECURRENT])
def test_beams_finish_wherever_all_of_them_fit_and_fail_by_name_elsewhere(
    groups: tuple[CacheGroup, ...], settings: dict[str, object]
) -> None:
    beams = BeamParams(width=WIDTH, length_penalty=1.0, early_stopping=EarlyStopping.NEVER)
    every = num_blocks_of(groups, WIDTH, len(PROMPT))
    for num_blocks in range(num_blocks_of(groups, 1), every + 4):
        result = outcome(driver(groups, num_blocks, **settings), beam_search=beams)
        prompt = -(-len(PROMPT) // BLOCK_TOKENS) if TOKENS in groups else 0
        if num_blocks < prompt + WIDTH * STATE_BLOCKS:
            assert isinstance(result, PromptTooLong), f"{num_blocks} blocks: {result}"
            assert "beside the states of 3 other beams" in str(result)
        elif isinstance(result, GenerationFailed):
            assert num_blocks < every
            assert "4 beams of" in str(result)
        else:
            assert isinstance(result, RequestRecord), f"{num_blocks} blocks: {result}"
            assert len(result.choices[0].tokens) == MAX_TOKENS
