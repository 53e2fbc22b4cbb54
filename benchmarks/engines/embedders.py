"""Libraries that make vectors of texts, each in a child process under a Python that has it.

`python -m benchmarks.engines.embedders '{"library": "onnxruntime", …}'` answers as
`benchmarks.measuring.json_lines` describes.
"""

import atexit
import base64
import http.client
import json
import subprocess
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measuring.json_lines import answer_lines

BATCH_SIZE, MAX_TOKENS = 16, 256
"""Of 4 to 256 texts in a batch, this many are the fastest for texts of 10 to 256 tokens."""

GPU_BATCH_SIZE = 64

Embed = Callable[[list[str]], Any]
"""Normalized vectors of texts, [num_texts, size]."""


def sentence_transformers(settings: dict[str, Any]) -> Embed:
    """`SentenceTransformer.encode`, which sorts texts by length."""
    import torch
    from sentence_transformers import SentenceTransformer

    torch.set_num_threads(settings["threads"])
    model = SentenceTransformer(settings["model"], device="cpu")
    return lambda texts: model.encode(texts, batch_size=BATCH_SIZE)


def onnxruntime(settings: dict[str, Any]) -> Embed:
    """A session of `onnxruntime`, for texts sorted by length as well."""
    import onnxruntime as ort

    tokenizer = _padding_tokenizer(settings["model"])
    options = ort.SessionOptions()
    options.intra_op_num_threads = settings["threads"]
    session = ort.InferenceSession(settings["onnx"], options, providers=["CPUExecutionProvider"])

    def sums_of(texts: list[str]) -> Any:
        encodings = tokenizer.encode_batch(texts)
        ids = np.array([encoding.ids for encoding in encodings])
        mask = np.array([encoding.attention_mask for encoding in encodings])
        inputs = {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}
        return (session.run(None, inputs)[0] * mask[:, :, None]).sum(1)

    return _in_batches(sums_of, BATCH_SIZE)


def transformers(settings: dict[str, Any]) -> Embed:
    """A model of `transformers`, for texts sorted by length as well."""
    import torch
    from transformers import AutoModel

    torch.set_num_threads(settings["threads"])
    tokenizer, device = _padding_tokenizer(settings["model"]), settings["device"]
    dtype = getattr(torch, settings["dtype"])
    model = AutoModel.from_pretrained(settings["model"], dtype=dtype).eval().to(device)

    def sums_of(texts: list[str]) -> Any:
        encodings = tokenizer.encode_batch(texts)
        ids = torch.tensor([encoding.ids for encoding in encodings], device=device)
        mask = torch.tensor([encoding.attention_mask for encoding in encodings], device=device)
        with torch.inference_mode():
            hidden = model(input_ids=ids, attention_mask=mask).last_hidden_state.float()
        return (hidden * mask[:, :, None]).sum(1).cpu().numpy()

    return _in_batches(sums_of, BATCH_SIZE if device == "cpu" else GPU_BATCH_SIZE)


def _padding_tokenizer(model: str) -> Any:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(f"{model}/tokenizer.json")
    tokenizer.enable_truncation(MAX_TOKENS)
    tokenizer.enable_padding()
    return tokenizer


def _in_batches(sums_of: Embed, size: int) -> Embed:
    """Embed texts of similar lengths together. sums_of: the sums of all tokens' vectors."""

    def embed(texts: list[str]) -> Any:
        order = sorted(range(len(texts)), key=lambda i: -len(texts[i]))
        batches = [order[at : at + size] for at in range(0, len(order), size)]
        sums = np.concatenate([sums_of([texts[i] for i in batch]) for batch in batches])
        # The direction of a sum is that of the mean.
        return (sums / np.linalg.norm(sums, axis=1, keepdims=True))[np.argsort(order)]

    return embed


def fastembed(settings: dict[str, Any]) -> Embed:
    """`TextEmbedding.embed` of the same file, which must be called `model.onnx`."""
    from fastembed import TextEmbedding

    model = TextEmbedding(
        "sentence-transformers/all-MiniLM-L6-v2",
        specific_model_path=str(Path(settings["onnx"]).parent),
        threads=settings["threads"],
    )
    return lambda texts: np.array(list(model.embed(texts, batch_size=BATCH_SIZE)))


def llama_server(settings: dict[str, Any]) -> Embed:
    """llama.cpp's server, which forms its own batches."""
    port, threads = settings["port"], settings["threads"]
    flags = f"--embeddings --pooling mean -t {threads} -b 4096 -ub 4096 -np 32 -c 16384"
    flags += f" -m {settings['gguf']} --port {port}"
    server = subprocess.Popen([settings["server"], *flags.split()], stdout=subprocess.DEVNULL)
    atexit.register(server.kill)
    while server.poll() is None:
        try:
            embed = over_http(f"127.0.0.1:{port}")
            embed(["It loads the model first."])
            return embed
        except (OSError, KeyError):
            time.sleep(0.1)
    raise RuntimeError(f"{settings['server']} ended with {server.returncode}")


def over_http(address: str) -> Embed:
    """A server's `/v1/embeddings`, on one connection, or on another one after the server has closed
    it: it is idle while others are measured."""
    connection = http.client.HTTPConnection(address)

    def embed(texts: list[str]) -> Any:
        body = json.dumps({"input": texts, "encoding_format": "base64"})
        arguments = "POST", "/v1/embeddings", body, {"Content-Type": "application/json"}
        try:
            connection.request(*arguments)
            response = connection.getresponse()
        except ConnectionError:
            connection.close()
            connection.request(*arguments)
            response = connection.getresponse()
        items = json.load(response)["data"]
        values = b"".join(base64.b64decode(item["embedding"]) for item in items)
        return np.frombuffer(values, dtype=np.float32).reshape(len(texts), -1)

    return embed


def timed(embed: Embed, texts: list[str], repeats: int) -> tuple[Any, list[float]]:
    """The vectors of texts, and the seconds of each of several calls."""
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        vectors = embed(texts)
        seconds.append(time.perf_counter() - began)
    return vectors, seconds


class Embedder:
    """The child's end."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._library = settings["library"]
        self._embed: Embed = globals()[self._library](settings)

    def about(self) -> dict[str, Any]:
        """Its name and version."""
        name = self._library.replace("_", "-")
        return {"name": name if name == "llama-server" else f"{name} {version(name)}"}

    def answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        """The vectors of the texts, and the seconds of each repeat."""
        vectors, seconds = timed(self._embed, asked["texts"], asked["repeats"])
        return {"vectors": vectors.tolist(), "seconds": seconds}


if __name__ == "__main__":
    answer_lines(Embedder, Embedder.answer)
