"""One version: every model says what it has to of the batch, the batch is judged, and models learn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headway.contracts.config.algorithm import AlgorithmConfig
from headway.contracts.types import PolicyVersion, Trajectory
from trainer.algorithms.judgement import judge
from trainer.algorithms.kl import AdaptiveKL, FixedKL
from trainer.api import TrainEngine
from trainer.batching.sequences import batch_of_trajectories
from trainer.interfaces.base import Inference
from trainer.interfaces.ppo_actor import PPOActor
from trainer.interfaces.ppo_critic import PPOCritic


@dataclass(frozen=True, slots=True)
class Follower:
    """A model that moves towards another after each version."""

    engine: TrainEngine
    source: TrainEngine
    eta: float

    def follow(self) -> None:
        """Take its share of the way; collective."""
        self.engine.move_towards(self.source, self.eta)


class Learner:
    """Trains on whole batches, the same on every rank."""

    def __init__(
        self,
        config: AlgorithmConfig,
        actor: PPOActor,
        critic: PPOCritic | None = None,
        others: Sequence[Inference] = (),
        follower: Follower | None = None,
        critic_warmup_steps: int = 0,
    ) -> None:
        """
        Args:
            others: reference and teacher, where the configuration asks for them.
            follower: the reference, if it follows the policy.
            critic_warmup_steps: first steps in which the policy does not learn.
        """
        self._config = config
        self._actor = actor
        self._critic = critic
        self._follower = follower
        self._warmup_steps = critic_warmup_steps
        needs_proximal = config.decoupled and config.proximal == "recompute"
        self._inferences: list[Inference] = [actor] if needs_proximal else []
        self._inferences += [critic] if critic is not None else []
        self._inferences += others
        self.kl = make_kl(config)

    def trains_policy(self, step: int) -> bool:
        """Whether the critic is warm by then."""
        return step >= self._warmup_steps

    def train_step(
        self, trajectories: Sequence[Trajectory], version: PolicyVersion, step: int = 0
    ) -> dict[str, float]:
        """Learn from one batch; collective.

        Args:
            trajectories: whole groups, the same list on every rank.
            version: of the weights that the step starts from.
            step: counts from 0.
        Returns:
            Figures of the step: those of the judgement, the critic and the actor.
        """
        batch = batch_of_trajectories(trajectories)
        # All models are asked before the first update: they speak of the step's first weights.
        for model in self._inferences:
            batch = batch.with_columns(**model.inference(batch))
        batch, figures = judge(self._config, batch, version, self.kl.coef)
        if self._config.kl_in == "reward":
            self.kl.update(figures["reference_kl"], len(trajectories))
        if self._critic is not None:
            figures |= self._critic.train_step(batch)
        if self.trains_policy(step):
            figures |= self._actor.train_step(batch)
            if self._follower is not None:
                self._follower.follow()
        return figures


def make_kl(config: AlgorithmConfig) -> FixedKL | AdaptiveKL:
    """The coefficient of the penalty, adaptive where there is a target."""
    if config.kl_target is None:
        return FixedKL(config.kl_coef)
    return AdaptiveKL(config.kl_coef, config.kl_target, config.kl_horizon)
