"""`headway drain URL SERVER [--undo]`: take a generation server out of traffic while it stays up."""

from __future__ import annotations

import click

from headway.launch.gateway_call import gateway_arguments, gateway_client
from headway.runtime.command_line import Command


@click.command("drain", cls=Command, example="headway drain http://127.0.0.1:8000 gpu-1")
@gateway_arguments
@click.argument("server")
@click.option("--undo", is_flag=True, help="Let it take traffic again.")
def command(url: str, server: str, undo: bool, token_env: str | None) -> None:
    """Take a generation server out of traffic while it stays up.

    `headway status URL` names the servers.
    """
    with gateway_client(url, token_env) as client:
        client.drain_server(server, drain=not undo)
        servers = {known.server_id: known.state for known in client.status().servers}
    click.echo(f"server {server} is {servers.get(server, 'gone')}")
