"""The kit can fail: each fault that a worker may have makes the case fail that is there for it."""

import math
import random
import struct
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from typing import Any

import grpc
import pytest

from conformance import cases
from conformance.runner import Verdict
from pagewire import columns
from pagewire.v1 import context_pb2, plan_pb2, pooling_pb2
from pagewire.v1 import worker_service_pb2 as pb
from tests.conformance.faults import (
    FaultTable,
    assert_found,
    assert_passed,
    named,
    on_new,
    on_plan,
    on_result,
    outcomes,
    serving,
)
from tests.support.mutant import Fault, mutant
from tests.support.processes import node_worker, python_worker


def on_params(**fields: Any) -> Callable[[], Fault]:
    """A worker that takes these parameters to be something else."""

    def change(new: plan_pb2.NewSequence) -> None:
        for name, value in fields.items():
            if value is None:
                new.sampling.ClearField(name)
            elif callable(value):
                setattr(new.sampling, name, value(getattr(new.sampling, name)))
            else:
                setattr(new.sampling, name, value)

    return on_new(change)


def ignores(*fields: str) -> Callable[[], Fault]:
    """A worker that does not read these fields of plans."""

    def change(plan: plan_pb2.StepPlan) -> None:
        for name in fields:
            plan.ClearField(name)

    return on_plan(change)


def _copies_backwards(plan: plan_pb2.StepPlan) -> None:
    plan.copy = columns.pack(columns.unpack(plan.copy)[::-1])


def _delays(column: str) -> Fault:
    """A worker that executes a column of each plan two plans later."""
    late = [b"", b""]

    def change(plan: plan_pb2.StepPlan) -> None:
        late.append(getattr(plan, column))
        setattr(plan, column, late.pop(0))

    return Fault(plan=change)


def _swaps_in_nothing_that_it_swaps_out(plan: plan_pb2.StepPlan) -> None:
    written = columns.unpack(plan.swap_out)[1::2]
    moves = columns.unpack(plan.swap_in)
    pairs = zip(moves[::2], moves[1::2], strict=True)
    plan.swap_in = columns.pack_rows([pair for pair in pairs if pair[0] not in written])


def _computes_prefixes_anew() -> Fault:
    """Ignores what is in the blocks; on the way it writes to blocks that are shared."""

    def change(plan: plan_pb2.StepPlan) -> None:
        ids = columns.unpack(plan.seq_ids)
        num_tokens = columns.unpack(plan.num_tokens) or [1] * len(ids)
        for new in plan.new_sequences:
            if new.seq_id in ids:
                num_tokens[ids.index(new.seq_id)] += new.num_computed_tokens
                new.num_computed_tokens = 0
        plan.num_tokens = columns.pack(num_tokens)

    return Fault(plan=change)


def _reverses_rows(result: plan_pb2.StepResult) -> None:
    result.token_ids = columns.pack(columns.unpack(result.token_ids)[::-1])


def _repeats_the_first_row(result: plan_pb2.StepResult) -> None:
    tokens = columns.unpack(result.token_ids)
    result.token_ids = columns.pack(tokens[:1] * len(tokens))


def _takes_steps_in_any_order() -> Fault:
    told, expected, answered = [], count(1), count()

    def change(plan: plan_pb2.StepPlan) -> None:
        told.append(plan.step_id)
        plan.step_id = next(expected)

    def restore(result: plan_pb2.StepResult) -> None:
        result.step_id = told[next(answered)]

    return Fault(plan=change, result=restore)


def on_pooling(field: str) -> Callable[[], Fault]:
    """A worker that does not read this field of what is pooled."""

    def change(new: plan_pb2.NewSequence) -> None:
        if new.HasField("pooling"):
            new.pooling.ClearField(field)  # type: ignore[arg-type]

    return on_new(change)


def _drops_a_vector(result: plan_pb2.StepResult) -> None:
    del result.vectors[-1:]


def _adds_a_vector(result: plan_pb2.StepResult) -> None:
    result.vectors.add(row=0, values=columns.pack_floats([1.0]))


def _numbers_vectors_by_themselves(result: plan_pb2.StepResult) -> None:
    for number, entry in enumerate(result.vectors):
        entry.row = number


