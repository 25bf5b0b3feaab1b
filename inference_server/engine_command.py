"""`headway engine check URL`: does an engine keep what rollouts rely on?"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import click

from headway.runtime.command_line import Command, Group, json_option

EXISTING = click.Path(exists=True, file_okay=False, path_type=Path)


@click.group("engine", cls=Group, example="headway engine check http://127.0.0.1:30000")
def command() -> None:
    """Look at an engine of SGLang or vLLM that runs already."""


@command.command(
    "check",
    cls=Command,
    example="headway engine check http://127.0.0.1:30000\n"
    "headway engine check http://gpu-1:8000 --model /models/qwen3 --scratch /shared/tmp",
)
@click.argument("url")
@click.option(
    "--model", metavar="DIR", type=EXISTING, help="Its weights; by default where it has them from."
)
@click.option(
    "--scratch",
    metavar="DIR",
    type=EXISTING,
    help="Place for versions that the engine reads, too; by default the one for temporary files.",
)
@click.option(
    "--tolerance",
    metavar="X",
    type=click.FloatRange(min=0.0, min_open=True),
    help="Mean error of logprobs; by default 0.001 for float32 weights, else 0.03.",
)
@json_option
def check(
    url: str,
    model: Path | None,
    scratch: Path | None,
    tolerance: float | None,
    json_file: Path | None,
) -> None:
    """Check an engine's logprobs, versions, weight updates, pauses, aborts and stop rules.

    Nothing else may use the engine meanwhile: its weights are exchanged several times. In the end it has
    the first ones again. Needs the extras `inference` and `testing`.
    """
    try:
        engine_check = import_module("inference_server.engine_check")
    except ModuleNotFoundError as error:
        raise click.ClickException(
            f"{error.name} is not installed; install Headway with the extras 'inference' and 'testing'"
        ) from error
    engine_check.check_engine(url, model, scratch, tolerance, json_file)
