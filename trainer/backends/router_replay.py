"""Router replay: tokens go to the experts that computed them when they were sampled.

A router that sees slightly other numbers (another kernel, another version) chooses other experts for a
few tokens, and their logprobs are far off. With the choice replayed, only the numbers differ. Gradients
reach the router through its weights for the chosen experts.

Source: rollout routing replay, arXiv:2510.11370.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from headway.contracts.errors import ConfigError
from weight_sync.model_size import expert_routers


class RouterReplay:
    """The routers of one model, in the order of its layers."""

    def __init__(self, model: nn.Module) -> None:
        routers = expert_routers(model)
        self._num_layers = len(routers)
        self.experts: Tensor | None = None
        """Experts of the current pass; kept, since the backward pass may compute activations again."""
        for layer, router in enumerate(routers):
            router.register_forward_hook(_Hook(self, layer))

    def begin(self, experts: Tensor | None) -> None:
        """Begin a pass.

        Args:
            experts: [T, L, K] int64 of its tokens, -1 where none are known; None lets the routers choose.

        Raises:
            ConfigError: they are of other layers.
        """
        if experts is not None and experts.shape[1] != self._num_layers:
            raise ConfigError(
                f"experts of {experts.shape[1]} layers were recorded, and {self._num_layers} layers of "
                "this model can replay them; serve the model that learns, or set "
                "algorithm.routed_experts=ignore"
            )
        self.experts = experts


class _Hook:
    def __init__(self, replay: RouterReplay, layer: int) -> None:
        self._replay = replay
        self._layer = layer
        self._is_known = False

    def __call__(
        self, router: Any, inputs: Any, output: Any
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        experts = self._replay.experts
        if experts is None:
            return None
        logits, scores, chosen = self._checked(router, output)
        replayed = experts[:, self._layer]
        if replayed.shape != chosen.shape:
            raise ConfigError(
                f"experts {tuple(replayed.shape)} were recorded for a router that chooses "
                f"{tuple(chosen.shape)}: the servers run another model"
            )
        indices = torch.where(replayed < 0, chosen, replayed)
        return logits, _scores(router, logits, indices).to(scores.dtype), indices

    def _checked(self, router: Any, output: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Check once that scores are computed as here."""
        if not self._is_known:
            self._is_known = _is_softmax(router, output)
            if not self._is_known:
                raise ConfigError(
                    f"the experts of a {type(router).__name__} cannot be replayed; set "
                    "algorithm.routed_experts=ignore"
                )
        logits, scores, chosen = output
        return logits, scores, chosen


@torch.no_grad()  # in one of two passes over a block: what autograd keeps must be the same
def _is_softmax(router: Any, output: Any) -> bool:
    """True if a router weighs its experts as `_scores` does."""
    if not isinstance(output, tuple) or len(output) != 3:
        return False
    logits, scores, chosen = output
    return torch.allclose(_scores(router, logits, chosen).to(scores.dtype), scores, atol=1e-3)


def _scores(router: Any, logits: Tensor, experts: Tensor) -> Tensor:
    """[T, K] weights of the experts in a token's sum."""
    chosen = logits.float().softmax(dim=-1).gather(1, experts)
    if getattr(router, "norm_topk_prob", True):
        return chosen / chosen.sum(dim=-1, keepdim=True)
    return chosen
