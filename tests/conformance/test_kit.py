"""The kit itself: its cases cite the contract, its arithmetic is right, its command line helps."""

import math
import re
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import grpc
import pytest
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from conformance import cases
from conformance.sampling_oracle import expected_token, philox4x32
from conformance.sequence import sampler_params
from pagewire.v1 import model_pb2
from pagewire.v1 import worker_service_pb2 as pb
from pagewire.v1.worker_service_pb2_grpc import (
    WorkerServiceServicer,
    add_WorkerServiceServicer_to_server,
)
from tests.support.certificates import Authority
from tests.support.processes import python_worker, run_kit, running
from tools.launch import ROOT


def comments(file: str) -> str:
    """All comments of a .proto file, as one line."""
    lines = (ROOT / "protos/pagewire/v1" / file).read_text().splitlines()
    return " ".join(line.split("//", 1)[1].strip() for line in lines if "//" in line)


def test_every_case_cites_the_contract() -> None:
    wrong = [case.full_name for case in cases.ALL if case.promise not in comments(case.file)]
    assert wrong == []


def test_every_case_has_a_name_of_its_own() -> None:
    names = [case.full_name for case in cases.ALL]
    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"[a-z_ ]+: [a-z0-9_ ]+", name) for name in names)


def test_philox_is_that_of_its_authors() -> None:
    # Known answers of Random123, kat_vectors.
    assert philox4x32((0, 0, 0, 0), (0, 0)) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    ones = 0xFFFFFFFF
    assert philox4x32((ones,) * 4, (ones,) * 2) == (
        0x408F276D,
        0x41C83B0E,
        0xA20BC7C6,
        0x6D5451FD,
    )


@pytest.mark.parametrize(
    ("fields", "uniform", "token"),
    [
        ({}, 0.2, 3),
        ({}, 0.35, 5),
        ({}, 0.9, 9),
        ({}, 0.3, None),  # on the edge between two tokens
        ({"top_k": 1}, 0.99, 5),
        ({"top_p": 0.4}, 0.99, 5),
        ({"top_p": 0.6}, 0.1, 3),
        ({"top_p": 0.5}, 0.1, None),  # exactly the nucleus: rounding decides
        ({"min_p": 0.7}, 0.99, 5),
        ({"temperature": 0.01}, 0.5, 5),
    ],
)
def test_a_token_is_predicted_unless_it_is_too_close_to_tell(
    fields: dict[str, float], uniform: float, token: int | None
) -> None:
    logprobs = {9: math.log(0.2), 5: math.log(0.5), 3: math.log(0.3)}
    assert expected_token(logprobs, sampler_params(**fields), uniform) == token


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ([], "expected ADDRESS or --core-listen"),
        (["--only", "nonsense"], "no case has"),
        (["nowhere"], "ADDRESS: expected HOST:PORT or unix:PATH, got 'nowhere'"),
        (["--core-listen", "nowhere"], "--core-listen: expected HOST:PORT or unix:PATH, got"),
        (["a:1", "--junit", "/no/such/file"], "--junit: cannot write /no/such/file: No such file"),
    ],
)
def test_wrong_options_are_refused(arguments: list[str], problem: str) -> None:
    run = run_kit(*arguments)
    assert run.returncode == 2
    assert problem in run.stderr


def test_a_worker_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    for arguments in ([f"unix:{tmp_path}/none.sock"], ["--core-listen", f"unix:{tmp_path}/c.sock"]):
        run = run_kit(*arguments, "--timeout", "1")
        assert run.returncode == 1
        waiting, problem = run.stderr.splitlines()
        assert waiting.startswith(
            f"waiting for a worker {'at' if len(arguments) == 1 else 'to reg'}"
        )
        assert arguments[-1] in waiting
        assert problem.startswith("error: ")


def test_a_closed_port_is_named_with_the_call_and_the_systems_reason() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    problem = run_kit(address, "--timeout", "1").stderr.splitlines()[-1]
    assert problem.startswith(f"error: no worker responds at {address} to GetInfo: ")
    assert problem.endswith("Connection refused")


