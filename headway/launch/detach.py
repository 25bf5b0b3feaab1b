"""`headway detach URL CONSUMER`: end a consumer that will not come back."""

from __future__ import annotations

import click

from headway.launch.gateway_call import gateway_arguments, gateway_client
from headway.runtime.command_line import Command


@click.command("detach", cls=Command, example="headway detach http://127.0.0.1:8000 my-run")
@gateway_arguments
@click.argument("consumer")
def command(url: str, consumer: str, token_env: str | None) -> None:
    """End a consumer that will not come back.

    What it has not consumed is cancelled, so that another one may attach. A trainer's name is `run_id` in
    run.json of its run folder.
    """
    with gateway_client(url, token_env) as client:
        cancelled = client.detach_consumer(consumer)
    click.echo(f"{consumer} is detached; {cancelled} trajectories were cancelled")
