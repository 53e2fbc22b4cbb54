"""What a frontend is told when it starts."""

from dataclasses import dataclass

from scheduler_service.addresses import check_address, split_host_port


@dataclass(frozen=True, kw_only=True, slots=True)
class FrontendConfig:
    """Addresses and limits of one frontend."""

    core: str = "127.0.0.1:7610"
    """Address of the scheduler core."""

    listen: str = "127.0.0.1:7600"
    """Where clients call. Loopback by default: there is no authentication yet."""

    http: str | None = None
    """Where HTTP clients call, HOST:PORT; None: nowhere."""

    http_share_port: bool = False
    """Whether other frontends on this machine may listen for HTTP at the same address."""

    max_concurrent_requests: int = 4096
    """Open requests after which new ones are refused; bounds memory, while the core's own queue
    bounds waiting."""

    default_timeout_s: float | None = None
    """Deadline of requests that bring none, in seconds; None leaves them without."""

    grace_period_s: float = 30.0
    """Seconds in which open requests may finish when the service is told to end."""

    def __post_init__(self) -> None:
        for name, address in (("core", self.core), ("listen", self.listen)):
            try:
                check_address(address)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from error
        if self.http is not None:
            _check_http(self.http)
        if self.max_concurrent_requests < 1:
            raise ValueError("max_concurrent_requests: expected at least 1")
        if self.default_timeout_s is not None and not 0 < self.default_timeout_s < float("inf"):
            raise ValueError("default_timeout: expected a positive number of seconds")
        if not 0 <= self.grace_period_s < float("inf"):
            raise ValueError("grace_period: expected a number of seconds, at least 0")


def _check_http(address: str) -> None:
    try:
        split_host_port(address)
    except ValueError:
        raise ValueError(f"http: {address!r}: expected HOST:PORT or off") from None
