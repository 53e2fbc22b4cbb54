"""`pagewire adapter`: load and unload LoRA adapters, and list them."""

import json
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from pagewire_cli import terminal
from pagewire_cli.command import Command
from pagewire_cli.options import CONNECTION, Connection, with_options
from pagewire_client.deployment import Adapter, plain

adapter = typer.Typer(help="Load and unload LoRA adapters, and list them.", no_args_is_help=True)


@adapter.callback()
def _commands() -> None:
    """Load and unload LoRA adapters, and list them."""


Name = Annotated[str, typer.Argument(help="Name of the adapter for clients.")]


@adapter.command(cls=Command)
@with_options(connection=CONNECTION)
def load(
    connection: Connection,
    name: Name,
    path: Annotated[str, typer.Argument(help="Folder of the adapter on the workers' disks.")],
    model: Annotated[
        str | None, typer.Option(help="Its model; the only one by default.", show_default=False)
    ] = None,
    replace: Annotated[
        bool, typer.Option("--replace", help="Replace an adapter that has the name.")
    ] = False,
) -> None:
    """Load an adapter on all workers of its model, or on none.

    Frontends must have been started with --allow-runtime-lora-updating; where they require keys, an
    operator's is needed.
    """
    with connection.client() as client:
        loaded = client.load_adapter(name, path, model=model, replace=replace)
    terminal.note(f"{name} is loaded: {_facts(loaded)}")


@adapter.command(cls=Command)
@with_options(connection=CONNECTION)
def unload(connection: Connection, name: Name) -> None:
    """Make an adapter's name unusable; requests that use it continue with it."""
    with connection.client() as client:
        number = client.unload_adapter(name)
    terminal.note(f"{name} is unloaded; {number} requests still use it")


@adapter.command("list", cls=Command)
@with_options(connection=CONNECTION)
def list_adapters(
    connection: Connection,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the adapters that can be used."""
    with connection.client() as client:
        by_model = client.list_adapters()
    if as_json:
        named = {model: list(map(_plain, found)) for model, found in by_model.items()}
        terminal.write(json.dumps(named) + "\n")
        return
    table = Table("model", "adapter", "kind", "MiB", "digest", "path", box=None)
    for model, found in by_model.items():
        for entry in found:
            size, digest = f"{entry.num_bytes / 2**20:.1f}", entry.digest.hex()[:12]
            table.add_row(model, entry.name, _kind(entry), size, digest, entry.path)
    Console().print(table)


def _kind(entry: Adapter) -> str:
    number = entry.num_virtual_tokens
    return f"{number} tokens" if number else f"rank {entry.rank}"


def _plain(entry: Adapter) -> dict[str, Any]:
    return {**plain(entry), "digest": entry.digest.hex()}


def _facts(entry: Adapter) -> str:
    return f"{_kind(entry)}, {entry.num_bytes / 2**20:.1f} MiB, {entry.digest.hex()[:12]}"
