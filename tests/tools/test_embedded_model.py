"""The artefacts of the embedded model, as they are shipped."""

import json
from pathlib import Path
from random import Random

import pytest
import torch
from safetensors import safe_open

from tools.embedded_model.arithmetic import QUESTIONS, Pair, held_out_pairs
from tools.embedded_model.documents import Exchange
from tools.embedded_model.evaluate import EmbeddedModel, plain_sums

DIRECTORY = Path(__file__).parents[2] / "worker_service" / "embedded_model"
MAX_WEIGHT_BYTES = 5_000_000
NUM_PAIRS = 250
MIN_ACCURACY = 0.95


@pytest.fixture(scope="module")
def model() -> EmbeddedModel:
    return EmbeddedModel(DIRECTORY)


@pytest.fixture(scope="module")
def pairs() -> list[Pair]:
    return Random(0).sample(list(held_out_pairs()), NUM_PAIRS)


def test_weights_are_small_and_of_the_type_that_the_config_names() -> None:
    path = DIRECTORY / "model.safetensors"
    config = json.loads((DIRECTORY / "config.json").read_text())
    assert path.stat().st_size <= MAX_WEIGHT_BYTES
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["num_key_value_heads"] < config["num_attention_heads"]
    with safe_open(path, framework="pt") as weights:
        dtypes = {weights.get_tensor(name).dtype for name in weights.keys()}  # noqa: SIM118
    assert dtypes == {getattr(torch, config["dtype"])}


def test_unseen_sums_are_right_in_plain_form(model: EmbeddedModel, pairs: list[Pair]) -> None:
    assert model.accuracy(plain_sums(pairs)) >= MIN_ACCURACY


def test_unseen_sums_are_right_in_chat_form(model: EmbeddedModel, pairs: list[Pair]) -> None:
    exchanges = [Exchange(QUESTIONS[0].format(a=a, b=b), f"{a} + {b} = {a + b}.") for a, b in pairs]
    questions = [model.chat_question(exchange) for exchange in exchanges]
    assert model.accuracy(questions) >= MIN_ACCURACY


def test_a_story_has_an_end_and_is_about_its_subject(model: EmbeddedModel) -> None:
    question = model.chat_question(Exchange("Write a story about a cat.", ""))
    (story,) = model.complete([question.prompt], max_new_tokens=300)
    assert story is not None
    assert story.startswith("Once upon a time")
    assert "cat" in story
    assert len(story.split()) > 40


def test_every_position_gives_finite_logits(model: EmbeddedModel) -> None:
    length = model.model.config.max_position_embeddings
    token_ids = torch.arange(length)[None] % model.model.config.vocab_size
    assert model.model(token_ids).logits.isfinite().all()


def test_the_chat_template_renders_several_turns_and_a_system_message(
    model: EmbeddedModel,
) -> None:
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Say hello."},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": " What is 1 + 2?\n"},
    ]
    text = model.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|bos|><|system|>Be kind.<|end|><|user|>Say hello.<|end|><|assistant|>Hello!<|end|>"
        "<|user|>What is 1 + 2?<|end|><|assistant|>"
    )


def test_the_chat_template_renders_a_call_and_its_result(model: EmbeddedModel) -> None:
    function = {"name": "add", "arguments": {"numbers": [1, 2]}}
    messages = [
        {"role": "user", "content": "What is 1 + 2?"},
        {"role": "assistant", "tool_calls": [{"type": "function", "function": function}]},
        {"role": "tool", "content": " 3"},
    ]
    text = model.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == (
        '<|bos|><|user|>What is 1 + 2?<|end|><|assistant|>{"name": "add", "arguments": '
        '{"numbers": [1, 2]}}<|end|><|user|>3<|end|><|assistant|>'
    )


def test_both_ends_stop_generation(model: EmbeddedModel) -> None:
    ends = model.tokenizer.convert_tokens_to_ids(["<|eos|>", "<|end|>"])
    assert model.model.generation_config.eos_token_id == ends
