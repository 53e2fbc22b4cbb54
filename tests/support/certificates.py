"""Authorities and certificates, made for a test."""

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from service_common.cluster import MEMBER_NAME

DAY = datetime.timedelta(days=1)


@dataclass(frozen=True)
class Issued:
    """A certificate and its key, as files."""

    cert: Path
    key: Path


class Authority:
    """Signs certificates; each is written to files of its own."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _name(name)
        self.cert = folder / f"{name}.pem"
        """The authority's own certificate."""
        builder = _builder(self._name, self._name, self._key, days=1, begins=-10)
        constraints = x509.BasicConstraints(ca=True, path_length=0)
        made = builder.add_extension(constraints, critical=True).sign(self._key, hashes.SHA256())
        self.cert.write_bytes(made.public_bytes(serialization.Encoding.PEM))

    def issue(
        self, file_name: str, host: str = MEMBER_NAME, *, days: int = 1, begins: int = -10
    ) -> Issued:
        """A certificate for a host's name or address. `days`, `begins`: days from now until it ends
        and begins, of the past if negative."""
        key = ec.generate_private_key(ec.SECP256R1())
        builder = _builder(_name(host), self._name, key, days=days, begins=begins)
        names = x509.SubjectAlternativeName([_general_name(host)])
        made = builder.add_extension(names, critical=False).sign(self._key, hashes.SHA256())
        issued = Issued(self._folder / f"{file_name}.pem", self._folder / f"{file_name}-key.pem")
        issued.cert.write_bytes(made.public_bytes(serialization.Encoding.PEM))
        issued.key.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        return issued


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    *,
    days: int,
    begins: int,
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now + begins * DAY)
        .not_valid_after(now + days * DAY)
    )


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
