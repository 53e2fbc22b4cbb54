"""The artefacts of the embedded model, as they are shipped."""

import hashlib
import json
from pathlib import Path
from random import Random

import pytest
import torch
from safetensors import safe_open
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast

DIRECTORY = Path(__file__).parents[2] / "worker_service" / "embedded_model"
MAX_WEIGHT_BYTES = 5_000_000
NUM_PAIRS = 250
MIN_ACCURACY = 0.95


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(DIRECTORY)


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(DIRECTORY, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def pairs() -> list[tuple[int, int]]:
    """Some pairs of numbers whose sums were not trained on."""
    numbers = [(a, b) for a in range(100) for b in range(100) if is_held_out(a, b)]
    assert len(numbers) == 1728
    return Random(0).sample(numbers, NUM_PAIRS)


def is_held_out(a: int, b: int) -> bool:
    """The rule in the model's README.md."""
    name = f"20:{min(a, b)}+{max(a, b)}"
    return hashlib.sha256(name.encode()).digest()[0] * 100 < 17 * 256


@torch.inference_mode()
def completions(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    prompts: list[str],
    max_new_tokens: int,
) -> list[str | None]:
    """The greedy text after each prompt; None if the model did not end it."""
    inputs = tokenizer(prompts, padding=True, return_tensors="pt", return_token_type_ids=False)
    outputs = model.generate(**inputs, max_new_tokens=max_new_tokens)
    ends = torch.tensor(model.generation_config.eos_token_id)
    return [
        tokenizer.decode(row, skip_special_tokens=True) if torch.isin(row, ends).any() else None
        for row in outputs[:, inputs.input_ids.shape[1] :]
    ]


def chat(tokenizer: PreTrainedTokenizerFast, question: str) -> str:
    """A question as a prompt, without the token that begins every text."""
    messages = [{"role": "user", "content": question}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return str(text).removeprefix(tokenizer.bos_token)


def test_weights_are_small_and_of_the_type_that_the_config_names() -> None:
    path = DIRECTORY / "model.safetensors"
    config = json.loads((DIRECTORY / "config.json").read_text())
    assert path.stat().st_size <= MAX_WEIGHT_BYTES
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["num_key_value_heads"] < config["num_attention_heads"]
    with safe_open(path, framework="pt") as weights:
        dtypes = {weights.get_tensor(name).dtype for name in weights.keys()}  # noqa: SIM118
    assert dtypes == {getattr(torch, config["dtype"])}


@pytest.mark.parametrize("is_chat", [False, True])
def test_unseen_sums_are_right(
    is_chat: bool,
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    pairs: list[tuple[int, int]],
) -> None:
    if is_chat:
        prompts = [chat(tokenizer, f"What is {a} + {b}?") for a, b in pairs]
        expected = [f"{a} + {b} = {a + b}." for a, b in pairs]
    else:
        prompts = [f"{a} + {b} =" for a, b in pairs]
        expected = [f" {a + b}\n" for a, b in pairs]
    answers = completions(model, tokenizer, prompts, 20)
    assert sum(map(str.__eq__, expected, map(str, answers))) >= MIN_ACCURACY * NUM_PAIRS


def test_a_story_has_an_end_and_is_about_its_subject(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast
) -> None:
    prompt = chat(tokenizer, "Write a story about a cat.")
    (story,) = completions(model, tokenizer, [prompt], 300)
    assert story is not None
    assert story.startswith("Once upon a time")
    assert "cat" in story
    assert len(story.split()) > 40


def test_the_chat_template_renders_several_turns_and_a_system_message(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Say hello."},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": " What is 1 + 2?\n"},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|bos|><|system|>Be kind.<|end|><|user|>Say hello.<|end|><|assistant|>Hello!<|end|>"
        "<|user|>What is 1 + 2?<|end|><|assistant|>"
    )


def test_the_chat_template_renders_a_call_and_its_result(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    function = {"name": "add", "arguments": {"numbers": [1, 2]}}
    messages = [
        {"role": "user", "content": "What is 1 + 2?"},
        {"role": "assistant", "tool_calls": [{"type": "function", "function": function}]},
        {"role": "tool", "content": " 3"},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == (
        '<|bos|><|user|>What is 1 + 2?<|end|><|assistant|>{"name": "add", "arguments": '
        '{"numbers": [1, 2]}}<|end|><|user|>3<|end|><|assistant|>'
    )


@pytest.mark.parametrize(
    "text",
    [
        "  two  spaces\tand a tab \r\n",
        "Grüße, 你好, שלום, नमस्ते",
        "emoji 👩‍👩‍👧 and a lone accent \u0301",
        "\x00\x01\x7f",
        "12345 + 67 = ١٢٣",
        "",
    ],
)
def test_any_text_round_trips(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    token_ids = tokenizer.encode(text)
    assert token_ids[0] == tokenizer.bos_token_id
    assert tokenizer.decode(token_ids[1:], skip_special_tokens=False) == text
