"""The role reward: a rule, or a model, which may have a tokenizer of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from headway.contracts.config.workers import WorkerRewardConfig, WorkersConfig
from headway.contracts.errors import ConfigError
from headway.contracts.http.rewards import AnswerToScore
from headway.contracts.registry import Registry
from headway.text.tokenizer import TextTokenizer
from trainer.api import TrainEngine
from trainer.batching.sequences import SequenceBatch
from trainer.interfaces.reward_modeling import score_sequences
from trainer.workers.data_proto import DataProto
from trainer.workers.dispatch import Dispatch, register
from trainer.workers.model_worker import ModelWorker
from trainer.workers.padding import to_sequences

ROW, MESSAGES = "row", "messages"
"""Columns of objects: the prompt's data row, and the prompt as a chat (None if it is text)."""


class RuleScorer(Protocol):
    """Scores text by a registered reward."""

    def score(self, answers: Sequence[AnswerToScore]) -> list[float]:
        """Return the score of each answer."""

    def close(self) -> None:
        """End it; the last call."""


RULE_SCORERS: Registry[Callable[..., RuleScorer]] = Registry(
    "rule scorer", {"local": "gateway.rewards.local_scorer:LocalScorer"}
)
"""Factories called with (reward, tokenizer directory, score of failures): known by their protocol."""


class RewardWorker(ModelWorker):
    """Scores whole sequences."""

    def __init__(self, config: WorkersConfig) -> None:
        super().__init__(config)
        self._score: Callable[[DataProto], Tensor] | None = None
        self._rule: RuleScorer | None = None

    @register(Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Load `reward.model`, or make `reward.rule`.

        Raises:
            ConfigError: none is configured, or it cannot be made.
        """
        reward = self._config.reward
        if reward.rule is not None:
            scorer = RULE_SCORERS.get("local")
            self._rule = scorer(reward.rule, self._config.model.path, reward.failed_score)
            self._score = self._by_rule
        elif reward.model is not None:
            engine = self._load(reward.model)
            encoder = None
            if reward.input_tokenizer is not None:
                encoder = SecondTokenizer(reward, reward.input_tokenizer, reward.model.path)
            self._score = lambda batch: self._by_model(engine, encoder, batch)
        else:
            raise ConfigError("the role reward has nothing to score by; set reward.rule or .model")

    @register()
    def compute_rm_score(self, batch: DataProto) -> DataProto:
        """Compute the score of each sequence as a whole.

        Args:
            batch: of `to_sequences`; for a rule also objects `row`, for a model with another tokenizer
                objects `messages`, if there.
        Returns:
            `scores` [B], and `rm_scores` [B, R], the score at the last token of the response, else 0.
        """
        if self._score is None:
            raise ConfigError("compute_rm_score came before init_model; call that first")
        scores = self._score(batch)
        width = batch["response_mask"].shape[1]
        attended = batch["attention_mask"][:, -width:]
        last = (attended * torch.arange(1, width + 1)).argmax(1)
        at_end = torch.zeros(len(scores), width).scatter_(1, last[:, None], scores[:, None].float())
        return DataProto({"scores": scores, "rm_scores": at_end * attended})

    def close(self) -> None:
        if self._rule is not None:
            self._rule.close()
            self._rule = None
        super().close()

    def _by_rule(self, batch: DataProto) -> Tensor:
        if self._rule is None:
            raise ConfigError("this worker was closed; start another one")
        rows = batch[ROW].tolist()
        answers = [
            AnswerToScore(prompt_ids=prompt, completion_ids=response, data=dict(row))
            for (prompt, response), row in zip(tokens_of(batch), rows, strict=True)
        ]
        return torch.tensor(self._rule.score(answers), dtype=torch.float32)

    def _by_model(
        self, engine: TrainEngine, encoder: SecondTokenizer | None, batch: DataProto
    ) -> Tensor:
        packed = to_sequences(batch) if encoder is None else encoder.encode(batch)
        ones = [1] * len(packed.lengths)
        with self._on_device(engine):
            scores: Tensor = engine.forward(packed, self._mb_spec, ones, score_sequences)
        return scores


class SecondTokenizer:
    """Tokens of the policy -> tokens of a model with another tokenizer, by way of the text."""

    def __init__(self, config: WorkerRewardConfig, policy: str, model: str) -> None:
        """
        Args:
            policy, model: directories of the two tokenizers.
        """
        self._policy = TextTokenizer(policy)
        self._model = TextTokenizer(model)
        self._max_length = config.max_length

    def encode(self, batch: DataProto) -> SequenceBatch:
        """Encode each sequence again; chats get the model's own template."""
        has_chats = MESSAGES in batch.objects
        chats = batch[MESSAGES].tolist() if has_chats else [None] * len(batch)
        rows = [
            self._tokens(chat, *tokens)[: self._max_length]
            for chat, tokens in zip(chats, tokens_of(batch), strict=True)
        ]
        ids = torch.tensor([token for row in rows for token in row])
        return SequenceBatch(tuple(map(len, rows)), {"input_ids": ids})

    def _tokens(
        self, chat: Sequence[Mapping[str, Any]] | None, prompt: list[int], response: list[int]
    ) -> list[int]:
        if chat is None:
            return self._model.encode(self._policy.decode(prompt) + self._policy.decode(response))
        said = {"role": "assistant", "content": self._policy.decode(response)}
        return self._model.encode_chat([*chat, said], opens=False)


def tokens_of(batch: DataProto) -> list[tuple[list[int], list[int]]]:
    """Return the tokens of prompt and response of each row."""
    ids, attended = batch["input_ids"], batch["attention_mask"].bool()
    start = ids.shape[1] - batch["response_mask"].shape[1]
    return [
        (row[:start][mask[:start]].tolist(), row[start:][mask[start:]].tolist())
        for row, mask in zip(ids, attended, strict=True)
    ]
