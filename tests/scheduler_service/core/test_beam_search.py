"""Beam search gives what transformers' own gives on the same scores, bit by bit."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GenerationConfig, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from scheduler_service.core.beam_search import BeamParams, BeamSearch, EarlyStopping, Path
from scheduler_service.core.step_plan import RowCandidates

EARLY_STOPPING: dict[Any, EarlyStopping] = {
    True: EarlyStopping.WHEN_FULL,
    False: EarlyStopping.WHEN_HOPELESS,
    "never": EarlyStopping.NEVER,
}
PROMPT = [3, 1, 4]


class ScoreTable:
    """Logits that depend on all tokens so far, drawn from a generator seeded by them."""

    def __init__(self, seed: int, vocab_size: int, spread: float) -> None:
        self.seed = seed
        self.vocab_size = vocab_size
        self.spread = spread

    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        rng = np.random.default_rng([self.seed, *tokens])
        values = self.spread * rng.standard_normal(self.vocab_size)
        return torch.from_numpy(values.astype(np.float32))

    def candidates(self, tokens: Sequence[int], count: int) -> RowCandidates:
        logprobs = torch.log_softmax(self.logits(tokens), dim=-1)
        values, ids = torch.topk(logprobs, min(count, self.vocab_size))
        return RowCandidates(token_ids=ids.tolist(), logprobs=values.tolist())


class TableModel(PreTrainedModel, GenerationMixin):
    """A model for `generate` whose logits are a table's."""

    config_class = PreTrainedConfig

    def __init__(self, table: ScoreTable) -> None:
        super().__init__(PreTrainedConfig(vocab_size=table.vocab_size))
        self.table = table
        self.anchor = torch.nn.Parameter(torch.zeros(1))

    def prepare_inputs_for_generation(self, input_ids: torch.Tensor, **_: Any) -> dict[str, Any]:
        return {"input_ids": input_ids}

    def forward(self, input_ids: torch.Tensor, **_: Any) -> CausalLMOutputWithPast:
        rows = [self.table.logits(tokens) for tokens in input_ids.tolist()]
        return CausalLMOutputWithPast(logits=torch.stack(rows).unsqueeze(1))


def oracle(
    table: ScoreTable, stops: Sequence[int], max_tokens: int, **settings: Any
) -> list[tuple[list[int], float]]:
    """Output tokens and scores of transformers' beams, best first."""
    width = settings["num_beams"]
    found = TableModel(table).generate(
        torch.tensor([PROMPT]),
        generation_config=GenerationConfig(
            max_new_tokens=max_tokens,
            do_sample=False,
            eos_token_id=list(stops) or None,
            pad_token_id=0,
            num_return_sequences=width,
            return_dict_in_generate=True,
            output_scores=True,
            use_cache=False,
            **settings,
        ),
    )
    outputs = []
    for tokens, score in zip(found.sequences.tolist(), found.sequences_scores, strict=True):
        output = tokens[len(PROMPT) :]
        ends = [index for index, token in enumerate(output) if token in stops]
        outputs.append((output[: ends[0] + 1] if ends else output, float(score)))
    return outputs


def search(
    table: ScoreTable, stops: Sequence[int], max_tokens: int, params: BeamParams
) -> list[tuple[list[int], float]]:
    """The same by our own."""
    beams = BeamSearch(params, frozenset(stops), max_tokens)
    while not beams.is_done:
        rows = [
            table.candidates([*PROMPT, *output_of(beam.path)], params.width + len(stops))
            for beam in beams.beams
        ]
        beams.advance(rows)
    return [(output_of(finished.path), finished.score) for finished in beams.finished]


def output_of(path: Path | None) -> list[int]:
    return [] if path is None else [step.token for step in path.steps()]


@settings(max_examples=150)
@given(
    seed=st.integers(0, 10**6),
    vocab_size=st.integers(12, 60),
    spread=st.sampled_from([0.3, 1.0, 3.0]),
    width=st.integers(1, 6),
    length_penalty=st.sampled_from([0.0, 0.5, 1.0, 2.0, -1.0, -0.7, 0.3]),
    early_stopping=st.sampled_from([True, False, "never"]),
    num_stops=st.integers(0, 8),
    max_tokens=st.integers(1, 12),
)
def test_beams_and_scores_are_those_of_transformers(
    seed: int,
    vocab_size: int,
    spread: float,
    width: int,
    length_penalty: float,
    early_stopping: Any,
    num_stops: int,
    max_tokens: int,
) -> None:
    if width == 1:
        return  # transformers searches greedily then, without scores
    table = ScoreTable(seed, vocab_size, spread)
    stops = list(range(num_stops))
    length_penalty = float(np.float32(length_penalty))
    expected = oracle(
        table,
        stops,
        max_tokens,
        num_beams=width,
        length_penalty=length_penalty,
        early_stopping=early_stopping,
    )
    params = BeamParams(
        width=width,
        length_penalty=length_penalty,
        early_stopping=EARLY_STOPPING[early_stopping],
    )
    assert search(table, stops, max_tokens, params) == expected


