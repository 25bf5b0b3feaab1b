"""`headway config`: what can be set, whether a file is right, and the graph of an experiment."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import TypeVar

import click
from click.shell_completion import CompletionItem

from headway.runtime.command_line import Group, nearest
from headway.runtime.settings import Setting, names_of_kinds, settings_of
from headway.runtime.settings_command import write_settings

EXAMPLE = """headway config show ppo-code
headway config check run.yaml
headway config graph experiment.yaml --mermaid calls.mmd"""
AS_THEY_ARE = {"ignore_unknown_options": True}
CommandT = TypeVar("CommandT", bound=Callable[..., object])


class ConfigGroup(Group):
    """A name alone is shown: `headway config ppo`."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command that the first argument names."""
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

    NAME is run, gateway, server, or an experiment: grpo, ppo, ppo-code, ppo-math, ppo-hybrid, sft, rw,
    dpo, or one that an installed package adds.
    """
    settings = settings_of(name) if name in names_of_kinds() else _added_settings(name, context)
    formatter = context.make_formatter()
    write_settings(settings, formatter, f"Settings of {name}")
    click.echo(formatter.getvalue().strip("\n"))


def _added_settings(name: str, context: click.Context) -> list[Setting]:
    """Return the settings of another package's experiment."""
    from headway.contracts.errors import UnknownName  # all with pydantic: not for help
    from headway.launch.experiments import experiment_model
    from headway.runtime.model_settings import list_settings

    try:
        return list_settings(experiment_model(name))
    except UnknownName:
        hint = nearest(name, [*names_of_kinds()]) or f"known: {', '.join(names_of_kinds())}"
        problem = f"nothing named {name!r} can be configured; {hint}"
        raise click.UsageError(problem, context) from None


@command.command("check", context_settings=AS_THEY_ARE, example="headway config check run.yaml")
@_takes_a_file
def check(file: str, flags: Sequence[str]) -> None:
    """Tell what is wrong with a file, and the nearest right name."""
    from headway.launch.config_check import check as check_file  # all models: not for help

    click.echo(check_file(file, flags))


@command.command(
    "graph", context_settings=AS_THEY_ARE, example="headway config graph ppo.yaml --mermaid ppo.mmd"
)
@_takes_a_file
@click.option(
    "--mermaid",
    metavar="OUT.mmd",
    type=click.Path(path_type=Path),
    help="Write it as a Mermaid diagram, too.",
)
def graph(file: str, flags: Sequence[str], mermaid: Path | None) -> None:
    """Show the calls of a file's experiment, and what flows between them."""
    import_module("trainer.experiments.graph_command").print_graph(file, flags, mermaid)
