"""What all interfaces share: calls on a model that read columns of a batch by name, and give columns by
name, or figures. They are registered by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from torch import Tensor

from headway.contracts.config.base import PartConfig
from headway.contracts.config.experiment import ExperimentConfig
from headway.contracts.engines import InferenceEngine
from headway.contracts.errors import ConfigError
from headway.contracts.registry import Registry
from trainer.api import MicroBatchSpec, TrainEngine
from trainer.batching.sequences import SequenceBatch
from trainer.data import PromptData
from trainer.meter import Meter
from trainer.prompt_filter import PromptFilter
from trainer.topology import Topology

Columns = dict[str, Tensor]
"""Name -> [T] over a whole batch, the same on every rank."""
Figures = dict[str, float]
"""Name -> number, the same on every rank."""
ConfigT = TypeVar("ConfigT", bound=ExperimentConfig)
"""The experiments that an interface is for."""


class Inference(Protocol):
    """A call that asks a model about a whole batch; collective."""

    def inference(self, batch: SequenceBatch) -> Columns:
        """New columns."""


class TrainStep(Protocol):
    """A call that updates a model from a whole batch; collective."""

    def train_step(self, batch: SequenceBatch) -> Figures:
        """Figures of the update."""


@dataclass(frozen=True, slots=True)
class InterfaceContext(Generic[ConfigT]):
    """What an interface of an experiment may use."""

    config: ConfigT
    """The whole experiment."""
    topology: Topology
    """The ranks; the collectives of a call are its own, whatever runs beside it."""
    mb_spec: MicroBatchSpec
    """How batches are cut for memory."""
    meter: Meter
    """Counts what passes through engines that the interface loads itself."""
    engine: TrainEngine | None = None
    """The model of the call, if it has one."""
    service: InferenceEngine | None = None
    """The rollout service; None on ranks other than the first."""
    data: PromptData | None = None
    """The prompts, by position."""
    prompt_filter: PromptFilter | None = None
    """Which of them are still worth playing, where that is looked at."""

    @property
    def model(self) -> TrainEngine:
        """The same, for interfaces that cannot do without.

        Raises:
            ConfigError: the call names none.
        """
        if self.engine is None:
            raise ConfigError("this interface asks a model; set `model` of its call")
        return self.engine


InterfaceFactory = Callable[..., Any]
"""`(context, **args) -> interface`."""

INTERFACES: Registry[InterfaceFactory] = Registry(
    "model interface",
    {
        "advantages": "trainer.interfaces.advantages:make",
        "dpo": "trainer.interfaces.dpo:make",
        "ppo_actor": "trainer.interfaces.ppo_actor:make",
        "ppo_critic": "trainer.interfaces.ppo_critic:make",
        "reference": "trainer.interfaces.frozen_model:make_reference",
        "reward_model": "trainer.interfaces.reward_model:make",
        "rw": "trainer.interfaces.rw:make",
        "sft": "trainer.interfaces.sft:make",
        "teacher": "trainer.interfaces.frozen_model:make_teacher",
        "verified_answers": "trainer.interfaces.verified_answers:make",
    },
    entry_point_group="headway.model_interfaces",
)


def register_interface(name: str, target: str | InterfaceFactory) -> None:
    """Add an interface: a class or function that is called with a context and the arguments of its
    configuration, or `"module:attribute"` for a lazy one.

    Raises:
        ConfigError: the name is taken.
    """
    INTERFACES.register(name, target)


def make_interface(config: PartConfig, context: InterfaceContext[Any]) -> Any:
    """Build an interface.

    Raises:
        UnknownName: nobody registered the name.
        ConfigError: the arguments do not fit.
    """
    factory = INTERFACES.get(config.name)
    try:
        return factory(context, **config.args)
    except TypeError as error:
        raise ConfigError(
            f"model interface {config.name!r} does not take {config.args}: {error}"
        ) from error
