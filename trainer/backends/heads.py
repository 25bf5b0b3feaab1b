"""What a model's head makes of hidden states: the `ModelOutput`s of the torch backends."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headway.contracts.errors import ConfigError
from trainer.algorithms.logprobs import chunked_logprobs, token_logprobs


@dataclass(frozen=True, slots=True)
class LanguageOutput:
    """Of a head that is one matrix: logits exist for a chunk of tokens at a time."""

    hidden: Tensor  # [T, H]
    head: torch.nn.Module
    """A linear layer of [V, H]."""
    kept_bytes: int = 0
    """Of `chunked_logprobs`."""

    def logprobs(
        self, labels: Tensor, temperature: float = 1.0, mask: Tensor | None = None
    ) -> Tensor:
        return self._judge(labels, temperature, mask, with_entropy=False)[0]

    def logprobs_and_entropy(
        self, labels: Tensor, temperature: float = 1.0, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        logprobs, entropy = self._judge(labels, temperature, mask, with_entropy=True)
        assert entropy is not None
        return logprobs, entropy

    def logits(self) -> Tensor:
        logits: Tensor = self.head(self.hidden)
        return logits

    def values(self) -> Tensor:
        raise _no_values()

    def _judge(
        self, labels: Tensor, temperature: float, mask: Tensor | None, with_entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        hidden, rows = self.hidden, None
        if mask is not None:
            rows = mask.nonzero().squeeze(1)
            hidden, labels = hidden.index_select(0, rows), labels[rows]
        logprobs, entropy = chunked_logprobs(
            hidden,
            self.head.weight,  # type: ignore[arg-type] # a parameter
            labels,
            temperature,
            bias=getattr(self.head, "bias", None),
            with_entropy=with_entropy,
            kept_bytes=self.kept_bytes,
        )
        if rows is not None:
            logprobs = self._spread(logprobs, rows)
            entropy = None if entropy is None else self._spread(entropy, rows)
        return logprobs, entropy

    def _spread(self, values: Tensor, rows: Tensor) -> Tensor:
        """[T] the values at their rows, 0 elsewhere."""
        return values.new_zeros(len(self.hidden)).index_copy(0, rows, values)


@dataclass(frozen=True, slots=True)
class LogitsOutput:
    """Of a model that scales or caps what its head gives: whole logits."""

    whole: Tensor  # [T, V]

    def logprobs(
        self, labels: Tensor, temperature: float = 1.0, mask: Tensor | None = None
    ) -> Tensor:
        return _masked(token_logprobs(self.whole, labels, temperature), mask)

    def logprobs_and_entropy(
        self, labels: Tensor, temperature: float = 1.0, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        scaled = self.whole.float() / (temperature or 1.0)
        table = torch.log_softmax(scaled, dim=-1)
        entropy = -(table.exp() * table).sum(-1)
        return self.logprobs(labels, temperature, mask), _masked(entropy, mask)

    def logits(self) -> Tensor:
        return self.whole

    def values(self) -> Tensor:
        raise _no_values()


@dataclass(frozen=True, slots=True)
class ValueOutput:
    """Of a head with one number per position."""

    hidden: Tensor  # [T, H]
    head: torch.nn.Module
    """A linear layer of [1, H]."""

    def logprobs(
        self, labels: Tensor, temperature: float = 1.0, mask: Tensor | None = None
    ) -> Tensor:
        raise _no_tokens()

    def logprobs_and_entropy(
        self, labels: Tensor, temperature: float = 1.0, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        raise _no_tokens()

    def logits(self) -> Tensor:
        raise _no_tokens()

    def values(self) -> Tensor:
        values: Tensor = self.head(self.hidden)
        return values[:, 0].to(torch.promote_types(values.dtype, torch.float32))


def _masked(values: Tensor, mask: Tensor | None) -> Tensor:
    return values if mask is None else torch.where(mask, values, 0.0)


def _no_values() -> ConfigError:
    return ConfigError("values were asked of a language model; set model.head=value")


def _no_tokens() -> ConfigError:
    return ConfigError(
        "logprobs were asked of a model whose head gives one value per position; set model.head=lm"
    )
