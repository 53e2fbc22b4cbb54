"""Beam search through core, wire and model runner: the very tokens of `transformers`, float32."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pagewire.v1 import sampling_pb2
from scheduler_service.core.config import PreemptionMode, SchedulerConfig
from scheduler_service.core.request import Generation, Request
from tests.support.beams import BeamCase, transformers_beams
from tests.support.checkpoints import checkpoint
from tests.support.in_process import FRONTEND, GREEDY, InProcessEngine
from tests.support.transformers_oracle import oracle

ROOMY = SchedulerConfig(max_num_seqs=32, max_num_batched_tokens=4096)


def prompt(length: int, seed: int = 7) -> list[int]:
    return np.random.default_rng(seed).integers(5, 250, size=length).tolist()


def some_cases(num_cases: int, seed: int) -> list[BeamCase]:
    """Cases of every kind, with enough stop tokens that beams end early."""
    rng = np.random.default_rng(seed)
    cases = []
    for number in range(num_cases):
        width = int(rng.integers(2, 6))
        stops = rng.choice(300, size=int(rng.choice([0, 3, 30])), replace=False).tolist()
        case = BeamCase(
            prompt=prompt(int(rng.integers(1, 30)), seed=number),
            width=width,
            n=int(rng.integers(1, width + 1)),
            max_tokens=int(rng.integers(1, 14)),
            length_penalty=float(rng.choice([0.0, 0.5, 1.0, 2.0, -1.0])),
            early_stopping=[True, False, "never"][number % 3],
            stops=stops,
            repetition_penalty=float(rng.choice([1.0, 1.5])),
        )
        cases.append(replace(case, min_tokens=min(int(rng.choice([0, 0, 4])), case.max_tokens)))
    return cases


def check(engine: InProcessEngine, model: Path, cases: list[BeamCase]) -> None:
    """All cases in one batch."""
    requests = []
    handle = 1
    for case in cases:
        requests.append(case.request(handle))
        handle += case.n
    outputs = engine.run(requests)
    for case, request in zip(cases, requests, strict=True):
        found = [outputs[request.handle + index].token_ids for index in range(case.n)]
        assert found == transformers_beams(model, case), case


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3", "mistral", "opt", "gemma2"])
def test_beams_are_those_of_transformers(family: str) -> None:
    model = checkpoint(family)
    check(InProcessEngine(model, config=ROOMY), model, some_cases(12, seed=len(family)))


def greedy_request(handle: int, tokens: Sequence[int], max_tokens: int) -> Request:
    return Request(
        frontend_id=FRONTEND,
        handle=handle,
        request_id=str(handle),
        model="model",
        prompt_token_ids=tokens,
        work=Generation(
            max_tokens=max_tokens,
            sampling=sampling_pb2.SamplerParams(**GREEDY),
        ),
    )


@pytest.mark.parametrize("caching", [True, False], ids=["cached", "uncached"])
@pytest.mark.parametrize(
    ("mode", "num_gpu_blocks", "num_cpu_blocks", "max_num_batched_tokens"),
    [
        ("auto", 512, 0, 4096),
        ("auto", 512, 0, 24),
        ("recompute", 44, 0, 24),
        ("recompute", 44, 0, 4096),
        ("swap", 44, 200, 24),
        ("auto", 44, 200, 4096),
    ],
)
def test_neighbours_chunks_and_want_of_memory_change_no_token(
    mode: str, num_gpu_blocks: int, num_cpu_blocks: int, max_num_batched_tokens: int, caching: bool
) -> None:
    model = checkpoint("llama")
    config = SchedulerConfig(
        max_num_seqs=24,
        max_num_batched_tokens=max_num_batched_tokens,
        preemption_mode=PreemptionMode(mode),
        enable_prefix_caching=caching,
        watermark=0.0,
    )
    engine = InProcessEngine(
        model, num_gpu_blocks=num_gpu_blocks, num_cpu_blocks=num_cpu_blocks, config=config
    )
    cases = [
        BeamCase(prompt=prompt(9 + 5 * i, seed=i), width=2 + i, n=1 + i // 2, max_tokens=12 + 3 * i)
        for i in range(4)
    ]
    beams = [case.request(100 * (i + 1)) for i, case in enumerate(cases)]
    plain = [greedy_request(1000 + i, prompt(11, seed=50 + i), 25) for i in range(4)]
    outputs = engine.run([request for pair in zip(plain, beams, strict=True) for request in pair])
    for case, request in zip(cases, beams, strict=True):
        found = [outputs[request.handle + index].token_ids for index in range(case.n)]
        assert found == transformers_beams(model, case)
    for request in plain:
        expected = oracle(model).generate(list(request.prompt_token_ids), 25)
        assert outputs[request.handle].token_ids == expected
    totals = engine.core.snapshot()
    assert (totals.num_preemptions > 0) == (num_gpu_blocks < 512)
    if mode == "swap":
        assert totals.num_swapped_out_blocks > 0


def test_log_probabilities_are_told_as_they_were_scored() -> None:
    model = checkpoint("llama")
    case = BeamCase(prompt=prompt(6), width=3, n=2, max_tokens=7, length_penalty=0.0)
    engine = InProcessEngine(model, config=ROOMY)
    outputs = engine.run([case.request(1, num_logprobs=5)])
    for index, output in enumerate(outputs.values()):
        logits = oracle(model).logits([*case.prompt, *output.token_ids])
        rows = logits.log_softmax(-1)[len(case.prompt) - 1 : -1]
        expected = [float(row[t]) for row, t in zip(rows, output.token_ids, strict=True)]
        assert output.logprobs == pytest.approx(expected, abs=1e-4), index
    first, second = (sum(output.logprobs) for output in outputs.values())
    assert first >= second
