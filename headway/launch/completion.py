"""`headway completion bash|zsh|fish`: a script that makes the shell complete `headway`."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from headway.runtime.command_line import Command, completion_variable

NAME = "headway"
SHELLS = ("bash", "zsh", "fish")
EXAMPLE = """eval "$(headway completion bash)"                               # in ~/.bashrc
eval "$(headway completion zsh)"                                # in ~/.zshrc, after compinit
headway completion fish > ~/.config/fish/completions/headway.fish"""


@click.command("completion", cls=Command, example=EXAMPLE)
@click.argument("shell", type=click.Choice(SHELLS))
def command(shell: str) -> None:
    """Print a script that makes a shell complete headway.

    It completes commands, options, dotted settings, choices and file names, by asking the headway that is
    installed: it has to be printed once only.
    """
    kind = get_completion_class(shell)
    if kind is None:
        raise click.UsageError(f"this version of click completes nothing in {shell}; update click")
    click.echo(kind(click.Command(NAME), {}, NAME, completion_variable(NAME)).source())
