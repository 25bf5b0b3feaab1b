"""`headway train` and `python -m trainer`: help and arguments."""

from __future__ import annotations

from headway.runtime.experiment_command import ExperimentCommand
from headway.runtime.settings import Setting

ABOUT = """Train: one rank of an experiment, which `type` names.

It trains on this machine's devices; torchrun starts several ranks. Experiments that learn from rollouts
want a gateway at rollout.url; `headway run` starts that, too."""


def _registered(kind: str) -> list[Setting]:
    """The settings of an experiment that another package registered; it is imported.

    Raises:
        UnknownName: it is not registered.
    """
    from headway.runtime.model_settings import list_settings  # both with pydantic: not for help
    from trainer.experiments.base import EXPERIMENTS

    return list_settings(EXPERIMENTS.get(kind).config)


command = ExperimentCommand(
    "train",
    "trainer.main",
    ABOUT,
    "headway train --config experiment.yaml --optimizer.lr 1e-6\n"
    "headway train --type ppo-code --help\n"
    "torchrun --nproc-per-node 4 -m trainer --config experiment.yaml",
    _registered,
)
