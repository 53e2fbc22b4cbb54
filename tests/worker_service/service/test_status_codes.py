"""Every error has a status."""

import grpc
import pytest
from google.rpc import error_details_pb2

from worker_service import errors
from worker_service.service.servicer import STATUS_CODES, to_status


def all_errors() -> set[type[errors.WorkerError]]:
    found: set[type[errors.WorkerError]] = {errors.WorkerError}
    pending = [errors.WorkerError]
    while pending:
        for kind in pending.pop().__subclasses__():
            found.add(kind)
            pending.append(kind)
    return found


def test_the_table_is_complete() -> None:
    assert set(STATUS_CODES) == all_errors()


def test_the_tree_in_the_docstring_is_complete() -> None:
    assert errors.__doc__ is not None
    for kind in all_errors():
        assert kind.__name__ in errors.__doc__


@pytest.mark.parametrize("kind", sorted(all_errors(), key=lambda kind: kind.__name__))
def test_an_error_carries_its_code_message_and_reason(kind: type[errors.WorkerError]) -> None:
    error = errors.InvalidPlan("a.b", "no") if kind is errors.InvalidPlan else kind("no")
    status = to_status(error)
    info = error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(info)
    assert status.code == STATUS_CODES[kind].value[0]
    assert status.message.endswith("no")
    assert info.reason.replace("_", "").lower() == kind.__name__.lower()


def test_a_bad_plan_names_its_field() -> None:
    status = to_status(errors.InvalidPlan("new_sequences[2].seq_id", "is known already"))
    fields = error_details_pb2.BadRequest()
    assert status.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
    assert status.details[1].Unpack(fields)
    (violation,) = fields.field_violations
    assert violation.field == "new_sequences[2].seq_id"
    assert violation.description == "is known already"
