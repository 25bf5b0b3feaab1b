"""The models of an experiment that trains a policy: loaded, and put together as its learner."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from headway.contracts.config.base import ComponentConfig
from headway.contracts.config.critic import CriticConfig, ValueModelConfig
from headway.contracts.config.model import TrainedModelConfig
from headway.contracts.config.optimizer import EMPTY, OptimizerConfig
from headway.contracts.config.rollout_experiments import (
    PolicyLearner,
    critic_of,
    reward_model_of,
)
from headway.contracts.engines import InferenceEngine
from headway.contracts.errors import ConfigError
from headway.contracts.types import FinetuneSpec
from trainer.allocations import Allocations
from trainer.api import TrainEngine
from trainer.backends.absent import AbsentEngine
from trainer.backends.base import make_engine
from trainer.checkpoint import CheckpointContents, Stateful
from trainer.data import PromptData
from trainer.dataflow.call import Call, interface_of
from trainer.dataflow.graph import Dataflow
from trainer.dataflow.policy import (
    ACTOR_GEN,
    CRITIC,
    POLICY,
    REFERENCE,
    REWARD,
    TEACHER,
    policy_calls,
)
from trainer.dataflow.runner import check_method
from trainer.dataflow.trace import TRACE_NAME
from trainer.interfaces.allocated import AllocatedInterface
from trainer.interfaces.base import (
    Generate,
    HasConnections,
    HasState,
    InterfaceContext,
    make_interface,
    save_model,
)
from trainer.learner import Follower, Learner
from trainer.memory import Planned, check_memory
from trainer.meter import Meter
from trainer.prompt_filter import PromptFilter
from trainer.topology import Topology
from weight_sync.channel import WeightPublisher


class PolicyModels:
    """The models that the calls of the dataflow name, and their interfaces."""

    def __init__(
        self,
        config: PolicyLearner,
        topology: Topology,
        publisher: WeightPublisher | None,
        spec: FinetuneSpec,
        meter: Meter,
        service: InferenceEngine | None = None,
        data: PromptData | None = None,
        prompt_filter: PromptFilter | None = None,
    ) -> None:
        """Load them all; collective.

        Args:
            service: the rollouts'; None on ranks other than the first.
            data, prompt_filter: for interfaces that look at rows.
        Raises:
            ConfigError: the calls make no graph; no such model, or one that these ranks cannot hold as
                configured.
        """
        calls = policy_calls(config)
        self._allocations = Allocations(config, calls, topology.world_size)
        flow = self._flow(calls, topology)
        self._config = config
        self._meter = meter
        self._topology = topology
        self._spec = spec
        self._shared = (service, data, prompt_filter)
        if topology.world_size > 1:
            topology.join()
        asked = {call.model for call in flow.calls}
        mine = self._allocations.ranks_of_model
        planned = {n: p for n, p in self._planned(asked).items() if topology.rank in mine(n)}
        check_memory(planned, config.trainer, topology)
        self._topologies: dict[str, Topology | None] = {}
        """Topology of each model: its calls may run beside those of others. None where it is not held."""
        self._trained: dict[str, TrainEngine] = {}
        self._frozen: dict[str, TrainEngine] = {}
        self._load_policy(publisher)
        if CRITIC in asked:
            self._load_critic()
        for name, model in self._frozen_models(asked).items():
            self._load_frozen(name, model)
        self.policy = self._trained[POLICY]
        self._trainers: dict[str | None, Any] = {}
        """The interfaces that train the models which this rank holds."""
        interfaces = self._make_interfaces(flow)
        self.generator: Generate | None = interfaces.get(ACTOR_GEN)
        """The interface that the configuration names for rollouts; None leaves them to the service,
        ahead of the steps."""
        self._connected = [one for one in interfaces.values() if isinstance(one, HasConnections)]
        follower = self._make_follower()
        self.learner = self._make_learner(flow, interfaces, follower)
        followers = {} if follower is None else {REFERENCE: follower.engine}
        self.checkpoint_contents = CheckpointContents(
            self._trained,
            followers,
            _states_of(interfaces.values()),
            is_split=self._allocations.are_split,
        )

    def _flow(self, calls: Sequence[Call], topology: Topology) -> Dataflow:
        """Return the graph of the calls, which knows where they run."""
        if not self._allocations.are_split:
            return Dataflow(calls)
        ranks = self._allocations.ranks_of_calls()
        return Dataflow(calls, ranks, is_serial=topology.device.type == "cuda")

    def step_lr_schedulers(self, step: int) -> None:
        """Advance the learning rates of the models that learned in a step."""
        for engine in self._trained.values():
            if engine is not self.policy or self.learner.trains_policy(step):
                engine.step_lr_scheduler()

    def export(self, folder: Path) -> None:
        """Write every trained model to a directory of its name, by the interface that trains it; in
        Hugging Face form, unless that has another; collective."""
        for name, engine in self._trained.items():
            save_model(self._trainers.get(name), engine, folder / name)

    def destroy(self) -> None:
        """Free them, close the connections of interfaces, and leave the process group."""
        for interface in self._connected:
            interface.close()
        for engine in (*self._frozen.values(), *self._trained.values()):
            engine.destroy()

    def _load_policy(self, publisher: WeightPublisher | None) -> None:
        config = _shorter(self._config, _warmup_steps(self._config))
        optimizer = config.optimizer
        self._trained[POLICY] = self._engine(POLICY, config, config.model, optimizer, publisher)
        self._trained[POLICY].initialize(None, self._spec)

    def _load_critic(self) -> None:
        critic, model = self._critic()
        self._trained[CRITIC] = self._engine(CRITIC, self._config, model, critic.optimizer)
        self._trained[CRITIC].initialize(None, self._spec)

    def _load_frozen(self, name: str, model: TrainedModelConfig) -> None:
        self._frozen[name] = self._engine(name, self._config, model, EMPTY)
        self._frozen[name].initialize(None, None)

    def _engine(
        self,
        name: str,
        config: PolicyLearner,
        model: TrainedModelConfig,
        optimizer: OptimizerConfig,
        publisher: WeightPublisher | None = None,
    ) -> TrainEngine:
        """Return an engine that loads nothing yet; on ranks without the model, one that never will."""
        topology = self._apart(name)
        if topology is None:
            return AbsentEngine(name, self._topology)
        engine = make_engine(config, topology, publisher, model, optimizer)
        return self._meter.around(engine, model)

    def _planned(self, asked: Collection[str | None]) -> dict[str, Planned]:
        """All models that this rank will hold."""
        planned = {POLICY: Planned(self._config.model, is_trained=True)}
        if CRITIC in asked:
            planned[CRITIC] = Planned(self._critic()[1], is_trained=True)
        frozen = self._frozen_models(asked)
        return planned | {name: Planned(model, is_trained=False) for name, model in frozen.items()}

    def _critic(self) -> tuple[CriticConfig, TrainedModelConfig]:
        config = self._config
        critic = critic_of(config)
        if critic is None:
            raise ConfigError("a call asks the critic, and the experiment has none; set type=ppo")
        value = {**config.model.model_dump(), "head": "value"}
        return critic, critic.model or ValueModelConfig(**value)

    def _frozen_models(self, asked: Collection[str | None]) -> dict[str, TrainedModelConfig]:
        models: dict[str, TrainedModelConfig] = {}
        if REFERENCE in asked:
            models[REFERENCE] = self._reference_model()
        if TEACHER in asked and self._config.teacher is not None:
            models[TEACHER] = TrainedModelConfig(**self._config.teacher.model_dump())
        reward_model = reward_model_of(self._config)
        if REWARD in asked and reward_model is not None:
            models[REWARD] = reward_model
        return models

    def _reference_model(self) -> TrainedModelConfig:
        model, path = self._config.model, self._config.reference.path
        if path is None:
            return model
        return model.model_copy(update={"path": path, "init_from_scratch": False, "lora": None})

    def _make_learner(
        self, flow: Dataflow, interfaces: Mapping[str, Any], follower: Follower | None
    ) -> Learner:
        config, topology = self._config, self._topology
        is_on_gpus = topology.world_size > 1 and topology.device.type == "cuda"
        changes = {"max_parallel": 1} if is_on_gpus else {}
        if self._allocations.are_split:  # ranks in different calls would wait for one another
            changes = {"max_parallel": len(flow.calls)}
        return Learner(
            flow,
            {name: each for name, each in interfaces.items() if name != ACTOR_GEN},
            config.dataflow.model_copy(update=changes),
            topology.device,
            follower,
            _warmup_steps(config),
            Path(config.run_dir) / TRACE_NAME if topology.is_main else None,
        )

    def _make_follower(self) -> Follower | None:
        eta = self._config.reference.ema_eta
        return None if eta is None else Follower(self._frozen[REFERENCE], self.policy, eta)

    def _make_interfaces(self, flow: Dataflow) -> dict[str, Any]:
        """Return interfaces by the name of the call; one that runs a model and trains it is one
        interface.
        """
        further = self._config.dataflow.calls
        has_generator = any(call.kind == "generate" for call in further)
        sharing: dict[tuple[str, str | None], list[Call]] = {}
        interfaces: dict[str, Any] = {}
        for call in flow.calls:
            if call.kind != "generate" or has_generator:
                part = interface_of(call, further)
                sharing.setdefault((part.model_dump_json(), call.model), []).append(call)
        for (part_json, _), calls in sharing.items():
            part = ComponentConfig.model_validate_json(part_json)
            interface = make_interface(part, self._context(calls))
            allocated = self._allocated(interface, calls[0])
            for call in calls:
                check_method(call, interface)
                interfaces[call.name] = allocated
                if call.kind == "train_step" and self._holds(call.model):
                    self._trainers[call.model] = interface
        return interfaces

    def _allocated(self, interface: Any, call: Call) -> Any:
        """Return the interface, or one around it where not all ranks hold its model."""
        ranks = self._allocations.ranks_of_model(call.model)
        if call.kind == "generate" or len(ranks) == self._topology.world_size:
            return interface
        everyone = self._topology.apart()
        return AllocatedInterface(interface, everyone, ranks[0], self._holds(call.model))

    def _holds(self, model: str | None) -> bool:
        return self._topology.rank in self._allocations.ranks_of_model(model)

    def _context(self, calls: Sequence[Call]) -> InterfaceContext[PolicyLearner]:
        """Return the context of an interface, which several calls on a model may share."""
        call, mb_spec_of = calls[0], self._allocations.mb_spec_of
        engine = None if call.model is None else (self._trained | self._frozen)[call.model]
        specs = {each.kind == "train_step": mb_spec_of(each) for each in calls}
        return InterfaceContext(
            self._config,
            self._apart(call.model or call.name) or self._topology,
            specs.get(False) or specs[True],
            self._meter,
            engine,
            *self._shared,
            train_mb_spec=specs.get(True),
        )

    def _apart(self, name: str) -> Topology | None:
        if name not in self._topologies:
            ranks = self._allocations.ranks_of_model(name)
            is_whole = len(ranks) == self._topology.world_size
            whole = self._topology
            self._topologies[name] = whole.apart() if is_whole else whole.among(ranks)
        return self._topologies[name]


def _states_of(interfaces: Iterable[Any]) -> dict[str, Stateful]:
    """Return what interfaces learn besides weights, by name."""
    states: dict[str, Stateful] = {}
    for interface in interfaces:
        if isinstance(interface, HasState):
            states |= interface.states
    return states


def _warmup_steps(config: PolicyLearner) -> int:
    critic = critic_of(config)
    return 0 if critic is None else critic.warmup_steps


def _shorter(config: PolicyLearner, num_steps: int) -> PolicyLearner:
    """Return the experiment with a schedule that starts `num_steps` later."""
    total_steps = config.trainer.total_steps - num_steps
    trainer = config.trainer.model_copy(update={"total_steps": total_steps})
    return config.model_copy(update={"trainer": trainer})
