"""The flags of `python -m scheduler_service frontend`."""

from typing import Annotated

import typer

from scheduler_service.command_line import LogLevel, run_service
from scheduler_service.frontend.config import FrontendConfig
from scheduler_service.frontend.server import serve

DEFAULTS = FrontendConfig()
HTTP_OFF = "off"


def frontend(
    core: Annotated[
        str,
        typer.Option(
            envvar="PAGEWIRE_CORE",
            metavar="HOST:PORT|unix:PATH",
            help="Where the scheduler core listens.",
        ),
    ] = DEFAULTS.core,
    listen: Annotated[
        str,
        typer.Option(
            envvar="PAGEWIRE_LISTEN",
            metavar="HOST:PORT|unix:PATH",
            help="Where clients call.",
        ),
    ] = DEFAULTS.listen,
    http: Annotated[
        str,
        typer.Option(
            envvar="PAGEWIRE_HTTP",
            metavar="HOST:PORT|off",
            help="Where HTTP clients call (OpenAI's interface), such as 127.0.0.1:8000.",
        ),
    ] = HTTP_OFF,
    http_share_port: Annotated[
        bool,
        typer.Option(
            "--http-share-port",
            envvar="PAGEWIRE_HTTP_SHARE_PORT",
            help="Let other frontends listen at the same HTTP address; connections are spread.",
        ),
    ] = DEFAULTS.http_share_port,
    max_concurrent_requests: Annotated[
        int,
        typer.Option(
            envvar="PAGEWIRE_MAX_CONCURRENT_REQUESTS",
            help="Most open requests; more are refused.",
        ),
    ] = DEFAULTS.max_concurrent_requests,
    default_timeout: Annotated[
        float | None,
        typer.Option(
            envvar="PAGEWIRE_DEFAULT_TIMEOUT",
            metavar="SECONDS",
            help="Deadline of requests that bring none; without it they have none.",
        ),
    ] = DEFAULTS.default_timeout_s,
    grace_period: Annotated[
        float,
        typer.Option(
            envvar="PAGEWIRE_GRACE_PERIOD",
            metavar="SECONDS",
            help="Time in which open requests may finish after SIGTERM.",
        ),
    ] = DEFAULTS.grace_period_s,
    log_level: Annotated[
        LogLevel, typer.Option(envvar="PAGEWIRE_LOG_LEVEL", help="Least severity logged.")
    ] = LogLevel.INFO,
) -> None:
    """Run a frontend: what clients call, text on one side and tokens on the other."""

    def make_config() -> FrontendConfig:
        return FrontendConfig(
            core=core,
            listen=listen,
            http=None if http == HTTP_OFF else http,
            http_share_port=http_share_port,
            max_concurrent_requests=max_concurrent_requests,
            default_timeout_s=default_timeout,
            grace_period_s=grace_period,
        )

    run_service(make_config, serve, log_level)
