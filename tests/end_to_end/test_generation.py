"""Real services and the embedded model give what `transformers` gives."""

import pytest

from pagewire.v1 import inference_service_pb2 as pb
from pagewire.v1.inference_service_pb2_grpc import InferenceServiceStub
from tests.end_to_end.conftest import Reference
from tests.support.cluster import Cluster
from tests.support.requests import generate, generate_together, inference_stub, request_for

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


def test_the_best_candidates_are_those_that_come_as_choices_otherwise(
    stub: InferenceServiceStub,
) -> None:
    sampling = {"temperature": 1.0, "seed": 11, "max_tokens": 12}
    all_of_them = generate(stub, request_for("One day", n=5, logprobs=0, **sampling))
    scored = [
        (sum(entry.token.logprob for entry in choice.logprobs), choice)
        for _, choice in sorted(all_of_them.choices.items())
    ]
    scored.sort(key=lambda pair: -pair[0])
    best = generate(stub, request_for("One day", n=2, best_of=5, **sampling))
    assert [best.choices[i].token_ids for i in range(2)] == [c.token_ids for _, c in scored[:2]]
    assert [best.choices[i].text for i in range(2)] == [c.text for _, c in scored[:2]]
    assert not best.choices[0].logprobs
    assert best.usage is not None
    assert best.usage.completion_tokens == sum(len(choice.token_ids) for _, choice in scored)


@pytest.mark.parametrize("early_stopping", [True, False, "never"])
def test_beams_are_those_of_transformers(
    stub: InferenceServiceStub, reference: Reference, early_stopping: bool | str
) -> None:
    told = {True: 1, False: 2, "never": 3}[early_stopping]
    prompts = [reference.encode(text) for text in PROMPTS[:5]]
    widths = (2, 3, 5, 4, 1)
    plain = request_for(prompts[0], temperature=0, max_tokens=16)
    answers = generate_together(
        stub,
        [
            request_for(
                prompt,
                n=(width + 1) // 2,
                max_tokens=16,
                beam_search={"width": width, "early_stopping": told, "length_penalty": 0.5},
            )
            for prompt, width in zip(prompts, widths, strict=True)
        ]
        + [plain],
    )
    for prompt, width, answer in zip(prompts, widths, answers, strict=False):
        expected = reference.beams(
            prompt, 16, width, early_stopping=early_stopping, length_penalty=0.5
        )
        found = [answer.choices[i].token_ids for i in range((width + 1) // 2)]
        assert found == expected[: len(found)]
    assert answers[-1].token_ids == reference.greedy(prompts[0], 16)


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


def test_a_seeded_request_gives_the_same_tokens_after_preemption(
    stub: InferenceServiceStub, tmp_path_factory: pytest.TempPathFactory
) -> None:
    requests = [
        sampled(PROMPTS[i % len(PROMPTS)], seed=i, repetition_penalty=1.1, presence_penalty=0.5)
        for i in range(12)
    ]
    undisturbed = [a.token_ids for a in generate_together(stub, requests)]
    folder = tmp_path_factory.mktemp("tight")
    with Cluster(folder, worker_flags=tight_memory(stub), core_flags=["--watermark", "0"]) as tight:
        tight.start()
        with inference_stub(tight.frontend_address()) as tight_stub:
            answers = generate_together(tight_stub, requests)
            status = tight_stub.GetStatus(pb.GetStatusRequest()).status
    assert status.num_preemptions > 0
    assert [a.token_ids for a in answers] == undisturbed


def tight_memory(stub: InferenceServiceStub, num_blocks: int = 16) -> list[str]:
    """Flags for a worker with room for a few sequences only."""
    model = stub.GetModel(pb.GetModelRequest()).model
    num_bytes = num_blocks * 16 * (model.block_bytes // model.cache_groups[0].block_tokens)
    return ["--dtype", "float32", "--block-size", "16", "--kv-cache-memory", str(num_bytes)]


def test_choices_of_one_request_differ_and_repeat(stub: InferenceServiceStub) -> None:
    request = sampled("Once upon a time there was", seed=11, n=4)
    first, second = generate_together(stub, [request, request])
    tokens = [first.choices[i].token_ids for i in range(4)]
    assert len({tuple(t) for t in tokens}) == 4
    assert [second.choices[i].token_ids for i in range(4)] == tokens
    alone = generate(stub, sampled("Once upon a time there was", seed=11))
    assert alone.token_ids == tokens[0]


def test_a_drawn_seed_is_told_and_repeats_the_answer(stub: InferenceServiceStub) -> None:
    unseeded = request_for("Once upon a time", temperature=1.0, max_tokens=20)
    first = generate(stub, unseeded)
    assert first.started is not None
    unseeded.sampling_params.seed = first.started.seed
    assert generate(stub, unseeded).token_ids == first.token_ids


def test_a_stop_string_ends_the_text_before_it(stub: InferenceServiceStub) -> None:
    free = generate(stub, request_for("Once upon a time", temperature=0, max_tokens=40))
    stop = free.text[10:14]
    answer = generate(
        stub, request_for("Once upon a time", temperature=0, max_tokens=40, stop=[stop])
    )
    assert answer.text == free.text[: free.text.index(stop)]
    assert answer.choices[0].finish_reason == pb.FINISH_REASON_STOP


def test_max_tokens_and_min_tokens_are_kept(stub: InferenceServiceStub) -> None:
    short = generate(stub, request_for("5 + 5 =", temperature=0, max_tokens=2, ignore_eos=True))
    assert len(short.token_ids) == 2
    assert short.choices[0].finish_reason == pb.FINISH_REASON_LENGTH
    long = generate(stub, request_for("5 + 5 =", temperature=0, max_tokens=40, min_tokens=30))
    assert len(long.token_ids) >= 30


def test_chat_answers_an_addition(stub: InferenceServiceStub) -> None:
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="What is 20 + 31?")])
    request = pb.GenerateRequest(chat=chat)
    request.sampling_params.temperature = 0
    request.sampling_params.max_tokens = 30
    answer = generate(stub, request)
    assert "51" in answer.text
    assert answer.choices[0].finish_reason == pb.FINISH_REASON_STOP


def test_usage_and_timings_add_up(stub: InferenceServiceStub) -> None:
    answer = generate(stub, request_for("Once upon a time", temperature=0, max_tokens=20, n=2))
    assert answer.usage is not None
    assert answer.timings is not None
    assert answer.started is not None
    assert answer.usage.prompt_tokens == len(answer.started.prompt_token_ids)
    assert answer.usage.completion_tokens == sum(len(c.token_ids) for c in answer.choices.values())
    parts = [field for field, _ in answer.timings.ListFields() if field.name != "total_us"]
    total = sum(getattr(answer.timings, field.name) for field in parts)
    assert total == pytest.approx(answer.timings.total_us, rel=0.01)
