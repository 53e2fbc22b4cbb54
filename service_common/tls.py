"""TLS, with certificates that may change on disk while they are in use."""

import ssl
from dataclasses import dataclass
from pathlib import Path

import grpc

from service_common.watched_files import WatchedFiles, read_file, warn_if_shared


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
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        for path in self.paths:
            read_file("tls", path)
        try:
            # Without this, OpenSSL would prompt for the passphrase of an encrypted key.
            context.load_cert_chain(self.cert, self.key, password=_no_passphrase)
        except (ssl.SSLError, ValueError) as error:
            raise ValueError(
                f"tls: {self.cert} and {self.key} are not a certificate and its key: {error}"
            ) from error
        if self.ca is not None:
            try:
                context.load_verify_locations(self.ca)
            except ssl.SSLError as error:
                raise ValueError(f"tls: {self.ca} holds no certificates: {error}") from error


def tls_files(cert: Path | None, key: Path | None, client_ca: Path | None) -> TlsFiles | None:
    """The files that flags name; None for no TLS. Raises ValueError."""
    if cert is not None and key is not None:
        return TlsFiles(cert=cert, key=key, ca=client_ca)
    if cert is not None or key is not None or client_ca is not None:
        raise ValueError("tls_cert, tls_key: expected both")
    return None


def _no_passphrase() -> str:
    raise ValueError("the key is encrypted; expected one without a passphrase")


def server_credentials(files: TlsFiles) -> grpc.ServerCredentials:
    """Credentials of a gRPC server. New connections use the current contents of the files; if
    `files.ca` is set, callers need a certificate signed by it. TLS 1.2 and 1.3."""
    warn_if_shared(files.key)
    watched = WatchedFiles(files.paths, lambda: _configuration(files))
    return grpc.dynamic_ssl_server_credentials(
        watched.get(), watched.get, require_client_authentication=files.ca is not None
    )


def _configuration(files: TlsFiles) -> grpc.ServerCertificateConfiguration:
    files.check()
    pair = (files.key.read_bytes(), files.cert.read_bytes())
    ca = None if files.ca is None else files.ca.read_bytes()
    return grpc.ssl_server_certificate_configuration([pair], root_certificates=ca)


def channel_credentials(files: TlsFiles) -> grpc.ChannelCredentials:
    """Credentials of a channel, with the current contents of the files."""
    files.check()
    return grpc.ssl_channel_credentials(
        root_certificates=None if files.ca is None else files.ca.read_bytes(),
        private_key=files.key.read_bytes(),
        certificate_chain=files.cert.read_bytes(),
    )
