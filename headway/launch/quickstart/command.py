"""`headway quickstart`: its help and arguments."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import click

from headway.runtime.command_line import Command

EXAMPLE = """headway quickstart --steps 50
headway quickstart --resume"""


@click.command("quickstart", cls=Command, example=EXAMPLE)
@click.option(
    "--steps", metavar="N", type=click.IntRange(min=1), default=100, help="Versions to train."
)
@click.option(
    "--eta",
    metavar="N",
    type=click.IntRange(min=0),
    default=2,
    help="Bound on staleness, in versions.",
)
@click.option("--sync", is_flag=True, help="Synchronous: the same run with eta 0.")
@click.option(
    "--servers", metavar="N", type=click.IntRange(min=1), default=1, help="Generation servers."
)
@click.option(
    "--seed",
    metavar="N",
    type=click.IntRange(min=0),
    default=0,
    help="Seed of data, weights and sampling.",
)
@click.option(
    "--run-dir",
    metavar="FOLDER",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder of the run; runs/quickstart-TIME by default.",
)
@click.option(
    "--resume",
    is_flag=False,
    flag_value="",
    metavar="[RUN_DIR]",
    type=click.Path(file_okay=False),
    help="Go on with a run that was interrupted; the newest one by default.",
)
@click.option(
    "--lengths",
    type=click.Choice(("task", "lognormal")),
    default="task",
    help="How long responses are: as the task has it, or drawn lognormal (for measuring only: "
    "the model cannot end by itself, so nothing is learnt).",
)
def command(**options: object) -> None:
    """Train a tiny policy on this machine, end to end: warm start, then asynchronous GRPO.

    The last line on standard output is the summary as JSON; the first run takes about 1½ minutes on a
    laptop.
    """
    quickstart = import_module("headway.launch.quickstart.quickstart")
    quickstart.start(quickstart.Options(**options))