@pytest.mark.parametrize("answers", [[], ["GetInfo"]])
def test_the_first_call_that_a_worker_lacks_is_named(answers: list[str]) -> None:
    class Unfinished(WorkerServiceServicer):
        pass

    if answers:
        Unfinished.GetInfo = lambda *_: pb.GetInfoResponse()  # type: ignore[assignment, method-assign]
    server = grpc.server(ThreadPoolExecutor(4))
    add_WorkerServiceServicer_to_server(Unfinished(), server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    run = run_kit(address, "--timeout", "5")
    server.stop(None)
    lacks = "ProfileBlocks" if answers else "GetInfo"
    assert run.returncode == 1
    assert run.stderr == (
        f"error: the worker at {address} responds to {lacks} with UNIMPLEMENTED: Method not"
        f" implemented!; every case needs {lacks}\n"
    )


def test_a_worker_that_executes_no_steps_yet_passes_the_cases_of_the_first_step() -> None:
    """docs/writing-a-worker.md names them."""

    class FirstStep(WorkerServiceServicer):
        last_epoch = 0

        def GetInfo(self, request: pb.GetInfoRequest, context: Any) -> pb.GetInfoResponse:
            model = model_pb2.ModelInfo(
                **dict.fromkeys(("name", "fingerprint", "architecture", "dtype"), "x"),
                **dict.fromkeys(("max_model_len", "vocab_size"), 64),
                cache_groups=[model_pb2.CacheGroup(lifetime=1, block_tokens=64)],
            )
            return pb.GetInfoResponse(
                worker_id="w",
                device="cpu",
                pid=1,
                num_weight_loads=1,
                model=model,
                last_epoch=self.last_epoch,
            )

        def ProfileBlocks(self, request: Any, context: Any) -> pb.ProfileBlocksResponse:
            if not 1 <= request.max_num_seqs <= request.max_num_batched_tokens:
                context.abort(grpc.StatusCode.INVALID_ARGUMENT, "max_num_seqs: out of range")
            return pb.ProfileBlocksResponse(num_gpu_blocks=64)

        def InitializeCache(self, request: Any, context: Any) -> pb.InitializeCacheResponse:
            if request.num_gpu_blocks < 1:
                context.abort(grpc.StatusCode.INVALID_ARGUMENT, "num_gpu_blocks: expected 1")
            self.last_epoch = request.epoch
            return pb.InitializeCacheResponse()

        def GetModelAssets(self, request: Any, context: Any) -> Iterator[Any]:
            yield from ()

    server = grpc.server(ThreadPoolExecutor(8))
    add_WorkerServiceServicer_to_server(FirstStep(), server)
    servicer = health.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    reflection.enable_server_reflection(
        ("pagewire.v1.WorkerService", reflection.SERVICE_NAME), server
    )
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    run = run_kit(address, "--only", "setup", "--only", "info")
    server.stop(None)
    assert run.returncode == 0, run.stdout + run.stderr


def test_a_run_is_told_line_by_line_and_as_junit(tmp_path: Path) -> None:
    listen, junit = f"unix:{tmp_path}/worker.sock", tmp_path / "junit.xml"
    flags = ["--simulate", "--simulate-cpu-blocks", "0", "--listen", listen]
    with running(python_worker(*flags), tmp_path):
        only = ["--only", "cache operations", "--only", "swaps"]
        run = run_kit(listen, *only, "--junit", str(junit))
    assert run.returncode == 0, run.stdout + run.stderr
    lines = run.stdout.splitlines()
    assert "PASS  cache operations: the blocks contents matter" in lines
    skipped = "SKIP  swaps: blocks come back from the host as they were"
    assert any(line.startswith(f"{skipped} (the worker has 0 host blocks") for line in lines)
    assert re.fullmatch(r"\d+ passed, 0 failed, 8 skipped in [\d.]+ s", lines[-1])
    suite = ElementTree.parse(junit).getroot()
    assert suite.get("failures") == "0"
    assert suite.get("skipped") == "8"
    assert len(suite) == int(suite.get("tests", "0")) == len(lines) - 1


def test_the_kit_checks_a_worker_that_lets_in_members_only(tmp_path: Path) -> None:
    authority = Authority(tmp_path, "authority")
    member, token = authority.issue("member"), tmp_path / "token"
    token.write_text("t" * 32)
    flags = ["--cluster-token-file", str(token), "--cluster-ca", str(authority.cert)]
    flags += ["--cluster-cert", str(member.cert), "--cluster-key", str(member.key)]
    listen, core = f"unix:{tmp_path}/worker.sock", f"unix:{tmp_path}/core.sock"
    command = [
        *python_worker("--simulate", "--simulate-vocab-size", "997"),
        "--listen",
        listen,
        "--core",
        core,
        *flags,
    ]
    with running(command, tmp_path) as process:
        kit = ["--core-listen", core, "--only", "info", "--only", "robustness", *flags]
        run = run_kit(*kit)
        assert run.returncode == 0, run.stdout + run.stderr
        assert "PASS" in run.stdout
        process.terminate()
