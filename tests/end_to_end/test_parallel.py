"""A group of two ranks as real services: one rank's tokens, also when its ranks are killed."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from pagewire.v1 import inference_service_pb2 as pb
from tests.support.cluster import Cluster
from tests.support.requests import Answer, generate, generate_together, inference_stub, request_for

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
    flags = ["--dtype", "float32", "--tensor-parallel-size", "2", "--threads", "1"]
    with Cluster(tmp_path, worker_flags=flags) as group:
        yield group.start()


def ranks_of(launcher_pid: int) -> dict[int, int]:
    """Process ids of a launcher's children by rank."""
    children = Path(f"/proc/{launcher_pid}/task/{launcher_pid}/children").read_text().split()
    command_lines = {pid: Path(f"/proc/{pid}/cmdline").read_text().split("\0") for pid in children}
    return {int(words[words.index("--rank") + 1]): int(p) for p, words in command_lines.items()}


def test_two_ranks_answer_as_one_and_survive_each_others_death(
    group: Cluster, cluster: Cluster
) -> None:
    bound = request_for("One day", regex="[a-z]{3}(?: [a-z]{2,5})*", temperature=0.0, max_tokens=40)
    with inference_stub(cluster.frontend_address()) as stub:
        alone = generate_together(stub, [*requests(NUM_TOKENS), bound])
    launcher = group.workers[0]
    before = ranks_of(launcher.process.pid)
    assert sorted(before) == [0, 1]
    with inference_stub(group.frontend_address()) as stub:
        disturbed = _generate_killing(stub, launcher.process.pid, victims=[1, 0])
        assert generate(stub, bound).text == alone[-1].text
    assert disturbed.token_ids == alone[0].token_ids
    assert len(disturbed.token_ids) == NUM_TOKENS
    pairs = zip(disturbed.choices[0].logprobs, alone[0].choices[0].logprobs, strict=True)
    assert max(abs(ours.token.logprob - theirs.token.logprob) for ours, theirs in pairs) < 1e-4
    after = ranks_of(launcher.process.pid)
    assert set(after.values()).isdisjoint(before.values())
    assert launcher.log.count("model loaded") == 4, "each rank and each that came in its place"


def _generate_killing(stub: object, launcher_pid: int, victims: list[int]) -> Answer:
    answer, waiting = Answer(), list(victims)
    for response in stub.Generate(requests(NUM_TOKENS)[0], timeout=240):  # type: ignore[attr-defined]
        answer.add(response)
        num_killed = len(victims) - len(waiting)
        if waiting and answer.choices and len(answer.token_ids) > 30 * (num_killed + 1):
            os.kill(ranks_of(launcher_pid)[waiting.pop(0)], signal.SIGKILL)
    assert waiting == []
    return answer
