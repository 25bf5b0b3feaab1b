"""`headway`: one command, its parts imported only when they are called.

A part is a module with a `command` (`headway.runtime.command_line`), which is light: what it runs is
imported when it runs, so `--help` and completion take little longer than Python's start.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import NoReturn

import click
from click.shell_completion import CompletionItem

from headway import __version__
from headway.runtime.command import run_command
from headway.runtime.command_line import Group, call, complete, completion_variable
from headway.runtime.ending import end_process

NAME = "headway"
COMMANDS = {
    "quickstart": ("headway.launch.quickstart.command", "train a tiny policy here, end to end"),
    "run": ("headway.launch.run_command", "gateway, servers and trainer of a config, here"),
    "gateway": ("gateway.app.command", "one gateway"),
    "serve": ("inference_server.command", "one generation server (python -m inference_server)"),
    "train": ("trainer.command", "one trainer rank (python -m trainer)"),
    "engine": ("inference_server.engine_command", "check an SGLang or vLLM that runs already"),
    "conformance": (
        "headway.launch.conformance.command",
        "check what any service keeps of three APIs",
    ),
    "ray": (
        "headway.launch.ray_command",
        "the same on a Ray cluster, with as many servers as it wants",
    ),
    "slurm": ("headway.launch.slurm_command", "batch scripts for a run, or a trainer, on Slurm"),
    "config": ("headway.launch.config_command", "what can be set; check a file; draw its calls"),
    "status": ("headway.launch.status", "what a gateway is doing"),
    "ledger": ("gateway.ledger.commands.main", "look into a ledger, requeue, export"),
    "weights": ("weight_sync.commands.main", "list, prove, compare, delete published versions"),
    "pin": ("headway.launch.pin", "hold a version while others are published"),
    "rollback": ("headway.launch.rollback", "serve an earlier version until the next one"),
    "drain": ("headway.launch.drain", "take a generation server out of traffic"),
    "scale": ("headway.launch.scale", "keep a Deployment at the size that the work wants"),
    "detach": ("headway.launch.detach", "end a consumer that will not come back"),
    "completion": ("headway.launch.completion", "a script for bash, zsh or fish"),
}
EXAMPLE = """headway quickstart
headway run --config run.yaml --model MODEL_DIR
headway help train"""


def _complete_words(
    context: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Commands, and the commands of a command."""
    group: click.Command | None = root
    for word in context.params.get("words") or ():
        group = group.get_command(context, word) if isinstance(group, Group) else None
    return group.shell_complete(context, incomplete) if isinstance(group, Group) else []


@click.group(NAME, cls=Group, lazy=COMMANDS, example=EXAMPLE)
@click.version_option(__version__, message=f"{NAME} %(version)s")
def root() -> None:
    """Asynchronous, decoupled rollout and training for language models."""


@root.command("help", short_help="help on a command, as its --help", example="headway help train")
@click.argument("words", metavar="[COMMAND]...", nargs=-1, shell_complete=_complete_words)
def help_command(words: Sequence[str]) -> None:
    """Show what `headway COMMAND --help` shows; without a command, list them all."""
    call(root, [*words, "--help"], NAME)


def entry() -> NoReturn:
    """The console script."""
    instruction = os.environ.get(completion_variable(NAME))
    if instruction:
        sys.exit(complete(root, NAME, instruction))
    try:
        run_command(main, sys.argv[1:])
    except SystemExit as end:
        if not isinstance(end.code, int):
            raise
        end_process(end.code)


def main(argv: Sequence[str]) -> None:
    """Hand over to a command."""
    call(root, argv or ["--help"], NAME)


if __name__ == "__main__":
    entry()
