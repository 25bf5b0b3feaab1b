"""`headway config graph`: the dataflow of an experiment, as text and as a picture."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from headway.contracts.errors import ConfigError
from headway.runtime.config import merge_sources, validate_config
from trainer.dataflow.drawing import as_svg, as_text
from trainer.experiments.base import EXPERIMENTS


def print_graph(file: str, flags: Sequence[str], picture: Path | None) -> None:
    """Print the graph of a file's experiment, and draw it.

    Args:
        flags: settings that win over the file's.
        picture: the SVG file to draw; None draws none.
    """
    tree = merge_sources(["--config", file, *flags])
    if isinstance(tree.get("trainer"), dict) and "rollout" in tree["trainer"]:
        tree = tree["trainer"]  # of a whole run
    kind = str(tree.get("type", "grpo"))
    experiment = EXPERIMENTS.get(kind)
    if experiment.flow is None:
        raise ConfigError(f"type={kind} has no graph of calls; give its `Experiment` a `flow`")
    flow = experiment.flow(validate_config(experiment.config, tree))
    sys.stdout.write(as_text(flow))
    if picture is not None:
        picture.write_text(as_svg(flow), encoding="utf-8")
