"""Adapters: the table that the core sets, and contents. Nothing is loaded, so that no files are
needed. Versions are times, so that a worker can be checked again. Workers without adapters are
left out."""

import time

import grpc

from conformance.assertions import Skipped, expect
from conformance.case import case
from conformance.cases.contexts import expect_refusal, generated
from conformance.sequence import ADAPTER, part
from conformance.worker import Worker
from pagewire.v1 import worker_service_pb2 as pb
from pagewire.v1.adapter_pb2 import Adapter, AdapterSet

UNKNOWN = b"\x5a" * 32
"""A digest that no content has."""


def table(worker: Worker, version: int, *digests: bytes) -> pb.SetAdaptersRequest:
    """A request to keep a table of adapters with these contents."""
    if not worker.info.model.max_loras:
        raise Skipped("the worker was not started for adapters")
    adapters = [Adapter(name=digest.hex(), digest=digest) for digest in digests]
    return pb.SetAdaptersRequest(adapters=AdapterSet(version=version, adapters=adapters))


def set_table(worker: Worker, request: pb.SetAdaptersRequest) -> list[bytes]:
    """Set a table; returns the contents that the worker lacks."""
    return list(worker.stub.SetAdapters(request, timeout=worker.timeout_s).missing)


@case("worker_service", "Has no effect if the answer lists contents that the worker does not have.")
def a_table_with_a_missing_content_is_not_kept(worker: Worker) -> None:
    version = time.time_ns()
    expect("missing", set_table(worker, table(worker, version, UNKNOWN)), [UNKNOWN])
    expect("missing of an older table", set_table(worker, table(worker, version - 1)), [])


@case("worker_service", "Refused with ABORTED if its table has a greater version.")
def a_table_of_a_lower_version_is_refused(worker: Worker) -> None:
    version = time.time_ns()
    expect("missing", set_table(worker, table(worker, version)), [])
    expect("missing of the same table", set_table(worker, table(worker, version)), [])
    refusal = worker.refusal(worker.stub.SetAdapters, table(worker, version - 1))
    refusal.expect(grpc.StatusCode.ABORTED)


@case("worker_service", "Returns the content of an adapter that the worker has, else NOT_FOUND.")
def a_content_that_the_worker_does_not_have_is_not_found(worker: Worker) -> None:
    table(worker, 0)

    def get(request: pb.GetAdapterRequest, timeout: float) -> None:
        list(worker.stub.GetAdapter(request, timeout=timeout))

    worker.refusal(get, pb.GetAdapterRequest(digest=UNKNOWN)).expect(grpc.StatusCode.NOT_FOUND)


@case("worker_service", "Refused with NOT_FOUND if nothing is at the path,")
def a_path_without_an_adapter_is_not_found(worker: Worker) -> None:
    table(worker, 0)
    request = pb.WorkerServiceLoadAdapterRequest(path="/no such folder")
    worker.refusal(worker.stub.LoadAdapter, request).expect(grpc.StatusCode.NOT_FOUND)


@case("context", "Weights that are added to the model's")
def a_sequence_with_an_adapter_that_is_not_loaded_is_refused(worker: Worker) -> None:
    table(worker, 0)
    expect_refusal(generated(worker, part(ADAPTER, "not loaded")), "an adapter not loaded")
