"""Which experts computed the tokens of a step, as the model's routers chose them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from weight_sync.model_size import expert_routers


class ExpertRecorder:
    """Hears the routers of one model, in the order of its layers."""

    def __init__(self, model: nn.Module) -> None:
        routers = expert_routers(model)
        for router in routers:
            router.register_forward_hook(self._hear)
        self.is_used = bool(routers)
        """True if the model has such routers."""
        self._chosen: list[Tensor] = []

    def take(self, places: list[int] | None) -> NDArray[np.int16] | None:
        """Return the experts of the last step, [T, L, K]; None of a dense model.

        Args:
            places: where each token was in the forward; None where they were in their order.
        """
        if not self._chosen:
            return None
        chosen, self._chosen = self._chosen, []
        experts = torch.stack(chosen, dim=1).to(torch.int16).cpu().numpy()
        return experts if places is None else experts[places]

    def _hear(self, router: Any, inputs: Any, output: tuple[Tensor, Tensor, Tensor]) -> None:
        self._chosen.append(output[2])
