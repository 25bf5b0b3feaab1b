"""Logits -> tokens and their logprobs, each row with its own parameters.

A row draws one uniform number per token from its own generator and takes the token at that point of
the cumulative distribution, so a seeded request samples the same tokens whatever else is in the
batch (exactly so where the batch does not change the logits, as in float32 on one device).

Order: repetition, frequency and presence penalties, logit bias, temperature; the logprob is of this
distribution. Then top_k, top_p and min_p, each judged on it, cut what may be drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headway.contracts.config.sampling import SamplingConfig

BLOCK = 256
"""The cumulative distribution is summed block by block: a plain cumsum over the vocabulary is serial."""
LIKELY = 1024
"""Nuclei are looked for among this many most likely tokens first; a whole sort costs far more."""
COLDEST = 1e-5
"""Lower temperatures would overflow, and differ in nothing else."""


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """One row of a batch."""

    config: SamplingConfig
    prompt: Sequence[int] = ()
    output: Sequence[int] = ()
    """Tokens sampled so far, for penalties."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """What one step drew."""

    tokens: Tensor
    """[n] int64."""
    logprobs: Tensor
    """[n] float32; not finite where the logits are not."""
    scaled: Tensor
    """[n, V] float32 logits of the distribution that `logprobs` are of, up to a constant per row."""


class SamplingPlan:
    """The parameters of the rows of a batch as tensors; rebuilt when the rows change."""

    def __init__(self, rows: Sequence[SamplingRow], vocab_size: int, device: torch.device) -> None:
        self.num_rows = len(rows)
        configs = [row.config for row in rows]
        self._device = device
        temperatures = [max(c.temperature, COLDEST) if c.temperature else 1.0 for c in configs]
        self._scale = torch.tensor([1.0 / t for t in temperatures], device=device)[:, None]
        self._is_scaled = any(t != 1.0 for t in temperatures)
        greedy = [config.temperature == 0.0 for config in configs]
        self._greedy = torch.tensor(greedy, device=device) if any(greedy) else None
        self._cut = _Cut.of(configs, device)
        self._bias = _Bias.of(configs, device)
        self._penalties = _Penalties.of(rows, vocab_size, device)

    def sample(
        self, logits: Tensor, uniforms: Tensor, forbidden: Sequence[tuple[int, Sequence[int]]] = ()
    ) -> Sampled:
        """Draw one token per row.

        Args:
            logits: [n, V].
            uniforms: [n] in [0, 1).
            forbidden: (row, token ids) that must not be sampled now.
        """
        scaled = logits.float()
        if self._penalties is not None:
            scaled = self._penalties.apply(scaled)
        if self._bias is not None:
            scaled = self._bias.apply(scaled)
        if self._is_scaled:
            scaled = scaled * self._scale
        probabilities = torch.softmax(scaled, dim=-1)
        # log Z: the largest probability is exp(largest logit) / Z.
        log_total = scaled.amax(dim=-1) - probabilities.amax(dim=-1).log()
        if forbidden:
            allowed = scaled.clone()
            for row, token_ids in forbidden:
                allowed[row, list(token_ids)] = float("-inf")
            probabilities = torch.softmax(allowed, dim=-1)
        if self._cut is not None:
            self._cut.apply_(probabilities)
        tokens = _inverse_cdf(probabilities, uniforms)
        if self._greedy is not None:
            tokens = torch.where(self._greedy, probabilities.argmax(dim=-1), tokens)
        if self._penalties is not None:
            self._penalties.count(tokens)
        logprobs = scaled.gather(1, tokens[:, None])[:, 0] - log_total
        return Sampled(tokens, logprobs, scaled)


def top_logprobs(scaled: Tensor, count: int) -> list[tuple[int, float]]:
    """The most likely tokens of one row [V] with their logprobs."""
    values, tokens = torch.log_softmax(scaled.float(), dim=-1).topk(min(count, scaled.shape[-1]))
    return list(zip(tokens.tolist(), values.tolist(), strict=True))


class _Cut:
    """Zero what top_k, top_p and min_p cut; the most likely token always stays."""

    def __init__(
        self, rows: list[int], configs: list[SamplingConfig], device: torch.device
    ) -> None:
        self._rows = torch.tensor(rows, device=device)
        huge = torch.iinfo(torch.int64).max
        self._top_k = torch.tensor([c.top_k or huge for c in configs], device=device)[:, None]
        self._top_p = torch.tensor([c.top_p for c in configs], device=device)[:, None]
        self._min_p = torch.tensor([c.min_p for c in configs], device=device)[:, None]
        self._needs_order = any(c.top_k is not None or c.top_p < 1.0 for c in configs)

    @staticmethod
    def of(configs: Sequence[SamplingConfig], device: torch.device) -> _Cut | None:
        rows = [
            row
            for row, c in enumerate(configs)
            if c.top_k is not None or c.top_p < 1.0 or c.min_p > 0.0
        ]
        return _Cut(rows, [configs[row] for row in rows], device) if rows else None

    def apply_(self, probabilities: Tensor) -> None:
        """Cut the rows that ask for it, in place."""
        chosen = probabilities[self._rows]
        least = self._min_p * chosen.amax(dim=-1, keepdim=True)
        chosen = torch.where(chosen >= least, chosen, 0.0)
        if self._needs_order:
            original = probabilities[self._rows]
            ordered, order = original.topk(min(LIKELY, original.shape[-1]), dim=-1)
            enough = (ordered.sum(dim=-1) >= self._top_p[:, 0]) | (
                self._top_k[:, 0] <= ordered.shape[-1]
            )
            if not bool(enough.all()):
                ordered, order = original.sort(dim=-1, descending=True)
            before = ordered.cumsum(dim=-1) - ordered
            rank = torch.arange(ordered.shape[-1], device=ordered.device)
            keep = (rank < self._top_k) & (before < self._top_p)
            keep[:, 0] = True
            kept = torch.zeros_like(chosen).scatter(1, order, keep.to(chosen.dtype))
            chosen = chosen * kept
        probabilities[self._rows] = chosen


class _Bias:
    """Added to single logits."""

    def __init__(
        self, rows: list[int], tokens: list[int], values: list[float], device: torch.device
    ) -> None:
        self._rows = torch.tensor(rows, device=device)
        self._tokens = torch.tensor(tokens, device=device)
        self._values = torch.tensor(values, device=device)

    @staticmethod
    def of(configs: Sequence[SamplingConfig], device: torch.device) -> _Bias | None:
        entries = [
            (row, token, value)
            for row, config in enumerate(configs)
            for token, value in config.logit_bias.items()
        ]
        if not entries:
            return None
        rows, tokens, values = zip(*entries, strict=True)
        return _Bias(list(rows), list(tokens), list(values), device)

    def apply(self, logits: Tensor) -> Tensor:
        """[n, V] with the bias."""
        return logits.index_put((self._rows, self._tokens), self._values, accumulate=True)


class _Penalties:
    """Presence, frequency and repetition penalties, with the counts they need."""

    def __init__(
        self, rows: list[int], chosen: list[SamplingRow], vocab_size: int, device: torch.device
    ) -> None:
        self._rows = torch.tensor(rows, device=device)
        self._counts = torch.stack([_histogram(row.output, vocab_size) for row in chosen]).to(
            device
        )
        prompts = torch.stack([_histogram(row.prompt, vocab_size) for row in chosen])
        self._in_prompt = (prompts > 0).to(device)

        def column(values: list[float]) -> Tensor:
            return torch.tensor(values, device=device)[:, None]

        self._presence = column([row.config.presence_penalty for row in chosen])
        self._frequency = column([row.config.frequency_penalty for row in chosen])
        self._repetition = column([row.config.repetition_penalty for row in chosen])

    @staticmethod
    def of(rows: Sequence[SamplingRow], vocab_size: int, device: torch.device) -> _Penalties | None:
        indices = [
            index
            for index, row in enumerate(rows)
            if row.config.presence_penalty
            or row.config.frequency_penalty
            or row.config.repetition_penalty != 1.0
        ]
        if not indices:
            return None
        return _Penalties(indices, [rows[i] for i in indices], vocab_size, device)

    def apply(self, logits: Tensor) -> Tensor:
        """[n, V] with the penalties."""
        chosen = logits[self._rows]
        seen = (self._counts > 0) | self._in_prompt
        repeated = torch.where(chosen > 0, chosen / self._repetition, chosen * self._repetition)
        chosen = torch.where(seen, repeated, chosen)
        chosen = chosen - self._frequency * self._counts
        chosen = chosen - self._presence * (self._counts > 0)
        return logits.index_copy(0, self._rows, chosen)

    def count(self, tokens: Tensor) -> None:
        """Remember what was sampled."""
        chosen = tokens[self._rows][:, None]
        self._counts.scatter_add_(1, chosen, torch.ones_like(chosen, dtype=self._counts.dtype))


def _histogram(tokens: Sequence[int], vocab_size: int) -> Tensor:
    return torch.bincount(torch.tensor(tokens, dtype=torch.long), minlength=vocab_size).float()


def _inverse_cdf(probabilities: Tensor, uniforms: Tensor) -> Tensor:
    """[n] the token at each point of its row's cumulative distribution."""
    n, vocab_size = probabilities.shape
    whole = vocab_size // BLOCK * BLOCK
    sums = probabilities[:, :whole].reshape(n, -1, BLOCK).sum(dim=-1)
    if whole < vocab_size:
        sums = torch.cat([sums, probabilities[:, whole:].sum(dim=-1, keepdim=True)], dim=1)
    block, rest = _search(sums, uniforms * sums.sum(dim=-1))
    columns = block[:, None] * BLOCK + torch.arange(BLOCK, device=block.device)
    inside = probabilities.gather(1, columns.clamp(max=vocab_size - 1))
    inside = inside.masked_fill(columns >= vocab_size, 0.0)
    token, _ = _search(inside, rest)
    return (block * BLOCK + token).clamp(max=vocab_size - 1)


def _search(weights: Tensor, points: Tensor) -> tuple[Tensor, Tensor]:
    """[n] the entry that each point falls into, and how far into it; never an entry of weight 0."""
    cumulative = weights.cumsum(dim=-1)
    total = cumulative[:, -1:]
    # Below the end: rounding must not select what lies behind the last positive entry.
    below = points[:, None].minimum(total.nextafter(total.new_zeros(())))
    index = torch.searchsorted(cumulative, below, right=True).clamp(max=weights.shape[-1] - 1)
    rest = below - (cumulative.gather(1, index) - weights.gather(1, index))
    return index[:, 0], rest[:, 0].clamp(min=0.0)
