"""Runs for sinks, and steps for them to take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from headway.contracts.config.metrics import MetricsConfig
from trainer.tracking.base import RunDescription

HISTOGRAM = [5, 0, 3]
"""Five were 0 versions old, none 1, three 2."""


def run_description(folder: Path, first_step: int = 0, **settings: Any) -> RunDescription:
    return RunDescription(
        run_id="0123abcd",
        name="a run",
        folder=folder,
        first_step=first_step,
        settings=MetricsConfig(project="tests", tags=("small",), **settings),
        config={"optimizer": {"lr": 0.5}},
        lineage={"git_commit": "c0ffee"},
    )


def step(number: int, loss: float) -> dict[str, Any]:
    return {"step": number, "loss": loss, "mfu": None, "staleness_tokens": HISTOGRAM}
