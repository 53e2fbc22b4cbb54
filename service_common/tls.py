"""TLS, with certificates that may change on disk while they are in use."""

import logging
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import grpc

from pagewire.pem_files import read_authorities, read_pair, validity
from service_common.watched_files import WatchedFiles, warn_if_shared

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class TlsFiles:
    """PEM files of one end of a connection."""

    cert: Path
    """The certificate chain of the process."""
    key: Path
    """That certificate's key, without a passphrase."""
    ca: Path | None = None
    """Authorities that must have signed the other end's certificate; None: callers need none."""

    def __post_init__(self) -> None:
        self.check()

    @property
    def paths(self) -> list[Path]:
        """The paths of all files."""
        return [path for path in (self.cert, self.key, self.ca) if path is not None]

    def check(self) -> None:
        """Raise ValueError unless the files can be read and belong together."""
        self.read()

    def read(self) -> tuple[bytes, bytes, bytes | None]:
        """The contents: certificate, key, authorities. Raises ValueError as `check` does."""
        try:
            pair = read_pair(self.cert, self.key)
            return *pair, None if self.ca is None else read_authorities(self.ca)
        except ValueError as error:
            raise ValueError(f"tls: {error}") from error


def tls_files(cert: Path | None, key: Path | None, client_ca: Path | None) -> TlsFiles | None:
    """The files that flags name; None for no TLS. Raises ValueError."""
    if cert is not None and key is not None:
        return TlsFiles(cert=cert, key=key, ca=client_ca)
    if cert is not None or key is not None or client_ca is not None:
        raise ValueError("tls_cert, tls_key: expected both")
    return None


def warn_of_files(files: TlsFiles) -> None:
    """Warn of a key that others can read, and of a certificate that is not valid now, which the
    other ends of connections refuse."""
    warn_if_shared(files.key)
    period = validity(files.read()[0])
    if not period.begins <= datetime.now(UTC) <= period.ends:
        logger.warning(
            "certificate is not valid now file=%s subject=%r not_before=%s not_after=%s",
            files.cert,
            period.subject,
            period.begins.isoformat(),
            period.ends.isoformat(),
        )


def server_credentials(files: TlsFiles) -> grpc.ServerCredentials:
    """Credentials of a gRPC server. New connections use the current contents of the files; if
    `files.ca` is set, callers need a certificate signed by it. TLS 1.2 and 1.3."""
    watched = WatchedFiles(files.paths, lambda: _configuration(files))
    used = watched.get()

    def changed() -> grpc.ServerCertificateConfiguration | None:
        """The configuration, if it is a new one. gRPC frees the one that another replaces while
        other connections may still begin with it: replaced at each connection, it crashes the
        process as soon as two of them come at once (seen with 1.85)."""
        nonlocal used
        previous, used = used, watched.get()
        return None if used is previous else used

    return grpc.dynamic_ssl_server_credentials(
        used, changed, require_client_authentication=files.ca is not None
    )


def _configuration(files: TlsFiles) -> grpc.ServerCertificateConfiguration:
    cert, key, ca = files.read()
    return grpc.ssl_server_certificate_configuration([(key, cert)], root_certificates=ca)


def channel_credentials(files: TlsFiles) -> grpc.ChannelCredentials:
    """Credentials of a channel, with the current contents of the files."""
    cert, key, ca = files.read()
    return grpc.ssl_channel_credentials(
        root_certificates=ca, private_key=key, certificate_chain=cert
    )
