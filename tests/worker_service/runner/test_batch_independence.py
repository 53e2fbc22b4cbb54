"""The runner with a real, tiny Llama: what a request gets does not depend on its company."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.checkpoints import VOCAB_SIZE, checkpoint
from tests.support.worker_driver import PlanBuilder, Row, sampler_params
from worker_service.config import ModelConfig
from worker_service.kv_cache.cache_engine import CacheEngine
from worker_service.loader import LoadedModel, load_model
from worker_service.plan import StepResult
from worker_service.runner.model_runner import ModelRunner
from worker_service.service import wire

BLOCK_SIZE = 4
NUM_TOKENS = 12
"""Tokens generated per sequence."""

PARAMS = {
    "temperature": 0.9,
    "top_p": 0.95,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.2,
    "logprobs": 2,
}


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load_model(ModelConfig(model=str(checkpoint("llama")), device="cpu", dtype="float32"))


class Generation:
    """Tokens and log probabilities of one sequence."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.logprobs: list[bytes] = []

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, Generation)
        return (self.tokens, self.logprobs) == (other.tokens, other.logprobs)

    __hash__ = None  # type: ignore[assignment]


class Session:
    """Steps of one runner."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._cache = CacheEngine(
            loaded.model.kv_cache_spec,
            block_size=BLOCK_SIZE,
            num_gpu_blocks=1024,
            num_cpu_blocks=0,
            device=torch.device("cpu"),
        )
        self._runner = ModelRunner(loaded.model, self._cache, BLOCK_SIZE)
        self.plans = PlanBuilder(block_size=BLOCK_SIZE)
        self.generations: dict[int, Generation] = {}

    def add(self, seq_id: int, prompt: Sequence[int], generated: Sequence[int] = ()) -> None:
        self.plans.add(
            seq_id,
            [*prompt, *generated],
            num_prompt_tokens=len(prompt),
            sampling=sampler_params(seed=seq_id * 7919, **PARAMS),
        )
        self.generations[seq_id] = Generation()

    def step(self, rows: Sequence[Row]) -> StepResult:
        result = self._runner.launch(wire.decode_plan(self.plans.plan(rows), 0)).collect()
        assert not result.errors
        sampling = [row for row in rows if row.sample]
        for row, token in zip(sampling, result.token_ids.tolist(), strict=True):
            self.generations[row.seq_id].tokens.append(token)
        for index, entry in result.logprobs.items():
            self.generations[rows[index].seq_id].logprobs.append(entry.logprobs.tobytes())
        return result


def prompts(count: int) -> dict[int, list[int]]:
    random = np.random.default_rng(5)
    return {
        seq_id: random.integers(0, VOCAB_SIZE, 1 + seq_id * 13 % 40).tolist()
        for seq_id in range(1, count + 1)
    }


def alone(loaded: LoadedModel, seq_id: int, prompt: list[int]) -> Generation:
    session = Session(loaded)
    session.add(seq_id, prompt)
    session.step([Row(seq_id, len(prompt))])
    for _ in range(NUM_TOKENS - 1):
        session.step([Row(seq_id)])
    return session.generations[seq_id]


def test_sampling_is_bitwise_the_same_alone_and_among_32(loaded: LoadedModel) -> None:
    requests = prompts(32)
    session = Session(loaded)
    rows: list[Row] = []
    # They come four at a time, so that prefills and decodes mix in all proportions.
    for seq_id, prompt in requests.items():
        session.add(seq_id, prompt)
        rows.append(Row(seq_id, len(prompt)))
        if seq_id % 4 == 0:
            session.step(rows)
            rows = [Row(row.seq_id) for row in rows]
    while len(session.generations[32].tokens) < NUM_TOKENS:
        session.step(rows)
    for seq_id, prompt in requests.items():
        expected = alone(loaded, seq_id, prompt)
        found = session.generations[seq_id]
        assert found.tokens[:NUM_TOKENS] == expected.tokens
        assert found.logprobs[:NUM_TOKENS] == expected.logprobs


@pytest.mark.parametrize("generated", [1, 5, 11])
def test_sampling_goes_on_bitwise_the_same_after_a_preemption(
    loaded: LoadedModel, generated: int
) -> None:
    (seq_id, prompt), *_ = list(prompts(9).items())[-1:]
    expected = alone(loaded, seq_id, prompt)
    session = Session(loaded)
    done = expected.tokens[:generated]
    session.add(seq_id, prompt, done)
    session.step([Row(seq_id, len(prompt) + generated)])
    while len(session.generations[seq_id].tokens) < NUM_TOKENS - generated:
        session.step([Row(seq_id)])
    found = session.generations[seq_id]
    assert found.tokens == expected.tokens[generated:]
    assert found.logprobs == expected.logprobs[generated:]


def test_sampling_is_bitwise_the_same_with_a_prompt_in_chunks(loaded: LoadedModel) -> None:
    seq_id, prompt = 3, prompts(3)[3]
    session = Session(loaded)
    session.add(seq_id, prompt)
    session.add(1, [5, 6])
    session.step([Row(1, 2)])
    session.step([Row(seq_id, 7, sample=False), Row(1)])
    session.step([Row(1), Row(seq_id, 1, sample=False)])
    session.step([Row(seq_id, len(prompt) - 8)])
    while len(session.generations[seq_id].tokens) < NUM_TOKENS:
        session.step([Row(seq_id)])
    assert session.generations[seq_id] == alone(loaded, seq_id, prompt)


def test_log_probabilities_agree_with_transformers(loaded: LoadedModel) -> None:
    model = AutoModelForCausalLM.from_pretrained(checkpoint("llama"), dtype=torch.float32)
    prompt = prompts(3)[3]
    with torch.inference_mode():
        logits = model(torch.tensor([prompt])).logits[0]
    expected = torch.log_softmax(logits.double(), -1)
    session = Session(loaded)
    session.plans.add(
        1, prompt, sampling=sampler_params(temperature=0.0, logprobs=3, prompt_logprobs=3)
    )
    session.generations[1] = Generation()
    result = session.step([Row(1, len(prompt))])
    entry, last = result.prompt_logprobs[0], result.logprobs[0]
    ids = np.concatenate([entry.token_ids, last.token_ids[None]])
    found = np.concatenate([entry.logprobs, last.logprobs[None]])
    np.testing.assert_allclose(found, expected.gather(1, torch.tensor(ids).long()), atol=1e-4)
    own = torch.tensor([*prompt[1:], int(result.token_ids[0])])
    assert entry.token_ids[:, 0].tolist() == prompt[1:]
    ranks = 1 + (logits > logits.gather(1, own.unsqueeze(1))).sum(-1)
    assert [*entry.ranks.tolist(), last.rank] == ranks.tolist()
    assert torch.equal(torch.tensor(ids[:, 1:]).long(), torch.topk(logits, 3).indices)