def _shortens_vectors(result: plan_pb2.StepResult) -> None:
    for entry in result.vectors:
        entry.values = entry.values[:-4]


def _changes_a_number(result: plan_pb2.StepResult) -> None:
    for entry in result.vectors:
        first, *others = columns.unpack_floats(entry.values)
        entry.values = columns.pack_floats([first + 1.0, *others])


def _pools_the_last(new: plan_pb2.NewSequence) -> None:
    if new.HasField("pooling"):
        new.pooling.type = pooling_pb2.POOLING_TYPE_LAST


def _pools_the_last_chunk() -> Fault:
    """Takes the vector of a prompt in chunks for that of its last token."""

    def change(plan: plan_pb2.StepPlan) -> None:
        is_last = not plan.output or plan.output[0] == 3
        for new in plan.new_sequences:
            if new.HasField("pooling") and not is_last:
                new.pooling.type = pooling_pb2.POOLING_TYPE_LAST

    return Fault(plan=change)


def _reports_too_few_logprobs(result: plan_pb2.StepResult) -> None:
    for entry in result.logprobs:
        entry.token_ids, entry.logprobs = entry.token_ids[:-4], entry.logprobs[:-4]


def _leaves_the_sampled_token_out(result: plan_pb2.StepResult) -> None:
    for entry in result.logprobs:
        entry.token_ids, entry.logprobs = entry.token_ids[4:], entry.logprobs[4:]


def _counts_ranks_from_0(result: plan_pb2.StepResult) -> None:
    for entry in result.logprobs:
        entry.sampled_rank -= 1


def _numbers_logprobs_by_themselves(result: plan_pb2.StepResult) -> None:
    for index, entry in enumerate(result.logprobs):
        entry.row = index


def _counts_prompt_positions_from_0(result: plan_pb2.StepResult) -> None:
    for entry in result.prompt_logprobs:
        entry.start -= 1


def _normalises_candidates(result: plan_pb2.StepResult) -> None:
    for entry in result.candidates:
        logprobs = columns.unpack_floats(entry.logprobs)
        total = math.log(sum(map(math.exp, logprobs)))
        entry.logprobs = struct.pack(
            f"<{len(logprobs)}f", *(logprob - total for logprob in logprobs)
        )


def _takes_output_for_prompt(new: plan_pb2.NewSequence) -> None:
    if not new.HasField("parent_seq_id"):
        new.num_prompt_tokens = len(new.token_ids) // 4


def _takes_prompt_for_output(new: plan_pb2.NewSequence) -> None:
    new.num_prompt_tokens = min(new.num_prompt_tokens, 1)


def _breaks_words(new: plan_pb2.NewSequence) -> None:
    for word in new.sampling.bad_words:
        word.token_ids = word.token_ids[-4:]


def _clears(message: Any, *names: str) -> None:
    for name in names:
        message.ClearField(name)


def _clamps(limit: int) -> Callable[[int], int]:
    return lambda value: min(value, limit)


def _hides(code: grpc.StatusCode) -> Callable[[], Fault]:
    """A worker that ends well where it should end with this code."""

    def status(found: grpc.StatusCode, details: str) -> tuple[grpc.StatusCode, str]:
        return (grpc.StatusCode.OK if found is code else found), details

    return lambda: Fault(status=status)


