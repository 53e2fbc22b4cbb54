"""PEM files of certificates and keys, checked before gRPC reads them: its errors name no file, and
instead of an empty file of authorities it uses the system's."""

import base64
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Validity:
    """From when until when a certificate is valid."""

    subject: str
    """Whose it is: the parts of the name, such as `Example Ltd, llm.example`; may be empty."""
    begins: datetime
    ends: datetime


def validity(chain: bytes) -> Validity:
    """The validity of the first certificate of a chain that OpenSSL has accepted."""
    encoded = chain.partition(_CERTIFICATE)[2].partition(b"-")[0]
    (_, certificate), *_ = _values(base64.b64decode(encoded))
    (_, signed), *_ = _values(certificate)
    # RFC 5280, section 4.1: the version, with a tag of its own, may be absent.
    _, _, _, period, subject, *_ = [part for tag, part in _values(signed) if tag != 0xA0]
    begins, ends = (_time(tag, text) for tag, text in _values(period))
    names = [pair for _, named in _values(subject) for _, pair in _values(named)]
    texts = [text.decode(errors="replace") for name in names for _, text in [*_values(name)][1:]]
    return Validity(subject=", ".join(texts), begins=begins, ends=ends)


def _values(der: bytes) -> Iterator[tuple[int, bytes]]:
    """Tags and contents of the values that DER holds, one after the other."""
    while der:
        tag, length, start = der[0], der[1], 2
        if length & 0x80:  # the length of the length
            start += length & 0x7F
            length = int.from_bytes(der[2:start], "big")
        yield tag, der[start : start + length]
        der = der[start + length :]


def _time(tag: int, text: bytes) -> datetime:
    digits = text.decode("ascii")
    if tag == 0x17:  # UTCTime, whose years have two digits
        digits = ("20" if digits < "5" else "19") + digits
    return datetime.strptime(digits, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC)


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
