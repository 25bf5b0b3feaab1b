"""`headway scale URL --deployment NAME`: keep a Kubernetes Deployment at the size that the work wants."""

from __future__ import annotations

from importlib import import_module

import click

from headway.launch.gateway_call import gateway_arguments, gateway_client
from headway.runtime.command_line import Command

EXAMPLE = """headway scale http://headway-gateway:8000 --deployment headway-server
kubectl proxy & headway scale http://127.0.0.1:8000 --deployment headway-server --namespace rl --api http://127.0.0.1:8001"""


@click.command("scale", cls=Command, example=EXAMPLE)
@gateway_arguments
@click.option("--deployment", required=True, metavar="NAME", help="Of generation servers.")
@click.option("--namespace", metavar="NAME", help="The Deployment's; by default the pod's own.")
@click.option("--api", metavar="URL", help="Kubernetes' API; by default that of the pod's cluster.")
@click.option("--min-servers", type=click.IntRange(0), default=1, show_default=True)
@click.option("--max-servers", type=click.IntRange(1), default=16, show_default=True)
@click.option(
    "--every-s",
    type=click.FloatRange(0.0, min_open=True),
    default=15.0,
    show_default=True,
    help="Seconds between two looks.",
)
def command(
    url: str,
    token_env: str | None,
    deployment: str,
    namespace: str | None,
    api: str | None,
    min_servers: int,
    max_servers: int,
    every_s: float,
) -> None:
    """Keep a Kubernetes Deployment at the number of servers that the work wants.

    It runs until it is stopped, and needs no more than `get` and `patch` of `deployments/scale`.
    """
    if min_servers > max_servers:
        raise click.UsageError(
            f"--min-servers {min_servers} is more than --max-servers {max_servers}"
        )
    import_module("headway.runtime.logging").configure_logging("scale")
    find_deployment = import_module("headway.launch.kubernetes").find_deployment
    follow = import_module("headway.launch.autoscale").follow
    with (
        find_deployment(deployment, namespace, api) as found,
        gateway_client(url, token_env) as gateway,
    ):
        follow(gateway, found, min_servers, max_servers, every_s)