FAULTS: FaultTable = {
    # Cache operations.
    "ignores swap_in": (
        ignores("swap_in"),
        ["blocks come back from the host", "a step without rows", "the next step finds"],
    ),
    "swaps in too late": (partial(_delays, "swap_in"), ["the next step finds what was swapped in"]),
    "swaps in nothing that it has just swapped out": (
        on_plan(_swaps_in_nothing_that_it_swaps_out),
        ["a swap in reads what its own step swapped out"],
    ),
    "ignores swap_out": (
        ignores("swap_out"),
        ["blocks come back from the host", "a block swapped out may be written in the same step"],
    ),
    "ignores copy": (
        ignores("copy"),
        ["a copied block holds", "an entry may be replaced", "target may be another copys source"],
    ),
    "copies backwards": (on_plan(_copies_backwards), ["a copy leaves its source as it is"]),
    "ignores what is in the blocks": (_computes_prefixes_anew, ["the blocks contents matter"]),
    "ignores changes of block tables": (ignores("block_updates"), ["a table grows by block"]),
    # Sequences.
    "ignores what to forget": (
        ignores("forget_seq_ids"),
        ["a forgotten sequence is unknown", "an id may be forgotten and reused"],
    ),
    "ignores forks' own tokens": (
        on_new(lambda new: _clears(new, "token_ids") if new.parent_seq_id else None),
        ["a forks own tokens follow its parents"],
    ),
    "takes output for prompt": (
        on_new(_takes_output_for_prompt),
        ["a recomputed sequence draws at its own position"],
    ),
    "takes prompt for output": (
        on_new(_takes_prompt_for_output),
        ["the prompt does not count for frequency and presence", "the prompt begins"],
    ),
    # Order, epochs, statuses.
    "takes steps in any order": (
        _takes_steps_in_any_order,
        ["a step left out ends the stream", "a step sent twice", "begin with step 1"],
    ),
    "forgets epochs": (
        lambda: Fault(forgets_epochs=True),
        ["a cache for an older epoch is refused", "a stream of an older epoch is refused"],
    ),
    "answers one step late": (
        lambda: Fault(is_lazy=True),
        ["a result does not wait for the next plan"],
    ),
    "ends well after a wrong plan": (
        _hides(grpc.StatusCode.INVALID_ARGUMENT),
        ["a row of an unknown sequence", "a copy column of 7 bytes", "without device blocks"],
    ),
    "ends well when taken over": (
        _hides(grpc.StatusCode.ABORTED),
        ["new caches end the stream", "a stream of a greater epoch ends the older one"],
    ),
    "does not name fields": (
        lambda: Fault(status=lambda code, details: (code, "wrong")),
        ["two rows of one sequence", "a block beyond the cache", "sampling before the last"],
    ),
    # Results.
    "reverses rows": (on_result(_reverses_rows), ["results are in the order of the rows"]),
    "repeats the first row": (
        on_result(_repeats_the_first_row),
        ["tokens do not depend on the rest of the batch"],
    ),
    "reports no times": (
        on_result(lambda result: _clears(result, "timings")),
        ["a steps times follow each other"],
    ),
    "reports no row errors": (
        on_result(lambda result: _clears(result, "errors")),
        ["a row without candidates fails", "fails again until forgotten"],
    ),
    "has no fingerprint": (
        lambda: Fault(info=lambda info: _clears(info.model, "fingerprint")),
        ["the model is described completely"],
    ),
    "serves neither health nor reflection": (
        Fault,
        ["the health service says serving", "reflection lists"],
    ),
    # Sampling.
    "cuts seeds to 32 bits": (
        on_params(seed=lambda seed: seed & 0xFFFFFFFF),
        ["draws are those of philox"],
    ),
    "ignores seeds": (on_params(seed=0), ["seeds and choices draw differently"]),
    "ignores choices": (
        on_new(lambda new: _clears(new, "choice_index")),
        ["seeds and choices draw differently", "draws are those of philox"],
    ),
    "is always greedy": (on_params(temperature=0.0), ["draws are those of philox"]),
    "ignores the temperature": (
        on_params(temperature=1.0),
        ["temperature 0 takes the most probable", "a low temperature", "a high temperature"],
    ),
    "ignores top_k": (on_params(top_k=0), ["top k of 1 is greedy", "top k keeps"]),
    "ignores top_p": (on_params(top_p=1.0), ["top p keeps the smallest set"]),
    "ignores min_p": (on_params(min_p=0.0), ["min p drops the improbable"]),
    "ignores biases": (on_params(logit_bias=None), ["a bias lifts", "a negative bias"]),
    "ignores presence penalties": (on_params(presence_penalty=0.0), ["a presence penalty"]),
    "ignores frequency penalties": (on_params(frequency_penalty=0.0), ["a frequency penalty"]),
    "ignores repetition penalties": (on_params(repetition_penalty=1.0), ["a repetition penalty"]),
    "ignores min_tokens": (
        on_params(min_tokens=0),
        ["min tokens holds suppressed tokens back", "without candidates"],
    ),
    "ignores which tokens to suppress": (
        on_params(suppressed_token_ids=b""),
        ["min tokens holds suppressed tokens back"],
    ),
    "holds tokens back one too long": (
        on_params(min_tokens=lambda number: number + 1),
        ["min tokens holds suppressed tokens back"],
    ),
    "ignores bad words": (on_params(bad_words=None), ["a bad word of one", "a bad word of two"]),
    "excludes the ends of bad words": (
        on_new(_breaks_words),
        ["a bad word of two tokens is not completed"],
    ),
    # Beams.
    "ignores that the core chooses": (
        on_params(num_candidates=None),
        ["candidates are reported instead", "beams and sampling rows share a batch"],
    ),
    "reports too few candidates": (
        on_params(num_candidates=_clamps(2)),
        ["candidates are reported instead of a token"],
    ),
    "ignores what the core chose": (
        ignores("appended_tokens"),
        ["a token for an unknown sequence is refused", "two tokens for one sequence"],
    ),
    "normalises candidates again": (
        on_result(_normalises_candidates),
        ["a bias changes a candidates log probability"],
    ),
    # Vectors.
    "returns too few vectors": (
        on_result(_drops_a_vector),
        ["a vector has as many numbers", "vectors and tokens share a batch"],
    ),
    "returns a vector too many": (
        on_result(_adds_a_vector),
        ["only rows that bring tokens", "vectors and tokens share a batch"],
    ),
    "numbers vectors by themselves": (
        on_result(_numbers_vectors_by_themselves),
        ["vectors and tokens share a batch"],
    ),
    "shortens vectors": (
        on_result(_shortens_vectors),
        ["a vector has as many numbers", "dimensions are the first numbers"],
    ),
    "changes a number of vectors": (
        on_result(_changes_a_number),
        ["a normalized vector has the norm 1", "dimensions are the first numbers"],
    ),
    "ignores dimensions": (
        on_pooling("dimensions"),
        ["dimensions are the first numbers", "more dimensions than the model"],
    ),
    "does not normalize": (
        on_pooling("normalize"),
        ["a normalized vector has the norm 1", "dimensions are the first numbers"],
    ),
    "always pools the last token": (
        on_new(_pools_the_last),
        [
            *("types pool the last all and the first", "a mean over cached tokens is refused"),
            *("every row brings the vectors of its", "a row without the vectors of its tokens"),
        ],
    ),
    "pools no more than the last chunk": (
        _pools_the_last_chunk,
        ["a vector does not depend on chunks"],
    ),
    "samples in every row": (
        ignores("output"),
        ["only rows that bring tokens", "a row may compute the last token and bring nothing"],
    ),
    # Log probabilities.
    "reports too few log probabilities": (
        on_result(_reports_too_few_logprobs),
        ["the sampled token comes first", "only rows that asked"],
    ),
    "leaves the sampled token out": (
        on_result(_leaves_the_sampled_token_out),
        ["the sampled token comes first", "logprobs of 0 reports the sampled token alone"],
    ),
    "counts ranks from 0": (on_result(_counts_ranks_from_0), ["the rank counts"]),
    "numbers log probabilities by themselves": (
        on_result(_numbers_logprobs_by_themselves),
        ["only rows that asked get log probabilities"],
    ),
    "reports log probabilities unasked": (
        on_params(logprobs=_clamps(1), prompt_logprobs=_clamps(1)),
        ["nothing is reported without a request", "only rows that asked get log probabilities"],
    ),
    "counts prompt positions from 0": (
        on_result(_counts_prompt_positions_from_0),
        ["every prompt token but the first", "chunks report their own tokens"],
    ),
    "ignores where prompt log probabilities begin": (
        on_new(lambda new: _clears(new, "prompt_logprobs_start")),
        ["those known before are left out"],
    ),
}


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A worker without a fault."""
    with serving(node_worker(), tmp_path_factory.mktemp("healthy")) as address:
        yield address


@pytest.mark.parametrize("name", FAULTS)
def test_it_finds_a_worker_that(name: str, healthy: str) -> None:
    make_fault, expected = FAULTS[name]
    assert_found(healthy, make_fault, named(expected))


def test_a_proxy_without_a_fault_passes_what_the_others_fail(healthy: str) -> None:
    names = sorted({case for _, expected in FAULTS.values() for case in expected})
    not_forwarded = ("the health service says serving", "reflection lists")
    assert_passed(healthy, named([name for name in names if name not in not_forwarded]))


def _not_invariant(noise: float) -> Callable[[], Fault]:
    """A worker whose log probabilities vary a little, and which says so."""

    def change(result: plan_pb2.StepResult) -> None:
        for entry in result.logprobs:
            values = [
                value + random.uniform(-noise, noise)
                for value in columns.unpack_floats(entry.logprobs)
            ]
            entry.logprobs = struct.pack(f"<{len(values)}f", *values)

    def info(info: pb.GetInfoResponse) -> None:
        info.model.batch_invariant = False

    return lambda: Fault(result=change, info=info)


def test_rounding_is_no_fault_of_a_worker_that_is_not_batch_invariant(healthy: str) -> None:
    names = ["a prompt in chunks", "a copied block", "the blocks contents", "forks draw"]
    assert_passed(healthy, named(names), _not_invariant(noise=0.05))
    assert_found(healthy, _not_invariant(noise=1.0), named(names[:2]))


def _garbles(result: plan_pb2.StepResult) -> None:
    """Other tokens, log probabilities and ranks than the worker's, and never the same."""
    tokens = columns.unpack(result.token_ids)
    result.token_ids = columns.pack([random.randrange(30) for _ in tokens])
    for entry in (*result.logprobs, *result.prompt_logprobs, *result.candidates):
        ids = columns.unpack(entry.token_ids)
        entry.token_ids = columns.pack([random.randrange(30) for _ in ids])
        entry.logprobs = random.randbytes(3 * len(ids)) + b"\x3f" * len(ids)


