from typing import Any

import pytest

from pagewire.columns import pack
from pagewire.v1 import inference_service_pb2 as inference_pb
from pagewire.v1 import sampling_pb2
from scheduler_service.columns import from_column
from scheduler_service.errors import InvalidArgument, PromptTooLong, UnsupportedByModel
from scheduler_service.frontend.input.processor import SEED_BITS, ResolvedRequest, resolve_request
from scheduler_service.frontend.models.adapters import RequestAdapter
from scheduler_service.frontend.models.frontend_model import FrontendModel, build_model
from scheduler_service.frontend.structured_output.constraint import to_lark
from tests.support.fake_core import model_info
from tests.support.frontends import generate_request
from tests.support.json_schemas import allows
from tests.support.tokenizers import EOS, byte_level, model_files, sentencepiece

EOS_ID = byte_level().token_to_id(EOS)
MODEL = build_model(model_info(structured_output=True), model_files(byte_level()))
BARE = build_model(model_info(), {})


def resolved(model: FrontendModel = MODEL, prompt: int = 10, **fields: Any) -> ResolvedRequest:
    return resolve_request(generate_request(list(range(3, 3 + prompt)), **fields), "r", model)


def with_defaults(**config: object) -> FrontendModel:
    return build_model(model_info(structured_output=True), model_files(byte_level(), **config))


def test_a_bare_request_gets_the_defaults_of_the_contract() -> None:
    request = resolved()
    sampling = request.submit.generation.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (1, 1, 0, 0)
    assert (sampling.repetition_penalty, sampling.presence_penalty) == (1, 0)
    assert not sampling.HasField("logprobs")
    assert not sampling.HasField("prompt_logprobs")
    assert request.submit.generation.num_choices == request.num_returned == 1
    assert request.submit.generation.max_tokens == 256 - 10
    assert from_column(request.submit.generation.stop_token_ids, "") == [EOS_ID]
    assert request.skip_special_tokens
    assert not request.include_stop


def test_the_models_author_fills_in_what_the_request_leaves_open() -> None:
    model = with_defaults(temperature=0.5, top_k=9, max_new_tokens=20, eos_token_id=[7])
    request = resolved(model, top_k=3)
    assert request.submit.generation.sampling.temperature == 0.5
    assert request.submit.generation.sampling.top_k == 3
    assert request.max_tokens == 20
    assert request.stop_token_ids == {EOS_ID, 7}
    assert resolved(model, temperature=0.0).submit.generation.sampling.temperature == 0


def test_tokens_may_wait_at_the_core_unless_stop_strings_are_looked_for_here() -> None:
    assert resolved(max_hold_ms=50).submit.generation.max_hold_ms == 50
    assert resolved(max_hold_ms=50, stop=["x"]).submit.generation.max_hold_ms == 0
    assert resolved().submit.generation.max_hold_ms == 0


def test_a_seed_is_drawn_once_and_fits_a_double() -> None:
    seeds = {resolved().seed for _ in range(50)}
    assert len(seeds) == 50
    assert max(seeds) < 2**SEED_BITS
    assert resolved(seed=2**64 - 1).submit.generation.sampling.seed == 2**64 - 1
    assert resolved(seed=0).seed == 0


def test_output_is_limited_to_the_room_the_prompt_leaves() -> None:
    assert resolved(max_tokens=10_000).max_tokens == 246
    assert resolved(prompt=255).max_tokens == 1


def test_output_without_a_limit_ends_where_the_kv_cache_does() -> None:
    small = build_model(model_info(max_cached_tokens=97), model_files(byte_level()))
    assert resolved(small).max_tokens == 87
    assert resolved(small, prompt=97).max_tokens == 1
    assert resolved(small, max_tokens=200).max_tokens == 200


def test_a_prompt_without_room_for_a_token_is_too_long_and_numbers_tell_why() -> None:
    with pytest.raises(PromptTooLong) as caught:
        resolved(prompt=256)
    assert caught.value.details == {"prompt_tokens": "256", "max_model_len": "256"}


