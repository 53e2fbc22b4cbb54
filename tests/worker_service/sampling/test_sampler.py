"""Whole rows through the sampler."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from worker_service.plan import FILTERS, SamplerParams, TokenLogprobs
from worker_service.sampling.logit_edits import EditedRow
from worker_service.sampling.sampler import NO_TOKEN, Samples, SamplingBatch, SamplingTable, sample
from worker_service.structured.masks import MaskedRows

VOCAB_SIZE = 500


def int32(tokens: Sequence[int]) -> np.ndarray:
    return np.array(tokens, np.int32)


class Rows:
    """Sequences whose next token is asked for."""

    def __init__(self, vocab_size: int = VOCAB_SIZE) -> None:
        self.table = SamplingTable(64)
        self.logits: list[torch.Tensor] = []
        self.outputs: list[np.ndarray] = []
        self.vocab_size = vocab_size

    def add(
        self,
        params: SamplerParams,
        logits: torch.Tensor | None = None,
        prompt: Sequence[int] = (1,),
        output: Sequence[int] = (),
        choice_index: int = 0,
    ) -> int:
        row_id = len(self.logits)
        self.table.put(row_id, params, choice_index, int32(prompt), int32(output))
        self.outputs.append(int32(output))
        if logits is None:
            generator = torch.Generator().manual_seed(row_id)
            logits = torch.randn(self.vocab_size, generator=generator) * 3
        self.logits.append(logits)
        return row_id

    def sample(
        self, order: Sequence[int] | None = None, masked: MaskedRows | None = None
    ) -> Samples:
        row_ids = np.array(range(len(self.logits)) if order is None else order)
        edits = self.table.edits
        batch = SamplingBatch(
            row_ids=row_ids,
            positions=np.array([len(self.outputs[row_id]) for row_id in row_ids]),
            edited=[
                EditedRow(row, edits[row_id], self.outputs[row_id])
                for row, row_id in enumerate(row_ids.tolist())
                if row_id in edits
            ],
            masked=masked,
        )
        return sample(torch.stack([self.logits[row_id] for row_id in row_ids]), batch, self.table)


def mixed_rows(vocab_size: int = VOCAB_SIZE) -> Rows:
    """32 sequences with all kinds of parameters."""
    rows = Rows(vocab_size)
    random = np.random.default_rng(7)
    for index in range(32):
        params = SamplerParams(
            temperature=(0.0, 0.7, 1.0, 1.5)[index % 4],
            top_k=(0, 5, 0, 90)[index // 4 % 4],
            top_p=(1.0, 0.9, 0.5)[index % 3],
            min_p=(0.0, 0.02)[index % 2],
            repetition_penalty=(1.0, 1.2)[index // 2 % 2],
            frequency_penalty=(0.0, 0.3)[index // 8 % 2],
            bias_token_ids=int32([3, 4] if index % 5 == 0 else []),
            bias_values=np.array([2.0, -2.0] if index % 5 == 0 else [], np.float32),
            bad_words=((8, 9), (11,)) if index % 7 == 0 else (),
            seed=1000 + index // 2,
            num_logprobs=(None, 0, 3, 40)[index % 4],
        )
        output = random.integers(0, vocab_size, index).tolist()
        rows.add(params, prompt=[2, 3, 5], output=output, choice_index=index % 2)
    return rows


def equal(one: TokenLogprobs, other: TokenLogprobs) -> bool:
    return (
        one.token_ids.tolist() == other.token_ids.tolist()
        and one.logprobs.tobytes() == other.logprobs.tobytes()
        and one.rank == other.rank
    )


# The largest is a size at which torch splits a single row's sum among threads.
@pytest.mark.parametrize("vocab_size", [VOCAB_SIZE, 50_000])
def test_a_row_is_bitwise_the_same_alone_shuffled_and_in_a_batch(vocab_size: int) -> None:
    rows = mixed_rows(vocab_size)
    together = rows.sample()
    order = np.random.default_rng(1).permutation(32).tolist()
    shuffled = rows.sample(order)
    assert len(together.logprobs) == 24
    for row in range(32):
        alone = rows.sample([row])
        place = order.index(row)
        assert alone.tokens[0] == together.tokens[row] == shuffled.tokens[place]
        if row in together.logprobs:
            assert equal(alone.logprobs[0], together.logprobs[row])
            assert equal(shuffled.logprobs[place], together.logprobs[row])


def test_greedy_takes_the_lowest_token_among_equals() -> None:
    logits = torch.zeros(VOCAB_SIZE)
    logits[[400, 17, 230]] = 5.0
    rows = Rows()
    rows.add(SamplerParams(temperature=0.0), logits)
    rows.add(SamplerParams(temperature=0.0), logits)
    assert rows.sample().tokens.tolist() == [17, 17]


@pytest.mark.parametrize(
    ("place", "broken"),
    [(250, torch.nan), (250, torch.inf), (slice(None), -torch.inf)],
    ids=["NaN", "infinity", "nothing possible"],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_with_broken_logits_fails_alone(
    place: int | slice, broken: float, temperature: float
) -> None:
    params = SamplerParams(temperature=temperature, seed=4, num_logprobs=1)
    sound, rows = Rows(), Rows()
    for outcome in (sound, rows):
        for _ in range(3):
            outcome.add(params)
    rows.logits[1] = rows.logits[1].clone()
    rows.logits[1][place] = broken
    expected, samples = sound.sample(), rows.sample()
    assert samples.non_finite.tolist() == [1]
    assert samples.tokens.tolist() == [expected.tokens[0], NO_TOKEN, expected.tokens[2]]
    assert sorted(samples.logprobs) == [0, 2]


@pytest.mark.parametrize("filters", [{}, {"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.1}])
@pytest.mark.parametrize(
    ("logit", "params"),
    [
        (3e38, {"temperature": 0.5}),
        (-3e38, {"temperature": 0.5}),
        (3e38, {"temperature": 1.0, "repetition_penalty": 0.5}),
        (3e38, {"temperature": 0.0, "frequency_penalty": -3e38}),
    ],
    ids=["divided", "negative", "repeated", "frequent"],
)
def test_a_row_whose_logits_overflow_fails_alone(
    logit: float, params: dict[str, float], filters: dict[str, float]
) -> None:
    sound, rows = Rows(), Rows()
    for outcome in (sound, rows):
        outcome.add(SamplerParams(seed=4, num_logprobs=1))
        outcome.add(SamplerParams(seed=4, **params, **filters), output=[3])
        outcome.add(SamplerParams(seed=4, top_p=0.9))
    rows.logits[1] = torch.full((VOCAB_SIZE,), logit)
    expected, samples = sound.sample(), rows.sample()
    assert samples.non_finite.tolist() == [1]
    assert samples.tokens.tolist() == [expected.tokens[0], NO_TOKEN, expected.tokens[2]]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_model_may_exclude_tokens_itself(temperature: float) -> None:
    rows = Rows()
    rows.add(SamplerParams(temperature=temperature, seed=4), torch.full((VOCAB_SIZE,), -torch.inf))
    rows.logits[0][17] = -3.0
    samples = rows.sample()
    assert (samples.tokens.tolist(), samples.non_finite.tolist()) == ([17], [])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_candidates_fails_alone(temperature: float) -> None:
    rows = Rows()
    everything = tuple((token,) for token in range(VOCAB_SIZE))
    rows.add(SamplerParams(temperature=temperature))
    rows.add(SamplerParams(temperature=temperature, bad_words=everything, num_logprobs=2))
    rows.add(SamplerParams(temperature=temperature, bad_words=everything[1:]))
    samples = rows.sample()
    assert samples.no_candidates.tolist() == [1]
    assert samples.non_finite.tolist() == []
    assert samples.tokens[1:].tolist() == [NO_TOKEN, 0]
    assert samples.logprobs == {}


def test_log_probabilities_are_of_the_model_s_own_logits() -> None:
    rows = Rows()
    rows.add(
        SamplerParams(
            temperature=0.5, repetition_penalty=3.0, bad_words=((9,),), num_logprobs=4, seed=2
        ),
        prompt=[9],
        output=[4, 4],
    )
    raw = rows.logits[0].clone()
    samples = rows.sample()
    entry = samples.logprobs[0]
    expected = torch.log_softmax(raw.double(), -1)
    assert entry.token_ids[0] == samples.tokens[0]
    assert entry.token_ids[1:].tolist() == torch.topk(raw, 4).indices.tolist()
    np.testing.assert_allclose(entry.logprobs, expected[entry.token_ids.tolist()], atol=1e-5)
    assert entry.rank == 1 + int((raw > raw[samples.tokens[0]]).sum())


def test_equally_probable_tokens_are_reported_lowest_first() -> None:
    logits = torch.zeros(VOCAB_SIZE)
    logits[[30, 10, 20]] = 1.0
    rows = Rows()
    rows.add(SamplerParams(temperature=0.0, num_logprobs=3), logits)
    entry = rows.sample().logprobs[0]
    assert entry.token_ids.tolist() == [10, 10, 20, 30]
    assert entry.rank == 1


def test_the_table_keeps_its_sequences_when_it_grows() -> None:
    table = SamplingTable(1)
    params = SamplerParams(
        temperature=0.3, top_k=4, top_p=0.8, min_p=0.1, seed=2**63, num_logprobs=2
    )
    table.put(0, params, 3, int32([1]), int32([]))
    table.resize(4)
    columns = (table.temperature, *table.filters.values(), table.seed)
    row = tuple(column[0] for column in columns)
    filters = (getattr(params, name) for name in FILTERS)
    assert row == (np.float32(0.3), *filters, 2**63)
    assert (table.choice_index[0], table.num_logprobs[0]) == (3, 2)
    assert len(table.temperature) == 4
