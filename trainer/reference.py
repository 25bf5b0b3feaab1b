"""A model that is not trained, and what it says of answers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor

from headway.contracts.config.experiment import DPOExperiment
from headway.contracts.config.model import TrainedModelConfig
from trainer.api import BasedEngine, MicroBatchSpec, ModelOutput, TrainEngine
from trainer.backends.base import make_engine
from trainer.batching.sequences import SequenceBatch
from trainer.topology import Topology


class Reference:
    """The engine of a frozen model, or a policy's own as it was before its adapters."""

    def __init__(
        self, engine: TrainEngine, base: Callable[[], AbstractContextManager[Any]] = nullcontext
    ) -> None:
        """
        Args:
            base: within it, the engine runs the frozen model.
        """
        self._engine = engine
        self._base = base

    def logprobs(self, batch: SequenceBatch, mb_spec: MicroBatchSpec) -> Tensor:
        """[T] float32 of the labels; collective."""
        with self._base():
            logprobs: Tensor = self._engine.forward(batch, mb_spec, post_hook=_logprobs)
        return logprobs


def make_reference(config: DPOExperiment, policy: TrainEngine, topology: Topology) -> Reference:
    """The model that `reference` names, or the one that the run starts from; collective."""
    is_own = config.reference is None and config.model.lora is not None
    if is_own and isinstance(policy, BasedEngine):
        return Reference(policy, policy.base)
    if config.reference is None:
        model = config.model.model_copy(update={"lora": None})
    else:
        model = TrainedModelConfig(**config.reference.model_dump())
    engine = make_engine(config.model_copy(update={"model": model}), topology, None)
    engine.initialize(None, None)
    return Reference(engine)


def _logprobs(output: ModelOutput, batch: SequenceBatch) -> Tensor:
    return output.logprobs(batch["labels"])
