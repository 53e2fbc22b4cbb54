"""The kit finds workers that do not keep to constraints as they say."""

import re
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from conformance import cases
from conformance.runner import Verdict, run
from conformance.worker import Worker
from pagewire import columns
from pagewire.v1 import plan_pb2, sampling_pb2
from tests.support.mutant import Fault, mutant
from tests.support.processes import node_worker, python_worker, running

GROUPS = ("structured output", "constrained rows")
CASES = [case for case in cases.ALL if case.group in GROUPS]
TIMEOUT_S = 20.0
ANYTHING = r"(?s:.*)"


def on_params(change: Callable[[sampling_pb2.SamplerParams], None]) -> Fault:
    """A fault in what becomes of a constrained sequence's parameters."""

    def change_all(plan: plan_pb2.StepPlan) -> None:
        for new in plan.new_sequences:
            if new.sampling.HasField("constraint"):
                change(new.sampling)

    return Fault(plan=change_all)


def _ignores_constraints(params: sampling_pb2.SamplerParams) -> None:
    params.ClearField("constraint")


def _ignores(kind: str) -> Callable[[], Fault]:
    def change(params: sampling_pb2.SamplerParams) -> None:
        if params.constraint.WhichOneof("kind") == kind:
            params.constraint.regex = ANYTHING

    return lambda: on_params(change)


def _takes_texts_for_patterns(params: sampling_pb2.SamplerParams) -> None:
    if params.constraint.HasField("choice"):
        params.constraint.regex = "|".join(params.constraint.choice.choices).replace("[x]*+", "x")


def _allows_any_white_space(params: sampling_pb2.SamplerParams) -> None:
    if params.constraint.json_schema.startswith('{"type": "object"'):
        one = r'\s*"%s"\s*:\s*(true|false)\s*'
        params.constraint.regex = r"\{" + one % "b" + "," + one % "a" + r"\}"


def _sorts_properties(params: sampling_pb2.SamplerParams) -> None:
    params.constraint.json_schema = re.sub(
        r'"b": (\{.*?\}), "a": (\{.*?\})', r'"a": \2, "b": \1', params.constraint.json_schema
    )


def _has_no_ends(params: sampling_pb2.SamplerParams) -> None:
    """Others than a token that nobody asked for."""
    params.constraint.end_token_ids = columns.pack([0])


def _ends_where_it_likes(result: plan_pb2.StepResult) -> None:
    """A token without a text is among the candidates of every row."""
    for entry in result.candidates:
        entry.token_ids = columns.pack([0, *columns.unpack(entry.token_ids)])
        entry.logprobs = struct.pack("<f", -0.1) + entry.logprobs


def _leaves_one_out(result: plan_pb2.StepResult) -> None:
    for entry in result.candidates:
        entry.token_ids, entry.logprobs = entry.token_ids[4:], entry.logprobs[4:]


def _ignores_min_tokens(params: sampling_pb2.SamplerParams) -> None:
    params.min_tokens = 0


def _ignores_last_tokens(params: sampling_pb2.SamplerParams) -> None:
    params.constraint.ClearField("last_token_ids")


def _ignores_thoughts(params: sampling_pb2.SamplerParams) -> None:
    params.constraint.ClearField("thought")


def _ignores_starts(params: sampling_pb2.SamplerParams) -> None:
    params.constraint.thought.start = ""


def _never_constrains(params: sampling_pb2.SamplerParams) -> None:
    if params.constraint.HasField("thought"):
        params.ClearField("constraint")


def _suppresses(params: sampling_pb2.SamplerParams) -> None:
    if params.suppressed_token_ids:
        params.bad_words.add(token_ids=params.suppressed_token_ids)


def _begins_anew(plan: plan_pb2.StepPlan) -> None:
    """Takes the output of sequences that were elsewhere for their prompts'."""
    for new in plan.new_sequences:
        if not new.HasField("parent_seq_id"):
            new.num_prompt_tokens = len(new.token_ids) // 4


def _tells_no_errors(result: plan_pb2.StepResult) -> None:
    result.ClearField("errors")