def _has_special_tokens_beyond_the_vocabulary(info: pb.GetInfoResponse) -> None:
    info.num_weight_loads = random.randrange(2**31)
    info.model.bos_token_id = info.model.vocab_size


def _says_nothing(info: pb.GetInfoResponse) -> None:
    _clears(info, "pid", "num_weight_loads", "last_epoch")
    _clears(info.model, "fingerprint")


def _is_late(result: plan_pb2.StepResult) -> None:
    result.step_id += 1


BROAD = {
    "garbles results": on_result(_garbles),
    "numbers results wrong": on_result(_is_late),
    "hides every error": lambda: Fault(status=lambda _, details: (grpc.StatusCode.OK, details)),
    "says nothing of itself": lambda: Fault(info=_says_nothing),
    "says too much of itself": lambda: Fault(
        info=_has_special_tokens_beyond_the_vocabulary,
        files=[("a.json", b"{"), ("b.json", b"{}"), ("a.json", b"}")],
        profile_path="",
    ),
    "has no room": lambda: Fault(num_gpu_blocks=0),
}


def test_every_case_can_fail(healthy: str) -> None:
    elsewhere = (
        *("registration", "structured output", "constrained rows", "groups", "contexts"),
        *("adapters", "moves"),
    )
    of_others = named([name for _, expected in ENCODER_FAULTS.values() for name in expected])
    left = {
        case.full_name: case
        for case in cases.ALL
        if case.group not in elsewhere and case not in of_others
    }
    for make_fault in BROAD.values():
        with mutant(healthy, make_fault) as address:
            for outcome in outcomes(address, list(left.values()), timeout_s=5.0):
                if outcome.verdict is Verdict.FAIL:
                    del left[outcome.case.full_name]
    assert " + ".join(sorted(left)) == ""


