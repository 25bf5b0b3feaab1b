"""The models of an experiment that trains a policy: loaded, and put together as its learner."""

from __future__ import annotations

from pathlib import Path

from headway.contracts.config.critic import ValueModelConfig
from headway.contracts.config.experiment import PolicyExperiment, PPOExperiment
from headway.contracts.config.model import TrainedModelConfig
from headway.contracts.config.optimizer import OptimizerConfig
from headway.contracts.types import FinetuneSpec
from trainer.algorithms.kl import AdaptiveKL
from trainer.api import MicroBatchSpec, SaveLoadMeta, TrainEngine
from trainer.backends.base import make_engine
from trainer.checkpoint import Parts, Stateful
from trainer.interfaces.base import Inference
from trainer.interfaces.frozen_model import FrozenModel
from trainer.interfaces.ppo_actor import PPOActor
from trainer.interfaces.ppo_critic import PPOCritic
from trainer.learner import Follower, Learner
from trainer.meter import Meter
from trainer.topology import Topology
from weight_sync.channel import WeightPublisher

POLICY, CRITIC, REFERENCE, TEACHER = "model", "critic", "reference", "teacher"
"""Also the names of their folders."""


class PolicyModels:
    """The policy, and whichever of critic, reference and teacher the configuration asks for."""

    def __init__(
        self,
        config: PolicyExperiment,
        topology: Topology,
        publisher: WeightPublisher | None,
        spec: FinetuneSpec,
        meter: Meter,
    ) -> None:
        """Load them all; collective.

        Raises:
            ConfigError: no such model, or one that these ranks cannot hold as configured.
        """
        self._config = config
        self._meter = meter
        self._topology = topology
        self._mb_spec = MicroBatchSpec(config.trainer.max_tokens_per_mb)
        warmup_steps = config.critic.warmup_steps if isinstance(config, PPOExperiment) else 0
        engine = make_engine(_shorter(config, warmup_steps), topology, publisher)
        self.policy = meter.around(engine, config.model)
        self.policy.initialize(None, spec)
        self._spec = spec
        self._trained: dict[str, TrainEngine] = {POLICY: self.policy}
        self._frozen: dict[str, TrainEngine] = {}
        critic = self._make_critic(config) if isinstance(config, PPOExperiment) else None
        reference = self._make_reference()
        others = [model for model in (reference, self._make_teacher()) if model is not None]
        follower = self._make_follower()
        self.learner = Learner(
            config.algorithm,
            PPOActor(
                self.policy,
                topology,
                config.algorithm,
                self._mb_spec,
                config.sampling.temperature,
            ),
            critic,
            others,
            follower,
            warmup_steps,
        )
        numbers: dict[str, Stateful] = {}
        if critic is not None and critic.normalizer is not None:
            numbers["value_normalizer"] = critic.normalizer
        if isinstance(self.learner.kl, AdaptiveKL):
            numbers["kl"] = self.learner.kl
        followers = {} if follower is None else {REFERENCE: follower.engine}
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

    def _make_critic(self, config: PPOExperiment) -> PPOCritic:
        model = config.critic.model
        if model is None:
            model = ValueModelConfig(**{**config.model.model_dump(), "head": "value"})
        optimizer = config.critic.optimizer
        engine = self._meter.around(
            make_engine(config, self._topology, None, model, optimizer), model
        )
        engine.initialize(None, self._spec)
        self._trained[CRITIC] = engine
        num_minibatches = config.algorithm.num_minibatches
        return PPOCritic(engine, self._topology, config.critic, self._mb_spec, num_minibatches)

    def _make_reference(self) -> Inference | None:
        config = self._config
        if config.algorithm.kl_coef == 0:
            return None
        path, eta = config.reference.path, config.reference.ema_eta
        if config.model.lora is not None and path is None and eta is None:
            return self._ask(self.policy, REFERENCE, is_base=True)
        model = config.model
        if path is not None:
            changes = {"path": path, "init_from_scratch": False, "lora": None}
            model = model.model_copy(update=changes)
        return self._ask(self._load_frozen(REFERENCE, model), REFERENCE)

    def _make_teacher(self) -> Inference | None:
        teacher = self._config.teacher
        if teacher is None:
            return None
        model = TrainedModelConfig(**teacher.model_dump())
        return self._ask(self._load_frozen(TEACHER, model), TEACHER)

    def _make_follower(self) -> Follower | None:
        eta = self._config.reference.ema_eta
        return None if eta is None else Follower(self._frozen[REFERENCE], self.policy, eta)

    def _load_frozen(self, name: str, model: TrainedModelConfig) -> TrainEngine:
        # An optimizer that never steps holds nothing.
        engine = self._meter.around(
            make_engine(self._config, self._topology, None, model, OptimizerConfig()), model
        )
        engine.initialize(None, None)
        self._frozen[name] = engine
        return engine

    def _ask(self, engine: TrainEngine, name: str, is_base: bool = False) -> FrozenModel:
        temperature = self._config.sampling.temperature
        return FrozenModel(
            engine, self._topology, self._mb_spec, temperature, f"{name}_logprobs", is_base
        )


def _shorter(config: PolicyExperiment, num_steps: int) -> PolicyExperiment:
    """With a schedule that begins so much later."""
    total_steps = config.trainer.total_steps - num_steps
    trainer = config.trainer.model_copy(update={"total_steps": total_steps})
    return config.model_copy(update={"trainer": trainer})
