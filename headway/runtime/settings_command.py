"""Commands whose arguments are settings: `--config FILE` and `--section.key value`.

Their help and completion come from the catalogue (`headway.runtime.settings`); the arguments themselves
go on as they are, to be checked together with the files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import click
from click.shell_completion import CompletionItem

from headway.runtime.command import import_main
from headway.runtime.command_line import HELP_NAMES, write_example
from headway.runtime.settings import Setting, required

CONFIG_HELP = "Settings from a YAML file; later files win, and flags over files."
SETTING_HELP = "A setting, its value in YAML."
TYPE_HELP = "Which one of these it is; what else may be set depends on it."
METAVARS = {"type": "NAME", "bool": "BOOL", "map": "{KEY: VALUE}", "list": "[VALUE, ...]"}

SettingsOf = Callable[[Sequence[str]], Iterable[Setting]]
"""Function from the arguments so far to the settings that there are."""


class SettingsCommand(click.Command):
    """Hands settings over to the `main` of a module."""

    def __init__(
        self, name: str, module: str, settings: SettingsOf, about: str, example: str
    ) -> None:
        """
        Args:
            module: has `main(argv)`; imported when the command runs.
            settings: what can be completed.
            about: what it does; its first line stands above all else.
        """
        super().__init__(
            name,
            help=about,
            options_metavar="[--config FILE]... [--SECTION.KEY VALUE]...",
            context_settings={"help_option_names": list(HELP_NAMES), "max_content_width": 120},
        )
        self.module = module
        self.settings = settings
        self.example = example

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Keep the arguments, unless help is asked for."""
        ctx.args = list(args)
        if not ctx.resilient_parsing and any(word in HELP_NAMES for word in args):
            click.echo(ctx.get_help(), color=ctx.color)
            ctx.exit()
        return ctx.args

    def invoke(self, ctx: click.Context) -> None:
        """Hand over."""
        import_main(self.module)(ctx.args)

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Options for completion."""
        config = click.Option(
            ["--config"], type=click.Path(), multiple=True, metavar="FILE", help=CONFIG_HELP
        )
        options = [_option(setting) for setting in _by_path(self.settings(ctx.args))]
        help_option = self.get_help_option(ctx)
        return [config, *options, *([] if help_option is None else [help_option])]

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Names of settings; without a beginning, only what every such command has."""
        if incomplete:
            return super().shell_complete(ctx, incomplete)
        return [CompletionItem("--config", help=CONFIG_HELP), CompletionItem("--help")]

    def format_usage(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """One line."""
        formatter.write_usage(ctx.command_path, self.options_metavar or "")

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options of every such command, then the settings by section."""
        write_options(formatter)
        self.format_settings(ctx, formatter)

    def format_settings(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """All settings; a subclass may say less."""
        write_settings(self.settings(ctx.args), formatter)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The examples."""
        write_example(self.example, formatter)


def write_options(formatter: click.HelpFormatter) -> None:
    """Write the options of every command that has settings."""
    rows = [
        ("--config FILE", f"{CONFIG_HELP} May be repeated."),
        ("--SECTION.KEY VALUE", SETTING_HELP),
        (", ".join(HELP_NAMES), "Show this message and exit."),
    ]
    with formatter.section("Options"):
        formatter.write_dl(rows)


def write_settings(
    settings: Iterable[Setting], formatter: click.HelpFormatter, title: str = "Settings"
) -> None:
    """Settings under the names of their sections."""
    settings = list(settings)
    needed = required(settings)
    sections: dict[str, list[Setting]] = {"": []}
    for setting in settings:
        sections.setdefault(setting.section, []).append(setting)
    for section, held in sections.items():
        with formatter.section(section or title):
            formatter.write_dl(
                [(_signature(setting), _meaning(setting, setting in needed)) for setting in held]
            )


def chosen(argv: Sequence[str], flag: str) -> str | None:
    """Return the value of the last `flag value` or `flag=value`; None without one."""
    found = None
    for at, word in enumerate(argv):
        if word == flag and at + 1 < len(argv):
            found = argv[at + 1]
        elif word.startswith(f"{flag}="):
            found = word.partition("=")[2]
    return found


def _option(setting: Setting) -> click.Option:
    kind: Any = click.STRING
    if setting.type in ("file", "folder"):
        kind = click.Path(file_okay=setting.type == "file")
    elif setting.choices:
        kind = click.Choice(setting.choices)
    return click.Option(
        [setting.flag, setting.path.replace(".", "_")], type=kind, help=setting.text or TYPE_HELP
    )


def _by_path(settings: Iterable[Setting]) -> list[Setting]:
    return list({setting.path: setting for setting in settings}.values())


def _signature(setting: Setting) -> str:
    return f"{setting.flag} {METAVARS.get(setting.type, setting.type.upper())}"


def _meaning(setting: Setting, is_needed: bool) -> str:
    parts = [f"(type {' or '.join(setting.variants)})"] if setting.variants else []
    parts.append(setting.text or TYPE_HELP)
    if setting.choices and setting.type != "bool":
        parts.append(f"One of {', '.join(setting.choices)}.")
    if setting.default is not None:
        parts.append(f"[default: {setting.default}]")
    else:
        parts.append("[required]" if is_needed else "[required in this section]")
    return " ".join(parts)
