"""Every error has a code, travels with its details, and arrives as the same error."""

from base64 import b64encode
from collections.abc import Iterator
from urllib.parse import quote

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from scheduler_service import errors, wire
from scheduler_service.status_codes import STATUS_CODES, from_failed, status_code, to_status
from service_common.grpc_status import DOMAIN


def all_classes(root: type[errors.PagewireError]) -> Iterator[type[errors.PagewireError]]:
    yield root
    for child in root.__subclasses__():
        yield from all_classes(child)


CLASSES = [cls for cls in all_classes(errors.PagewireError) if cls.__name__ in vars(errors)]
"""Those of the scheduling side; a worker's errors grow from the same root."""


def example(error_class: type[errors.PagewireError]) -> errors.PagewireError:
    if error_class is errors.InvalidArgument:
        return errors.InvalidArgument("sampling_params.n", "expected 1 to 128")
    return error_class("it is so", details={"limit": 7}, retry_delay_s=1.5)


def details(status: status_pb2.Status) -> dict[str, object]:
    """Details by the name of their type."""
    kinds = [
        error_details_pb2.ErrorInfo,
        error_details_pb2.BadRequest,
        error_details_pb2.RetryInfo,
    ]
    found: dict[str, object] = {}
    for packed in status.details:
        for kind in kinds:
            if packed.Is(kind.DESCRIPTOR):
                found[kind.__name__] = message = kind()
                packed.Unpack(message)
    return found


def test_the_table_holds_every_error_and_nothing_else() -> None:
    assert set(STATUS_CODES) == set(CLASSES)


def test_reasons_are_unique() -> None:
    assert len({error_class.reason for error_class in CLASSES}) == len(CLASSES)


@pytest.mark.parametrize("error_class", CLASSES)
def test_a_status_always_tells_reason_domain_and_numbers(
    error_class: type[errors.PagewireError],
) -> None:
    error = example(error_class)
    status = to_status(error)
    info = details(status)["ErrorInfo"]
    assert isinstance(info, error_details_pb2.ErrorInfo)
    assert (info.reason, info.domain) == (error.reason, DOMAIN)
    assert dict(info.metadata) == error.details
    assert status.message == error.message
    assert status.code == STATUS_CODES[error_class].value[0]


def test_an_invalid_argument_names_its_field() -> None:
    bad = details(to_status(errors.InvalidArgument("a.b[3]", "expected more")))["BadRequest"]
    assert isinstance(bad, error_details_pb2.BadRequest)
    (violation,) = bad.field_violations
    assert (violation.field, violation.description) == ("a.b[3]", "expected more")


def test_a_delay_is_told_as_retry_info() -> None:
    retry = details(to_status(errors.QueueFull("full", retry_delay_s=0.25)))["RetryInfo"]
    assert isinstance(retry, error_details_pb2.RetryInfo)
    assert retry.retry_delay.ToMicroseconds() == 250_000
    assert "RetryInfo" not in details(to_status(errors.QueueFull("full")))


def test_an_error_that_is_not_ours_tells_nothing_of_itself() -> None:
    status = to_status(RuntimeError("secret"))
    assert status.code == grpc.StatusCode.INTERNAL.value[0]
    assert b"secret" not in status.SerializeToString()


TRAILERS_BYTES = 8192
"""What gRPC takes at least."""


@pytest.mark.parametrize("character", ["x", "\u00e9", "\U0001f600"])
def test_long_texts_are_cut_to_what_trailers_can_carry(character: str) -> None:
    text = character * 100_000
    for error in (
        errors.InvalidArgument(text, text),
        errors.UnknownModel(text, details={"model": text, "served": text}),
    ):
        status = to_status(error)
        message = quote(status.message)  # as gRPC writes it
        binary = b64encode(status.SerializeToString())
        assert 500 < len(message) + len(binary) < TRAILERS_BYTES


def test_a_text_that_is_no_unicode_is_told_all_the_same() -> None:
    assert to_status(errors.InvalidArgument("text", "a \ud800")).message == "text: a \\ud800"


@pytest.mark.parametrize("error_class", CLASSES)
def test_an_error_arrives_at_the_frontend_as_it_left_the_core(
    error_class: type[errors.PagewireError],
) -> None:
    error = example(error_class)
    failed = wire.encode_failed(5, error)
    arrived = from_failed(
        failed.code,
        failed.reason,
        failed.message,
        {detail.key: detail.value for detail in failed.details},
        failed.retry_delay_us / 1e6 if failed.HasField("retry_delay_us") else None,
    )
    assert failed.handle == 5
    assert type(arrived) is error_class
    for fact in ("message", "reason", "details", "retry_delay_s"):
        assert getattr(arrived, fact) == getattr(error, fact)


def test_a_special_reason_keeps_the_class_of_its_code() -> None:
    error = from_failed(grpc.StatusCode.UNAVAILABLE.value[0], "SHUTTING_DOWN", "later", {})
    assert type(error) is errors.Unavailable
    assert error.reason == "SHUTTING_DOWN"
    assert status_code(error) is grpc.StatusCode.UNAVAILABLE


def test_an_unknown_code_becomes_an_internal_error() -> None:
    error = from_failed(999, "NEW", "from the future", {})
    assert status_code(error) is grpc.StatusCode.INTERNAL
