"""The names that workers accept are those of the formats that frontends have."""

from collections.abc import Iterable

from scheduler_service.frontend.chat_formats.formats import CALL_FORMATS, REASONING_FORMATS
from scheduler_service.frontend.chat_formats.syntax import CallFormat, ReasoningFormat
from service_common.chat_parsers import REASONING_PARSERS, TOOL_CALL_PARSERS


def names(formats: Iterable[ReasoningFormat | CallFormat]) -> list[str]:
    return ["auto", "none", *sorted({name for found in formats for name in found.names})]


def test_workers_accept_the_names_of_all_formats_and_no_others() -> None:
    assert names(REASONING_FORMATS) == list(REASONING_PARSERS)
    assert names(CALL_FORMATS) == list(TOOL_CALL_PARSERS)
