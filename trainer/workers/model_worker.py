"""Base of the roles that hold models: loading, offload, and what passes cost."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from headway.contracts.config.model import TrainedModelConfig
from headway.contracts.config.optimizer import OptimizerConfig
from headway.contracts.config.workers import WorkersConfig
from headway.contracts.errors import ConfigError
from trainer.api import MicroBatchSpec, OffloadingEngine, TrainEngine
from trainer.backends.base import make_engine
from trainer.meter import Meter
from trainer.workers.dispatch import Dispatch, register
from trainer.workers.worker import Worker
from trainer.wrapper import EngineWrapper


class ModelWorker(Worker):
    """Base of all roles."""

    def __init__(self, config: WorkersConfig) -> None:
        super().__init__(config.trainer.device)
        if config.trainer.num_threads is not None:
            torch.set_num_threads(config.trainer.num_threads)
        self._config = config
        self._mb_spec = MicroBatchSpec(config.trainer.max_tokens_per_mb)
        self._meter = Meter(config.metrics, self.topology)

    @register(Dispatch.ONE_TO_ALL)
    def begin_step(self) -> None:
        """Count the passes of a step from here on."""
        self._meter.begin()

    @register(Dispatch.ONE_TO_ALL)
    def end_step(
        self, tokens: int, wait_s: float, train_s: float, publish_s: float
    ) -> dict[str, float | None]:
        """Return the speed of the step, as `Meter.take` does; the same on every rank."""
        return self._meter.take(tokens, wait_s, train_s, publish_s)

    def _load(
        self, model: TrainedModelConfig, optimizer: OptimizerConfig | None = None
    ) -> TrainEngine:
        """A model; one without an optimizer is never trained."""
        # An optimizer that never steps holds nothing.
        chosen = optimizer or OptimizerConfig()
        made = make_engine(self._config, self.topology, None, model, chosen)
        engine = self._meter.around(made, model)
        engine.initialize(None, None)
        self._offload(engine)
        return engine

    @contextmanager
    def _on_device(self, engine: TrainEngine, with_optimizer: bool = False) -> Iterator[None]:
        """Within it the engine's parameters are on the device, and its optimizer if asked for."""
        offload = self._config.offload
        if offload.parameters or (offload.optimizer and with_optimizer):
            is_on = with_optimizer or not offload.optimizer
            _offloading(engine).place_on_device(parameters=True, optimizer=is_on)
        try:
            yield
        finally:
            self._offload(engine)

    def _offload(self, engine: TrainEngine) -> None:
        offload = self._config.offload
        if offload.parameters or offload.optimizer:
            _offloading(engine).place_on_device(not offload.parameters, not offload.optimizer)


def unwrapped(engine: TrainEngine) -> TrainEngine:
    """Return the train engine inside wrappers."""
    while isinstance(engine, EngineWrapper):
        engine = engine.train_engine
    return engine


def _offloading(engine: TrainEngine) -> OffloadingEngine:
    inner = unwrapped(engine)
    if not isinstance(inner, OffloadingEngine):
        raise ConfigError(
            f"a {type(inner).__name__} cannot move its parameters; leave out offload, or set "
            "trainer.backend=fsdp2"
        )
    return inner
