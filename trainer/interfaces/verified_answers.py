"""Answers of a batch, scored by the experiment's verifier: right, wrong, or wrong in the right form."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from headway.contracts.config.ppo_code import VerifiedPPOExperiment
from headway.contracts.config.ppo_settings import PPOCodeConfig
from headway.contracts.config.rollout_experiments import PolicyLearner
from headway.contracts.errors import ConfigError
from trainer.algorithms.answer_format import answer_score
from trainer.batching.checks import check_verifier
from trainer.batching.sequences import SequenceBatch
from trainer.data import PromptData
from trainer.data_supervised import Encoder
from trainer.interfaces.answers import AnswerTextRule
from trainer.interfaces.base import Columns, InterfaceContext
from trainer.interfaces.reward_verifier import VerifierReward
from trainer.prompt_filter import PromptFilter


class VerifiedAnswers:
    """A verifier in the service; its scores also show whether it works, and how hard the prompts are."""

    def __init__(
        self, verifier: VerifierReward, ppo: PPOCodeConfig, prompt_filter: PromptFilter | None
    ) -> None:
        """
        Args:
            verifier: with the rule that turns its verdicts into scores.
            prompt_filter: gets the rewards of each prompt; None if there is none.
        """
        self._verifier = verifier
        self._ppo = ppo
        self._prompt_filter = prompt_filter

    @property
    def states(self) -> dict[str, PromptFilter]:
        """State that it learns, for checkpoints."""
        return {} if self._prompt_filter is None else {"prompt_filter": self._prompt_filter}

    def inference(self, batch: SequenceBatch) -> Columns:
        """`scores` [T], before bias and scaling; collective.

        Args:
            batch: columns `input_ids`, `action_mask`, `row`.
        Raises:
            RewardError: no answer scored above the lowest (`check_verifier_status`).
            ServiceError: the service could not score them.
        """
        columns = self._verifier.inference(batch)
        bias, scaling = self._ppo.reward_output_bias, self._ppo.reward_output_scaling
        scores = batch.with_columns(**columns).per_sequence("scores").double()
        rewards: list[float] = ((scores - bias) * scaling).tolist()
        if self._ppo.check_verifier_status:
            check_verifier(rewards, self._ppo.lowest_reward)
        if self._prompt_filter is not None:
            self._prompt_filter.observe(batch.per_sequence("row").tolist(), rewards)
        return columns


def make(context: InterfaceContext[PolicyLearner]) -> VerifiedAnswers:
    """Build it as the experiment is configured.

    Raises:
        ConfigError: it verifies no answers.
    """
    config, data = context.config, context.data
    if not isinstance(config, VerifiedPPOExperiment) or data is None:
        raise ConfigError("verified_answers belongs to type=ppo-code and ppo-math; set one of them")
    encoder = Encoder(config.model.path)
    decode = partial(encoder.tokenizer.decode, skip_special_tokens=True)
    adjust = partial(answer_score, check_xml_format=config.ppo.check_xml_format)
    verifier = VerifierReward(
        context.service,
        context.topology,
        config.rollout.reward,
        partial(_row_at, data),
        config.rollout.wait_timeout_s,
        rule=AnswerTextRule(decode, adjust),
    )
    return VerifiedAnswers(verifier, config.ppo, context.prompt_filter)


def _row_at(data: PromptData, position: int) -> Mapping[str, Any]:
    return data.rows[data.row_index(position)]
