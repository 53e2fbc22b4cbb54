"""Filters and the draw against a dense reference."""

import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.worker_service.sampling import reference
from worker_service.plan import FILTERS, SamplerParams
from worker_service.sampling.draw import CHUNK, WINDOWS, Filters, draw, largest

VOCAB_SIZES = (2, 7, CHUNK, CHUNK + 1, 700, 2500)
EDGE = 1e-6
"""Closer than this to a filter's border float32 and float64 may differ."""


def filters(params: SamplerParams, count: int) -> Filters:
    values = {name: getattr(params, name) for name in FILTERS}
    return Filters.uniform(count, torch.device("cpu"), **values)


@st.composite
def logit_rows(draw_value: st.DrawFn) -> list[float]:
    """Peaked and flat rows, some full of ties."""
    vocab_size = draw_value(st.sampled_from(VOCAB_SIZES))
    random = np.random.default_rng(draw_value(st.integers(0, 2**32)))
    row = random.normal(scale=draw_value(st.sampled_from((0.01, 1.0, 4.0, 20.0))), size=vocab_size)
    if draw_value(st.booleans()):
        row = np.round(row * 2) / 2
    return row.astype(np.float32).tolist()


@st.composite
def filter_params(draw_value: st.DrawFn) -> SamplerParams:
    return SamplerParams(
        temperature=draw_value(st.sampled_from((0.5, 1.0, 2.0))),
        top_k=draw_value(st.sampled_from((0, 1, 2, 5, 63, 64, 65, 1000, 5000))),
        top_p=draw_value(st.one_of(st.just(1.0), st.floats(0.01, 0.999))),
        min_p=draw_value(st.one_of(st.just(0.0), st.floats(1e-6, 0.9))),
    )


def is_near_an_edge(logits: list[float], params: SamplerParams) -> bool:
    """Whether rounding decides what a filter keeps."""
    probs = reference.probabilities([logit / params.temperature for logit in logits])
    if any(math.isclose(p, params.min_p * max(probs), rel_tol=EDGE) for p in probs):
        return True
    without_top_p = SamplerParams(
        temperature=params.temperature, top_k=params.top_k, min_p=params.min_p
    )
    kept = sorted(reference.filtered(logits, without_top_p), reverse=True)
    return bool((np.abs(np.cumsum(kept) - params.top_p) < EDGE).any())


@settings(max_examples=120)
@given(logit_rows(), filter_params())
def test_each_token_is_drawn_over_just_its_share_of_the_unit_interval(
    logits: list[float], params: SamplerParams
) -> None:
    assume(params.top_p == 1.0 or not is_near_an_edge(logits, params))
    expected = reference.filtered(logits, params)
    shares = [(token, p) for token, p in enumerate(expected) if p > 20 * EDGE]
    shares = shares[:: 1 + len(shares) // 30] + shares[-1:]
    borders = np.cumsum([0.0, *expected])
    points, tokens = [], []
    for token, share in shares:
        for position in (5 * EDGE / share, 0.5, 1 - 5 * EDGE / share):
            points.append(borders[token] + position * share)
            tokens.append(token)
    rows = torch.tensor([logits]).expand(len(points), -1) / params.temperature
    drawn = draw(rows, filters(params, len(points)), torch.tensor(points, dtype=torch.float64))
    assert drawn.tolist() == tokens


@pytest.mark.parametrize("num_ties", [63, 64, 100, 1023, 1024, 1200])
@pytest.mark.parametrize(
    "params",
    [SamplerParams(top_p=0.6), SamplerParams(top_k=2), SamplerParams(min_p=0.9, top_p=0.01)],
)
def test_ties_at_the_cut_all_stay_however_many_they_are(
    num_ties: int, params: SamplerParams
) -> None:
    vocab_size, lowest, highest = 2000, 300, 300 + num_ties - 1
    logits = torch.full((1, vocab_size), -30.0)
    logits[0, lowest : highest + 1] = 0.0
    for point, token in ((1e-9, lowest), (1 - 1e-9, highest)):
        uniforms = torch.tensor([point], dtype=torch.float64)
        assert draw(logits, filters(params, 1), uniforms).tolist() == [token]


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1.0 - 2.0**-53])
@pytest.mark.parametrize("vocab_size", [3, CHUNK, 1000])
def test_a_token_of_probability_zero_is_never_drawn(uniform: float, vocab_size: int) -> None:
    logits = torch.full((1, vocab_size), -torch.inf)
    logits[0, 1] = 0.0
    everything = filters(SamplerParams(), 1)
    assert draw(logits, everything, torch.tensor([uniform], dtype=torch.float64)).tolist() == [1]


def test_the_draw_ends_in_the_last_token_with_weight_when_rounding_overshoots() -> None:
    logits = torch.full((1, 3 * CHUNK), -torch.inf)
    logits[0, 5] = logits[0, CHUNK + 7] = 1.0
    overshot = torch.tensor([1.0], dtype=torch.float64)
    assert draw(logits, None, overshot).tolist() == [CHUNK + 7]
    assert draw(logits, filters(SamplerParams(top_k=2), 1), overshot).tolist() == [CHUNK + 7]


@settings(max_examples=30)
@given(logit_rows(), st.integers(0, 2**32))
def test_rows_without_filters_need_no_filtering(logits: list[float], seed: int) -> None:
    uniforms = torch.from_numpy(np.random.default_rng(seed).random(50))
    rows = torch.tensor([logits]).expand(50, -1)
    found = draw(rows, None, uniforms)
    assert torch.equal(found, draw(rows, filters(SamplerParams(), 50), uniforms))
    expected = reference.probabilities(logits)
    borders = np.concatenate([[0.0], np.cumsum(expected)])
    for token, point in zip(found.tolist(), uniforms.tolist(), strict=True):
        assert borders[token] - EDGE <= point <= borders[token + 1] + EDGE


@pytest.mark.parametrize("count", [1, *WINDOWS])
@pytest.mark.parametrize("vocab_size", [1500, 300 * CHUNK + 11])
def test_the_largest_logits_are_found_without_looking_at_all(count: int, vocab_size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, vocab_size, generator=generator).mul(8).round() / 8
    values, columns = largest(logits, count)
    assert torch.equal(values, torch.topk(logits, count).values)
    assert torch.equal(logits.gather(1, columns), values)


@settings(max_examples=20)
@given(st.integers(0, 2**32), st.sampled_from((40, 900, 5000)))
def test_a_row_gets_the_same_token_alone_and_in_any_batch(seed: int, vocab_size: int) -> None:
    random = np.random.default_rng(seed)
    count = 32
    logits = torch.from_numpy(random.normal(scale=3, size=(count, vocab_size)).astype(np.float32))
    logits = logits.mul(4).round() / 4 if seed % 2 else logits
    mixed = Filters(
        top_k=torch.from_numpy(random.choice([0, 3, 70, 2000], count)),
        top_p=torch.from_numpy(random.choice([1.0, 0.9, 0.2, 0.9999], count)),
        min_p=torch.from_numpy(random.choice([0.0, 0.05], count)),
    )
    uniforms = torch.from_numpy(random.random(count))
    together = draw(logits, mixed, uniforms)
    order = torch.from_numpy(random.permutation(count))
    shuffled = draw(logits[order], mixed.rows(order), uniforms[order])
    assert torch.equal(shuffled, together[order])
    for row in range(count):
        only = torch.tensor([row])
        assert torch.equal(draw(logits[only], mixed.rows(only), uniforms[only]), together[only])
