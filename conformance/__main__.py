"""The command line: `python -m conformance ADDRESS`."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from conformance import cases, runner
from conformance.assertions import Failed
from conformance.case import Case
from conformance.credentials import Credentials
from conformance.registration_server import RegistrationServer
from conformance.worker import Worker
from pagewire.usage_errors import OneLineCommand

EXIT_FAILED = 1
EXIT_WRONG_OPTION = 2


def main(
    address: Annotated[
        str | None, typer.Argument(help="Where the worker listens: HOST:PORT or unix:PATH.")
    ] = None,
    core_listen: Annotated[
        str | None,
        typer.Option(
            help="Listen here as a core, and also check the registration of a worker. "
            "ADDRESS is then optional. At the end the worker is stopped."
        ),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(
            help="Only cases of this group, or with this text in `group: name`. May be repeated."
        ),
    ] = None,
    junit: Annotated[Path | None, typer.Option(help="Also write a JUnit file.")] = None,
    timeout: Annotated[
        float, typer.Option(help="Seconds for each call and each step stream.", min=1.0)
    ] = 60.0,
    cluster_token_file: Annotated[
        Path | None, typer.Option(help="File of the token of the worker's cluster.")
    ] = None,
    cluster_ca: Annotated[
        Path | None, typer.Option(help="The authority of its certificates (PEM).")
    ] = None,
    cluster_cert: Annotated[Path | None, typer.Option(help="A member's certificate (PEM).")] = None,
    cluster_key: Annotated[Path | None, typer.Option(help="That certificate's key (PEM).")] = None,
    list_cases: Annotated[bool, typer.Option("--list", help="Only list the cases.")] = False,
) -> None:
    """Check whether a worker implements the contract of `pagewire.v1`."""
    chosen = _choose(only)
    if list_cases:
        for case in chosen:
            typer.echo(f"{case.full_name}\n      {case.file}: {case.promise}")
        return
    if address is None and core_listen is None:
        raise typer.BadParameter("expected ADDRESS or --core-listen")
    for name, given_address in (("ADDRESS", address), ("--core-listen", core_listen)):
        if given_address is not None and ":" not in given_address:
            raise typer.BadParameter(
                f"{name}: expected HOST:PORT or unix:PATH, got {given_address!r}"
            )
    if junit is not None:
        try:
            junit.open("a").close()  # not only after the run
        except OSError as error:
            raise typer.BadParameter(f"--junit: cannot write {junit}: {error.strerror}") from None
    given = [path is not None for path in (cluster_ca, cluster_cert, cluster_key)]
    if any(given) and not all(given):
        raise typer.BadParameter("expected all of --cluster-ca, --cluster-cert, --cluster-key")
    credentials = Credentials(
        token_file=cluster_token_file, ca=cluster_ca, cert=cluster_cert, key=cluster_key
    )
    sys.exit(_run(chosen, address, core_listen, timeout, junit, credentials))


def _choose(only: list[str] | None) -> list[Case]:
    chosen = [case for case in cases.ALL if not only or any(_selects(t, case) for t in only)]
    if not chosen:
        raise typer.BadParameter(f"no case has {' or '.join(map(repr, only or []))} in its name")
    return chosen


def _selects(text: str, case: Case) -> bool:
    """Whether it is the name of the case's group or, if it names no group, part of its name."""
    if any(text.lower() == other.group for other in cases.ALL):
        return case.group == text.lower()
    return text.lower() in case.full_name.lower()


def _run(
    chosen: list[Case],
    address: str | None,
    core_listen: str | None,
    timeout_s: float,
    junit: Path | None,
    credentials: Credentials,
) -> int:
    server = None
    try:
        if core_listen is not None:
            server = RegistrationServer(core_listen, credentials)
        if address is None:
            assert server is not None, "checked with the options"
            _note(f"waiting for a worker to register at {core_listen} …")
            address = server.wait(timeout_s).address
        worker = Worker(
            address,
            timeout_s=timeout_s,
            registration_server=server,
            credentials=credentials,
            on_wait=lambda: _note(f"waiting for a worker at {address} …"),
        )
    except (Failed, OSError, RuntimeError, ValueError) as error:
        return _give_up(str(error))
    outcomes = []
    for outcome in runner.run(chosen, worker):
        outcomes.append(outcome)
        typer.echo(runner.format_outcome(outcome))
    typer.echo(runner.format_summary(outcomes))
    if junit is not None:
        runner.write_junit(outcomes, junit)
    if server is not None:
        server.close()
    failed = any(outcome.verdict is runner.Verdict.FAIL for outcome in outcomes)
    return EXIT_FAILED if failed else 0


def _note(text: str) -> None:
    typer.echo(text, err=True)


def _give_up(problem: str) -> int:
    _note(f"error: {problem}")
    return EXIT_FAILED


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command(cls=OneLineCommand)(main)
    app(prog_name="pagewire conformance")
