"""A group of two ranks as real services: one rank's tokens, also when its ranks are killed."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from pagewire.v1 import inference_service_pb2 as pb
from pagewire.v1 import sampling_pb2
from tests.support.cluster import Cluster
from tests.support.eagle_heads import head_for
from tests.support.requests import Answer, generate, generate_together, inference_stub, request_for
from tests.support.worker_flags import FLOAT32

NUM_TOKENS = 120
PROMPTS = ("Once upon a time", "The sun", "A", "One day a little dog went to the park and")


def requests(max_tokens: int) -> list[pb.GenerateRequest]:
    """Greedy, so that sums in another order make no difference but in a tie."""
    return [
        request_for(prompt, temperature=0.0, max_tokens=max_tokens, ignore_eos=True, logprobs=1)
        for prompt in PROMPTS
    ]


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Cluster]:
    flags = [*FLOAT32, "--tensor-parallel-size", "2", "--threads", "1"]
    with Cluster(tmp_path, worker_flags=flags) as group:
        yield group.start()


def ranks_of(launcher_pid: int) -> dict[int, int]:
    """Process ids of a launcher's children by rank."""
    children = Path(f"/proc/{launcher_pid}/task/{launcher_pid}/children").read_text().split()
    command_lines = {pid: Path(f"/proc/{pid}/cmdline").read_text().split("\0") for pid in children}
    return {int(words[words.index("--rank") + 1]): int(p) for p, words in command_lines.items()}


@pytest.mark.parametrize(
    "victims", [[1], pytest.param([1, 0], marks=pytest.mark.long)], ids=["one", "each"]
)
def test_two_ranks_answer_as_one_and_survive_each_others_death(
    victims: list[int], group: Cluster, cluster: Cluster
) -> None:
    bound = request_for("One day", regex="[a-z]{3}(?: [a-z]{2,5})*", temperature=0.0, max_tokens=40)
    with inference_stub(cluster.frontend_address()) as stub:
        alone = generate_together(stub, [*requests(NUM_TOKENS), bound])
    launcher = group.workers[0]
    before = ranks_of(launcher.process.pid)
    assert sorted(before) == [0, 1]
    with inference_stub(group.frontend_address()) as stub:
        disturbed = _generate_killing(stub, launcher.process.pid, victims)
        assert generate(stub, bound).text == alone[-1].text
    assert disturbed.token_ids == alone[0].token_ids
    assert len(disturbed.token_ids) == NUM_TOKENS
    pairs = zip(disturbed.choices[0].logprobs, alone[0].choices[0].logprobs, strict=True)
    assert max(abs(ours.token.logprob - theirs.token.logprob) for ours, theirs in pairs) < 1e-4
    after = ranks_of(launcher.process.pid)
    assert all((after[rank] != before[rank]) == (rank in victims) for rank in before)
    num_loads = 2 + len(victims)
    assert launcher.log.count("model loaded") == num_loads, "each rank and each that replaced one"


@pytest.mark.parametrize("speculative", ["eagle", pytest.param("draft", marks=pytest.mark.long)])
def test_two_stages_keep_drafts_and_every_bit_also_when_one_is_killed(
    speculative: str, cluster: Cluster, tmp_path: Path
) -> None:
    """A bias on one token makes every draft of a random head right: how many drafts a worker
    computes depends on the time that they save, so that one right draft in some would not do."""
    head = head_for(hidden_size=128, vocab_size=1024)
    drafted = load_file(head / "model.safetensors")["d2t"] + torch.arange(1024 // 3)
    bias = [sampling_pb2.LogitBias(token_id=int(drafted[1]), bias=80.0)]
    request = request_for(
        PROMPTS[0], seed=3, max_tokens=NUM_TOKENS, ignore_eos=True, logit_bias=bias, logprobs=0
    )
    model = {"eagle": str(head), "draft": "embedded"}[speculative]
    flags = [*FLOAT32, "--pipeline-parallel-size", "2", "--threads", "1"]
    flags += ["--speculative", speculative, "--speculative-model", model]
    with (
        inference_stub(cluster.frontend_address()) as stub,
        Cluster(tmp_path, worker_flags=flags).start() as group,
        inference_stub(group.frontend_address()) as drafting_stub,
    ):
        alone = generate(stub, request)
        together = generate(drafting_stub, request)
        launcher = group.workers[0].process.pid
        disturbed = _generate_killing(drafting_stub, launcher, victims=[0], request=request)
    assert together.choices == disturbed.choices == alone.choices
    assert together.timings is not None
    accepted, drafted = together.timings.num_accepted_drafts, together.timings.num_drafts
    assert 0 < accepted <= drafted


def _generate_killing(
    stub: object, launcher_pid: int, victims: list[int], request: pb.GenerateRequest | None = None
) -> Answer:
    answer, waiting = Answer(), list(victims)
    request = request or requests(NUM_TOKENS)[0]
    for response in stub.Generate(request, timeout=240):  # type: ignore[attr-defined]
        answer.add(response)
        num_killed = len(victims) - len(waiting)
        if waiting and answer.choices and len(answer.token_ids) > 30 * (num_killed + 1):
            os.kill(ranks_of(launcher_pid)[waiting.pop(0)], signal.SIGKILL)
    assert waiting == []
    return answer
