"""Supervised fine-tuning on a JSON Lines file of prompts and completions."""

from __future__ import annotations

from headway.contracts.config.experiment import SFTExperiment
from trainer.data_supervised import Encoder, demonstrations
from trainer.dataflow.supervised import sft_flow
from trainer.experiments.base import Experiment
from trainer.experiments.supervised import run_supervised


def run(config: SFTExperiment) -> None:
    """Train a policy on what it shall imitate."""
    run_supervised(config, sft_flow(config), Encoder(config.model.path), demonstrations)


SFT_EXPERIMENT = Experiment(SFTExperiment, run, sft_flow)
