"""Logits -> tokens and their logprobs, each row with its own parameters.

A row draws one uniform number per token from its own generator and takes the token at that point of
the cumulative distribution, so a seeded request samples the same tokens whatever else is in the
batch (exactly so where the batch does not change the logits, as in float32 on one device).

Order: repetition, frequency and presence penalties, logit bias, grammar, temperature; the logprob is
of this distribution. Then top_k, top_p and min_p, each applied to it, limit what may be drawn. For a
row that asks for its sampling mask, the logprob is over the tokens that are left.

No step waits for the device: what it needs was sent when the rows changed, and what it draws stays there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headway.contracts.config.sampling import SamplingConfig
from inference_server.backends.embedded.device import Device
from inference_server.backends.embedded.logit_changes import (
    EarlyStops,
    GrammarMasks,
    LogitBias,
    Penalties,
)
from inference_server.backends.embedded.sampling_rows import Columns, SamplingRow, send_together

BLOCK = 256
"""The cumulative distribution is summed block by block: a plain cumsum over the vocabulary is serial."""
LIKELY = 1024
"""Nuclei are looked for among this many most likely tokens first; a whole sort costs far more."""
COLDEST = 1e-5
"""Lower temperatures would overflow, and differ in nothing else."""


@dataclass(frozen=True, slots=True)
class StepMasks:
    """Sampling masks of one step."""

    rows: list[int]
    """Rows that have one."""
    counts: Tensor
    """[m] int32 tokens left."""
    tokens: Tensor
    """Their ids: [sum of counts] row by row, or [m, `LIKELY`], where the first ones of each row count."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """Tokens drawn in one step."""

    tokens: Tensor
    """[n] int64."""
    logprobs: Tensor
    """[n] float32, over the tokens left where a row reports its mask; not finite where the logits are
    not."""
    scaled: Tensor
    """[n, V] float32 logits of the distribution before the cut, up to a constant per row."""
    is_enough: Tensor | None
    """[m] bool: false where a nucleus or mask holds more than the `LIKELY` most likely tokens, among
    which it was looked for: draw again with `is_whole`. None if there is nothing to look at."""
    masks: StepMasks | None = None
    """None if no row reports one."""


class SamplingPlan:
    """The parameters of the rows of a batch as tensors; rebuilt when the rows change."""

    def __init__(self, rows: Sequence[SamplingRow], vocab_size: int, device: Device) -> None:
        self.num_rows = len(rows)
        configs = [row.config for row in rows]
        temperatures = [max(c.temperature, COLDEST) if c.temperature else 1.0 for c in configs]
        self._is_scaled = any(t != 1.0 for t in temperatures)
        self._has_greedy = any(config.temperature == 0.0 for config in configs)
        self._scale = Columns(
            torch.tensor([1.0 / t for t in temperatures])[:, None],
            torch.tensor([config.temperature == 0.0 for config in configs]),
        )
        self._cut = _Cut.of(configs, device.is_host)
        self._masks = _Masks.of(rows, device.is_host)
        self._bias = LogitBias.of(configs)
        self._early = EarlyStops.of(rows, vocab_size)
        self._penalties = Penalties.of(rows, vocab_size)
        self._grammars = GrammarMasks.of(rows, device)
        parts = (self._scale, self._cut, self._masks, self._bias, self._early, self._penalties)
        send_together(device, *parts, self._grammars)
        self._last: Tensor | None = None

    def sample(self, logits: Tensor, uniforms: Tensor, is_whole: bool = False) -> Sampled:
        """Draw one token per row.

        Args:
            logits: [n, V].
            uniforms: [n] in [0, 1).
            is_whole: draw the last tokens again, with nuclei looked for in the whole vocabulary.

        Raises:
            DataError: the grammar of a row cannot be followed.
        """
        if self._last is not None and not is_whole:
            self._remember(self._last)
        scale, greedy = self._scale.columns
        scaled = logits.float()
        if self._penalties is not None:
            scaled = self._penalties.apply(scaled)
        if self._bias is not None:
            scaled = self._bias.apply(scaled)
        if self._grammars is not None:
            scaled = self._grammars.apply(scaled, is_same=is_whole)
        if self._is_scaled:
            scaled = scaled * scale
        probabilities = torch.softmax(scaled, dim=-1)
        # log Z: the largest probability is exp(largest logit) / Z.
        log_total = scaled.amax(dim=-1) - probabilities.amax(dim=-1).log()
        if self._early is not None and self._early.is_due:
            probabilities = torch.softmax(self._early.apply(scaled), dim=-1)
        is_enough = None
        if self._cut is not None:
            is_enough = self._cut.apply_(probabilities, is_whole)
        tokens = _inverse_cdf(probabilities, uniforms)
        if self._has_greedy:
            tokens = torch.where(greedy, probabilities.argmax(dim=-1), tokens)
        logprobs = scaled.gather(1, tokens[:, None])[:, 0] - log_total
        self._last = tokens
        if self._masks is None:
            return Sampled(tokens, logprobs, scaled, is_enough)
        return self._masks.report(
            Sampled(tokens, logprobs, scaled, is_enough), probabilities, is_whole
        )

    def _remember(self, tokens: Tensor) -> None:
        if self._penalties is not None:
            self._penalties.count(tokens)
        if self._early is not None:
            self._early.count()


def top_logprobs(scaled: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The most likely tokens of each row [n, V], most likely first.

    Returns:
        [n, count] token ids, [n, count] their logprobs.
    """
    table = torch.log_softmax(scaled.float(), dim=-1)
    values, tokens = table.topk(min(count, scaled.shape[-1]), dim=-1)
    return tokens, values


