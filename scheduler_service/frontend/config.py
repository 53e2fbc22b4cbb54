"""A frontend's configuration, and the limits of the servers that clients can reach."""

from dataclasses import dataclass, field
from pathlib import Path

from pagewire.bearer_tokens import is_bearer_token
from scheduler_service.frontend.auth import read_keys
from service_common.addresses import check_addresses, is_local, split_host_port
from service_common.cluster import NO_CLUSTER, ClusterConfig
from service_common.durations import check_seconds
from service_common.grpc_options import Options, server_options
from service_common.tls import TlsFiles

MIN_API_KEY_CHARS = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class FrontendConfig:
    """Addresses and limits of one frontend."""

    core: str = "127.0.0.1:7610"
    """Address of the scheduler core."""

    listen: str = "127.0.0.1:7600"
    """Address for clients. Without keys, every caller that reaches it is served."""

    health_listen: str | None = None
    """Additional address for health checks, without TLS or credentials."""

    api_keys: Path | None = None
    """Keys that clients may present, as TOML; without them no key is required. See
    docs/security.md."""

    api_key: list[str] = field(default_factory=list, repr=False)
    """A key for all clients; may be repeated, and in the variable several are separated by spaces.
    Other users of this machine can read it on a command line, but not in the environment."""

    tls: TlsFiles | None = None
    """The certificate for clients, and the authority of certificates required of them."""

    cluster: ClusterConfig = NO_CLUSTER
    """Credentials for the core."""

    max_connections: int = 16_384
    """Maximum number of client connections; more are refused."""

    http: str | None = None
    """Address for HTTP clients, HOST:PORT; None: no HTTP."""

    http_share_port: bool = False
    """Allow other frontends on this machine to listen for HTTP at the same address; the system
    distributes connections among them."""

    http_allowed_hosts: list[str] = field(default_factory=list)
    """Host name that HTTP clients may use, as in their Host header; may be repeated. By default any
    name, except that a loopback address without keys accepts only its own name and localhost, so
    that a web page from elsewhere cannot call it under a name that resolves to it."""

    sse_keep_alive_s: float = 15.0
    """Time without output after which a stream over HTTP gets a comment (Anthropic's API: a ping),
    so that proxies between do not close it; 0 for none."""

    allow_runtime_lora_updating: bool = False
    """Let operators load and unload LoRA adapters, which the workers read from their disks."""

    otlp_endpoint: str | None = None
    """Address to which spans of requests are exported (OTLP over gRPC), such as
    http://127.0.0.1:4317; by default taken from OpenTelemetry's environment variables."""

    metrics: str | None = None
    """Address at which Prometheus scrapes /metrics; a port alone is on 127.0.0.1. The HTTP address,
    if enabled, serves it as well."""

    max_concurrent_requests: int = 4096
    """Maximum number of open requests; more are refused."""

    max_tenant_requests: int | None = None
    """Maximum number of open requests of one tenant, and of one call; by default half of
    --max-concurrent-requests. If keys name no tenants, the limit applies only to calls."""

    default_timeout_s: float | None = None
    """Deadline of requests that set none; by default no deadline."""

    grace_period_s: float = 30.0
    """Time in which open requests may finish after SIGTERM."""

    def __post_init__(self) -> None:
        check_addresses(core=self.core, listen=self.listen, health_listen=self.health_listen)
        if self.http is not None:
            _check_http(self.http)
        self._check_keys()
        for name in ("max_connections", "max_concurrent_requests", "max_tenant_requests"):
            limit = getattr(self, name)
            if limit is not None and limit < 1:
                raise ValueError(f"{name}: expected at least 1, got {limit}")
        if self.default_timeout_s == 0:
            raise ValueError("default_timeout: expected more than 0 seconds, got 0")
        check_seconds(
            default_timeout=self.default_timeout_s,
            grace_period=self.grace_period_s,
            sse_keep_alive=self.sse_keep_alive_s,
        )

    @property
    def tenant_share(self) -> int:
        """Maximum number of open requests of one tenant or one call."""
        if self.max_tenant_requests is not None:
            return min(self.max_tenant_requests, self.max_concurrent_requests)
        return (self.max_concurrent_requests + 1) // 2

    @property
    def knows_callers(self) -> bool:
        """Whether callers must authenticate."""
        asks_certificate = self.tls is not None and self.tls.ca is not None
        return asks_certificate or self.api_keys is not None or bool(self.api_key)

    @property
    def allowed_hosts(self) -> frozenset[str] | None:
        """Names that the Host header of an HTTP request may have, in lower case; None: any."""
        if self.http_allowed_hosts:
            return frozenset(map(str.lower, self.http_allowed_hosts))
        if self.http is None or self.knows_callers or not is_local(self.http):
            return None
        return frozenset({"localhost", "127.0.0.1", "::1", split_host_port(self.http)[0]})

    def _check_keys(self) -> None:
        if self.api_keys is not None:
            if self.api_key:
                raise ValueError("api_key: expected none with --api-keys, the file of keys")
            if not read_keys(self.api_keys):
                raise ValueError(
                    f"api_keys: {self.api_keys}: expected at least one key, got none;"
                    " `pagewire key new` makes a key"
                )
        if not all(map(is_bearer_token, self.api_key)):
            raise ValueError("api_key: expected visible ASCII characters, which clients can send")
        if short := [len(key) for key in self.api_key if len(key) < MIN_API_KEY_CHARS]:
            raise ValueError(
                f"api_key: expected at least {MIN_API_KEY_CHARS} characters, got {short[0]};"
                " `pagewire key new` makes a key"
            )


def _check_http(address: str) -> None:
    try:
        split_host_port(address)
    except ValueError:
        raise ValueError(f"http: {address!r}: expected HOST:PORT or off") from None


MAX_PUBLIC_MESSAGE_BYTES = 16 << 20
"""Largest message a client may send: a prompt of four million token ids."""

MAX_PUBLIC_STREAMS = 1024
"""Open calls of one client connection; further calls wait at the client."""

MAX_PENDING_CALLS = 16_384
"""Maximum number of calls, over all connections, that gRPC has received and the frontend has not
accepted yet; further ones end with CANCELLED and without a reason. By default gRPC refuses some
from 1,000 on, which a burst of requests reaches, although the frontend itself refuses requests with
a retry delay."""

MAX_PENDING_S = 600
"""Time after which gRPC cancels such a call; by default 30 seconds."""

MAX_PUBLIC_IDLE_MS = 900_000
"""Time after which a client's connection without calls is closed; clients reconnect
automatically."""


def public_server_options(*, max_connections: int) -> Options:
    """Options of a server that is reachable by untrusted clients."""
    return [
        *server_options(max_receive_bytes=MAX_PUBLIC_MESSAGE_BYTES),
        ("grpc.max_concurrent_streams", MAX_PUBLIC_STREAMS),
        # By default calls that have ended and are not freed yet count as open: a client that opens
        # a call whenever one ends would have some of them reset (REFUSED_STREAM).
        ("grpc.http.overload_protection", 0),
        ("grpc.server.max_pending_requests", MAX_PENDING_CALLS),
        ("grpc.server.max_pending_requests_hard_limit", MAX_PENDING_CALLS),
        ("grpc.server_max_unrequested_time_in_server", MAX_PENDING_S),
        ("grpc.max_connection_idle_ms", MAX_PUBLIC_IDLE_MS),
        ("grpc.max_allowed_incoming_connections", max_connections),
    ]