def test_one_beam_is_greedy() -> None:
    table = ScoreTable(5, 20, 1.0)
    tokens = list(PROMPT)
    for _ in range(6):
        tokens.append(int(table.logits(tokens).argmax()))
    params = BeamParams(width=1, length_penalty=1.0, early_stopping=EarlyStopping.WHEN_FULL)
    [(output, _)] = search(table, [], 6, params)
    assert output == tokens[len(PROMPT) :]


def row(*entries: tuple[int, float]) -> RowCandidates:
    return RowCandidates(
        token_ids=[token for token, _ in entries], logprobs=[logprob for _, logprob in entries]
    )


def small_search(*, width: int = 2, stops: Sequence[int] = (), max_tokens: int = 10) -> BeamSearch:
    params = BeamParams(width=width, length_penalty=1.0, early_stopping=EarlyStopping.WHEN_FULL)
    return BeamSearch(params, frozenset(stops), max_tokens)


def test_of_equal_scores_the_first_beam_and_its_more_probable_token_come_first() -> None:
    beams = small_search()
    beams.advance([row((5, -1.0), (6, -1.0), (7, -1.0))] * 2)
    assert [output_of(beam.path) for beam in beams.beams] == [[5], [6]]
    beams.advance([row((8, -2.0), (9, -3.0)), row((3, -2.0), (4, -2.5))])
    assert [output_of(beam.path) for beam in beams.beams] == [[5, 8], [6, 3]]


def test_beams_without_candidates_end_and_the_search_with_the_last_of_them() -> None:
    beams = small_search()
    beams.advance([row((5, -1.0), (6, -1.5))] * 2)
    beams.advance([row(), row((7, -1.0))])
    assert [output_of(beam.path) for beam in beams.beams] == [[6, 7]]
    beams.advance([row()])
    assert beams.is_done
    assert beams.finished == []


@pytest.mark.parametrize(
    ("early_stopping", "length_penalty", "is_done"),
    [
        (EarlyStopping.WHEN_FULL, 1.0, True),
        (EarlyStopping.WHEN_HOPELESS, 1.0, True),
        (EarlyStopping.NEVER, 1.0, False),
        (EarlyStopping.NEVER, -1.0, True),
    ],
)
def test_a_search_that_never_stops_early_waits_for_the_score_of_the_greatest_length(
    early_stopping: EarlyStopping, length_penalty: float, is_done: bool
) -> None:
    params = BeamParams(width=1, length_penalty=length_penalty, early_stopping=early_stopping)
    beams = BeamSearch(params, frozenset({2}), 4)
    beams.advance([row((2, -1.0), (6, -1.5))])
    assert [output_of(finished.path) for finished in beams.finished] == [[2]]
    assert beams.is_done == is_done, "-1.5 / 4 would be better than -1.0, -1.5 is not"


def test_what_could_have_stood_there_is_kept_only_where_it_is_to_be_told() -> None:
    for num_logprobs, is_kept in ((None, False), (0, True)):
        params = BeamParams(
            width=1,
            length_penalty=1.0,
            early_stopping=EarlyStopping.NEVER,
            num_logprobs=num_logprobs,
        )
        beams = BeamSearch(params, frozenset(), 1)
        beams.advance([row((5, -1.0), (6, -1.5))])
        assert (beams.finished[0].path.row is not None) == is_kept


def test_a_long_search_can_be_forgotten() -> None:
    beams = small_search(width=1, max_tokens=20_000)
    for _ in range(19_999):
        beams.advance([row((5, -1.0))])
    del beams


@pytest.mark.parametrize("length_penalty", [5.0, -5.0])
def test_scores_stay_numbers_at_the_greatest_penalties(length_penalty: float) -> None:
    params = BeamParams(width=1, length_penalty=length_penalty, early_stopping=EarlyStopping.NEVER)
    beams = BeamSearch(params, frozenset(), 10**6)
    beams.num_tokens = 10**6 - 1
    beams.advance([row((5, -1.0))])
    assert -1e38 < beams.finished[0].score < 0
