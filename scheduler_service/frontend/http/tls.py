"""TLS of the HTTP server, with certificates that may change on disk while they are in use."""

import ssl

from service_common.tls import TlsFiles
from service_common.watched_files import WatchedFiles


def http_context(files: TlsFiles) -> ssl.SSLContext:
    """For an HTTP server: each new connection gets the certificate, and is held to the authority,
    that are on disk then."""
    watched = WatchedFiles(files.paths, lambda: _context(files))
    context = _context(files)

    def use_newest(connection: ssl.SSLObject, _: str | None, __: ssl.SSLContext) -> None:
        connection.context = watched.get()

    context.sni_callback = use_newest
    return context


def _context(files: TlsFiles) -> ssl.SSLContext:
    files.check()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    context.load_cert_chain(files.cert, files.key)
    if files.ca is not None:
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(files.ca)
        # Who resumes a session shows no certificate again: the former authority's clients could.
        context.num_tickets = 0
        context.options |= ssl.OP_NO_TICKET
    return context
