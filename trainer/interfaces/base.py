"""Common ground of all interfaces: calls on a model that read columns of a batch by name, and return
columns by name, or metrics. They are registered by name.

An interface has the method that the `kind` of its call names (`generate`, `inference`, `train_step`), and
as it likes `save`, `evaluate` and `states`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

from torch import Tensor

from headway.contracts.config.base import ComponentConfig
from headway.contracts.config.experiment import ExperimentConfig
from headway.contracts.config.trainer import TokenNormalizeScope
from headway.contracts.engines import InferenceEngine
from headway.contracts.errors import ConfigError
from headway.contracts.registry import Registry
from headway.contracts.types import RolloutRequest, TrajectoryGroup
from trainer.api import MicroBatchSpec, SaveLoadMeta, TrainEngine
from trainer.batching.sequences import SequenceBatch
from trainer.checkpoint import Stateful
from trainer.data import PromptData
from trainer.meter import Meter
from trainer.prompt_filter import PromptFilter
from trainer.topology import Topology

Columns = dict[str, Tensor]
"""Name -> [T] over a whole batch, the same on every rank."""
Metrics = dict[str, float]
"""Name -> number, the same on every rank."""
ConfigT = TypeVar("ConfigT", bound=ExperimentConfig)
"""The experiments that an interface is for."""


class Inference(Protocol):
    """A call that asks a model about a whole batch; collective."""

    def inference(self, batch: SequenceBatch) -> Columns:
        """New columns."""


class Generate(Protocol):
    """A call that brings the trajectories of a step; collective."""

    def generate(self, requests: Sequence[RolloutRequest]) -> Sequence[TrajectoryGroup]:
        """Run prompt groups, each with its sampling settings; what the first rank returns counts.

        Args:
            requests: the step's, the same on every rank.
        Returns:
            Whole groups of these requests, known by their `rollout_id`.
        """


class TrainStep(Protocol):
    """A call that updates a model from a whole batch; collective."""

    def train_step(self, batch: SequenceBatch) -> Metrics:
        """Metrics of the update."""


@runtime_checkable
class CanSave(Protocol):
    """An interface that writes the model that it trains itself; others leave it to the engine."""

    def save(self, folder: Path) -> None:
        """Write the model for those who will use it, by default in Hugging Face form; collective."""


@runtime_checkable
class CanEvaluate(Protocol):
    """An interface that looks at rows which are not trained on (experiments on rows, `held_out`)."""

    def evaluate(self, batch: SequenceBatch) -> Metrics:
        """Metrics of the held-out rows, which are written with `eval_` in front; collective."""


@runtime_checkable
class HasState(Protocol):
    """An interface that learns numbers, which checkpoints hold."""

    @property
    def states(self) -> Mapping[str, Stateful]:
        """State by name; a name stands for the same state in every run."""


@runtime_checkable
class HasConnections(Protocol):
    """An interface that asks services of its own."""

    def close(self) -> None:
        """Close its connections, for good."""


@dataclass(frozen=True, slots=True)
class InterfaceContext(Generic[ConfigT]):
    """Objects that an interface of an experiment may use."""

    config: ConfigT
    """The whole experiment."""
    topology: Topology
    """The ranks; the collectives of a call are its own, whatever runs beside it."""
    mb_spec: MicroBatchSpec
    """Limits of the micro-batches that batches are split into."""
    meter: Meter
    """Counts what passes through engines that the interface loads itself."""
    engine: TrainEngine | None = None
    """The model of the call, if it has one."""
    service: InferenceEngine | None = None
    """The rollout service; None on ranks other than the first."""
    data: PromptData | None = None
    """The prompts, by position."""
    prompt_filter: PromptFilter | None = None
    """Filter of the prompts that are still worth a rollout, if one is configured."""
    train_mb_spec: MicroBatchSpec | None = None
    """Limits of the micro-batches of `train_step`, where they differ from those of `inference`."""

    @property
    def token_normalize_scope(self) -> TokenNormalizeScope:
        """What losses are averaged over, for `TrainEngine.train_batch`."""
        return self.config.trainer.token_normalize_scope

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
        "rollout": "trainer.interfaces.rollout:make",
        "reward_model": "trainer.interfaces.reward_model:make",
        "reward_role": "trainer.interfaces.reward_role:make",
        "rw": "trainer.interfaces.reward_modeling:make",
        "sft": "trainer.interfaces.sft:make",
        "teacher": "trainer.interfaces.frozen_model:make_teacher",
        "teacher_servers": "trainer.interfaces.teacher_servers:make",
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


def make_interface(config: ComponentConfig, context: InterfaceContext[Any]) -> Any:
    """Build an interface.

    Raises:
        UnknownName: no interface is registered under the name.
        ConfigError: the arguments do not fit.
    """
    factory = INTERFACES.get(config.name)
    try:
        return factory(context, **config.args)
    except TypeError as error:
        raise ConfigError(
            f"model interface {config.name!r} does not take {config.args}: {error}"
        ) from error


def save_model(interface: Any, engine: TrainEngine, folder: Path) -> None:
    """Write a trained model: by the interface that trains it if it has `save`, otherwise by the engine as
    a Hugging Face directory; collective."""
    if isinstance(interface, CanSave):
        interface.save(folder)
    else:
        engine.save(SaveLoadMeta(str(folder), weight_format="hf"))
