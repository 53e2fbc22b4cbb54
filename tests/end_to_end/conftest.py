"""One set of real services with the embedded model, shared by the tests that do not harm it."""

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from pagewire.v1.inference_service_pb2_grpc import InferenceServiceStub
from tests.support.cluster import Cluster
from tests.support.requests import inference_stub
from tests.support.worker_flags import FLOAT32
from tools.launch import ROOT

EMBEDDED = ROOT / "worker_service/embedded_model"


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("cluster")
    flags = {"worker_flags": FLOAT32, "frontend_flags": ["--http", "127.0.0.1:0"]}
    with Cluster(folder, **flags) as cluster:
        yield cluster.start()


@pytest.fixture
def stub(cluster: Cluster) -> Iterator[InferenceServiceStub]:
    with inference_stub(cluster.frontend_address()) as stub:
        yield stub


@pytest.fixture
def openai_client(cluster: Cluster) -> Iterator[openai.OpenAI]:
    url = f"{cluster.http_url()}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60) as client:
        yield client


class Reference:
    """The embedded model in `transformers`, float32."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer(text)["input_ids"])

    def greedy(self, prompt: list[int], max_tokens: int, *, ignore_eos: bool = False) -> list[int]:
        """Output tokens of `generate`, the end-of-sequence token included."""
        options: dict[str, object] = {"min_new_tokens": max_tokens} if ignore_eos else {}
        with torch.inference_mode():
            output = self.model.generate(
                torch.tensor([prompt]), max_new_tokens=max_tokens, do_sample=False, **options
            )
        return output[0, len(prompt) :].tolist()

    def logprobs(self, token_ids: list[int]) -> torch.Tensor:
        """Log probabilities [len(token_ids), vocab] of each position's next token."""
        with torch.inference_mode():
            return self.model(torch.tensor([token_ids])).logits[0].log_softmax(-1)


@pytest.fixture(scope="session")
def reference() -> Reference:
    return Reference(EMBEDDED)
