"""Routed experts as SGLang and vLLM report them: of all layers of the model, dense ones included."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.contracts.errors import BackendError, DataError
from headway.contracts.routed_experts import RoutedExperts
from headway.contracts.types import LLMRequest
from weight_sync.checkpoint import ExpertCounts, expert_counts, expert_layers

FLAG = "--enable-return-routed-experts"
"""Has either engine report experts."""


@dataclass(frozen=True, slots=True)
class EngineExperts:
    """Experts of the model that an engine serves."""

    counts: ExpertCounts | None = None
    """None of a dense model."""
    layers: tuple[int, ...] = ()
    """Indices of the layers with experts."""
    is_reported: bool = False
    """The engine runs with `FLAG`."""

    @classmethod
    def of_model(cls, model: str, is_reported: bool) -> EngineExperts:
        """Read a model directory.

        Raises:
            ConfigError: it is damaged.
        """
        counts = expert_counts(model)
        return cls() if counts is None else cls(counts, expert_layers(model), is_reported)

    def are_wanted(self, req: LLMRequest) -> bool:
        """True if the engine has to report the experts of a request.

        Raises:
            DataError: it does not report any.
        """
        if not req.routed_experts or self.counts is None:
            return False
        if not self.is_reported:
            raise DataError(
                f"request {req.rid} asks for its routed experts, and the engine reports none; start it "
                f"with {FLAG} (in backend.args), or train with algorithm.routed_experts=ignore"
            )
        return True

    def of_response(self, ids: NDArray[Any] | None, num_tokens: int) -> RoutedExperts | None:
        """Return the experts of a response.

        Args:
            ids: as the engine sent them, token by token and layer by layer; None if it sent none.
            num_tokens: of the prompt and the output; nothing computed the last one.

        Raises:
            BackendError: they are not of whole tokens.
        """
        if ids is None or self.counts is None:
            return None
        _, num_layers, top_k = self.counts
        if ids.size % (num_layers * top_k):
            raise BackendError(
                f"the engine reported {ids.size} routed experts, which are not of whole tokens: each "
                f"has {num_layers} layers x {top_k} experts"
            )
        rows = ids.reshape(-1, num_layers, top_k)[: num_tokens - 1]
        return RoutedExperts(rows[:, list(self.layers)].astype(np.int16))
