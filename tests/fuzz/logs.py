"""Errors in the services' logs, with their tracebacks."""

import re
from collections.abc import Iterator

_BEGINS_RECORD = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} ")
_ERROR = re.compile(r" (ERROR|CRITICAL) |Traceback|never awaited|never retrieved")


class Logs:
    """All services' lines, joined to records."""

    def __init__(self) -> None:
        self._records: dict[str, list[list[str]]] = {}

    def add(self, service: str, line: str) -> None:
        """One more line of a service; each has a thread of its own."""
        records = self._records.setdefault(service, [[]])
        if _BEGINS_RECORD.match(line):
            records.append([])
        records[-1].append(line)

    def errors(self) -> Iterator[str]:
        """Records of errors, each with its service."""
        for service, records in self._records.items():
            for lines in records:
                text = "\n".join(lines)
                if _ERROR.search(text):
                    yield f"{service}: {text}"
