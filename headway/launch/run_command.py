"""`headway run`: its help and arguments."""

from __future__ import annotations

from collections.abc import Sequence

import click

from headway.runtime.command import import_main
from headway.runtime.settings import (
    FILLED_IN,
    RUN_SECTIONS,
    Setting,
    own_settings,
    required,
    settings_of,
)
from headway.runtime.settings_command import (
    SettingsCommand,
    chosen,
    write_settings,
)

TRAINERS = RUN_SECTIONS["trainer"]
SECTIONS = {
    "--gateway.KEY": "Any setting of a gateway: `headway gateway --help`.",
    "--server.KEY": "Any setting of a generation server: `headway serve --help`.",
    "--trainer.KEY": "Any setting of the experiment that --trainer.type names "
    f"({', '.join(TRAINERS)}; default grpo): `headway train --type grpo --help`.",
}
ABOUT = """Start gateway, generation servers and trainer on this machine, and follow them to the end.

The last line on standard output is the summary of the run as JSON. Each process has a log of its own in
RUN_DIR/logs. `headway config show run` lists every setting."""


class RunSettingsCommand(SettingsCommand):
    """Help of a run: its own settings, and where those of its processes are listed."""

    def __init__(self, name: str, module: str, about: str, example: str) -> None:
        super().__init__(name, module, _settings, about, example)

    def format_settings(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write its own settings, those without a default, and the sections."""
        write_settings(own_settings("run"), formatter, "Settings of the run")
        with formatter.section("Settings of its processes"):
            formatter.write_dl(list(SECTIONS.items()))
        with formatter.section("Settings without a default (--model gives the first three)"):
            needed = required(settings_of("run", _trainers(ctx.args)[:1]))
            formatter.write_dl(
                [(each.flag, each.text) for each in needed if each.path not in FILLED_IN]
            )


class RunCommand(RunSettingsCommand):
    """`headway run` itself."""

    def invoke(self, ctx: click.Context) -> None:
        """Hand over; what the run's processes import is imported while the settings are read."""
        from headway.launch.launchers.preload import preload  # help does without what it imports

        fork_server = preload()
        try:
            import_main(self.module)(ctx.args, fork_server)
        finally:
            fork_server.close()


def _trainers(argv: Sequence[str]) -> tuple[str, ...]:
    kind = chosen(argv, "--trainer.type")
    return TRAINERS if kind is None or kind not in TRAINERS else (kind,)


def _settings(argv: Sequence[str]) -> list[Setting]:
    return settings_of("run", _trainers(argv))


command = RunCommand(
    "run",
    "headway.launch.run",
    ABOUT,
    "headway run --config run.yaml --model MODEL_DIR --trainer.data.path train.jsonl\n"
    "headway run --config run.yaml --trainer.recovery.mode resume",
)
