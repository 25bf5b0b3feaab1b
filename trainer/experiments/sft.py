"""Supervised fine-tuning on a JSON Lines file of prompts and completions."""

from __future__ import annotations

from headway.contracts.config.experiment import SFTExperiment
from trainer.data_supervised import Encoder, demonstrations
from trainer.experiments.base import Experiment
from trainer.experiments.supervised import run_supervised
from trainer.interfaces.sft import SFT


def run(config: SFTExperiment) -> None:
    """Train a policy on what it shall imitate."""
    run_supervised(config, Encoder(config.model.path), demonstrations, lambda *_: SFT())


SFT_EXPERIMENT = Experiment(SFTExperiment, run)
