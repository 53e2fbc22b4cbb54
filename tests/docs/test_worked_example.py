"""The plans and results of docs/writing-a-worker.md are those of a real worker, byte for byte.

`python -m tests.docs.test_worked_example` prints them as they should stand there.
"""

import re
import tempfile
from pathlib import Path

from tokenizers import Tokenizer

from conformance.sequence import Sequence
from conformance.step_stream import StepStream
from conformance.worker import Worker
from pagewire import columns
from pagewire.v1 import plan_pb2, sampling_pb2
from pagewire.v1 import worker_service_pb2 as pb
from tests.support.annotated_bytes import annotated, read
from tests.support.processes import python_worker, running
from tools.launch import ROOT

PAGE = ROOT / "docs/writing-a-worker.md"
TOKENIZER = str(ROOT / "worker_service/embedded_model/tokenizer.json")
PROMPT = "27 + 45 ="
BLOCK_SIZE = 4
TIMEOUT_S = 150.0


def worked_example(folder: Path) -> tuple[list[plan_pb2.StepPlan], list[plan_pb2.StepResult], str]:
    """Plans, results without their times, and the text of the tokens."""
    listen = f"unix:{folder}/worker.sock"
    flags = ["--dtype", "float32", "--block-size", str(BLOCK_SIZE), "--listen", listen]
    with running(python_worker("--model", "embedded", *flags), folder):
        worker = Worker(listen, timeout_s=TIMEOUT_S)
        texts = worker.token_texts
        with worker.open() as stream:
            prompt = Tokenizer.from_file(TOKENIZER).encode(PROMPT).ids
            plans, results = _three_steps(stream, prompt)
    tokens = [token for result in results for token in columns.unpack(result.token_ids)]
    return plans, results, b"".join(texts[token] for token in tokens).decode()


def _three_steps(
    stream: StepStream, prompt: list[int]
) -> tuple[list[plan_pb2.StepPlan], list[plan_pb2.StepResult]]:
    """A prompt in one piece, then two tokens; each plan is sent before the former's result."""
    greedy = sampling_pb2.SamplerParams(top_p=1, repetition_penalty=1)
    sequence: Sequence = stream.new(prompt, sampling=greedy)
    plans = []
    for _ in range(3):
        row = sequence.row()
        plan = stream.plan(row)
        stream.send_plan(plan, [row])
        plans.append(plan)
    results = [stream.receive().message for _ in plans]
    for result in results:
        result.ClearField("timings")
    return plans, results


def blocks(plans: list[plan_pb2.StepPlan], results: list[plan_pb2.StepResult]) -> list[str]:
    """What the page shows, in its order."""
    requests = [pb.ExecuteStepsRequest(plans=[plan]) for plan in plans]
    responses = [pb.ExecuteStepsResponse(results=[result]) for result in results]
    return [annotated(message) for message in (*requests, *responses)]


def test_the_page_shows_the_messages_of_a_real_worker(tmp_path: Path) -> None:
    plans, results, text = worked_example(tmp_path)
    page = PAGE.read_text()
    shown = re.findall(r"```hex\n(.*?)\n```", page, re.DOTALL)
    assert shown == blocks(plans, results)
    messages = [pb.ExecuteStepsRequest(plans=[plan]) for plan in plans]
    assert [read(message) for message in shown[:3]] == [
        message.SerializeToString() for message in messages
    ]
    assert f"`{text}`" in page
    assert f"`{PROMPT}`" in page


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        example = worked_example(Path(scratch))
    print("\n\n".join(blocks(*example[:2])), example[2], sep="\n\n")
