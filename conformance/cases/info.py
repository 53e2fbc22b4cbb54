"""The worker's identity, and the standard services that it offers."""

from collections.abc import Iterator

import grpc

from conformance.assertions import Skipped, expect, expect_true
from conformance.case import case
from conformance.worker import Worker
from pagewire import columns
from pagewire.v1 import worker_service_pb2 as pb

MAX_CHUNK_BYTES = 2**20
SERVING = b"\x08\x01"
"""A HealthCheckResponse with status SERVING."""

LIST_SERVICES = b"\x3a\x00"
"""A ServerReflectionRequest with list_services set."""


@case("worker_service", "Returns the worker's identity and its model.")
def get_info_returns_the_workers_identity(worker: Worker) -> None:
    info = worker.get_info()
    expect_true(bool(info.worker_id), "worker_id is empty")
    expect("worker_id of a second call", info.worker_id, worker.info.worker_id)
    expect_true(bool(info.device), "device is empty")
    expect_true(info.pid > 0, "pid is 0")
    expect_true(info.num_weight_loads >= 1, "num_weight_loads is 0 though the worker serves")


@case("model", "A served model, as its worker loaded it.")
def the_model_is_described_completely(worker: Worker) -> None:
    model = worker.info.model
    for field in ("name", "fingerprint", "architecture", "dtype"):
        expect_true(bool(getattr(model, field)), f"model.{field} is empty")
    for field in ("max_model_len", "vocab_size"):
        expect_true(getattr(model, field) >= 1, f"model.{field} is 0")
    expect_true(bool(model.cache_groups) or model.whole_prompt, "model.cache_groups is empty")


@case("model", "token ids are less than this.")
def special_tokens_are_in_the_vocabulary(worker: Worker) -> None:
    model = worker.info.model
    special = columns.unpack(model.eos_token_ids)
    if model.HasField("bos_token_id"):
        special.append(model.bos_token_id)
    wrong = [token for token in special if not 0 <= token < model.vocab_size]
    expect("eos and bos tokens outside the vocabulary", wrong, [])


@case("worker_service", "The greatest epoch seen, 0 if none.")
def get_info_returns_the_greatest_epoch(worker: Worker) -> None:
    with worker.open():
        expect("last_epoch after InitializeCache", worker.get_info().last_epoch, worker.epoch)


@case("model", "The chunks of one file arrive in order")
def the_models_files_are_sent_in_chunks(worker: Worker) -> None:
    complete: set[str] = set()
    current = ""
    for response in worker.model_assets():
        name, size = response.chunk.file_name, len(response.chunk.data)
        expect_true(bool(name) and "/" not in name, f"file_name is {name!r}")
        expect_true(size <= MAX_CHUNK_BYTES, f"a piece of {name} has {size} bytes")
        if name != current:
            complete.add(current)
            expect_true(name not in complete, f"{name} continues after {current}")
            current = name


@case("worker_service", "it serves grpc.health.v1.Health")
def the_health_service_says_serving(worker: Worker) -> None:
    check = worker.channel.unary_unary("/grpc.health.v1.Health/Check")
    expect("the answer to a health check", check(b"", timeout=worker.timeout_s), SERVING)


@case("worker_service", "and server reflection")
def reflection_lists_the_worker_service(worker: Worker) -> None:
    call = worker.channel.stream_stream(
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
    )
    answers: Iterator[bytes] = call(iter([LIST_SERVICES]), timeout=worker.timeout_s)
    listed = b"pagewire.v1.WorkerService" in next(answers, b"")
    expect_true(listed, "pagewire.v1.WorkerService is not among the services listed")


@case("worker_service", "Starts a torch profiler trace.")
def a_profile_can_be_started_and_stopped(worker: Worker) -> None:
    try:
        worker.stub.StartProfile(pb.StartProfileRequest(), timeout=worker.timeout_s)
    except grpc.RpcError as error:
        raise Skipped(f"no profiling: {error.code().name} {error.details()}") from None
    with worker.open() as stream:
        stream.prefilled(worker.prompt(1))
    stopped = worker.stub.StopProfile(pb.StopProfileRequest(), timeout=worker.timeout_s)
    expect_true(bool(stopped.path), "StopProfile names no file")