def test_virtual_tokens_of_an_adapter_precede_the_prompt_and_count_as_tokens() -> None:
    adapter = RequestAdapter("model", "prompt", b"d" * 32, num_virtual_tokens=6)

    def with_prompt(prompt: int, **fields: Any) -> ResolvedRequest:
        request = generate_request(list(range(3, 3 + prompt)), **fields)
        return resolve_request(request, "r", MODEL, adapter)

    found = with_prompt(10)
    assert from_column(found.submit.prompt_token_ids, "") == [0] * 6 + list(range(3, 13))
    assert found.prompt_token_ids == list(range(3, 13))
    assert (found.num_prompt_tokens, found.max_tokens) == (16, 240)
    with pytest.raises(PromptTooLong):
        with_prompt(250)
    short = with_prompt(100, truncate_prompt_tokens=0, max_tokens=200)
    assert short.prompt_token_ids == list(range(53, 103))
    with pytest.raises(InvalidArgument, match="to leave room for a prompt within 250 tokens"):
        with_prompt(10, truncate_prompt_tokens=0, max_tokens=250)


def test_stop_tokens_come_beside_the_ends_of_sequence() -> None:
    request = resolved(stop_token_ids=[9, EOS_ID])
    assert request.stop_token_ids == {9, EOS_ID}
    assert request.reported_stop_token_ids == {9}


def test_ends_of_sequence_can_be_ignored() -> None:
    assert resolved(ignore_eos=True).submit.generation.stop_token_ids == b""
    request = resolved(ignore_eos=True, stop_token_ids=[EOS_ID])
    assert request.reported_stop_token_ids == {EOS_ID}


def test_min_tokens_holds_every_stop_token_back() -> None:
    request = resolved(min_tokens=4, stop_token_ids=[9])
    assert request.submit.generation.sampling.min_tokens == 4
    assert set(from_column(request.submit.generation.sampling.suppressed_token_ids, "")) == {
        9,
        EOS_ID,
    }
    assert resolved().submit.generation.sampling.suppressed_token_ids == b""


def test_bad_words_travel_as_token_sequences() -> None:
    words = resolved(bad_words=["fox"]).submit.generation.sampling.bad_words
    sequences = [from_column(word.token_ids, "") for word in words]
    assert [byte_level().decode(ids) for ids in sequences] == ["fox", " fox"]


def test_log_probabilities_travel_with_their_zero() -> None:
    sampling = resolved(logprobs=0, prompt_logprobs=3).submit.generation.sampling
    assert sampling.HasField("logprobs")
    assert (sampling.logprobs, sampling.prompt_logprobs) == (0, 3)


def test_candidates_are_as_many_choices_with_log_probabilities() -> None:
    request = resolved(n=2, best_of=5)
    assert (request.submit.generation.num_choices, request.num_returned) == (5, 2)
    assert request.submit.generation.sampling.HasField("logprobs")
    assert request.num_logprobs is None
    assert not request.is_streamed
    assert resolved(n=2, best_of=5, logprobs=3).submit.generation.sampling.logprobs == 3


def test_as_many_candidates_as_choices_are_just_choices() -> None:
    request = resolved(n=2, best_of=2)
    assert request.is_streamed
    assert not request.submit.generation.sampling.HasField("logprobs")


def test_a_search_is_settled_with_candidates_and_without_what_the_author_says_of_sampling() -> None:
    model = with_defaults(temperature=0.5, top_k=9, top_p=0.5, eos_token_id=[7])
    request = resolved(model, n=2, beam_search={"width": 4})
    beam, sampling = request.submit.generation.beam_search, request.submit.generation.sampling
    assert (beam.width, beam.length_penalty) == (4, 1.0)
    assert beam.early_stopping == sampling_pb2.EARLY_STOPPING_WHEN_HOPELESS
    assert request.submit.generation.num_choices == request.num_returned == 2
    assert not request.is_streamed
    assert sampling.num_candidates == 4 + len(request.stop_token_ids)
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0, 0, 1)


