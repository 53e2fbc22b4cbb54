"""What the services of one deployment show each other."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from typer import Option

from service_common.cluster import ClusterConfig
from worker_service.command_line.options import env
from worker_service.errors import InvalidOption


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterFlags:
    """What the services of one deployment show each other."""

    cluster_token_file: Annotated[
        Path | None,
        Option(
            envvar=env("CLUSTER_TOKEN_FILE"),
            metavar="FILE",
            help="The token that the services of the deployment show each other.",
        ),
    ] = None
    cluster_ca: Annotated[
        Path | None,
        Option(
            envvar=env("CLUSTER_CA"),
            metavar="FILE",
            help="Authority of the services' certificates (PEM), for TLS between them.",
        ),
    ] = None
    cluster_cert: Annotated[
        Path | None,
        Option(envvar=env("CLUSTER_CERT"), metavar="FILE", help="This service's certificate."),
    ] = None
    cluster_key: Annotated[
        Path | None,
        Option(envvar=env("CLUSTER_KEY"), metavar="FILE", help="That certificate's key (PEM)."),
    ] = None

    def config(self) -> ClusterConfig:
        """As settings. Raises InvalidOption."""
        try:
            return ClusterConfig(
                token_file=self.cluster_token_file,
                ca=self.cluster_ca,
                cert=self.cluster_cert,
                key=self.cluster_key,
            )
        except ValueError as error:
            raise InvalidOption(str(error)) from error
