"""PEM files of certificates and keys, checked before gRPC reads them: its errors name no file, and
instead of an empty file of authorities it uses the system's."""

import ssl
from pathlib import Path

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_CERTIFICATE, _KEY = b"CERTIFICATE-----", b"PRIVATE KEY-----"


def read_pair(cert: Path, key: Path) -> tuple[bytes, bytes]:
    """A certificate chain and its key. Raises ValueError that names the file and its fault."""
    contents = _read(cert, _CERTIFICATE, "certificate"), _read(key, _KEY, "private key")
    try:
        # Without this, OpenSSL would prompt for the passphrase of an encrypted key.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, password=_no_passphrase)
    except (ssl.SSLError, ValueError) as error:
        raise ValueError(f"{cert} and {key} are not a certificate and its key: {error}") from error
    return contents


def read_authorities(ca: Path) -> bytes:
    """Certificates of authorities. Raises ValueError that names the file and its fault."""
    contents = _read(ca, _CERTIFICATE, "certificate")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(ca)
    except ssl.SSLError as error:
        raise ValueError(f"{ca} holds no valid certificates: {error}") from error
    return contents


def _read(path: Path, label: bytes, what: str) -> bytes:
    try:
        contents = path.read_bytes()
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from error
    if contents.startswith(_BYTE_ORDER_MARK):
        raise ValueError(f"{path} begins with a byte order mark; save it as plain ASCII")
    if label not in contents:
        raise ValueError(f"{path} holds no {what}; expected one in PEM, {_found(contents)}")
    return contents


def _found(contents: bytes) -> str:
    """What a file holds in place of what was expected, in words."""
    if not contents.strip():
        return "got an empty file"
    if _CERTIFICATE in contents:
        return "got a certificate"
    return "got a private key" if _KEY in contents else "got something else"


def _no_passphrase() -> str:
    raise ValueError("the key is encrypted; expected one without a passphrase")
