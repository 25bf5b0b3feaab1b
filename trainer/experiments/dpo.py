"""Direct preference optimisation on a JSON Lines file of chosen and rejected answers."""

from __future__ import annotations

from headway.contracts.config.experiment import DPOExperiment
from trainer.data_supervised import Encoder, pairs
from trainer.dataflow.supervised import dpo_flow
from trainer.experiments.base import Experiment
from trainer.experiments.supervised import run_supervised


def run(config: DPOExperiment) -> None:
    """Train a policy on preferred answers, relative to its reference."""
    run_supervised(config, dpo_flow(config), Encoder(config.model.path), pairs)


DPO_EXPERIMENT = Experiment(DPOExperiment, run, dpo_flow)