def test_a_search_has_candidates_for_the_log_probabilities_asked_for() -> None:
    sampling = resolved(beam_search={"width": 2}, logprobs=17).submit.generation.sampling
    assert sampling.num_candidates == 17


def test_more_candidates_than_the_vocabulary_has_are_the_vocabulary() -> None:
    model = build_model(model_info(vocab_size=30), model_files(byte_level()))
    assert (
        resolved(model, beam_search={"width": 64}).submit.generation.sampling.num_candidates == 30
    )


def test_a_single_beam_is_greedy() -> None:
    request = resolved(beam_search={"width": 1})
    assert not request.submit.generation.HasField("beam_search")
    assert not request.submit.generation.sampling.HasField("num_candidates")
    assert request.submit.generation.sampling.temperature == 0
    assert request.is_streamed


def test_top_k_beyond_the_vocabulary_is_the_vocabulary() -> None:
    assert resolved(top_k=2**32 - 1).submit.generation.sampling.top_k == model_info().vocab_size


@pytest.mark.parametrize(
    ("prompt", "fields"), [("text", {}), ([3], {"stop": ["x"]}), ([3], {"bad_words": ["x"]})]
)
def test_without_a_tokenizer_what_needs_text_is_refused(prompt: Any, fields: Any) -> None:
    request = generate_request(prompt, **fields)
    with pytest.raises(UnsupportedByModel, match="no tokenizer") as caught:
        resolve_request(request, "r", BARE)
    assert caught.value.reason == "NO_TOKENIZER"


def test_without_a_tokenizer_token_ids_work_and_there_is_no_text() -> None:
    request = resolved(BARE)
    assert request.make_detokenizer().push(5) == request.make_detokenizer().flush() == ""
    assert request.token_text(5) == ""


def test_output_goes_on_with_its_prompt_and_an_answer_begins_a_text() -> None:
    info = model_info(vocab_size=1000, structured_output=True)
    model = build_model(info, model_files(sentencepiece()))
    word = sentencepiece().token_to_id("▁hello")
    continued = {"role": "user", "content": "a"}, {"role": "assistant", "content": "a"}

    def text_after(**prompt: Any) -> str:
        request = inference_pb.GenerateRequest(**prompt)
        return resolve_request(request, "r", model).make_detokenizer().push(word)

    assert text_after(text="a") == text_after(token_ids={"ids": [word]}) == " hello"
    assert text_after(chat={"messages": continued[:1]}) == "hello"
    regex = {"regex": " hello"}
    assert text_after(chat={"messages": continued[:1]}, sampling_params=regex) == " hello"
    assert text_after(chat={"messages": continued, "continue_final_message": True}) == " hello"


def test_tokenizer_files_that_cannot_be_used_leave_token_ids_working() -> None:
    model = build_model(model_info(), {"tokenizer.json": b"{}"})
    assert resolved(model).submit.prompt_token_ids == pack(range(3, 13))
    with pytest.raises(UnsupportedByModel, match="cannot be used"):
        model.require_tokenizer("text")


def constraint_of(model: FrontendModel = MODEL, **fields: Any) -> sampling_pb2.Constraint:
    sampling = resolved(model, **fields).submit.generation.sampling
    assert sampling.suppressed_token_ids == b""
    assert sampling.HasField("constraint")
    return sampling.constraint


def ends_of(constraint: sampling_pb2.Constraint) -> tuple[set[int], set[int]]:
    return (
        set(from_column(constraint.end_token_ids, "")),
        set(from_column(constraint.last_token_ids, "")),
    )


