"""The flags of `python -m scheduler_service frontend`."""

import logging
import os
import resource
from dataclasses import replace
from pathlib import Path

from scheduler_service.command_line import service_command
from scheduler_service.frontend.config import FrontendConfig
from service_common.cluster import ClusterConfig
from service_common.config_flags import CLUSTER, ConfigFlags, Flags, flag
from service_common.garbage import imports_exempted
from service_common.metrics_server import metrics_address
from service_common.tls import tls_files

logger = logging.getLogger(__name__)

HTTP_OFF = "off"

FRONTEND = ConfigFlags(
    FrontendConfig,
    metrics="metrics_port",
    default_timeout_s="default_timeout",
    grace_period_s="grace_period",
    sse_keep_alive_s="sse_keep_alive",
    http_share_port="http_share_port!",
    allow_runtime_lora_updating="allow_runtime_lora_updating!",
    http=None,
    tls=None,
    cluster=None,
)
HTTP = flag(
    "http", str, HTTP_OFF, "Where HTTP clients call (OpenAI's interface), such as 127.0.0.1:8000."
)
TLS = [
    flag("tls_cert", Path | None, None, "Certificate for clients (PEM)."),
    flag("tls_key", Path | None, None, "That certificate's key (PEM)."),
    flag(
        "tls_client_ca",
        Path | None,
        None,
        "Authority of which clients must have a certificate (PEM).",
    ),
]


OWN_FILES = 64
"""Files of a frontend besides connections of clients: libraries, listeners, the core's stream."""


def connections_within(max_files: int, max_connections: int) -> int:
    """How many connections, of gRPC and of HTTP each, a process may have that can open `max_files`:
    one that runs out of files accepts none for a second."""
    return max(1, min(max_connections, max_files - OWN_FILES))


async def _serve(config: FrontendConfig) -> None:
    with imports_exempted():
        from scheduler_service.frontend.server import serve

    max_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if (limit := connections_within(max_files, config.max_connections)) < config.max_connections:
        logger.warning(
            "this process may open few files, so that it accepts fewer connections than"
            " --max-connections: raise the limit (ulimit -Hn) max_files=%d max_connections=%d",
            max_files,
            limit,
        )
        config = replace(config, max_connections=limit)
    await serve(config)


@service_command(_serve, FRONTEND.parameters, [HTTP], TLS)
def frontend(flags: Flags) -> FrontendConfig:
    """Run a frontend: what clients call, text on one side and tokens on the other."""
    if not flags["api_key"] and os.environ.get("PAGEWIRE_API_KEY"):
        raise ValueError("PAGEWIRE_API_KEY: expected a key, got blanks; unset it for no keys")
    if not flags["api_key"] and not flags["api_keys"] and os.environ.get("VLLM_API_KEY"):
        raise ValueError("VLLM_API_KEY is PAGEWIRE_API_KEY here; unset it for no keys")
    fields = FRONTEND.fields_of(flags) | {"metrics": metrics_address(flags["metrics_port"])}
    return FrontendConfig(
        **fields,
        http=None if flags["http"] == HTTP_OFF else flags["http"],
        tls=tls_files(flags["tls_cert"], flags["tls_key"], flags["tls_client_ca"]),
        cluster=ClusterConfig(**CLUSTER.fields_of(flags)),
    )
