"""Writes docs/reference.md: every setting of every process, taken from the configuration models.

python docs/make_reference.py
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from pydantic import BaseModel

from headway.contracts.config.experiment import GRPOExperiment, SFTExperiment
from headway.contracts.config.gateway import GatewayConfig
from headway.contracts.config.launch import LaunchConfig
from headway.contracts.config.server import BackendConfig, ServerConfig
from headway.runtime.config import describe

TARGET = Path(__file__).with_name("reference.md")

HEADER = """# Reference of settings

Written by `python docs/make_reference.py`; do not edit. How files and flags merge:
[configuration.md](configuration.md).
"""

PAGES: dict[str, type[BaseModel]] = {
    "Gateway: `headway gateway`": GatewayConfig,
    "Generation server: `python -m inference_server`": ServerConfig,
    "Trainer, `type: grpo`: `torchrun … -m trainer`": GRPOExperiment,
    "Trainer, `type: sft`: `torchrun … -m trainer`": SFTExperiment,
    "All on one machine: `headway run`": LaunchConfig,
}
NESTED = ("gateway", "server", "trainer")
BACKEND = "backend"

YAML = {"None": "null", "True": "true", "False": "false", "()": "[]", "": "''"}

ENTRY = re.compile(r"^  (?P<flag>--\S+)  \((?P<default>.*)\)(?:\n      (?P<text>.*))?$")


def render() -> str:
    """The page."""
    parts = [HEADER]
    for title, model in PAGES.items():
        rows = _rows(model)
        note, more = "", ""
        if model is LaunchConfig:
            rows = _without(rows, *NESTED)
            note = (
                "Besides these, `gateway.`, `server.` and `trainer.` hold the settings of the "
                "gateway, the server and the GRPO trainer above.\n\n"
            )
        if model is ServerConfig:
            rows = _without(rows, BACKEND)
            note = (
                "`--backend.type` (default `embedded_torch`) chooses the backend, whose settings "
                "stand in tables of their own.\n\n"
            )
            more = "".join(_backends())
        parts.append(f"## {title}\n\n{note}{_table(rows)}{more}")
    return "\n".join(parts)


def _backends() -> list[str]:
    """A table for each kind of backend; kinds that have the same settings share one."""
    kinds: dict[tuple[str, ...], list[str]] = {}
    for section in get_args(get_args(BackendConfig)[0]):
        rows = tuple(_without(_rows(section, f"{BACKEND}."), f"{BACKEND}.type"))
        kinds.setdefault(rows, []).append(f"`{section.model_fields['type'].default}`")
    return [
        f"\n### `backend.type`: {' or '.join(names)}\n\n{_table(rows)}"
        for rows, names in kinds.items()
    ]


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


if __name__ == "__main__":
    TARGET.write_text(render())