class _Cut(Columns):
    """Zero the tokens that top_k, top_p and min_p exclude; the most likely one always stays."""

    def __init__(self, rows: list[int], configs: list[SamplingConfig], is_host: bool) -> None:
        huge = torch.iinfo(torch.int64).max
        ordered = [i for i, c in enumerate(configs) if c.top_k is not None or c.top_p < 1.0]
        nuclei = [configs[index] for index in ordered]
        super().__init__(
            torch.tensor(rows),
            torch.tensor([c.min_p for c in configs])[:, None],
            torch.tensor(ordered, dtype=torch.int64),
            torch.tensor([c.top_k or huge for c in nuclei], dtype=torch.int64)[:, None],
            torch.tensor([c.top_p for c in nuclei], dtype=torch.float32)[:, None],
        )
        self._is_host = is_host
        self._needs_order = bool(ordered)
        self._orders_all = len(ordered) == len(rows)

    @staticmethod
    def of(configs: Sequence[SamplingConfig], is_host: bool) -> _Cut | None:
        rows = [
            row
            for row, c in enumerate(configs)
            if c.top_k is not None or c.top_p < 1.0 or c.min_p > 0.0
        ]
        return _Cut(rows, [configs[row] for row in rows], is_host) if rows else None

    def apply_(self, probabilities: Tensor, is_whole: bool) -> Tensor | None:
        """Truncate the rows that ask for it, in place.

        Returns:
            [m] bool, where it was not looked at: whether the likely tokens were enough.
        """
        rows, min_p, ordered, _, _ = self.columns
        original = probabilities[rows]
        least = min_p * original.amax(dim=-1, keepdim=True)
        chosen = torch.where(original >= least, original, 0.0)
        is_enough = None
        if self._orders_all:
            kept, is_enough = self._nuclei(original, is_whole)
            chosen = chosen * kept
        elif self._needs_order:
            kept, is_enough = self._nuclei(original[ordered], is_whole)
            chosen = chosen.index_copy(0, ordered, chosen[ordered] * kept)
        probabilities[rows] = chosen
        return is_enough

    def _nuclei(self, original: Tensor, is_whole: bool) -> tuple[Tensor, Tensor | None]:
        """1 where a token stays, else 0 [m, V]; and whether the likely tokens were enough."""
        _, _, _, top_k, top_p = self.columns
        is_enough = None
        if is_whole:
            ordered, order = original.sort(dim=-1, descending=True)
        else:
            ordered, order = original.topk(min(LIKELY, original.shape[-1]), dim=-1)
            is_enough = (ordered.sum(dim=-1) >= top_p[:, 0]) | (top_k[:, 0] <= ordered.shape[-1])
            if self._is_host:
                if not bool(is_enough.all()):
                    ordered, order = original.sort(dim=-1, descending=True)
                is_enough = None
            elif ordered.shape[-1] == original.shape[-1]:
                is_enough = None
        before = ordered.cumsum(dim=-1) - ordered
        rank = torch.arange(ordered.shape[-1], device=ordered.device)
        keep = (rank < top_k) & (before < top_p)
        keep[:, 0] = True
        kept = torch.zeros_like(original).scatter(1, order, keep.to(original.dtype))
        return kept, is_enough


class _Masks(Columns):
    """Rows that report their masks."""

    def __init__(self, rows: list[int], is_host: bool) -> None:
        super().__init__(torch.tensor(rows))
        self._rows = rows
        self._is_host = is_host

    @staticmethod
    def of(rows: Sequence[SamplingRow], is_host: bool) -> _Masks | None:
        asking = [at for at, row in enumerate(rows) if _has_mask(row)]
        return _Masks(asking, is_host) if asking else None

    def report(self, sampled: Sampled, probabilities: Tensor, is_whole: bool) -> Sampled:
        """Add the masks, and replace these rows' logprobs by those over the tokens left.

        Args:
            probabilities: [n, V] that the tokens were drawn from, up to a factor; 0 where cut.
        """
        (rows,) = self.columns
        own = probabilities if len(self._rows) == len(probabilities) else probabilities[rows]
        is_left = own > 0.0
        counts = is_left.sum(dim=-1, dtype=torch.int32)
        drawn = own.gather(1, sampled.tokens[rows, None])[:, 0]
        logprobs = drawn.log() - own.sum(dim=-1).log()
        is_enough = sampled.is_enough
        if self._is_host or is_whole:
            tokens = is_left.nonzero()[:, 1]
        else:
            tokens = own.topk(min(LIKELY, own.shape[-1]), dim=-1).indices
            if own.shape[-1] > LIKELY:
                fits = counts <= LIKELY
                is_enough = fits if is_enough is None else torch.cat([is_enough, fits])
        return Sampled(
            sampled.tokens,
            sampled.logprobs.index_copy(0, rows, logprobs),
            sampled.scaled,
            is_enough,
            StepMasks(self._rows, counts, tokens.to(torch.int32)),
        )


def _has_mask(row: SamplingRow) -> bool:
    return row.reports_mask and row.config.cuts_distribution


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
    # Below the end: rounding must not select an entry behind the last positive one.
    below = points[:, None].minimum(total.nextafter(total.new_zeros(())))
    index = torch.searchsorted(cumulative, below, right=True).clamp(max=weights.shape[-1] - 1)
    rest = below - (cumulative.gather(1, index) - weights.gather(1, index))
    return index[:, 0], rest[:, 0].clamp(min=0.0)
