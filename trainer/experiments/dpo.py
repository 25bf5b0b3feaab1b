"""Direct preference optimisation on a JSON Lines file of chosen and rejected answers."""

from __future__ import annotations

from headway.contracts.config.experiment import DPOExperiment
from trainer.api import TrainEngine
from trainer.data_supervised import Encoder, pairs
from trainer.experiments.base import Experiment
from trainer.experiments.supervised import run_supervised
from trainer.interfaces.dpo import DPO
from trainer.meter import Meter
from trainer.reference import make_reference
from trainer.topology import Topology


def run(config: DPOExperiment) -> None:
    """Train a policy on what is preferred, relative to its reference."""

    def make_interface(engine: TrainEngine, topology: Topology, meter: Meter) -> DPO:
        return DPO(config.algorithm, make_reference(config, engine, topology, meter))

    run_supervised(config, Encoder(config.model.path), pairs, make_interface)


DPO_EXPERIMENT = Experiment(DPOExperiment, run)
