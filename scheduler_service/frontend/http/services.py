"""The services that the endpoints use."""

from dataclasses import dataclass

from prometheus_client import CollectorRegistry

from scheduler_service.frontend.auth import Authentication
from scheduler_service.frontend.core_client import CoreConnection
from scheduler_service.frontend.request_manager import RequestManager
from scheduler_service.frontend.served_models import ModelDirectory


@dataclass(frozen=True, kw_only=True, slots=True)
class HttpServices:
    """The parts of a frontend that HTTP shares with gRPC."""

    requests: RequestManager
    models: ModelDirectory
    core: CoreConnection
    authentication: Authentication
    registry: CollectorRegistry
    """The metrics that Prometheus scrapes."""
    allowed_hosts: frozenset[str] | None = None
    """Names that the Host header may have; None: any."""
