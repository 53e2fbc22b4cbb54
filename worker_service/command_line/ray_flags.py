"""Ranks on a Ray cluster."""

from dataclasses import dataclass
from typing import Annotated

from typer import Option

from worker_service.command_line.options import env


@dataclass(frozen=True, kw_only=True, slots=True)
class RayFlags:
    """Ranks on a Ray cluster."""

    ray_address: Annotated[
        str | None,
        Option(
            envvar=[env("RAY_ADDRESS"), "RAY_ADDRESS"],
            metavar="HOST:PORT",
            help="The Ray cluster.",
            show_default="the one this machine belongs to",
        ),
    ] = None
    ray_cpus_per_rank: Annotated[
        int, Option(envvar=env("RAY_CPUS_PER_RANK"), help="CPUs that Ray keeps for a rank.")
    ] = 1
    ray_timeout: Annotated[
        float,
        Option(
            envvar=env("RAY_TIMEOUT"),
            metavar="SECONDS",
            help="How long to wait for nodes that have room for the group.",
        ),
    ] = 300.0
