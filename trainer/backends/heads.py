"""`ModelOutput`s of the torch backends: the outputs of a model's head on hidden states."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headway.contracts.errors import ConfigError
from trainer.algorithms.logprobs import (
    chunked_logprobs,
    chunked_top,
    scaled_logits,
    token_logprobs,
)
from trainer.batching.sampling_mask import PackedSamplingMask
from trainer.batching.sequences import SequenceBatch


@dataclass(frozen=True, slots=True)
class LanguageOutput:
    """Output of a head that is one matrix: logits exist for a chunk of tokens at a time."""

    hidden: Tensor  # [T, H]
    head: torch.nn.Module
    """A linear layer of [V, H]."""
    batch: SequenceBatch
    """Batch that the hidden states belong to."""
    kept_bytes: int = 0
    """Passed on to `chunked_logprobs`."""

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

    def top(
        self, count: int, temperature: float = 1.0, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        hidden, rows, sampling_mask = self._rows(mask)
        ids, logprobs = chunked_top(
            hidden,
            self.head.weight,  # type: ignore[arg-type] # a parameter
            count,
            temperature,
            getattr(self.head, "bias", None),
            sampling_mask,
        )
        if rows is not None:
            ids, logprobs = self._spread(ids, rows), self._spread(logprobs, rows)
        return ids, logprobs

    def logits(self) -> Tensor:
        logits: Tensor = self.head(self.hidden)
        return logits

    def values(self) -> Tensor:
        raise _no_values()

    def _judge(
        self, labels: Tensor, temperature: float, mask: Tensor | None, with_entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        hidden, rows, sampling_mask = self._rows(mask)
        logprobs, entropy = chunked_logprobs(
            hidden,
            self.head.weight,  # type: ignore[arg-type] # a parameter
            labels if rows is None else labels[rows],
            temperature,
            bias=getattr(self.head, "bias", None),
            with_entropy=with_entropy,
            kept_bytes=self.kept_bytes,
            sampling_mask=sampling_mask,
        )
        if rows is not None:
            logprobs = self._spread(logprobs, rows)
            entropy = None if entropy is None else self._spread(entropy, rows)
        return logprobs, entropy

    def _rows(self, mask: Tensor | None) -> tuple[Tensor, Tensor | None, PackedSamplingMask | None]:
        """Hidden states and sampling mask of a mask's positions, and which these are; None are all."""
        sampling_mask = self.batch.sampling_mask
        if mask is None:
            return self.hidden, None, sampling_mask
        rows = self.batch.positions(mask)
        return (
            self.hidden.index_select(0, rows),
            rows,
            None if sampling_mask is None else sampling_mask.rows(rows),
        )

    def _spread(self, values: Tensor, rows: Tensor) -> Tensor:
        """[T, ...] the values at their rows, 0 elsewhere."""
        whole = values.new_zeros(len(self.hidden), *values.shape[1:])
        return whole.index_copy(0, rows, values)


@dataclass(frozen=True, slots=True)
class LogitsOutput:
    """Output of a model that scales or caps its head's output: whole logits."""

    whole: Tensor  # [T, V]
    batch: SequenceBatch
    """Batch that the logits belong to."""

    def logprobs(
        self, labels: Tensor, temperature: float = 1.0, mask: Tensor | None = None
    ) -> Tensor:
        logprobs = token_logprobs(self.whole, labels, temperature, self.batch.sampling_mask)
        return _masked(logprobs, mask)

    def logprobs_and_entropy(
        self, labels: Tensor, temperature: float = 1.0, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        scaled = scaled_logits(self.whole, temperature, self.batch.sampling_mask)
        table = torch.log_softmax(scaled, dim=-1)
        entropy = -(table.exp() * table).sum(-1)
        return self.logprobs(labels, temperature, mask), _masked(entropy, mask)

    def top(
        self, count: int, temperature: float = 1.0, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        scaled = scaled_logits(self.whole, temperature, self.batch.sampling_mask)
        logprobs, ids = scaled.log_softmax(-1).topk(count)
        return _masked(ids, mask), _masked(logprobs, mask)

    def logits(self) -> Tensor:
        return self.whole

    def values(self) -> Tensor:
        raise _no_values()


@dataclass(frozen=True, slots=True)
class ValueOutput:
    """Output of a head with one number per position."""

    hidden: Tensor  # [T, H]
    head: torch.nn.Linear
    """A linear layer of [1, H]."""

    def logprobs(
        self, labels: Tensor, temperature: float = 1.0, mask: Tensor | None = None
    ) -> Tensor:
        raise _no_tokens()

    def logprobs_and_entropy(
        self, labels: Tensor, temperature: float = 1.0, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        raise _no_tokens()

    def top(
        self, count: int, temperature: float = 1.0, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        raise _no_tokens()

    def logits(self) -> Tensor:
        raise _no_tokens()

    def values(self) -> Tensor:
        # A product of halves would round values to 8 bits.
        dtype = torch.promote_types(self.hidden.dtype, torch.float32)
        weight, bias = self.head.weight, self.head.bias
        values = torch.nn.functional.linear(
            self.hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
        )
        return values[:, 0]


def _masked(values: Tensor, mask: Tensor | None) -> Tensor:
    if mask is None:
        return values
    return torch.where(mask if values.ndim == 1 else mask[:, None], values, 0)


def _no_values() -> ConfigError:
    return ConfigError("values were asked of a language model; set model.head=value")


def _no_tokens() -> ConfigError:
    return ConfigError(
        "logprobs were asked of a model whose head gives one value per position; set model.head=lm"
    )
