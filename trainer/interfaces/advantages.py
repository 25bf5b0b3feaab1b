"""Advantages of a batch, computed after all models have added their columns."""

from __future__ import annotations

from headway.contracts.config.algorithm import AlgorithmConfig
from headway.contracts.config.rollout_experiments import PolicyLearner
from headway.contracts.types import PolicyVersion
from trainer.algorithms.batch_advantages import compute_advantages
from trainer.algorithms.kl import AdaptiveKL, FixedKL
from trainer.batching.sequences import SequenceBatch
from trainer.interfaces.base import Columns, InterfaceContext, Metrics


class AdvantagesCall:
    """Rewards -> advantages and returns, with the coefficient of the penalty, which may adapt."""

    def __init__(self, config: AlgorithmConfig) -> None:
        self._config = config
        self.kl = make_kl(config)

    @property
    def states(self) -> dict[str, AdaptiveKL]:
        """Adaptive values, for checkpoints."""
        return {"kl": self.kl} if isinstance(self.kl, AdaptiveKL) else {}

    def compute(self, batch: SequenceBatch, version: PolicyVersion) -> tuple[Columns, Metrics]:
        """See `compute_advantages`.

        Args:
            batch: whole, the same on every rank.
            version: of the weights that the step starts from.
        """
        credited, metrics = compute_advantages(self._config, batch, version, self.kl.coef)
        if self._config.kl_in == "reward":
            self.kl.update(metrics["reference_kl"], len(batch.lengths))
        columns = {name: v for name, v in credited.columns.items() if name not in batch.columns}
        return columns, metrics


def make_kl(config: AlgorithmConfig) -> FixedKL | AdaptiveKL:
    """The coefficient of the penalty, adaptive where there is a target."""
    if config.kl_target is None:
        return FixedKL(config.kl_coef)
    return AdaptiveKL(config.kl_coef, config.kl_target, config.kl_horizon)


def make(context: InterfaceContext[PolicyLearner]) -> AdvantagesCall:
    """Build it as the experiment is configured."""
    return AdvantagesCall(context.config.algorithm)
