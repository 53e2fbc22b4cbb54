"""Drafts from recent outputs: what is found and forgotten, and what no tenant learns of others."""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagewire.v1 import sampling_pb2
from scheduler_service.core.request import Generation, Request
from tests.support.checkpoints import checkpoint
from tests.support.in_process import FRONTEND, GREEDY, MODEL, InProcessEngine
from tests.support.speculation import SpeculatingEngine
from worker_service.array_types import Int32Array
from worker_service.kv_cache.cache_engine import CacheEngine
from worker_service.runner.drafting.suffix_drafter import (
    MAX_MATCH,
    HashPairs,
    OutputHistory,
    SuffixDrafter,
    hash_pairs,
    likeliest_path,
)

TENANT = np.uint64(2**63 + 5)
OTHER = np.uint64(7)
NAMELESS = np.uint64(0)
PROMPT_END = 99


def ints(tokens: Sequence[int]) -> Int32Array:
    return np.array(tokens, np.int32)


def add(history: OutputHistory, tokens: Sequence[int], tenant: np.uint64 = TENANT) -> None:
    """A whole output at once, after a prompt that ends with PROMPT_END."""
    before = history.num_added - 1 + np.arange(len(tokens))
    before[0] = -1
    previous = ints([PROMPT_END, *tokens[:-1]])
    history.add(np.full(len(tokens), tenant, np.uint64), previous, ints(tokens), before)


def follow(
    history: OutputHistory,
    tokens: Sequence[int],
    num_drafts: int = 4,
    tenant: np.uint64 = TENANT,
) -> list[int]:
    ends, _ = history.match(tenant, ints(tokens))
    return likeliest_path(history.continuations(ends, num_drafts)).tolist()


def one_hash(
    tenants: np.uint64 | npt.NDArray[np.uint64], previous: Int32Array, tokens: Int32Array
) -> npt.NDArray[np.uint16]:
    return np.zeros(len(tokens), np.uint16)


each_hash = pytest.mark.parametrize("hash_pairs", [hash_pairs, one_hash])
"""Equal hashes are neither equal tokens nor equal tenants."""


@each_hash
def test_tokens_of_other_tenants_are_never_found(hash_pairs: HashPairs) -> None:
    history = OutputHistory(64, hash_pairs)
    add(history, [1, 2, 3, 4], OTHER)
    assert follow(history, [1, 2]) == []
    add(history, [1, 2, 5], TENANT)
    assert follow(history, [1, 2]) == [5]


class Token(NamedTuple):
    """A token in the oracle's history."""

    tenant: int
    previous: int
    token: int
    before: int
    """Its place among all tokens, or -1."""


class Oracle:
    """The same history as lists, searched token by token."""

    def __init__(self, capacity: int) -> None:
        self.tokens: list[Token] = []
        self.first = 0
        self.capacity = capacity

    def add(self, tokens: Sequence[Token]) -> None:
        half = self.capacity // 2
        for start in range(0, len(tokens), half):
            part = tokens[start : start + half]
            if len(self.tokens) + len(part) - self.first > self.capacity:
                self.first = len(self.tokens) - half
            self.tokens += part

    def context(self, place: int) -> list[int]:
        """The tokens up to one, the last first, as far as they are known."""
        found = []
        while place >= self.first:
            found.append(self.tokens[place].token)
            last, place = place, self.tokens[place].before
        return [*found, self.tokens[last].previous]

    def after(self, place: int) -> int | None:
        places = range(place + 1, len(self.tokens))
        return next((at for at in places if self.tokens[at].before == place), None)

    def match(self, tenant: int, tokens: Sequence[int]) -> tuple[list[int], int]:
        wanted = [*reversed(tokens)][:MAX_MATCH]
        lengths = {}
        for place in range(self.first, len(self.tokens)):
            if self.tokens[place].tenant != tenant or self.after(place) is None:
                continue
            pairs = zip(wanted, self.context(place), strict=False)
            equal = [ours == theirs for ours, theirs in pairs]
            lengths[place] = equal.index(False) if False in equal else len(equal)
        longest = max(lengths.values(), default=0)
        if longest < 2:
            return [], 0
        return [place for place, length in lengths.items() if length == longest], longest

    def continuations(self, places: Sequence[int], num_tokens: int) -> list[list[int]]:
        found = []
        for place in places:
            tokens: list[int] = []
            at = self.after(place)
            while at is not None and len(tokens) < num_tokens:
                tokens.append(self.tokens[at].token)
                at = self.after(at)
            found.append(tokens)
        return found


def majority(continuations: list[list[int]]) -> list[int]:
    """Token by token, the most frequent, the latest of equals."""
    path: list[int] = []
    while True:
        depth = len(path)
        alive = [
            continuation
            for continuation in continuations
            if continuation[:depth] == path and len(continuation) > depth
        ]
        if not alive:
            return path
        counts = Counter(continuation[depth] for continuation in alive)
        most = max(counts.values())
        path.append(
            [continuation[depth] for continuation in alive if counts[continuation[depth]] == most][
                -1
            ]
        )


