"""`headway status URL`: what a gateway or server is doing, for a terminal; `--json` for programs."""

from __future__ import annotations

from importlib import import_module

import click

from headway.launch.gateway_call import gateway_arguments, gateway_client
from headway.runtime.command_line import Command

EXAMPLE = """headway status http://127.0.0.1:8000
headway status http://127.0.0.1:8000 --watch"""


@click.command("status", cls=Command, example=EXAMPLE)
@gateway_arguments
@click.option("--watch", is_flag=True, help="Again every 2 s, until Ctrl-C.")
@click.option(
    "--json", "as_json", is_flag=True, help="As JSON: status, the ledger's audit, versions."
)
def command(url: str, watch: bool, as_json: bool, token_env: str | None) -> None:
    """Show what a gateway or a generation server is doing."""
    if watch and as_json:
        raise click.UsageError("give either --watch or --json")
    page = import_module("headway.launch.status_page")  # rich tables: not for help
    show = page.print_json if as_json else page.watch if watch else page.print_page
    with gateway_client(url, token_env) as client:
        show(client)