ENCODER_FAULTS: FaultTable = {
    "has room for blocks": (
        lambda: Fault(num_gpu_blocks=4),
        ["a model without cache groups has no blocks"],
    ),
    "hides every error": (
        lambda: Fault(status=lambda _, details: (grpc.StatusCode.OK, details)),
        ["a part of a whole prompt is refused"],
    ),
    "ignores heads": (on_pooling("head"), ["a classifier brings a logit for each label"]),
}


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A worker whose model has labels, and no cache groups."""
    flags = ("--simulate-cache-groups", "none")
    command = python_worker("--simulate", "--simulate-vocab-size", "997", *flags)
    with serving(command, tmp_path_factory.mktemp("encoder")) as address:
        yield address


@pytest.mark.parametrize("name", ENCODER_FAULTS)
def test_it_finds_a_worker_without_cache_groups_that(name: str, encoder: str) -> None:
    make_fault, expected = ENCODER_FAULTS[name]
    assert_found(encoder, make_fault, named(expected))
    assert_passed(encoder, named(expected))


def _begins_tables_at_0(new: plan_pb2.NewSequence) -> None:
    for table in new.tables:
        table.first_index = 0


def _has_narrower_windows(info: pb.GetInfoResponse) -> None:
    """It still reads what it makes its cores release."""
    for group in info.model.cache_groups:
        group.span //= 2


def _reads_no_source_in_first_chunks(plan: plan_pb2.StepPlan) -> None:
    """A source that reaches the last chunk of a prompt alone."""
    for new in plan.new_sequences if plan.output == b"\0" else ():
        _takes_no_media(new)


def _takes_no_media(new: plan_pb2.NewSequence) -> None:
    if any(part.kind == context_pb2.CONTEXT_KIND_MEDIA for part in new.context):
        del new.context[:], new.tables[-1]


def _gives_sources_away(new: plan_pb2.NewSequence) -> None:
    """A worker that has released the source of a sequence before others read it."""
    if new.num_computed_tokens or new.HasField("parent_seq_id"):
        blocks = columns.unpack(new.tables[-1].block_ids)
        new.tables[-1].block_ids = columns.pack([blocks[0] + 100, *blocks[1:]])


def _ignores_digests(new: plan_pb2.NewSequence) -> None:
    for part in new.context:
        part.digest = bytes(32)


GROUP_FAULTS: FaultTable = {
    "ignores digests": (on_new(_ignores_digests), ["adapters and media are distinguished"]),
    "takes copies of states after its step": (
        partial(_delays, "copy"),
        ["a state continues from a copy at its position"],
    ),
    "reads no source in the first chunks": (
        on_plan(_reads_no_source_in_first_chunks),
        ["a source is read by rows that follow the first"],
    ),
    "gives sources away": (
        on_new(_gives_sources_away),
        [
            *("forks share their parents source", "a source serves a sequence with a cached"),
            "a source returns from the host",
        ],
    ),
    "begins all tables at 0": (on_new(_begins_tables_at_0), ["tables that begin at its windows"]),
    "sees more than its windows": (
        lambda: Fault(info=_has_narrower_windows),
        ["released blocks may be given to others"],
    ),
    "ignores copies": (ignores("copy"), ["a state continues from a copy at its position"]),
    "saves no states": (
        ignores("saved_states"),
        ["states that are saved within a row are continued"],
    ),
    "hides every error": (
        _hides(grpc.StatusCode.INVALID_ARGUMENT),
        [
            *(case.name for case in cases.ALL if case.group == "groups" and "refused" in case.name),
            *("a digest of 31 bytes", "a part of an unknown kind", "a context of a fork"),
        ],
    ),
}


@pytest.fixture(scope="module")
def grouped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A worker whose model has cache groups of several lifetimes."""
    groups = ("--simulate-cache-groups", "growing:16,window:16:24,chunk:8:16,state:3,fixed:16")
    command = python_worker("--simulate", "--simulate-vocab-size", "997", *groups)
    with serving(command, tmp_path_factory.mktemp("grouped")) as address:
        yield address


@pytest.mark.parametrize("name", GROUP_FAULTS)
def test_it_finds_a_worker_with_cache_groups_that(name: str, grouped: str) -> None:
    make_fault, expected = GROUP_FAULTS[name]
    assert_found(grouped, make_fault, named(expected))


def test_every_case_of_cache_groups_can_fail(grouped: str) -> None:
    names = [name for _, expected in GROUP_FAULTS.values() for name in expected]
    found = {case.full_name for case in named(names)}
    of_groups = {c.full_name for c in cases.ALL if c.group in ("groups", "contexts")}
    assert of_groups <= found
    assert_passed(grouped, named(names))