def test_a_worker_is_told_what_the_output_must_match_and_what_may_end_it() -> None:
    assert not resolved().submit.generation.sampling.HasField("constraint")
    constraint = constraint_of(regex="a+", stop_token_ids=[9], min_tokens=4)
    assert (constraint.regex, ends_of(constraint)) == ("a+", ({9, EOS_ID}, set()))
    assert constraint_of(json_schema="{}").json_schema == "{}"
    assert constraint_of(grammar="start: A").grammar == "start: A"
    gbnf = constraint_of(grammar='root ::= "a" tail\ntail ::= [b-d]+')
    to_lark(gbnf)
    assert [allows(gbnf.grammar, text) for text in ("abcd", "a", "b")] == [True, False, False]
    assert constraint_of(choice={"choices": ["a", "b"]}).choice.choices == ["a", "b"]
    assert not constraint_of(regex="a").HasField("thought")
    thought = {"start": "<think>", "ends": ["</think>", "<answer>"], "other_starts": ["<t>"]}
    assert constraint_of(regex="a", thought=thought).thought == sampling_pb2.Thought(**thought)


def test_a_constraint_of_a_chat_applies_after_the_models_thought() -> None:
    files = model_files(byte_level())
    template = files["chat_template.jinja"] + b"{# <think></think> #}"
    thinking = build_model(
        model_info(structured_output=True), files | {"chat_template.jinja": template}
    )
    request = inference_pb.GenerateRequest()
    request.chat.messages.add(role="user", content="hello")
    request.sampling_params.regex = "a"

    def thought() -> sampling_pb2.Thought:
        return resolve_request(request, "r", thinking).submit.generation.sampling.constraint.thought

    other_starts = ["\n<think>", "\n\n<think>", " <think>"]
    assert thought() == sampling_pb2.Thought(
        start="<think>", ends=["</think>"], other_starts=other_starts
    )
    request.sampling_params.thought.ends.append("so:")
    assert thought() == sampling_pb2.Thought(ends=["so:"]), "the request's own"
    assert not constraint_of(thinking, regex="a").HasField("thought"), "it is no chat"


def test_an_end_of_sequence_that_is_ignored_ends_what_cannot_go_on() -> None:
    assert ends_of(constraint_of(regex="a", ignore_eos=True)) == (set(), {EOS_ID})
    asked = constraint_of(regex="a", ignore_eos=True, stop_token_ids=[9])
    assert ends_of(asked) == ({9}, {EOS_ID})
    also = constraint_of(regex="a", ignore_eos=True, stop_token_ids=[EOS_ID])
    assert EOS_ID in ends_of(also)[0]
    request = resolved(regex="a", ignore_eos=True)
    assert EOS_ID in request.stop_token_ids


def test_only_allowed_tokens_may_be_in_the_output_and_end_it() -> None:
    constraint = constraint_of(allowed_token_ids=[9, 5, 4, 9, 6, EOS_ID], stop_token_ids=[6, 7])
    assert constraint.grammar == f"start: <[{EOS_ID},4-6,9]>*"
    assert ends_of(constraint) == ({6, EOS_ID}, set())
    assert not constraint.HasField("thought")
    assert ends_of(constraint_of(allowed_token_ids=[5], min_tokens=2)) == (set(), set())
    ignored = constraint_of(allowed_token_ids=[5, EOS_ID], ignore_eos=True)
    assert ends_of(ignored) == (set(), set()), "a token like others"
    with pytest.raises(InvalidArgument, match="vocabulary size") as caught:
        resolved(allowed_token_ids=[1, 10**6])
    assert caught.value.field == "sampling_params.allowed_token_ids[1]"
    plain = build_model(model_info(), model_files(byte_level()))
    with pytest.raises(UnsupportedByModel, match="structured output"):
        resolved(plain, allowed_token_ids=[1])


def test_structured_output_needs_a_token_that_ends_it() -> None:
    info = model_info(eos_token_ids=b"", structured_output=True)
    endless = build_model(info, model_files(byte_level()) | {"tokenizer_config.json": b"{}"})
    with pytest.raises(InvalidArgument, match="no end of sequence") as caught:
        resolved(endless, regex="a")
    assert caught.value.field == "sampling_params.stop_token_ids"
    assert ends_of(constraint_of(endless, regex="a", stop_token_ids=[9])) == ({9}, set())
