"""Scores of a batch by a reward model, alone or beside the experiment's verifier."""

from __future__ import annotations

from typing import Protocol

from headway.contracts.config.ppo_code import VerifiedPPOExperiment
from headway.contracts.config.rollout_experiments import PolicyLearner
from headway.contracts.errors import ConfigError
from trainer.batching.sequences import SequenceBatch
from trainer.checkpoint import Stateful
from trainer.interfaces import verified_answers
from trainer.interfaces.base import Columns, HasState, InterfaceContext
from trainer.interfaces.reward_model import ModelReward, padding_of_model
from trainer.prompt_filter import PromptFilter


class BatchScores(Protocol):
    """An interface that scores a whole batch."""

    def inference(self, batch: SequenceBatch) -> Columns:
        """`scores` [T], and whatever else it says."""


class RewardRole:
    """The call `rew_inf` with a model: its scores are the rewards, before `max_reward_clip`."""

    def __init__(
        self,
        model: BatchScores,
        verifier: BatchScores | None = None,
        bias: float = 0.0,
        scaling: float = 1.0,
        prompt_filter: PromptFilter | None = None,
    ) -> None:
        """
        Args:
            verifier: its score less `bias`, times `scaling`, is added to the model's; None adds nothing.
            prompt_filter: gets the model's rewards of each prompt where there is no verifier, which tells
                it its own.
        """
        self._model = model
        self._verifier = verifier
        self._bias = bias
        self._scaling = scaling
        self._prompt_filter = prompt_filter

    @property
    def states(self) -> dict[str, Stateful]:
        """State that is learned, for checkpoints."""
        if isinstance(self._verifier, HasState):
            return dict(self._verifier.states)
        return {} if self._prompt_filter is None else {"prompt_filter": self._prompt_filter}

    def inference(self, batch: SequenceBatch) -> Columns:
        """`scores` [T], and `dense_scores` [T] where the model scores every token; collective.

        Args:
            batch: columns `input_ids`, `action_mask`, `row`.
        """
        columns = self._model.inference(batch)
        if self._verifier is not None:
            verified = self._verifier.inference(batch)["scores"]
            columns["scores"] = columns["scores"] + (verified - self._bias) * self._scaling
        elif self._prompt_filter is not None:
            rewards = batch.with_columns(scores=columns["scores"]).per_sequence("scores")
            self._prompt_filter.observe(batch.per_sequence("row").tolist(), rewards.tolist())
        return columns


def make(context: InterfaceContext[PolicyLearner]) -> RewardRole:
    """Build it as the experiment is configured.

    Raises:
        ConfigError: it has no reward model.
    """
    config = context.config
    if not isinstance(config, VerifiedPPOExperiment) or config.reward_model is None:
        raise ConfigError("reward_role belongs to type=ppo-code and ppo-math with a reward_model")
    ppo, has_verifier = config.ppo, config.ppo.reward_source == "both"
    model = ModelReward(
        context.model,
        context.topology,
        context.mb_spec,
        padding_of_model(config.reward_model.path),
        0.0 if has_verifier else -ppo.reward_output_bias,
        ppo.model_output_scaling,
        is_dense=ppo.rw_type == "dense",
    )
    verifier = verified_answers.make(context) if has_verifier else None
    return RewardRole(
        model,
        verifier,
        ppo.reward_output_bias,
        ppo.reward_output_scaling,
        context.prompt_filter,
    )
