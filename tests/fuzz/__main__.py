"""`python -m tests.fuzz grpc http --calls 100000`: long runs, their figures on standard output."""

import sys
import time
from typing import Annotated

import typer

from tests.fuzz.run import TARGETS, run


def main(
    targets: Annotated[list[str], typer.Argument(help=f"Among {', '.join(TARGETS)}.")],
    calls: Annotated[int, typer.Option(help="Requests at each target.")] = 100_000,
    seed: Annotated[int, typer.Option(help="Of the mutations.")] = 1,
) -> None:
    """Send mutated requests to a deployment with a simulated worker; exit code 1 after any harm."""
    harmed = False
    for target in targets:
        began = time.monotonic()
        outcome, growth = run(target, num_calls=calls, seed=seed)
        typer.echo(f"{target}: {outcome}")
        typer.echo(f"  {time.monotonic() - began:.0f} s\n{growth}")
        for harm in outcome.harm:
            harmed = True
            typer.echo(f"  HARM {harm}")
    sys.exit(1 if harmed else 0)


if __name__ == "__main__":
    typer.run(main)