def _normalises(result: plan_pb2.StepResult) -> None:
    """Reports log probabilities of what is allowed alone."""
    for entry in result.logprobs:
        entry.token_ids = entry.token_ids[:4] * (len(entry.token_ids) // 4)


def _mixes_rows_up(result: plan_pb2.StepResult) -> None:
    """Each row gets its neighbour's token."""
    result.token_ids = result.token_ids[4:] + result.token_ids[:4]


def _forgets_what_it_computed() -> Fault:
    """Every other step comes to another token."""
    count = iter(range(10**9))

    def change(result: plan_pb2.StepResult) -> None:
        if next(count) % 2:
            tokens = columns.unpack(result.token_ids)
            result.token_ids = columns.pack([token ^ 1 for token in tokens])

    return Fault(result=change)


def _is_greedy(params: sampling_pb2.SamplerParams) -> None:
    params.temperature = 0.0


FAULTS: dict[str, tuple[Callable[[], Fault], list[str]]] = {
    "ignores constraints": (
        lambda: on_params(_ignores_constraints),
        [
            "a choice allows",
            "a regular expression allows",
            "a grammar allows",
            "a schema allows",
            "a token without a text",
            "steps planned ahead",
            "a fork follows",
            "an output that does not match",
            "drafts count as output",
        ],
    ),
    "ignores choices": (_ignores("choice"), ["a choice allows", "a character may come"]),
    "ignores schemas": (_ignores("json_schema"), ["a schema allows", "properties come"]),
    "takes texts for patterns": (lambda: on_params(_takes_texts_for_patterns), ["as they are"]),
    "allows any white space": (lambda: on_params(_allows_any_white_space), ["white space"]),
    "sorts properties": (lambda: on_params(_sorts_properties), ["properties come"]),
    "has no ends": (lambda: on_params(_has_no_ends), ["an output may end"]),
    "ends where it likes": (
        lambda: Fault(result=_ends_where_it_likes),
        ["a token without a text", "an output may end", "an end token is never text"],
    ),
    "leaves a token out": (
        lambda: Fault(result=_leaves_one_out),
        ["a choice", "the most probable"],
    ),
    "ignores min_tokens": (lambda: on_params(_ignores_min_tokens), ["min tokens holds the end"]),
    "ignores last tokens": (lambda: on_params(_ignores_last_tokens), ["a last token"]),
    "ignores thoughts": (
        lambda: on_params(_ignores_thoughts),
        ["the constraint applies after", "a thought is free", "a special token may end"],
    ),
    "ignores a thought's start": (
        lambda: on_params(_ignores_starts),
        ["an output without a thought"],
    ),
    "does not constrain what follows a thought": (
        lambda: on_params(_never_constrains),
        ["the constraint applies after", "a thought is free"],
    ),
    "suppresses tokens": (lambda: on_params(_suppresses), ["suppressed tokens"]),
    "starts again": (
        lambda: Fault(plan=_begins_anew),
        ["a recomputed sequence continues where", "an output that does not match"],
    ),
    "reports no errors": (
        lambda: Fault(result=_tells_no_errors),
        ["an output that does not match", "bad words may exclude"],
    ),
    "reports what is allowed alone": (lambda: Fault(result=_normalises), ["those of before"]),
    "draws otherwise": (lambda: on_params(_is_greedy), ["a draw is among"]),
    "mixes rows up": (
        lambda: Fault(result=_mixes_rows_up),
        ["rows without a constraint", "a step beyond the end"],
    ),
    "is not the same twice": (
        _forgets_what_it_computed,
        ["steps planned ahead", "drafts count as output"],
    ),
}


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A worker that keeps to constraints."""
    folder: Path = tmp_path_factory.mktemp("healthy")
    address = f"unix:{folder}/worker.sock"
    command = python_worker("--model", "embedded", "--dtype", "float32", "--listen", address)
    with running(command, folder):
        Worker(address)  # waits until it listens
        yield address


def named(*names: str) -> list[Any]:
    """The cases with these names."""
    for name in names:
        assert any(name in case.name for case in CASES), f"no case is called {name}"
    return [case for case in CASES if any(name in case.name for name in names)]


@pytest.mark.parametrize("name", FAULTS)
def test_it_finds_a_worker_that(name: str, healthy: str) -> None:
    make_fault, expected = FAULTS[name]
    with mutant(healthy, make_fault) as address:
        for outcome in run(named(*expected), Worker(address, timeout_s=TIMEOUT_S)):
            assert outcome.verdict is Verdict.FAIL, outcome.case.full_name
            assert outcome.explanation


def test_every_case_finds_a_fault_and_a_proxy_without_one_passes(healthy: str) -> None:
    found = {case.name for _, names in FAULTS.values() for case in named(*names)}
    assert {case.name for case in CASES} - found == {"a worker with constraints has a tokenizer"}
    with mutant(healthy, Fault) as address:
        outcomes = list(run(CASES, Worker(address, timeout_s=TIMEOUT_S)))
    failed = [outcome.case.name for outcome in outcomes if outcome.verdict is not Verdict.PASS]
    assert failed == []


def test_who_says_so_without_a_tokenizer_is_found_out(tmp_path: Path) -> None:
    def boast(info: Any) -> None:
        info.model.structured_output = True

    address = f"unix:{tmp_path}/worker.sock"
    with running(node_worker("--listen", address), tmp_path):
        Worker(address)
        with mutant(address, lambda: Fault(info=boast)) as proxy:
            case = named("a worker with constraints")
            (outcome,) = run(case, Worker(proxy, timeout_s=TIMEOUT_S))
    assert outcome.verdict is Verdict.FAIL
    assert "tokenizer.json" in outcome.explanation
