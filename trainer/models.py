"""The models of an experiment that trains a policy: loaded, and put together as its learner."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from headway.contracts.config.base import PartConfig
from headway.contracts.config.critic import ValueModelConfig
from headway.contracts.config.model import TrainedModelConfig
from headway.contracts.config.optimizer import OptimizerConfig
from headway.contracts.config.rollout_experiments import PolicyLearner, critic_of
from headway.contracts.engines import InferenceEngine
from headway.contracts.errors import ConfigError
from headway.contracts.types import FinetuneSpec
from trainer.api import MicroBatchSpec, SaveLoadMeta, TrainEngine
from trainer.backends.base import make_engine
from trainer.checkpoint import Parts, Stateful
from trainer.data import PromptData
from trainer.dataflow.call import Call
from trainer.dataflow.graph import Dataflow
from trainer.dataflow.policy import CRITIC, POLICY, REFERENCE, TEACHER, policy_flow
from trainer.dataflow.trace import TRACE_NAME
from trainer.interfaces.base import InterfaceContext, make_interface
from trainer.learner import Follower, Learner
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
        flow = policy_flow(config)
        self._config = config
        self._meter = meter
        self._topology = topology
        self._spec = spec
        self._shared = (service, data, prompt_filter)
        if topology.world_size > 1:
            topology.join()
        self._topologies: dict[str, Topology] = {}
        """Of each model: its calls may run beside those of others."""
        self._trained: dict[str, TrainEngine] = {}
        self._frozen: dict[str, TrainEngine] = {}
        asked = {call.model for call in flow.calls}
        self._load_policy(publisher)
        if CRITIC in asked:
            self._load_critic()
        if REFERENCE in asked:
            self._load_frozen(REFERENCE, self._reference_model())
        if TEACHER in asked and config.teacher is not None:
            self._load_frozen(TEACHER, TrainedModelConfig(**config.teacher.model_dump()))
        self.policy = self._trained[POLICY]
        interfaces = self._make_interfaces(flow)
        follower = self._make_follower()
        is_one_at_a_time = topology.world_size > 1 and topology.device.type == "cuda"
        changes = {"max_parallel": 1} if is_one_at_a_time else {}
        self.learner = Learner(
            flow,
            interfaces,
            config.dataflow.model_copy(update=changes),
            topology.device,
            follower,
            _warmup_steps(config),
            Path(config.run_dir) / TRACE_NAME if topology.is_main else None,
        )
        followers = {} if follower is None else {REFERENCE: follower.engine}
        numbers: dict[str, Stateful] = {}
        for interface in interfaces.values():
            numbers |= getattr(interface, "numbers", {})
        self.parts = Parts(self._trained, followers, numbers)

    def step_lr_schedulers(self, step: int) -> None:
        """Advance the learning rates of the models that learned in a step."""
        for engine in self._trained.values():
            if engine is not self.policy or self.learner.trains_policy(step):
                engine.step_lr_scheduler()

    def export(self, folder: Path) -> None:
        """Write every trained model as a Hugging Face directory; collective."""
        for name, engine in self._trained.items():
            engine.save(SaveLoadMeta(str(folder / name), weight_format="hf"))

    def destroy(self) -> None:
        """Free them, and leave the process group."""
        for engine in (*self._frozen.values(), *self._trained.values()):
            engine.destroy()

    def _load_policy(self, publisher: WeightPublisher | None) -> None:
        config = _shorter(self._config, _warmup_steps(self._config))
        engine = make_engine(config, self._apart(POLICY), publisher)
        self._trained[POLICY] = self._meter.around(engine, config.model)
        self._trained[POLICY].initialize(None, self._spec)

    def _load_critic(self) -> None:
        config = self._config
        critic = critic_of(config)
        if critic is None:
            raise ConfigError("a call asks the critic, and the experiment has none; set type=ppo")
        model = critic.model
        if model is None:
            model = ValueModelConfig(**{**config.model.model_dump(), "head": "value"})
        optimizer = critic.optimizer
        engine = make_engine(config, self._apart(CRITIC), None, model, optimizer)
        self._trained[CRITIC] = self._meter.around(engine, model)
        self._trained[CRITIC].initialize(None, self._spec)

    def _load_frozen(self, name: str, model: TrainedModelConfig) -> None:
        # An optimizer that never steps holds nothing.
        engine = make_engine(self._config, self._apart(name), None, model, OptimizerConfig())
        self._frozen[name] = self._meter.around(engine, model)
        self._frozen[name].initialize(None, None)

    def _reference_model(self) -> TrainedModelConfig:
        model, path = self._config.model, self._config.reference.path
        if path is None:
            return model
        return model.model_copy(update={"path": path, "init_from_scratch": False, "lora": None})

    def _make_follower(self) -> Follower | None:
        eta = self._config.reference.ema_eta
        return None if eta is None else Follower(self._frozen[REFERENCE], self.policy, eta)

    def _make_interfaces(self, flow: Dataflow) -> dict[str, Any]:
        """By the name of the call; one that asks a model and trains it is one interface."""
        further = {call.name: call.interface for call in self._config.dataflow.calls}
        made: dict[tuple[str, str | None], Any] = {}
        interfaces: dict[str, Any] = {}
        for call in flow.calls:
            if call.kind == "generate":
                continue
            part = further.get(call.name) or PartConfig(name=call.interface)
            key = (part.model_dump_json(), call.model)
            if key not in made:
                made[key] = make_interface(part, self._context(call))
            interfaces[call.name] = made[key]
        return interfaces

    def _context(self, call: Call) -> InterfaceContext[PolicyLearner]:
        engine = None if call.model is None else (self._trained | self._frozen)[call.model]
        mb_spec = MicroBatchSpec(self._config.trainer.max_tokens_per_mb)
        topology = self._apart(call.model or call.name)
        meter = self._meter
        return InterfaceContext(self._config, topology, mb_spec, meter, engine, *self._shared)

    def _apart(self, name: str) -> Topology:
        if name not in self._topologies:
            self._topologies[name] = self._topology.apart()
        return self._topologies[name]


def _warmup_steps(config: PolicyLearner) -> int:
    critic = critic_of(config)
    return 0 if critic is None else critic.warmup_steps


def _shorter(config: PolicyLearner, num_steps: int) -> PolicyLearner:
    """With a schedule that begins so much later."""
    total_steps = config.trainer.total_steps - num_steps
    trainer = config.trainer.model_copy(update={"total_steps": total_steps})
    return config.model_copy(update={"trainer": trainer})
