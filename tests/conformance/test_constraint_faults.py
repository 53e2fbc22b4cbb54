"""The kit finds workers that do not keep to constraints as they say."""

import re
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from conformance import cases
from conformance.runner import Verdict
from pagewire import columns
from pagewire.v1 import plan_pb2, sampling_pb2
from tests.conformance.faults import (
    FaultTable,
    assert_found,
    assert_passed,
    named,
    on_new,
    on_result,
    outcomes,
    serving,
)
from tests.support.mutant import Fault, mutant
from tests.support.processes import node_worker, python_worker

CASES = [case for case in cases.ALL if case.group in ("structured output", "constrained rows")]
ANYTHING = r"(?s:.*)"
Params = sampling_pb2.SamplerParams


def on_params(change: Callable[[Params], object]) -> Callable[[], Fault]:
    """A fault in what becomes of a constrained sequence's parameters."""

    def change_constrained(new: plan_pb2.NewSequence) -> None:
        if new.sampling.HasField("constraint"):
            change(new.sampling)

    return on_new(change_constrained)


def _ignores(kind: str) -> Callable[[], Fault]:
    def change(params: Params) -> None:
        if params.constraint.WhichOneof("kind") == kind:
            params.constraint.regex = ANYTHING

    return on_params(change)


def _takes_texts_for_patterns(params: Params) -> None:
    if params.constraint.HasField("choice"):
        params.constraint.regex = "|".join(params.constraint.choice.choices).replace("[x]*+", "x")


def _allows_any_white_space(params: Params) -> None:
    if params.constraint.json_schema.startswith('{"type": "object"'):
        one = r'\s*"%s"\s*:\s*(true|false)\s*'
        params.constraint.regex = r"\{" + one % "b" + "," + one % "a" + r"\}"


def _sorts_properties(params: Params) -> None:
    params.constraint.json_schema = re.sub(
        r'"b": (\{.*?\}), "a": (\{.*?\})', r'"a": \2, "b": \1', params.constraint.json_schema
    )


def _has_no_ends(params: Params) -> None:
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


def _never_constrains(params: Params) -> None:
    if params.constraint.HasField("thought"):
        params.ClearField("constraint")


def _suppresses(params: Params) -> None:
    if params.suppressed_token_ids:
        params.bad_words.add(token_ids=params.suppressed_token_ids)


def _begins_anew(new: plan_pb2.NewSequence) -> None:
    """The output of a sequence that was elsewhere counts as its prompt's."""
    if not new.HasField("parent_seq_id"):
        new.num_prompt_tokens = len(new.token_ids) // 4


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


def _is_greedy(params: Params) -> None:
    params.temperature = 0.0


FAULTS: FaultTable = {
    "ignores constraints": (
        on_params(lambda params: params.ClearField("constraint")),
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
    "takes texts for patterns": (on_params(_takes_texts_for_patterns), ["as they are"]),
    "allows any white space": (on_params(_allows_any_white_space), ["white space"]),
    "sorts properties": (on_params(_sorts_properties), ["properties come"]),
    "has no ends": (on_params(_has_no_ends), ["an output may end"]),
    "ends where it likes": (
        on_result(_ends_where_it_likes),
        ["a token without a text", "an output may end", "an end token is never text"],
    ),
    "leaves a token out": (
        on_result(_leaves_one_out),
        ["a choice", "the most probable"],
    ),
    "ignores min_tokens": (
        on_params(lambda params: params.ClearField("min_tokens")),
        ["min tokens holds the end"],
    ),
    "ignores last tokens": (
        on_params(lambda params: params.constraint.ClearField("last_token_ids")),
        ["a last token"],
    ),
    "ignores thoughts": (
        on_params(lambda params: params.constraint.ClearField("thought")),
        ["the constraint applies after", "a thought is free", "a special token may end"],
    ),
    "ignores a thought's start": (
        on_params(lambda params: params.constraint.thought.ClearField("start")),
        ["an output without a thought"],
    ),
    "does not constrain what follows a thought": (
        on_params(_never_constrains),
        ["the constraint applies after", "a thought is free"],
    ),
    "suppresses tokens": (on_params(_suppresses), ["suppressed tokens"]),
    "starts again": (
        on_new(_begins_anew),
        ["a recomputed sequence continues where", "an output that does not match"],
    ),
    "reports no errors": (
        on_result(lambda result: result.ClearField("errors")),
        ["an output that does not match", "bad words may exclude"],
    ),
    "reports what is allowed alone": (on_result(_normalises), ["those of before"]),
    "draws otherwise": (on_params(_is_greedy), ["a draw is among"]),
    "mixes rows up": (
        on_result(_mixes_rows_up),
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
    command = python_worker("--model", "embedded", "--dtype", "float32")
    with serving(command, tmp_path_factory.mktemp("healthy")) as address:
        yield address


@pytest.mark.parametrize("name", FAULTS)
def test_it_finds_a_worker_that(name: str, healthy: str) -> None:
    make_fault, expected = FAULTS[name]
    assert_found(healthy, make_fault, named(expected, CASES))


def test_every_case_finds_a_fault_and_a_proxy_without_one_passes(healthy: str) -> None:
    found = {case.name for _, names in FAULTS.values() for case in named(names, CASES)}
    assert {case.name for case in CASES} - found == {"a worker with constraints has a tokenizer"}
    assert_passed(healthy, CASES)


def test_who_says_so_without_a_tokenizer_is_found_out(tmp_path: Path) -> None:
    def boast(info: Any) -> None:
        info.model.structured_output = True

    case = named(["a worker with constraints"], CASES)
    with (
        serving(node_worker(), tmp_path) as address,
        mutant(address, lambda: Fault(info=boast)) as proxy,
    ):
        (outcome,) = outcomes(proxy, case, timeout_s=60.0)
    assert outcome.verdict is Verdict.FAIL
    assert "tokenizer.json" in outcome.explanation
