"""Bad input and faults: a clear error for that request, and a healthy service after it."""

import json
import os
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import grpc
import pytest
import torch
from safetensors.torch import save_file

from pagewire.v1 import inference_service_pb2 as pb
from pagewire.v1.inference_service_pb2_grpc import InferenceServiceStub
from tests.end_to_end.conftest import EMBEDDED
from tests.support.cluster import SERVING, Cluster, health
from tests.support.requests import (
    bad_field,
    fold,
    generate,
    inference_stub,
    reason,
    request_for,
)
from tools import launch
from tools.launch import Service

GREETING = request_for("Once upon a time", temperature=0, max_tokens=4)


def refused(stub: InferenceServiceStub, request: pb.GenerateRequest) -> grpc.RpcError:
    with pytest.raises(grpc.RpcError) as error:
        generate(stub, request)
    assert len(generate(stub, GREETING).token_ids) == 4
    return error.value


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (pb.GenerateRequest(), "prompt"),
        (request_for(""), "text"),
        (request_for([]), "token_ids.ids"),
        (request_for([1, 10**6]), "token_ids.ids[1]"),
        (request_for("x", temperature=float("nan")), "sampling_params.temperature"),
        (request_for("x", temperature=-1.0), "sampling_params.temperature"),
        (request_for("x", top_p=0.0), "sampling_params.top_p"),
        (request_for("x", n=0), "sampling_params.n"),
        (request_for("x", max_tokens=0), "sampling_params.max_tokens"),
        (request_for("x", min_tokens=9, max_tokens=3), "sampling_params.min_tokens"),
        (request_for("x", n=3, best_of=2), "sampling_params.best_of"),
        (request_for("x", logprobs=21), "sampling_params.logprobs"),
        (request_for("x", stop=[""]), "sampling_params.stop[0]"),
        (request_for("x", request_id="white space"), "request_id"),
    ],
)
def test_a_wrong_field_is_named(
    stub: InferenceServiceStub, request_: pb.GenerateRequest, field: str
) -> None:
    error = refused(stub, request_)
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert bad_field(error) == field


def test_a_prompt_longer_than_the_model_is_refused_with_numbers(stub: InferenceServiceStub) -> None:
    error = refused(stub, request_for([1] * 100_000))
    assert error.code() == grpc.StatusCode.FAILED_PRECONDITION
    assert reason(error) == "PROMPT_TOO_LONG"


def test_an_unknown_model_is_not_found(stub: InferenceServiceStub) -> None:
    request = request_for("x")
    request.model = "nobody"
    assert refused(stub, request).code() == grpc.StatusCode.NOT_FOUND


def test_a_prompt_longer_than_memory_is_refused_and_shorter_ones_go_on(
    stub: InferenceServiceStub, tmp_path: Path
) -> None:
    model = stub.GetModel(pb.GetModelRequest()).model
    token_bytes = model.block_bytes // model.cache_groups[0].block_tokens
    memory = ["--block-size", "16", "--kv-cache-memory", str(64 * token_bytes)]
    flags = ["--dtype", "float32", *memory]
    with Cluster(tmp_path, worker_flags=flags) as small:
        small.start()
        with inference_stub(small.frontend_address()) as small_stub:
            error = refused(small_stub, request_for([5] * 100, max_tokens=4))
            assert error.code() == grpc.StatusCode.FAILED_PRECONDITION
            assert reason(error) == "PROMPT_LARGER_THAN_CACHE"


def num_free_blocks(stub: InferenceServiceStub) -> tuple[int, int]:
    group = stub.GetStatus(pb.GetStatusRequest()).status.groups[0]
    return group.num_free_gpu_blocks, group.num_gpu_blocks


def eventually(condition: Callable[[], bool], timeout_s: float = 20) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "condition never became true"
        time.sleep(0.02)


def test_a_client_that_leaves_frees_its_blocks(stub: InferenceServiceStub) -> None:
    stream = stub.Generate(request_for("Once", max_tokens=900, ignore_eos=True, temperature=0))
    responses = iter(stream)
    while not next(responses).choices:
        pass
    free, total = num_free_blocks(stub)
    assert free < total
    stream.cancel()
    eventually(lambda: num_free_blocks(stub) == (total, total))


def test_a_deadline_ends_the_stream_and_frees_its_blocks(stub: InferenceServiceStub) -> None:
    request = request_for("Once", max_tokens=900, ignore_eos=True, temperature=0)
    with pytest.raises(grpc.RpcError) as error:
        generate(stub, request, timeout_s=0.3)
    assert error.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    total = num_free_blocks(stub)[1]
    eventually(lambda: num_free_blocks(stub) == (total, total))


def test_a_live_request_id_is_refused_and_can_be_aborted(stub: InferenceServiceStub) -> None:
    request = request_for(
        "Once", request_id="twice", max_tokens=900, ignore_eos=True, temperature=0
    )
    stream = stub.Generate(request)
    next(iter(stream))
    with pytest.raises(grpc.RpcError) as second:
        generate(stub, request)
    assert second.value.code() == grpc.StatusCode.ALREADY_EXISTS
    stub.Abort(pb.AbortRequest(request_id="twice"))
    with pytest.raises(grpc.RpcError) as first:
        fold(stream)
    assert first.value.code() == grpc.StatusCode.CANCELLED
    with pytest.raises(grpc.RpcError) as gone:
        stub.Abort(pb.AbortRequest(request_id="twice"))
    assert gone.value.code() == grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize("name", ["core.sock", "frontend-0.sock", "worker-0.sock"])
