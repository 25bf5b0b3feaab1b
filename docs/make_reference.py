"""Writes every setting of every process, taken from the configuration models.

To docs/reference.md for people, and to headway/runtime/settings.json for help and completion.

python docs/make_reference.py
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel

from headway.contracts.config.experiment import (
    DPOExperiment,
    GRPOExperiment,
    PPOExperiment,
    RWExperiment,
    SFTExperiment,
)
from headway.contracts.config.gateway import GatewayConfig
from headway.contracts.config.launch import LaunchConfig
from headway.contracts.config.ppo_code import PPOCodeExperiment, PPOMathExperiment
from headway.contracts.config.ppo_hybrid import PPOHybridExperiment
from headway.contracts.config.server import BackendConfig, ServerConfig
from headway.contracts.config.weight_sync import WeightSyncConfig
from headway.contracts.config.workers import WorkersConfig
from headway.launch.config_check import MODELS
from headway.launch.experiments import EXPERIMENTS
from headway.runtime.model_settings import describe, list_settings
from headway.runtime.settings import CATALOGUE, RUN_SECTIONS

TARGET = Path(__file__).with_name("reference.md")

HEADER = """# Reference of settings

Written by `python docs/make_reference.py`; do not edit. How files and flags merge:
[configuration.md](configuration.md).
"""

PAGES: dict[str, type[BaseModel]] = {
    "Gateway: `headway gateway`": GatewayConfig,
    "Generation server: `python -m inference_server`": ServerConfig,
    "Trainer, `type: grpo`: `torchrun … -m trainer`": GRPOExperiment,
    "Trainer, `type: ppo`: `torchrun … -m trainer`": PPOExperiment,
    "Trainer, `type: ppo-code`: `torchrun … -m trainer`": PPOCodeExperiment,
    "Trainer, `type: ppo-math`: `torchrun … -m trainer`": PPOMathExperiment,
    "Trainer, `type: ppo-hybrid`: `headway train`": PPOHybridExperiment,
    "Trainer, `type: sft`: `torchrun … -m trainer`": SFTExperiment,
    "Trainer, `type: rw`: `torchrun … -m trainer`": RWExperiment,
    "Trainer, `type: dpo`: `torchrun … -m trainer`": DPOExperiment,
    "All on one machine: `headway run`": LaunchConfig,
    "Workers: `WorkersConfig`": WorkersConfig,
}
SEPARATOR = ",\n"
LIKE: dict[type[BaseModel], tuple[str, type[BaseModel]]] = {
    PPOExperiment: ("grpo", GRPOExperiment),
    PPOCodeExperiment: ("grpo", GRPOExperiment),
    PPOMathExperiment: ("ppo-code", PPOCodeExperiment),
}
"""Types whose settings are listed under another one; a type lists only its own."""
WITHOUT: dict[type[BaseModel], str] = {
    PPOCodeExperiment: ", but there is no `algorithm`, which follows from `ppo`",
}
NESTED = ("gateway", "server", "trainer")
VARIANTS: dict[str, tuple[Any, str]] = {
    "backend": (BackendConfig, "embedded_torch"),
    "weight_sync": (WeightSyncConfig, "disk"),
}
"""Sections that are one of several types: the union, and which it is unless told."""

YAML = {"None": "null", "True": "true", "False": "false", "()": "[]", "": "''"}

ENTRY = re.compile(r"^  (?P<flag>--\S+)  \((?P<default>.*)\)(?:\n      (?P<text>.*))?$")


def render() -> str:
    """The page."""
    return "\n".join([HEADER, *(f"## {title}\n\n{_body(model)}" for title, model in PAGES.items())])


def _body(model: type[BaseModel]) -> str:
    rows = _rows(model)
    notes, tables = "", ""
    if model in LIKE:
        kind, other = LIKE[model]
        shared = _rows(other)
        notes = f"What `type: {kind}` has not, or has with another default; all else is as there"
        notes += WITHOUT.get(model, "") + ".\n\n"
        return f"{notes}{_table([row for row in rows if row not in shared])}"
    if model is WorkersConfig:
        shared = _rows(GRPOExperiment) + _rows(PPOExperiment)
        notes = (
            "Made in code ([workers](training/workers.md)). `model`, `optimizer`, `trainer`, `algorithm` "
            "and `reference` are as of `type: grpo`, `critic` as of `type: ppo`; besides:\n\n"
        )
        return f"{notes}{_table([row for row in rows if row not in shared])}"
    if model is PPOHybridExperiment:
        shared = _rows(GRPOExperiment) + _rows(PPOExperiment)
        notes = (
            "`run_dir`, `model`, `data`, `sampling`, `optimizer`, `trainer`, `metrics`, `algorithm`, "
            "`reference` and `recovery` are as of `type: grpo`, `critic` as of `type: ppo`; besides:\n\n"
        )
        return f"{notes}{_table([row for row in rows if row not in shared])}"
    if model is LaunchConfig:
        rows = _without(rows, *NESTED)
        notes = (
            "Besides these, `gateway.`, `server.` and `trainer.` hold the settings of the "
            "gateway, the server and the `grpo` (or `ppo`, `ppo-code`, `ppo-math`) trainer above.\n\n"
        )
    for section, (union, default) in VARIANTS.items():
        if section in model.model_fields:
            kinds = _kinds(section, union)
            shared = [row for row in next(iter(kinds.values())) if _is_in_all(row, kinds)]
            rows = [*_without(rows, _flag(section)), *shared]
            notes += (
                f"`--{_flag(section)}.type` (default `{default}`) chooses a type; what not all types "
                "have stands in tables of their own.\n\n"
            )
            tables += _tables(section, kinds)
    return f"{notes}{_table(rows)}{tables}"


def _kinds(section: str, union: Any) -> dict[str, list[str]]:
    """The rows of each type that a section may have."""
    return {
        kind.model_fields["type"].default: _without(
            _rows(kind, f"{section}."), f"{_flag(section)}.type"
        )
        for kind in get_args(get_args(union)[0])
    }


def _is_in_all(row: str, kinds: dict[str, list[str]]) -> bool:
    return all(row in rows for rows in kinds.values())


def _tables(section: str, kinds: dict[str, list[str]]) -> str:
    """A table for each type; types that have the same settings share one."""
    names: dict[tuple[str, ...], list[str]] = {}
    for name, rows in kinds.items():
        own = tuple(row for row in rows if not _is_in_all(row, kinds))
        names.setdefault(own, []).append(f"`{name}`")
    return "".join(
        f"\n### `{section}.type`: {' or '.join(named)}\n\n{_table(own)}"
        for own, named in names.items()
    )


def _flag(section: str) -> str:
    return section.replace("_", "-")


def _rows(model: type[BaseModel], prefix: str = "") -> list[str]:
    return [_row(entry) for entry in describe(model, prefix)]


def _without(rows: Sequence[str], *paths: str) -> list[str]:
    """The rows of all settings but these, and those below them."""
    starts = tuple(f"| `--{path}{end}" for path in paths for end in (".", "`"))
    return [row for row in rows if not row.startswith(starts)]


def _table(rows: Sequence[str]) -> str:
    return "\n".join(["| setting | default | meaning |", "|---|---|---|", *rows, ""])


def _row(entry: str) -> str:
    match = ENTRY.match(entry)
    if match is None:
        raise ValueError(f"cannot read {entry!r}, which headway.runtime.config.describe wrote")
    default = match["default"].removeprefix("default ")
    shown = default if default == "required" else f"`{YAML.get(default, default)}`"
    return f"| `{match['flag']}` | {shown} | {match['text'] or ''} |"


def render_catalogue() -> str:
    """The settings as help and completion read them: one line for each, with whose it is."""
    rows: dict[str, list[str]] = {}
    for kind, model in MODELS.items():
        for setting in list_settings(model):
            if kind == "run" and setting.path.partition(".")[0] in RUN_SECTIONS:
                continue
            known = {name: value for name, value in asdict(setting).items() if value != ()}
            rows.setdefault(json.dumps(known, ensure_ascii=False), []).append(kind)
    lines = [f'{row[:-1]}, "kinds": {json.dumps(kinds)}}}' for row, kinds in rows.items()]
    kinds = {kind: _title(model) for kind, model in MODELS.items()}
    return (
        f'{{"kinds": {json.dumps(kinds, indent=1)},\n"experiments": {json.dumps([*EXPERIMENTS])},\n'
        f'"settings": [\n{SEPARATOR.join(lines)}\n]}}\n'
    )


def _title(model: type[BaseModel]) -> str:
    return " ".join((model.__doc__ or "").split("\n\n")[0].split())


if __name__ == "__main__":
    TARGET.write_text(render())
    CATALOGUE.write_text(render_catalogue(), encoding="utf-8")
