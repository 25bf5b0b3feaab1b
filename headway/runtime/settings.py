"""Every setting with its default and meaning, without the models that check it.

Help and shell completion must answer at once, and importing all configuration models takes several times
as long as everything else that they do. They therefore read `settings.json`, which `python
docs/make_reference.py` writes from the models beside the reference page; a test compares both. What is
given is checked by the models alone (`headway.runtime.config`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

CATALOGUE = Path(__file__).with_name("settings.json")
RUN_SECTIONS = {
    "gateway": ("gateway",),
    "server": ("server",),
    "trainer": ("grpo", "ppo", "ppo-code", "ppo-math"),
}
"""Sections of a run's configuration: their settings are those of the processes."""
FILLED_IN = ("trainer.weight_sync.root",)
"""Settings of a run that it chooses itself, though its trainer's section requires them."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting as a person sees it."""

    path: str
    """Dotted, as in a file: `optimizer.warmup_steps`."""
    type: str
    """Kind of value: `int`, `float`, `bool`, `text`, `list`, `map`, `file` or `folder`."""
    default: str | None = None
    """Default as YAML; None where a value has to be given."""
    text: str = ""
    """Meaning of the setting."""
    choices: tuple[str, ...] = ()
    """All values that there are, where they can be listed."""
    variants: tuple[str, ...] = ()
    """The `type`s that its section must have; empty where the setting is always there."""

    @property
    def flag(self) -> str:
        """Flag as on a command line: `--optimizer.warmup-steps`."""
        return f"--{self.path}".replace("_", "-")

    @property
    def section(self) -> str:
        """Path of the section that holds it; empty for the outermost."""
        return self.path.rpartition(".")[0]


def names_of_kinds() -> dict[str, str]:
    """Return everything that can be configured by a file, `grpo` or `gateway`, with a description
    in one line."""
    return dict(_catalogue()["kinds"])


def experiments() -> dict[str, str]:
    """The `type`s of a trainer, and what each is in one line."""
    return {name: _catalogue()["kinds"][name] for name in _catalogue()["experiments"]}


def own_settings(kind: str) -> list[Setting]:
    """The settings of a kind; of `run`, those beside the sections of its processes."""
    return [_setting(row) for row, kinds in _rows() if kind in kinds]


def settings_of(kind: str, trainers: Iterable[str] = RUN_SECTIONS["trainer"]) -> list[Setting]:
    """All settings of a kind.

    Args:
        trainers: the experiments whose settings a run's section `trainer` may have.
    """
    if kind != "run":
        return own_settings(kind)
    found = own_settings(kind)
    for section, kinds in RUN_SECTIONS.items():
        chosen = tuple(trainers) if section == "trainer" else kinds
        found += [replace(setting, path=f"{section}.{setting.path}") for setting in united(chosen)]
    return found


def united(kinds: Iterable[str]) -> list[Setting]:
    """The settings that any of these kinds has; of one that differs, the first, with all choices."""
    found: dict[str, Setting] = {}
    for kind in kinds:
        for setting in own_settings(kind):
            known = found.setdefault(setting.path, setting)
            choices = tuple(dict.fromkeys([*known.choices, *setting.choices]))
            if choices != known.choices:
                found[setting.path] = replace(known, choices=choices)
    return list(found.values())


def shared(kinds: Iterable[str]) -> list[Setting]:
    """The settings that all of these kinds have alike."""
    first, *others = [own_settings(kind) for kind in kinds]
    return [setting for setting in first if all(setting in other for other in others)]


def required(settings: Iterable[Setting]) -> list[Setting]:
    """Those that have to be given whatever else is; not those of sections that may be absent, or that are
    of another type by default."""
    settings = list(settings)
    optional = {setting.path for setting in settings if setting.default is not None}
    types = {setting.section: setting.default for setting in settings if setting.type == "type"}
    found = []
    for setting in settings:
        parts = setting.path.split(".")
        above = {".".join(parts[:length]) for length in range(1, len(parts))}
        chosen = {types[section] for section in above & types.keys()}
        is_of_another_type = bool(setting.variants) and chosen.isdisjoint(setting.variants)
        if setting.default is None and not above & optional and not is_of_another_type:
            found.append(setting)
    return found


@cache
def _catalogue() -> Mapping[str, Any]:
    catalogue: Mapping[str, Any] = json.loads(CATALOGUE.read_text(encoding="utf-8"))
    return catalogue


@cache
def _rows() -> list[tuple[Mapping[str, Any], frozenset[str]]]:
    return [
        ({name: value for name, value in row.items() if name != "kinds"}, frozenset(row["kinds"]))
        for row in _catalogue()["settings"]
    ]


def _setting(row: Mapping[str, Any]) -> Setting:
    tuples = {name: tuple(row[name]) for name in ("choices", "variants") if name in row}
    return Setting(**{**row, **tuples})
