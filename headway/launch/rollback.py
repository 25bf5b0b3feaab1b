"""`headway rollback URL VERSION`: serve an earlier version until the next one is published."""

from __future__ import annotations

import click

from headway.launch.gateway_call import describe_versions, gateway_arguments, gateway_client
from headway.runtime.command_line import Command, VersionType


@click.command("rollback", cls=Command, example="headway rollback http://127.0.0.1:8000 41")
@gateway_arguments
@click.argument("version", type=VersionType())
def command(url: str, version: int, token_env: str | None) -> None:
    """Serve an earlier version until the next one is published.

    It must still be kept; `headway status URL --json` names those that are.
    """
    with gateway_client(url, token_env) as client:
        weights = client.rollback(version)
    click.echo(describe_versions(weights))
