"""Writes docs/reference.md: every setting of every process, taken from the configuration models.

python docs/make_reference.py
"""

from __future__ import annotations

import re
from pathlib import Path

from pydantic import BaseModel

from headway.contracts.config.experiment import GRPOExperiment, SFTExperiment
from headway.contracts.config.gateway import GatewayConfig
from headway.contracts.config.launch import LaunchConfig
from headway.contracts.config.server import ServerConfig
from headway.runtime.config import describe

TARGET = Path(__file__).with_name("reference.md")

HEADER = """# Reference of settings

Written by `python docs/make_reference.py`; do not edit. How files and flags merge:
[configuration.md](configuration.md). A flag that stands twice belongs to two variants, told apart by
their `type`.
"""

PAGES: dict[str, type[BaseModel]] = {
    "Gateway: `headway gateway`": GatewayConfig,
    "Generation server: `python -m inference_server`": ServerConfig,
    "Trainer, `type: grpo`: `torchrun … -m trainer`": GRPOExperiment,
    "Trainer, `type: sft`: `torchrun … -m trainer`": SFTExperiment,
    "All on one machine: `headway run`": LaunchConfig,
}
NESTED = {"gateway": GatewayConfig, "server": ServerConfig, "trainer": GRPOExperiment}

YAML = {"None": "null", "True": "true", "False": "false", "()": "[]", "": "''"}

ENTRY = re.compile(r"^  (?P<flag>--\S+)  \((?P<default>.*)\)(?:\n      (?P<text>.*))?$")


def render() -> str:
    """The page."""
    parts = [HEADER]
    for title, model in PAGES.items():
        rows = [_row(entry) for entry in describe(model)]
        note = ""
        if model is LaunchConfig:
            rows = [row for row in rows if not row.startswith(tuple(f"| `--{n}." for n in NESTED))]
            note = (
                "Besides these, `gateway.`, `server.` and `trainer.` hold the settings of the "
                "gateway, the server and the GRPO trainer above.\n\n"
            )
        table = "\n".join(["| setting | default | meaning |", "|---|---|---|", *rows])
        parts.append(f"## {title}\n\n{note}{table}\n")
    return "\n".join(parts)


def _row(entry: str) -> str:
    match = ENTRY.match(entry)
    if match is None:
        raise ValueError(f"cannot read {entry!r}, which headway.runtime.config.describe wrote")
    default = match["default"].removeprefix("default ")
    shown = default if default == "required" else f"`{YAML.get(default, default)}`"
    return f"| `{match['flag']}` | {shown} | {match['text'] or ''} |"


if __name__ == "__main__":
    TARGET.write_text(render())
