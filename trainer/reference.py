"""The model that a policy is compared with, and its logprobs of answers."""

from __future__ import annotations

from contextlib import nullcontext

from torch import Tensor

from headway.contracts.config.experiment import DPOExperiment
from headway.contracts.config.model import TrainedModelConfig
from headway.contracts.config.optimizer import EMPTY
from trainer.api import MicroBatchSpec, ModelOutput, TrainEngine
from trainer.backends.base import make_engine
from trainer.batching.sequences import SequenceBatch
from trainer.meter import Meter
from trainer.topology import Topology


class Reference:
    """The engine of a frozen model, or a policy's own without its adapters."""

    def __init__(self, engine: TrainEngine, is_base: bool = False) -> None:
        """
        Args:
            is_base: the model is `engine`'s without its adapters.
        """
        self._engine = engine
        self._is_base = is_base

    def logprobs(self, batch: SequenceBatch, mb_spec: MicroBatchSpec) -> Tensor:
        """[T] float32 of the labels in the loss, elsewhere 0; collective."""
        with self._engine.without_adapters() if self._is_base else nullcontext():
            logprobs: Tensor = self._engine.forward(batch, mb_spec, post_hook=_logprobs)
        return logprobs


def make_reference(
    config: DPOExperiment, policy: TrainEngine, topology: Topology, meter: Meter
) -> Reference:
    """The model that `reference` names, or the one that the run starts from; collective."""
    if config.has_base_reference:
        return Reference(policy, is_base=True)
    model = reference_model(config)
    engine = meter.around(make_engine(config, topology, None, model, EMPTY), model)
    engine.initialize(None, None)
    return Reference(engine)


def reference_model(config: DPOExperiment) -> TrainedModelConfig:
    """Return the model that `reference` names, or the one that the run starts from."""
    if config.reference is None:
        return config.model
    return TrainedModelConfig(**config.reference.model_dump())


def _logprobs(output: ModelOutput, batch: SequenceBatch) -> Tensor:
    return output.logprobs(batch["labels"], mask=batch["loss_mask"])
