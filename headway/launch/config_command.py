"""`headway config`: what can be set, whether a file is right, and the graph of an experiment."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import TypeVar

import click
from click.shell_completion import CompletionItem

from headway.runtime.command_line import Group, nearest
from headway.runtime.settings import names_of_kinds, settings_of
from headway.runtime.settings_command import write_settings

EXAMPLE = """headway config show ppo-code
headway config check run.yaml
headway config graph experiment.yaml --svg calls.svg"""
AS_THEY_ARE = {"ignore_unknown_options": True}
CommandT = TypeVar("CommandT", bound=Callable[..., object])


class ConfigGroup(Group):
    """A name alone is shown: `headway config ppo`."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Whom the first argument names."""
        if args[0] in names_of_kinds():
            return super().resolve_command(ctx, ["show", *args])
        return super().resolve_command(ctx, args)


@click.group("config", cls=ConfigGroup, example=EXAMPLE)
def command() -> None:
    """Show what can be set, check a file, or draw the calls of its experiment."""


def _complete_kinds(
    context: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    known = names_of_kinds().items()
    return [CompletionItem(name, help=text) for name, text in known if name.startswith(incomplete)]


def _takes_a_file(function: CommandT) -> CommandT:
    """Give a command a file, and settings that win over it."""
    flags = click.argument(
        "flags", metavar="[--SECTION.KEY VALUE]...", nargs=-1, type=click.UNPROCESSED
    )
    file = click.argument("file", metavar="FILE", type=click.Path())
    return file(flags(function))


@command.command("show", example="headway config show server")
@click.argument("name", shell_complete=_complete_kinds)
@click.pass_context
def show(context: click.Context, name: str) -> None:
    """Show every setting of NAME with its default and meaning.

    NAME is run, gateway, server, or an experiment: grpo, ppo, ppo-code, ppo-math, sft, rw, dpo.
    """
    if name not in names_of_kinds():
        hint = nearest(name, [*names_of_kinds()]) or f"known: {', '.join(names_of_kinds())}"
        raise click.UsageError(f"nothing named {name!r} can be configured; {hint}", context)
    formatter = context.make_formatter()
    write_settings(settings_of(name), formatter, f"Settings of {name}")
    click.echo(formatter.getvalue().strip("\n"))


@command.command("check", context_settings=AS_THEY_ARE, example="headway config check run.yaml")
@_takes_a_file
def check(file: str, flags: Sequence[str]) -> None:
    """Tell what is wrong with a file, and the nearest right name."""
    from headway.launch.config_check import check as check_file  # all models: not for help

    click.echo(check_file(file, flags))


@command.command(
    "graph", context_settings=AS_THEY_ARE, example="headway config graph ppo.yaml --svg ppo.svg"
)
@_takes_a_file
@click.option("--svg", metavar="OUT.svg", type=click.Path(path_type=Path), help="Draw it, too.")
def graph(file: str, flags: Sequence[str], svg: Path | None) -> None:
    """Show the calls of a file's experiment, and what flows between them."""
    import_module("trainer.dataflow.command").print_graph(file, flags, svg)
