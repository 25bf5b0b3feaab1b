"""`headway pin URL [VERSION | --release]`: hold a published version while others are published."""

from __future__ import annotations

import click

from headway.launch.gateway_call import describe_versions, gateway_arguments, gateway_client
from headway.runtime.command_line import Command, VersionType

EXAMPLE = """headway pin http://127.0.0.1:8000 41
headway pin http://127.0.0.1:8000 --release"""


@click.command("pin", cls=Command, example=EXAMPLE)
@gateway_arguments
@click.argument("version", type=VersionType(), required=False)
@click.option("--release", is_flag=True, help="Go on with the newest version.")
def command(url: str, version: int | None, release: bool, token_env: str | None) -> None:
    """Hold a version while others are published.

    Without VERSION, the one that serves is held. `headway status URL --json` names those that are kept.
    """
    if release and version is not None:
        raise click.UsageError("give either VERSION or --release")
    with gateway_client(url, token_env) as client:
        if version is None and not release:
            version = client.status().version
        weights = client.pin(version)
    click.echo(describe_versions(weights))
