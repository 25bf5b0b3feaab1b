"""Commands whose settings are those of an experiment, which `type` names."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import click

from headway.runtime.settings import Setting, experiments, settings_of, shared, united
from headway.runtime.settings_command import SettingsCommand, chosen, write_settings

TYPE = "--type"


class ExperimentCommand(SettingsCommand):
    """Tells of the experiment that is named, else of what all have."""

    def __init__(
        self,
        name: str,
        module: str,
        about: str,
        example: str,
        beyond: Callable[[str], list[Setting]] | None = None,
    ) -> None:
        """
        Args:
            beyond: the settings of an experiment that is not of this distribution, by name.
        """
        super().__init__(name, module, _settings, about, example)
        self.beyond = beyond

    def format_settings(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The experiments, and the settings."""
        known = experiments()
        kind = chosen(ctx.args, TYPE)
        if kind is not None:
            write_settings(self._settings_of(kind), formatter, f"Settings of {kind}")
            return
        with formatter.section(f"Experiments ({TYPE} NAME, or `type` in a file; grpo by default)"):
            formatter.write_dl(list(known.items()))
        formatter.write_paragraph()
        formatter.write_text(
            f"`{ctx.command_path} {TYPE} NAME --help` shows every setting of one of them; "
            "`headway config show NAME` does so, too."
        )
        write_settings(shared(known), formatter, "Settings of every experiment")

    def _settings_of(self, kind: str) -> list[Setting]:
        known = experiments()
        if kind in known:
            return settings_of(kind)
        if self.beyond is None:
            raise click.UsageError(f"no experiment named {kind!r}; known: {', '.join(known)}")
        return self.beyond(kind)


def _settings(argv: Sequence[str]) -> list[Setting]:
    kind = chosen(argv, TYPE)
    known = experiments()
    return united([kind] if kind in known else known)
