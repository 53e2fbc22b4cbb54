"""Real services and the embedded model give what `transformers` gives."""

import pytest

from pagewire.v1 import inference_service_pb2 as pb
from pagewire.v1.inference_service_pb2_grpc import InferenceServiceStub
from tests.end_to_end.conftest import Reference
from tests.support.requests import generate, generate_together, request_for

PROMPTS = [
    "Once upon a time",
    "27 + 45 =",
    "Count from 3 to 9:",
    "One day, a small cat named Tom",
    "The days of the week are Monday,",
    "A",
    "12 + 7 =",
    "There was a girl who lived by the sea. She liked to walk on the sand and look for shells. "
    "One morning she found a big blue shell and",
    "January, February, March,",
    "5 6 7 8",
    "The dog said",
    "Reverse the word lamp:",
]


def test_ragged_prompts_together_give_the_tokens_of_transformers(
    stub: InferenceServiceStub, reference: Reference
) -> None:
    prompts = [reference.encode(text) for text in PROMPTS]
    answers = generate_together(
        stub, [request_for(p, temperature=0, max_tokens=24) for p in prompts]
    )
    assert [a.token_ids for a in answers] == [reference.greedy(p, 24) for p in prompts]


def test_text_is_the_decoded_tokens_and_deltas_are_never_rewritten(
    stub: InferenceServiceStub, reference: Reference
) -> None:
    for text in PROMPTS[:4]:
        answer = generate(stub, request_for(text, temperature=0, max_tokens=40))
        decoded = reference.tokenizer.decode(answer.token_ids, skip_special_tokens=True)
        assert answer.text == decoded
        assert answer.started is not None
        assert list(answer.started.prompt_token_ids) == reference.encode(text)


def test_log_probabilities_agree_with_transformers(
    stub: InferenceServiceStub, reference: Reference
) -> None:
    prompt = reference.encode(PROMPTS[7])
    request = request_for(prompt, temperature=0, max_tokens=12, logprobs=3, prompt_logprobs=2)
    answer = generate(stub, request)
    expected = reference.logprobs(prompt + answer.token_ids)
    assert len(answer.choices[0].logprobs) == len(answer.token_ids)
    for offset, entry in enumerate(answer.choices[0].logprobs):
        row = expected[len(prompt) + offset - 1]
        check_entry(entry, row, answer.token_ids[offset], 3)
    assert len(answer.prompt_logprobs) == len(prompt)
    assert not answer.prompt_logprobs[0].token.HasField("logprob")
    for position in range(1, len(prompt)):
        check_entry(answer.prompt_logprobs[position], expected[position - 1], prompt[position], 2)


def check_entry(entry: pb.TokenLogprobs, row: object, token_id: int, num_top: int) -> None:
    assert entry.token.token_id == token_id
    assert entry.token.logprob == pytest.approx(float(row[token_id]), abs=1e-4)  # type: ignore[index]
    values, ids = row.topk(num_top)  # type: ignore[attr-defined]
    assert [top.token_id for top in entry.top] == ids.tolist()
    assert [top.logprob for top in entry.top] == pytest.approx(values.tolist(), abs=1e-4)


def sampled(text: str, seed: int, **extra: object) -> pb.GenerateRequest:
    return request_for(
        text, temperature=1.5, top_p=0.98, seed=seed, max_tokens=40, ignore_eos=True, **extra
    )


def test_a_seeded_request_gives_the_same_tokens_alone_and_in_a_batch_of_32(
    stub: InferenceServiceStub,
) -> None:
    requests = [sampled(PROMPTS[i % len(PROMPTS)], seed=i) for i in range(32)]
    together = [a.token_ids for a in generate_together(stub, requests)]
    assert len({tuple(tokens) for tokens in together}) > 24
    for index in (0, 7, 13, 31):
        assert generate(stub, requests[index]).token_ids == together[index]
