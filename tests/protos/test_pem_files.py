"""Validity of certificates as `cryptography` writes them."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from pagewire.pem_files import Validity, validity
from tests.support.certificates import Authority

KEY = ec.generate_private_key(ec.SECP256R1())
BEGINS, ENDS = datetime(1999, 12, 31, 23, 59, 58, tzinfo=UTC), datetime(2049, 12, 31, tzinfo=UTC)
"""RFC 5280: the last year of UTCTime is 2049."""


def chain_of(subject: x509.Name, ends: datetime = ENDS) -> bytes:
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "i" * 64)]))
        .public_key(KEY.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(BEGINS)
        .not_valid_after(ends)
    )
    return builder.sign(KEY, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


@pytest.mark.parametrize("ends", [ENDS, ENDS + timedelta(days=1), datetime.max.replace(tzinfo=UTC)])
@pytest.mark.parametrize("names", [[], ["llm.example"], ["Größe GmbH", "llm.example", "x" * 60]])
def test_a_certificate_tells_its_subject_and_its_times(names: list[str], ends: datetime) -> None:
    kinds = [NameOID.ORGANIZATION_NAME, NameOID.COMMON_NAME, NameOID.ORGANIZATIONAL_UNIT_NAME]
    attributes = map(x509.NameAttribute, kinds, names)
    ends = ends.replace(microsecond=0)
    assert validity(chain_of(x509.Name(attributes), ends)) == Validity(
        subject=", ".join(names), begins=BEGINS, ends=ends
    )


def test_the_first_certificate_of_a_chain_counts_whatever_is_before_it(tmp_path: Path) -> None:
    authority = Authority(tmp_path, "authority")
    own = authority.issue("own", "llm.example").cert.read_bytes()
    trusted = own.replace(b" CERTIFICATE-----", b" TRUSTED CERTIFICATE-----")
    for first in (own, b"subject=llm.example\n" + own, trusted, own.replace(b"\n", b"\r\n")):
        assert validity(first + authority.cert.read_bytes()).subject == "llm.example"
