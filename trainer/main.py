"""`python -m trainer --config experiment.yaml` or `torchrun … -m trainer`: one trainer rank."""

from __future__ import annotations

from collections.abc import Sequence

from headway.runtime.command import collector_at_rest
from headway.runtime.config import merge_sources, validate_config
from headway.runtime.logging import configure_logging
from headway.runtime.modules import import_modules
from trainer.experiments.base import EXPERIMENTS


def main(argv: Sequence[str]) -> None:
    """Run the experiment that `type` names."""
    tree = merge_sources(argv)
    with collector_at_rest():  # imports torch and transformers
        experiment = EXPERIMENTS.get(str(tree.get("type", "grpo")))
    config = validate_config(experiment.config, tree)
    configure_logging("trainer")
    import_modules(config.trainer.modules)
    experiment.run(config)