def test_a_megabyte_of_garbage_on_a_port_harms_nobody(
    cluster: Cluster, stub: InferenceServiceStub, name: str
) -> None:
    with socket.socket(socket.AF_UNIX) as wire:
        wire.settimeout(10)
        wire.connect(str(cluster.folder / name))
        # Hanging up on garbage is right.
        with suppress(BrokenPipeError, ConnectionResetError):
            wire.sendall(os.urandom(1 << 20))
    assert len(generate(stub, GREETING).token_ids) == 4
    assert all(service.process.poll() is None for service in cluster.services)


def test_requests_wait_for_a_worker_until_their_deadline(tmp_path: Path) -> None:
    with Cluster(tmp_path, worker_flags=["--dtype", "float32"]) as late:
        late.start_core()
        late.start_frontend()
        eventually(lambda: health(late.frontend_address()) is not None)
        assert health(late.frontend_address()) != SERVING
        with inference_stub(late.frontend_address()) as stub:
            with pytest.raises(grpc.RpcError) as error:
                generate(stub, GREETING, timeout_s=0.5)
            assert error.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
            stream = stub.Generate(GREETING, timeout=90)
            late.start_worker()
            assert len(fold(stream).token_ids) == 4
        late.wait_serving()


def exit_message(folder: Path, *command: str) -> tuple[int, str]:
    service = Service("failing", launch.module(*command), folder / "failing.log")
    return service.wait(), service.log


def test_a_taken_port_is_a_clear_error(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        for role in (
            ["scheduler_service", "scheduler", "--listen", address],
            ["scheduler_service", "frontend", "--listen", address],
            ["worker_service", "--listen", address, "--load-format", "dummy"],
        ):
            code, log = exit_message(tmp_path, *role)
            assert code != 0
            assert f"cannot listen on {address}" in log
            assert "Traceback" not in log


def damaged(folder: Path, change: Callable[[dict[str, object]], None] | None = None) -> Path:
    """A copy of the embedded model, its configuration changed or its weights cut short."""
    copy = Path(shutil.copytree(EMBEDDED, folder / "damaged"))
    if change is None:
        weights = copy / "model.safetensors"
        os.truncate(weights, weights.stat().st_size // 2)
    else:
        config = json.loads((copy / "config.json").read_text())
        change(config)
        (copy / "config.json").write_text(json.dumps(config))
    return copy


@pytest.mark.parametrize(
    ("model_type", "architecture"),
    [("t5", "T5ForConditionalGeneration"), ("bloom", "BloomForCausalLM")],
)
def test_an_unsupported_model_is_refused_by_name(
    tmp_path: Path, model_type: str, architecture: str
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(
        json.dumps({"model_type": model_type, "architectures": [architecture]})
    )
    save_file({"weight": torch.zeros(1)}, folder / "model.safetensors")
    code, log = exit_message(tmp_path, "worker_service", "--model", str(folder))
    assert code != 0
    assert architecture in log
    assert "Traceback" not in log


def test_an_unknown_model_path_is_named(tmp_path: Path) -> None:
    code, log = exit_message(tmp_path, "worker_service", "--model", str(tmp_path / "nowhere"))
    assert code != 0
    assert str(tmp_path / "nowhere") in log.replace("\n", "")
    assert "Traceback" not in log


def test_a_truncated_weight_file_is_named(tmp_path: Path) -> None:
    code, log = exit_message(tmp_path, "worker_service", "--model", str(damaged(tmp_path)))
    assert code != 0
    assert "model.safetensors" in log
    assert "Traceback" not in log


def test_a_misshapen_tensor_is_named(tmp_path: Path) -> None:
    model = damaged(tmp_path, lambda config: config.update(intermediate_size=100))
    code, log = exit_message(tmp_path, "worker_service", "--model", str(model))
    assert code != 0
    assert "mlp" in log
    assert "Traceback" not in log


@pytest.mark.parametrize("role", ["worker", "frontend", "core"])
def test_sigterm_lets_a_running_stream_finish(tmp_path: Path, role: str) -> None:
    with Cluster(tmp_path, worker_flags=["--dtype", "float32"]) as ending:
        ending.start()
        with inference_stub(ending.frontend_address()) as stub:
            request = request_for("Once", max_tokens=300, ignore_eos=True, temperature=0)
            stream = stub.Generate(request, timeout=60)
            next(iter(stream))
            service = {
                "worker": ending.workers[0],
                "frontend": ending.frontends[0],
                "core": ending.core,
            }[role]
            assert service is not None
            ender = threading.Thread(target=service.kill, args=(signal.SIGTERM,))
            ender.start()
            answer = fold(stream)
            ender.join()
        assert len(answer.token_ids) == 300
        assert service.process.returncode == 0
