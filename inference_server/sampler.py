"""Logits -> tokens and their logprobs, each row with its own parameters.

A row draws one uniform number per token from its own generator and takes the token at that point of
the cumulative distribution, so a seeded request samples the same tokens whatever else is in the
batch (exactly so where the batch does not change the logits, as in float32 on one device).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from headway.contracts.config.sampling import SamplingConfig


class SamplingPlan:
    """The parameters of the rows of a batch as tensors; rebuilt when the rows change."""

    def __init__(self, configs: Sequence[SamplingConfig], device: torch.device) -> None:
        self.num_rows = len(configs)
        temperatures = [config.temperature or 1.0 for config in configs]
        self._scale = torch.tensor([1.0 / t for t in temperatures], device=device)[:, None]
        self._is_scaled = any(t != 1.0 for t in temperatures)
        greedy = [config.temperature == 0.0 for config in configs]
        self._greedy = torch.tensor(greedy, device=device) if any(greedy) else None
        self._cut = any(
            config.top_k is not None or config.top_p < 1.0 or config.min_p > 0.0
            for config in configs
        )
        if self._cut:
            huge = torch.iinfo(torch.int64).max
            self._top_k = torch.tensor([c.top_k or huge for c in configs], device=device)[:, None]
            self._top_p = torch.tensor([c.top_p for c in configs], device=device)[:, None]
            self._min_p = torch.tensor([c.min_p for c in configs], device=device)[:, None]

    def sample(
        self, logits: Tensor, uniforms: Tensor, forbidden: Sequence[tuple[int, Sequence[int]]] = ()
    ) -> tuple[Tensor, Tensor]:
        """Draw one token per row.

        Args:
            logits: [n, V].
            uniforms: [n] in [0, 1).
            forbidden: (row, token ids) that must not be sampled now.
        Returns:
            tokens [n] int64; logprobs [n] float32 of the temperature-scaled distribution before any
            cut. A row whose logits are not finite has a logprob that is not finite.
        """
        scaled = logits.float()
        if self._is_scaled:
            scaled = scaled * self._scale
        logprobs = torch.log_softmax(scaled, dim=-1)
        if forbidden:
            allowed = scaled.clone()
            for row, token_ids in forbidden:
                allowed[row, list(token_ids)] = float("-inf")
            probabilities = torch.softmax(allowed, dim=-1)
        else:
            probabilities = logprobs.exp()
        if self._cut:
            probabilities = self._keep_likely(probabilities)
        tokens = _inverse_cdf(probabilities, uniforms)
        if self._greedy is not None:
            tokens = torch.where(self._greedy, probabilities.argmax(dim=-1), tokens)
        return tokens, logprobs.gather(1, tokens[:, None])[:, 0]

    def _keep_likely(self, probabilities: Tensor) -> Tensor:
        """Zero what top_k, top_p and min_p cut; the most likely token always stays."""
        ordered, order = probabilities.sort(dim=-1, descending=True)
        rank = torch.arange(ordered.shape[-1], device=ordered.device)
        before = ordered.cumsum(dim=-1) - ordered
        keep = (
            (rank < self._top_k)
            & (before < self._top_p)
            & (ordered >= self._min_p * ordered[:, :1])
        )
        keep[:, 0] = True
        return torch.zeros_like(probabilities).scatter(1, order, ordered * keep)


def _inverse_cdf(probabilities: Tensor, uniforms: Tensor) -> Tensor:
    cumulative = probabilities.cumsum(dim=-1)
    # At most the last positive entry: rounding must not select a token of probability 0.
    points = (uniforms[:, None] * cumulative[:, -1:]).clamp(
        max=cumulative[:, -1:].nextafter(cumulative.new_zeros(()))
    )
    return torch.searchsorted(cumulative, points, right=True)[:, 0].clamp(
        max=probabilities.shape[-1] - 1
    )
