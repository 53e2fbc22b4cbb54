"""Steps launched before the last one's tokens are known give the tokens they would give after."""

import gc
from collections import deque
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from pagewire.v1 import context_pb2, sampling_pb2
from tests.support.counting_model import VOCAB_SIZE, CountingModel, next_token
from tests.support.in_process import KnowingDrafter
from tests.support.runners import AllDrafts, LateEvent, eager, host, recorded, speculating
from tests.support.vocabularies import END
from tests.support.worker_driver import GREEDY, Row, block_table, column, sampler_params
from tests.worker_service.runner.test_model_runner import Bench, continuation
from worker_service.engine.executor import FinishedStep, Step
from worker_service.kv_cache.cache_engine import CacheEngine
from worker_service.plan import RowErrorReason, StepResult
from worker_service.runner.device.in_flight_step import InFlightStep
from worker_service.runner.device.reports import DevicePass
from worker_service.runner.device.rows import MAX_EDITS
from worker_service.runner.device.state import DeviceState, StateShape
from worker_service.runner.device.steps import DeviceSteps
from worker_service.runner.model_runner import ModelRunner
from worker_service.service import wire

NUM_STEPS = 7
TOO_MANY = [{"token_ids": column([i % 90, i // 90])} for i in range(MAX_EDITS + 1)]
SALT = context_pb2.ContextPart(kind=context_pb2.CONTEXT_KIND_SALT, digest=bytes(32))
WORD = [{"token_ids": column([7])}, {"token_ids": column([3, 9])}]


def matching(pattern: str) -> sampling_pb2.Constraint:
    """Outputs that match a regular expression."""
    return sampling_pb2.Constraint(regex=pattern, end_token_ids=column([END]))


PARAMS: dict[str, sampling_pb2.SamplerParams] = {
    "greedy": GREEDY,
    "random": sampler_params(temperature=1.3, seed=5),
    "filtered": sampler_params(temperature=2.0, top_k=20, top_p=0.9, min_p=0.01, seed=6),
    "penalties": sampler_params(
        temperature=1.5, seed=8, repetition_penalty=1.2, presence_penalty=0.4, frequency_penalty=0.1
    ),
    "bad words": sampler_params(temperature=1.5, seed=9, bad_words=WORD),
    "a bias": sampler_params(temperature=0.0, logit_bias=[{"token_id": 3, "bias": 2.0}]),
    "log probabilities": sampler_params(temperature=1.1, seed=10, logprobs=3),
    "its own alone": sampler_params(temperature=0.0, logprobs=0),
    "of the prompt": sampler_params(temperature=0.0, prompt_logprobs=1),
    "a constraint": sampler_params(temperature=1.3, seed=12, constraint=matching("[a-d]{2,40}")),
    "one that soon ends": sampler_params(
        temperature=0.0, min_tokens=9, logprobs=1, constraint=matching("(?:ab|ba){2}")
    ),
    "one beside other edits": sampler_params(
        temperature=1.1,
        seed=13,
        top_k=30,
        frequency_penalty=0.3,
        bad_words=WORD,
        logprobs=2,
        constraint=matching("(?:[a-z]+ )*"),
    ),
    "all at once": sampler_params(
        temperature=1.5, seed=11, top_k=30, presence_penalty=0.5, logprobs=2, bad_words=WORD
    ),
}


class Pipeline:
    """A bench whose steps are collected some launches later."""

    def __init__(self, depth: int, **options: Any) -> None:
        self.bench = Bench(**options)
        self.results: list[StepResult] = []
        self._depth = depth
        self._steps: deque[Step] = deque()

    def launch(self, rows: Sequence[Row], **fields: Any) -> Step:
        plan = wire.decode_plan(self.bench.plans.plan(rows, **fields), 0)
        step = self.bench.runner.launch(plan)
        self._steps.append(step)
        while len(self._steps) > self._depth:
            self.collect()
        return step

    def collect(self) -> None:
        self.results.append(self._steps.popleft().collect())

    def finish(self) -> list[StepResult]:
        while self._steps:
            self.collect()
        return self.results


def prompts(count: int) -> dict[int, list[int]]:
    draw = np.random.default_rng(3)
    return {
        seq_id: draw.integers(0, VOCAB_SIZE, 1 + seq_id * 5 % 13).tolist()
        for seq_id in range(1, count + 1)
    }


def add_all(pipeline: Pipeline, params: Sequence[sampling_pb2.SamplerParams]) -> list[list[Row]]:
    """Adds sequences with these parameters; rows of steps in which all kinds of rows meet."""
    requests = prompts(len(params))
    for (seq_id, prompt), sampling in zip(requests.items(), params, strict=True):
        pipeline.bench.plans.add(seq_id, prompt, sampling=sampling)
    lengths = {seq_id: len(prompt) for seq_id, prompt in requests.items()}
    early = [Row(seq_id, length) for seq_id, length in lengths.items() if length < 8]
    late = [Row(seq_id, 6, sample=False) for seq_id, length in lengths.items() if length >= 8]
    done = [Row(row.seq_id) for row in early]
    rest = [Row(row.seq_id, lengths[row.seq_id] - 6) for row in late]
    every = [Row(seq_id) for seq_id in lengths]
    return [[*early, *late], done, [*rest, *done], *[every] * NUM_STEPS]


def outcome(result: StepResult) -> tuple[Any, ...]:
    """All but the times, to compare."""
    return (
        result.step_id,
        result.token_ids.tolist(),
        {row: (e.token_ids.tolist(), e.rank) for row, e in result.logprobs.items()},
        {row: e.token_ids.tolist() for row, e in result.prompt_logprobs.items()},
        result.errors,
    )


def run(params: Sequence[sampling_pb2.SamplerParams], depth: int, **options: Any) -> Pipeline:
    pipeline = Pipeline(depth, **options)
    for rows in add_all(pipeline, params):
        pipeline.launch(rows)
    pipeline.finish()
    return pipeline


CASES = [([name] * 3, 2, recorded) for name in PARAMS]
CASES += [(list(PARAMS), depth, kind) for depth in (0, 1, 3) for kind in (eager, recorded)]


@pytest.mark.parametrize(("names", "depth", "make_runner"), CASES)
def test_launching_ahead_changes_nothing(names: list[str], depth: int, make_runner: Any) -> None:
    params = [PARAMS[name] for name in names]
    expected = run(params, 0, make_runner=host).results
    results = run(params, depth, make_runner=make_runner).results
    assert [outcome(result) for result in results] == [outcome(result) for result in expected]
    for result, other in zip(results, expected, strict=True):
        for row, entry in result.logprobs.items():
            np.testing.assert_allclose(entry.logprobs, other.logprobs[row].logprobs, atol=1e-5)


def tokens_by_row(results: Sequence[StepResult], num_rows: int) -> list[list[int]]:
    """Of steps that have the same rows."""
    found: list[list[int]] = [[] for _ in range(num_rows)]
    for result in results:
        counts = [1] * num_rows if result.num_sampled is None else result.num_sampled.tolist()
        ends = np.cumsum(counts)[:-1]
        for row, tokens in enumerate(np.split(result.token_ids, ends)):
            found[row] += tokens.tolist()
    return found


@pytest.mark.parametrize("kind", [eager, recorded])
@pytest.mark.parametrize(
    "names", [["greedy"], ["greedy", "penalties", "random", "filtered", "log probabilities"]]
)
def test_steps_are_launched_behind_steps_with_drafts(names: list[str], kind: Any) -> None:
    """Where they begin, only the device knows until the results of these are read: as long as no
    sequence is due for drafts, nothing waits for them. A sequence that is forgotten meanwhile
    leaves nothing to that which gets its row."""

    def rows_of(count: int) -> list[Row]:
        return [Row(seq_id) for seq_id in range(1, count + 1)]

    params, requests = [PARAMS[name] for name in names], prompts(len(names))
    plain = Pipeline(0, make_runner=host, block_size=16)
    for (seq_id, prompt), sampling in zip(requests.items(), params, strict=True):
        plain.bench.plans.add(seq_id, prompt, sampling=sampling)
    plain.launch([Row(seq_id, len(prompt)) for seq_id, prompt in requests.items()])
    for _ in range(60):
        plain.launch(rows_of(len(names)))
    expected = tokens_by_row(plain.finish(), len(names))
    outputs = [
        [*prompt, *tokens] for prompt, tokens in zip(requests.values(), expected, strict=True)
    ]
    drafter, lengths = KnowingDrafter(outputs), AllDrafts()
    make_runner = partial(speculating, lambda _: drafter, lengths, kind=kind)
    pipeline = Pipeline(9, make_runner=make_runner, block_size=16)
    for (seq_id, prompt), sampling in zip(requests.items(), params, strict=True):
        pipeline.bench.plans.add(seq_id, prompt, sampling=sampling)
    pipeline.launch([Row(seq_id, len(prompt)) for seq_id, prompt in requests.items()])
    for _ in range(6):
        for seq_id in requests:
            pipeline.bench.plans.grow(seq_id, 5)
        steps = [pipeline.launch(rows_of(len(names)), lookahead=bytes([5] * len(names)))]
        steps += [pipeline.launch(rows_of(len(names))) for _ in range(2)]
        if kind is recorded:
            assert not any(step.is_available for step in steps), "nothing waits for any of them"
    assert lengths.num_drafts > lengths.num_accepted > len(names)
    pipeline.bench.plans.grow(1, 5)
    pipeline.launch([Row(1)], lookahead=b"\x05")
    last = len(names) + 1
    pipeline.bench.plans.add(last, requests[1], sampling=params[0])
    pipeline.launch([Row(last, len(requests[1]))], forget_seq_ids=column([1]))
    for _ in range(3):
        pipeline.launch([Row(last)])
    results = pipeline.finish()
    found = tokens_by_row(results[:19], len(names))
    assert all(len(tokens) > 25 for tokens in found)
    assert found == [tokens[: len(some)] for tokens, some in zip(expected, found, strict=True)]
    assert tokens_by_row(results[20:], 1) == [expected[0][:4]]


def test_padding_leaves_no_trace_in_the_cache() -> None:
    params = [GREEDY] * 5
    plain = run(params, 2, make_runner=eager)
    padded = run(params, 2, make_runner=recorded)
    assert (8, 8) in padded.bench.model.batches, "five decodes are computed as eight"
    assert plain.bench.cache.device_cache.equal(padded.bench.cache.device_cache)


def test_more_rows_than_the_largest_recording_are_computed_all_the_same() -> None:
    results = run([GREEDY] * 9, 2, make_runner=recorded).results
    requests = list(prompts(9).values())
    last = [continuation(prompt, NUM_STEPS + 3) for prompt in requests]
    for place, prompt in enumerate(requests):
        ends = NUM_STEPS + (3 if len(prompt) < 8 else 1)
        assert results[-1].token_ids[place] == last[place][ends - 1]


def test_a_row_that_cannot_follow_its_constraint_fails_alone_and_stays_failed() -> None:
    bad = sampler_params(temperature=0.0, constraint=matching("a("))
    odd = sampler_params(
        temperature=0.0,
        constraint=matching("a"),
        bad_words=[{"token_ids": column([token])} for token in range(VOCAB_SIZE)],
    )
    for depth, make_runner in ((0, host), (2, eager), (2, recorded)):
        results = run([GREEDY, bad, odd], depth, make_runner=make_runner).results[-NUM_STEPS:]
        reasons = {1: RowErrorReason.CONSTRAINT, 2: RowErrorReason.NO_CANDIDATES}
        assert [result.errors for result in results] == [reasons] * NUM_STEPS
        assert all(result.token_ids[0] >= 0 for result in results)


class TestWaiting:
    """What a launch waits for, on a device that gets nowhere by itself."""

    def pipeline(self, sampling: sampling_pb2.SamplerParams = GREEDY) -> Pipeline:
        pipeline = Pipeline(9, make_runner=recorded)
        pipeline.bench.plans.add(1, [1, 2, 3], sampling=sampling)
        pipeline.bench.plans.add(2, [4, 5])
        return pipeline

    def is_done(self, step: Step) -> bool:
        return isinstance(step, FinishedStep) or step.end.is_reached  # type: ignore[attr-defined]

    @pytest.mark.parametrize(
        "sampling",
        [
            PARAMS[name]
            for name in ("greedy", "random", "penalties", "filtered", "a bias", "log probabilities")
        ],
        ids=str,
    )
    def test_decodes_and_new_sequences_wait_for_nothing(self, sampling: Any) -> None:
        pipeline = self.pipeline(sampling)
        steps = [pipeline.launch([Row(1, 3), Row(2, 2)])]
        steps += [pipeline.launch([Row(1), Row(2)]) for _ in range(5)]
        pipeline.bench.plans.add(3, [6] * 9)
        steps.append(pipeline.launch([Row(1), Row(3, 9)], forget_seq_ids=column([2])))
        assert not any(self.is_done(step) for step in steps)

    def test_edits_that_read_tokens_wait_for_those_alone(self) -> None:
        pipeline = self.pipeline(PARAMS["bad words"])
        both = pipeline.launch([Row(1, 3), Row(2, 2)])
        other = pipeline.launch([Row(2)])
        again = pipeline.launch([Row(1)])
        assert [self.is_done(step) for step in (both, other, again)] == [True, False, False]

    def test_a_fork_waits_for_its_parent(self) -> None:
        pipeline = self.pipeline()
        first = pipeline.launch([Row(1, 3), Row(2, 2)])
        other = pipeline.launch([Row(2)])
        table = block_table(pipeline.bench.plans.tables[1])
        pipeline.bench.plans.add(3, [9], parent_seq_id=1, tables=table)
        pipeline.launch([Row(2)])
        assert [self.is_done(step) for step in (first, other)] == [True, False]

    def test_candidates_wait_for_the_chosen_token_alone(self) -> None:
        pipeline = self.pipeline()
        steps = [pipeline.launch([Row(1, 3)]), pipeline.launch([Row(1)])]
        pipeline.bench.plans.add(3, [6], sampling=sampler_params(num_candidates=2))
        offering = pipeline.launch([Row(1), Row(3, 1)])
        steps.append(pipeline.launch([Row(1)]))
        assert not any(self.is_done(step) for step in (*steps, offering))
        best = next_token([6])
        assert offering.collect().candidates[1].token_ids.tolist() == [best, best + 1]
        steps.append(pipeline.launch([Row(1)]))
        chosen = pipeline.launch([Row(1), Row(3)], appended_tokens=column([3, best]))
        assert [self.is_done(step) for step in steps] == [True, True, False, False]
        best = next_token([6, best])
        assert chosen.collect().candidates[1].token_ids.tolist() == [best, best + 1]

    def test_prompt_log_probabilities_wait_for_nothing(self) -> None:
        pipeline = self.pipeline()
        steps = [pipeline.launch([Row(1, 3)]), pipeline.launch([Row(1)])]
        asks = sampler_params(temperature=0.0, prompt_logprobs=1)
        pipeline.bench.plans.add(3, [6, 7, 8], sampling=asks)
        steps.append(pipeline.launch([Row(1), Row(3, 2, sample=False)]))
        steps.append(pipeline.launch([Row(1), Row(3)]))
        assert not any(self.is_done(step) for step in steps)
        *_, chunk, rest = pipeline.finish()
        assert list(chunk.prompt_logprobs) == [1]
        assert chunk.prompt_logprobs[1].start == 1
        assert chunk.prompt_logprobs[1].token_ids[:, 0].tolist() == [7, 8]
        assert not rest.prompt_logprobs


@pytest.mark.parametrize("length", [2, 4], ids="poison in the first {} tokens".format)
def test_a_prompt_without_valid_log_probabilities_fails_whether_its_row_samples_or_not(
    length: int,
) -> None:
    results = []
    for depth, make_runner in ((0, host), (3, eager), (3, recorded)):
        pipeline = Pipeline(depth, make_runner=make_runner, poison=96)
        asks = sampler_params(temperature=0.0, prompt_logprobs=1)
        pipeline.bench.plans.add(1, [1, 2, 3])
        pipeline.bench.plans.add(2, [96, 5, 6, 7], sampling=asks)
        pipeline.launch([Row(1, 3), Row(2, length, sample=length == 4)])
        if depth:
            pipeline.collect()
        pipeline.launch([Row(1)])
        results.append([outcome(result) for result in pipeline.finish()])
        assert results[-1][0][-1] == {1: RowErrorReason.NON_FINITE_LOGITS}
    assert results[0] == results[1] == results[2]


@pytest.mark.parametrize("counted", [0, 3, 100], ids="at most {} counted on the device".format)
def test_penalties_are_the_same_wherever_tokens_are_counted(counted: int) -> None:
    def make_runner(model: CountingModel, cache: CacheEngine, block_size: int) -> ModelRunner:
        shape = StateShape(max_count_bytes=counted * 4 * model.vocab_size)
        state = DeviceState(model, cache, block_size, shape)
        device = DeviceSteps(model, cache, state, make_event=LateEvent)
        return ModelRunner(model, cache, block_size, device=device)

    params = [PARAMS["penalties"], PARAMS["all at once"]] * 5
    expected = run(params, 0, make_runner=host).results
    results = run(params, 3, make_runner=make_runner).results
    assert [outcome(result) for result in results] == [outcome(result) for result in expected]


def test_tokens_that_the_host_sampled_in_between_are_counted_too() -> None:
    pipelines = [Pipeline(3, make_runner=recorded), Pipeline(0, make_runner=host)]
    for pipeline in pipelines:
        pipeline.bench.plans.add(1, [1, 2, 3], sampling=PARAMS["penalties"])
        pipeline.launch([Row(1, 3)])
        pipeline.launch([Row(1)])
        pipeline.bench.plans.add(2, [4, 5, 6], sampling=sampler_params(bad_words=TOO_MANY))
        pipeline.launch([Row(1), Row(2, 2, sample=False)])
        pipeline.launch([Row(1)], forget_seq_ids=column([2]))
        for _ in range(8):
            pipeline.launch([Row(1)])
    ahead, one_by_one = ([outcome(result) for result in p.finish()] for p in pipelines)
    assert ahead == one_by_one


def test_a_failure_that_nobody_knows_of_yet_is_told_in_every_later_step() -> None:
    pipeline = Pipeline(3, make_runner=recorded, poison=96)
    pipeline.bench.plans.add(1, [1, 2, 3])
    pipeline.bench.plans.add(2, [1, 96, 3])
    pipeline.launch([Row(1, 3), Row(2, 3)])
    for _ in range(4):
        pipeline.launch([Row(1), Row(2)])
    tokens = continuation([1, 2, 3], 5)
    for result, token in zip(pipeline.finish(), tokens, strict=True):
        assert result.token_ids.tolist() == [token, -1]
        assert result.errors == {1: RowErrorReason.NON_FINITE_LOGITS}


def test_a_row_may_have_a_new_sequence_while_the_old_ones_token_is_in_flight() -> None:
    pipeline = Pipeline(9, make_runner=recorded)
    pipeline.bench.plans.add(1, [1, 2, 3])
    pipeline.launch([Row(1, 3)])
    pipeline.launch([Row(1)])
    pipeline.bench.plans.add(2, [7, 8], num_prompt_tokens=1)
    pipeline.launch([Row(2, 2)], forget_seq_ids=column([1]))
    pipeline.launch([Row(2)])
    penalised = sampler_params(temperature=0.0, presence_penalty=0.0001)
    pipeline.bench.plans.add(3, [5], sampling=penalised)
    for _ in range(2):
        pipeline.launch([Row(2), Row(3)])
    results = pipeline.finish()
    tokens = [result.token_ids.tolist()[0] for result in results]
    assert tokens == continuation([1, 2, 3], 2) + continuation([7, 8], 4)


def test_sequences_beyond_the_devices_room_are_computed_while_tokens_are_under_way() -> None:
    pipeline = Pipeline(3, make_runner=partial(recorded, num_rows=4))
    pipeline.bench.plans.add(1, [1, 2])
    pipeline.launch([Row(1, 2)])
    for seq_id in range(2, 7):
        pipeline.bench.plans.add(seq_id, [seq_id])
        pipeline.launch([Row(1), Row(seq_id, 1)])
    every = [Row(seq_id) for seq_id in range(1, 7)]
    kinds = [type(pipeline.launch(every)) for _ in range(3)]
    kinds.append(type(pipeline.launch(every[:4], forget_seq_ids=column([5, 6]))))
    assert kinds == [FinishedStep] * 3 + [InFlightStep]
    pipeline.bench.plans.add(7, [7])  # takes a row that was beyond
    assert isinstance(pipeline.launch([Row(1), Row(7, 1)]), FinishedStep)
    pipeline.launch([Row(1)], forget_seq_ids=column([2, 7]))
    pipeline.bench.plans.add(8, [8])  # takes the lowest one that is free
    assert isinstance(pipeline.launch([Row(8, 1), Row(1)]), InFlightStep)
    results = pipeline.finish()
    tokens = [int(result.token_ids[0]) for result in results[:-1]] + [int(results[-1].token_ids[1])]
    assert tokens == continuation([1, 2], len(tokens))
    assert results[-4].token_ids.tolist()[3] == continuation([4], 5)[-1]
    assert results[-3].token_ids.tolist()[1] == next_token([7])
    assert results[-1].token_ids.tolist()[0] == next_token([8])


def test_edits_of_sequences_beyond_the_devices_room_are_not_sent_to_it() -> None:
    pipeline = Pipeline(3, make_runner=partial(recorded, num_rows=2))
    for seq_id in range(1, 4):
        pipeline.bench.plans.add(seq_id, [seq_id])
    pipeline.bench.plans.add(4, [4], sampling=sampler_params(temperature=0.0, bad_words=WORD))
    everything = [Row(seq_id, 1) for seq_id in range(1, 5)]
    assert isinstance(pipeline.launch(everything), FinishedStep)
    assert isinstance(pipeline.launch([Row(1), Row(4)]), FinishedStep)
    kinds = {type(pipeline.launch([Row(1), Row(2)])) for _ in range(2)}
    assert kinds == {InFlightStep}
    assert [int(result.token_ids[0]) for result in pipeline.finish()] == continuation([1], 4)


def test_steps_under_way_may_be_collected_after_a_reset() -> None:
    pipeline = Pipeline(9, make_runner=recorded)
    pipeline.bench.plans.add(1, [1, 2, 3])
    pipeline.launch([Row(1, 3)])
    pipeline.launch([Row(1)])
    pipeline.bench.runner.reset()
    pipeline.bench.plans.add(1, [9, 9])
    for _ in range(2):
        pipeline.launch([Row(1, 2)] if len(pipeline.bench.plans.tables[1]) == 0 else [Row(1)])
    results = pipeline.finish()
    tokens = [int(result.token_ids[0]) for result in results]
    assert tokens == continuation([1, 2, 3], 2) + continuation([9, 9], 2)


def test_kept_sequences_have_the_tokens_of_steps_in_flight_but_none_that_failed() -> None:
    pipeline = Pipeline(3, make_runner=recorded, poison=96)
    pipeline.bench.plans.add(1, [96, 4])
    pipeline.bench.plans.add(2, [3, 1, 4, 1], context=[SALT])
    pipeline.launch([Row(1, 2), Row(2, 4)])
    pipeline.launch([Row(1), Row(2)])
    (kept,) = pipeline.bench.runner.kept_sequences()
    expected = [3, 1, 4, 1, *continuation([3, 1, 4, 1], 1)]
    assert (kept.seq_id, kept.token_ids.tolist()) == (2, expected)
    assert [part.digest for part in kept.context] == [SALT.digest]
    (table,) = kept.tables
    assert table.block_ids.tolist() == pipeline.bench.plans.tables[2]
    pipeline.bench.runner.reset()
    pipeline.finish()
    assert pipeline.bench.runner.kept_sequences() == []


def test_times_of_steps_that_overlap_do_not() -> None:
    results = run([GREEDY] * 3, 3, make_runner=recorded).results
    for earlier, later in pairwise(results):
        assert earlier.timings.started_us <= earlier.timings.finished_us
        assert earlier.timings.finished_us <= later.timings.started_us


def test_memory_of_in_flight_steps_is_used_again() -> None:
    pipeline = Pipeline(1, make_runner=recorded)
    pipeline.bench.plans.add(1, [1])
    made = {id(pipeline.launch([Row(1)]).buffers) for _ in range(20)}  # type: ignore[attr-defined]
    assert len(made) <= 3
    assert LateEvent().is_reached is False


@pytest.mark.parametrize("make_runner", [eager, recorded])
def test_what_a_step_was_computed_with_is_let_go_of_at_once(make_runner: Any) -> None:
    """Not when the garbage collector comes: hidden states and caches are memory of the device."""
    pipeline = Pipeline(9, make_runner=make_runner)
    pipeline.bench.plans.add(1, [1, 2, 3], sampling=PARAMS["log probabilities"])
    gc.collect()
    gc.disable()
    try:
        for rows in ([Row(1, 3)], [Row(1)]):
            pipeline.launch(rows)
        assert not [found for found in gc.get_objects() if type(found) is DevicePass]
    finally:
        gc.enable()
