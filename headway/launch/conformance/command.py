"""`headway conformance URL`: does a service keep what trainers and agents rely on?"""

from __future__ import annotations

from pathlib import Path

import click

from headway.runtime.command_line import Command, UrlType, json_option

DIRECTORY = click.Path(exists=True, file_okay=False, path_type=Path)


@click.command(
    "conformance",
    cls=Command,
    example="headway conformance http://127.0.0.1:8000\n"
    "headway conformance http://127.0.0.1:30000 --dialect sglang --weights /models/a /models/b",
)
@click.argument("url", metavar="URL", type=UrlType())
@click.option(
    "--dialect",
    "dialects",
    type=click.Choice(["sglang", "openai", "vllm"]),
    multiple=True,
    help="Play only the clients of this API; may be given more than once.",
)
@click.option(
    "--weights",
    metavar="DIR DIR",
    nargs=2,
    type=DIRECTORY,
    help="Two directories with weights of the model, which the service can read. They serve by turns.",
)
@click.option(
    "--tolerance",
    metavar="X",
    type=click.FloatRange(min=0.0, min_open=True),
    default=0.03,
    show_default=True,
    help="Mean error of logprobs; 0.001 for weights in float32.",
)
@click.option(
    "--timeout-s",
    metavar="SECONDS",
    type=click.FloatRange(min=0.0, min_open=True),
    default=60.0,
    show_default=True,
    help="For every answer.",
)
@click.option("--token-env", metavar="VARIABLE", help="Environment variable with a bearer token.")
@json_option
def command(
    url: str,
    dialects: tuple[str, ...],
    weights: tuple[Path, Path] | None,
    tolerance: float,
    timeout_s: float,
    token_env: str | None,
    json_file: Path | None,
) -> None:
    """Play clients of three APIs against any service: an engine, a server, a gateway.

    It generates a few thousand tokens, and pauses the service for a second. Its weights stay as they are
    without --weights; with it, those of the first directory serve in the end.
    """
    from headway.launch.conformance.referee import judge
    from headway.runtime.secret import read_token

    token = read_token(token_env)
    judge(url, dialects, weights or None, token, tolerance, timeout_s, json_file)