@settings(max_examples=150)
@given(st.data())
def test_searches_are_those_of_a_brute_force_search(data: st.DataObject) -> None:
    """Sequences of several tenants grow in turns, over few tokens, beyond the capacity."""
    capacity = data.draw(st.integers(2, 40), "capacity")
    history, oracle = OutputHistory(capacity), Oracle(capacity)
    token = st.integers(0, 2)
    ends: dict[int, tuple[int, int]] = {}
    for _ in range(data.draw(st.integers(1, 12), "steps")):
        new: list[Token] = []
        for seq in data.draw(st.lists(st.integers(0, 4), max_size=4, unique=True), "sequences"):
            for _ in range(data.draw(st.integers(1, 5), "tokens")):
                before, previous = ends.get(seq, (-1, data.draw(token)))
                new.append(Token(seq % 2, previous, data.draw(token), before))
                ends[seq] = (len(oracle.tokens) + len(new) - 1, new[-1].token)
        oracle.add(new)
        tenants, previous, tokens, before = np.array(new, np.int64).reshape(-1, 4).T
        history.add(
            tenants.astype(np.uint64), previous.astype(np.int32), tokens.astype(np.int32), before
        )
    tenant = data.draw(st.integers(0, 2), "tenant")
    query = data.draw(st.lists(token, max_size=8), "query")
    places, length = oracle.match(tenant, query)
    found, num_matched = history.match(np.uint64(tenant), ints(query))
    assert num_matched == length
    assert (found + oracle.first).tolist() == places
    continuations = oracle.continuations(places, 6)
    rows = history.continuations(found, 6)
    assert [[token for token in row if token >= 0] for row in rows.tolist()] == continuations
    assert likeliest_path(rows).tolist() == majority(continuations)


def test_memory_is_bounded_and_the_latest_half_is_kept() -> None:
    history = OutputHistory(1000)
    sizes = {
        name: array.nbytes for name, array in vars(history).items() if hasattr(array, "nbytes")
    }
    for number in range(200):
        add(history, [number, 5000 + number, *range(7)])
    assert follow(history, [199, 5199]) == [0, 1, 2, 3]
    assert follow(history, [150, 5150]) == [0, 1, 2, 3]
    assert follow(history, [20, 5020]) == []
    assert sizes == {name: getattr(history, name).nbytes for name in sizes}
    many = np.arange(3333, dtype=np.int32)
    add(history, many.tolist())
    assert follow(history, [3000, 3001]) == [3002, 3003, 3004, 3005]


class Engine(SpeculatingEngine):
    """Drafts from recent outputs."""

    num_drafts = 4
    history_tokens = 1 << 12

    def make_drafter(self, cache: CacheEngine) -> SuffixDrafter:
        self.drafter = SuffixDrafter(self.history_tokens)
        return self.drafter

    def answer(self, tenant: str, handle: int, num_choices: int = 1) -> list[list[int]]:
        """The choices of a request of a tenant; the prompt has no repetition."""
        request = Request(
            frontend_id=FRONTEND,
            handle=handle,
            request_id=str(handle),
            model=MODEL,
            prompt_token_ids=list(range(5, 25)),
            tenant=tenant,
            work=Generation(
                max_tokens=40,
                num_choices=num_choices,
                sampling=sampling_pb2.SamplerParams(**(GREEDY | {"temperature": 1.0, "seed": 8})),
            ),
        )
        return [answer.token_ids for answer in self.run([request]).values()]


def test_an_output_helps_its_tenant_and_no_other() -> None:
    engine = Engine(checkpoint("llama"))
    plain = InProcessEngine(checkpoint("llama")).generate(
        [list(range(5, 25))], 40, temperature=1.0, seed=8
    )[0]
    first = engine.answer("a", 1)
    num_right = [engine.lengths.num_accepted]
    for handle, tenant in enumerate(("a", "b", "b"), 2):
        assert engine.answer(tenant, handle) == first == [plain.token_ids]
        num_right.append(engine.lengths.num_accepted)
    again, other, other_again = np.diff(num_right).tolist()
    assert again > 25, "the second time, the first answer is repeated"
    assert other == num_right[0], "another tenant has what it had without it"
    assert other_again == again


class EngineWithoutHistory(Engine):
    """Drafts from a sequence's own tokens."""

    history_tokens = 0


def test_without_a_history_an_output_helps_no_other() -> None:
    engine = EngineWithoutHistory(checkpoint("llama"))
    answers, num_right = [], [0]
    for handle in (1, 2):
        answers += engine.answer("a", handle)
        num_right.append(engine.lengths.num_accepted)
    assert answers[0] == answers[1]
    first, again = np.diff(num_right).tolist()
    assert first == again < 25
    assert engine.drafter.history.num_added == 0


def test_choices_help_each_other_and_change_nothing() -> None:
    engine = Engine(checkpoint("llama"))
    plain = InProcessEngine(checkpoint("llama")).generate(
        [list(range(5, 25))], 40, num_choices=4, temperature=1.0, seed=8
    )
    assert engine.answer("", 1, num_choices=4) == [answer.token_ids for answer in plain]
    history = engine.drafter.history
    assert history.num_added == 4 * 40
    for choice in plain:
        tokens = choice.token_ids
        assert follow(history, tokens[:16], tenant=NAMELESS) == tokens[16:20]


def test_rows_that_are_used_again_begin_a_new_output() -> None:
    engine = Engine(checkpoint("llama"))
    outputs = [engine.answer("", handle)[0] for handle in range(1, 4)]
    assert engine.drafter.history.num_added == 3 * 40
    assert follow(engine.drafter.history, outputs[0][-2:], tenant=NAMELESS) == []
