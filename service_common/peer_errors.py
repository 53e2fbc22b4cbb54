"""gRPC's own words for a failed call to another service of the deployment, explained."""

from service_common.cluster import MEMBER_NAME

_WRONG_PORT = "an HTTP server answers there; is it the port of another service?"
_EXPLANATIONS = {
    ": Socket closed": "it closes the connection; it may expect TLS, or other certificates "
    "(--cluster-ca, --cluster-cert, --cluster-key)",
    "WRONG_VERSION_NUMBER": "it does not speak TLS, but this service has --cluster-ca, "
    "--cluster-cert, --cluster-key",
    "CERTIFICATE_VERIFY_FAILED": "its certificate has expired, or no authority in --cluster-ca has "
    "signed it",
    "Hostname Verification Check failed": f"its certificate is not for the name {MEMBER_NAME}",
    "http1.x server": _WRONG_PORT,
    "Failed parsing HTTP/2": _WRONG_PORT,
    "Method not found!": "another service answers there: it has no such call",
    "Internal error from Core": "the connection broke while a message was being sent",
}


def explained(details: str | None) -> str:
    """A failed call's details; an explanation precedes them if they are gRPC's own."""
    details = details or "no message"
    for words, explanation in _EXPLANATIONS.items():
        if words in details:
            return f"{explanation} ({details})"
    return details
