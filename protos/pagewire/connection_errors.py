"""gRPC's messages for failed calls, in words: the same for clients and between services."""

import re
from urllib.parse import unquote

_AT = r"last error: \w+: (?:ipv[46]:)?(?P<at>\S+): "

# gRPC's messages for a failed connection, and the parts that matter to users.
_NO_CONNECTION = (
    re.compile(_AT + r".*(?P<reason>http1\.x server)"),
    re.compile(_AT + r"(?P<reason>Failed parsing HTTP/2)"),
    re.compile(_AT + r"Failed .*?: (?P<reason>.+)"),
    re.compile(r"last error: \w+: (?P<at>unix:\S+): connect failed: .*error: (?P<reason>.+)"),
    re.compile(r"errors resolving (?P<at>\S+): .*error:(?P<reason>.+?)\]?$"),
    re.compile(_AT + r"Tls .*(?P<reason>certificate has expired)"),
    re.compile(_AT + r"Tls .*(?P<reason>is not yet valid)"),
    re.compile(_AT + r"Tls .*:(?P<reason>[A-Z_]{9,})"),
    re.compile(_AT + r".*(?P<reason>proxy returned response code \d+)"),
    re.compile(_AT + r".*(?P<reason>missing selected ALPN)"),
    re.compile(_AT + r"(?P<reason>Socket closed)"),
    re.compile(_AT + r".*(?P<reason>Hostname Verification)"),
)
HTTP_1 = (
    "an HTTP server answers there; gRPC has a port of its own, 7600 by default (a core's: 7610)"
)
_IN_WORDS = {
    "Method not found!": "this is another service's address: no such call exists there",
    "http1.x server": HTTP_1,
    "Failed parsing HTTP/2": HTTP_1,
    "missing selected ALPN": HTTP_1,
    "Socket closed": (
        "the server closes the connection; it may expect TLS, or a client's certificate that it"
        " trusts and that has not expired"
    ),
    "WRONG_VERSION_NUMBER": "the server does not speak TLS",
    "Hostname Verification": "its certificate is not for that name",
    "CERTIFICATE_VERIFY_FAILED": "no known authority has signed its certificate",
    "certificate has expired": "its certificate, or that of the authority, has expired",
    "is not yet valid": "its certificate is not valid yet; are both clocks right?",
}
"""Explanations by gRPC's own message, for errors that do not come from the server."""


def in_words(details: str | None) -> str:
    """Rephrase a message of gRPC itself; a service's message is returned unchanged."""
    details = details or "no message"
    for pattern in _NO_CONNECTION:
        if found := pattern.search(details):
            reason = _IN_WORDS.get(found["reason"], found["reason"])
            return f"cannot connect to {unquote(found['at'])}: {reason[0].lower()}{reason[1:]}"
    return _IN_WORDS.get(details, details)
