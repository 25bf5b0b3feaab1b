"""`headway config graph`: the dataflow of an experiment, as text and as a diagram."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from headway.contracts.errors import ConfigError
from headway.runtime.config import merge_sources, validate_config
from headway.runtime.modules import import_modules
from trainer.dataflow.drawing import as_mermaid, as_text
from trainer.experiments.base import EXPERIMENTS


def print_graph(file: str, flags: Sequence[str], diagram: Path | None) -> None:
    """Print the graph of a file's experiment, and draw it.

    Args:
        flags: settings that win over the file's.
        diagram: the Mermaid file to write; None writes none.
    """
    tree = merge_sources(["--config", file, *flags])
    if isinstance(tree.get("trainer"), dict) and "rollout" in tree["trainer"]:
        tree = tree["trainer"]  # of a whole run
    kind = str(tree.get("type", "grpo"))
    experiment = EXPERIMENTS.get(kind)
    if experiment.flow is None:
        raise ConfigError(f"type={kind} has no graph of calls; give its `Experiment` a `flow`")
    config = validate_config(experiment.config, tree)
    import_modules(config.trainer.modules)
    flow = experiment.flow(config)
    sys.stdout.write(as_text(flow))
    if diagram is not None:
        diagram.write_text(as_mermaid(flow), encoding="utf-8")
