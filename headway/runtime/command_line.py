"""Commands as people know them: help, nearest names and completion, all by click.

Why click: a process has some 400 dotted settings, which pydantic models check together with its files.
Click lets one command take its arguments as they are while all others are declared, loads commands when
they are called, completes in bash, zsh and fish, and is there already (uvicorn needs it). argparse takes
`-1e-6` for an option and completes nothing by itself; typer and cyclopts want every option to be a
parameter of a function.

Neither this nor a module that declares a command loads what the command needs to run: help and completion
answer at once.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import click
from click.shell_completion import (
    BashComplete,
    CompletionItem,
    add_completion_class,
    shell_complete,
)

HELP_NAMES = ("-h", "--help")
MAX_WIDTH = 120
CONTEXT = {
    "help_option_names": list(HELP_NAMES),
    "max_content_width": MAX_WIDTH,
    "show_default": True,
}
json_option = click.option(
    "--json",
    "json_file",
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the results there, too.",
)
"""Of commands that print results."""
LazyCommands = Mapping[str, tuple[str, str]]
"""Name -> the module whose `command` it is, and what it does in one line."""


class Command(click.Command):
    """A command whose help ends with examples."""

    def __init__(self, *args: Any, example: str = "", **kwargs: Any) -> None:
        """
        Args:
            example: command lines, one each line.
        """
        kwargs["context_settings"] = CONTEXT | (kwargs.get("context_settings") or {})
        super().__init__(*args, **kwargs)
        self.example = example

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The examples."""
        write_example(self.example, formatter)


class Group(click.Group):
    """A command of commands; those of `lazy` are imported when they are called."""

    command_class = Command

    def __init__(
        self,
        *args: Any,
        example: str = "",
        lazy: LazyCommands | None = None,
        **kwargs: Any,
    ) -> None:
        kwargs["context_settings"] = CONTEXT | (kwargs.get("context_settings") or {})
        kwargs.setdefault("no_args_is_help", False)
        kwargs.setdefault("subcommand_metavar", "COMMAND [ARGUMENTS]...")
        super().__init__(*args, **kwargs)
        self.example = example
        self.lazy = dict(lazy or {})

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Refuse to be called without a command, naming those that there are."""
        if not args and not ctx.resilient_parsing:
            known = ", ".join(self.list_commands(ctx))
            raise click.UsageError(f"{ctx.info_name} wants a command; there are {known}", ctx)
        return super().parse_args(ctx, args)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the options in the order in which they were written."""
        return [*self.lazy, *self.commands]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of a name, imported now."""
        if cmd_name not in self.lazy:
            return self.commands.get(cmd_name)
        found: click.Command = import_module(self.lazy[cmd_name][0]).command
        return found

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command that the first argument names, or the nearest."""
        name = args[0]
        known = self.list_commands(ctx)
        if name in known or name.startswith("-") or ctx.resilient_parsing:
            return super().resolve_command(ctx, args)
        hint = nearest(name, known) or f"there are {', '.join(known)}"
        raise click.UsageError(f"no command {name!r}; {hint}", ctx)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The commands with one line each; nothing is imported for it."""
        rows = [(name, text) for name, (_, text) in self.lazy.items()]
        rows += [
            (name, command.get_short_help_str(limit=MAX_WIDTH))
            for name, command in self.commands.items()
        ]
        with formatter.section("Commands"):
            formatter.write_dl(rows)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Commands by name; click would import each of them for its help."""
        if incomplete.startswith("-"):
            return super().shell_complete(ctx, incomplete)
        return [
            CompletionItem(name, help=self.lazy[name][1] if name in self.lazy else None)
            for name in self.list_commands(ctx)
            if name.startswith(incomplete)
        ]

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The examples."""
        write_example(self.example, formatter)


class VersionType(click.ParamType[int]):
    """A policy version: `7`, or `v7`."""

    name = "version"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """The number."""
        number = str(value).removeprefix("v")
        if not number.isdecimal():
            self.fail(f"{value!r} is no version; give its number, for example 7", param, ctx)
        return int(number)


class UrlType(click.ParamType[str]):
    """URL of a service."""

    name = "url"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The URL as it is."""
        scheme, _, host = str(value).partition("://")
        if scheme not in ("http", "https") or not host:
            self.fail(f"{value!r} is no URL; http://HOST:PORT is wanted", param, ctx)
        return str(value)


def call(command: click.Command, argv: Sequence[str], prog_name: str) -> None:
    """Run a command in this process.

    Raises:
        ConfigError: the arguments are wrong; with the nearest right name.
    """
    try:
        with command.make_context(prog_name, list(argv)) as context:
            command.invoke(context)
    except click.exceptions.Exit:
        return  # help was printed
    except click.UsageError as error:
        from headway.contracts.errors import ConfigError  # pydantic: not for help

        raise ConfigError(explain(error)) from error


class BashWords(BashComplete):
    """bash gives `--flag=value` as three words."""

    def get_completion_args(self) -> tuple[list[str], str]:
        """The words without the `=` between a flag and its value."""
        words, incomplete = super().get_completion_args()
        return [word for word in words if word != "="], incomplete


def complete(command: click.Command, prog_name: str, instruction: str) -> int:
    """Answer a shell that asks for completion; the exit status."""
    add_completion_class(BashWords)
    variable = completion_variable(prog_name)
    return shell_complete(command, {}, prog_name, variable, instruction)


def completion_variable(prog_name: str) -> str:
    """The environment variable by which a shell asks."""
    return f"_{prog_name.upper()}_COMPLETE"


def explain(error: click.UsageError) -> str:
    """Return the message about a wrong command line, the usage, and where help is."""
    context = error.ctx
    if isinstance(error, click.NoSuchOption):
        options = [] if context is None else _option_names(context)
        hint = nearest(error.option_name, options) or f"there are {', '.join(options)}"
        text = f"no option {error.option_name!r}; {hint}"
    else:
        text = error.format_message()
        text = text[0].lower() + text[1:].removesuffix(".")
    if context is None:
        return text
    return f"{text}\n{_usage(context)}\n`{context.command_path} --help` tells more"


def write_example(example: str, formatter: click.HelpFormatter) -> None:
    """Command lines under a heading, as they are."""
    if example:
        with formatter.section("Example" if "\n" not in example else "Examples"):
            for line in example.splitlines():
                formatter.write(f"{'':>{formatter.current_indent}}{line}\n")


def _option_names(context: click.Context) -> list[str]:
    names = [name for param in context.command.get_params(context) for name in param.opts]
    return [name for name in names if name.startswith("--")]


def nearest(name: str, known: Sequence[str]) -> str:
    """A question that holds the nearest name; empty if none is near."""
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]!r}?" if near else ""


def _usage(context: click.Context) -> str:
    usage = context.get_usage()
    return usage[0].lower() + usage[1:]
