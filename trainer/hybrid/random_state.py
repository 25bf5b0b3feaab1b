"""State of the random generators, saved and restored around something else that draws from them."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RandomState:
    """State of the process-wide generators: PyTorch's, NumPy's and Python's."""

    torch_cpu: Tensor
    torch_cuda: Tensor | None
    """State of the current device's generator."""
    numpy: Any
    python: Any

    @staticmethod
    def capture() -> RandomState:
        """Read the current state."""
        is_cuda = torch.cuda.is_initialized()  # else there is no state yet
        return RandomState(
            torch.get_rng_state(),
            torch.cuda.get_rng_state() if is_cuda else None,
            np.random.get_state(),
            random.getstate(),
        )

    def restore(self) -> None:
        """Set the generators to this state."""
        torch.set_rng_state(self.torch_cpu)
        if self.torch_cuda is not None:
            torch.cuda.set_rng_state(self.torch_cuda)
        np.random.set_state(self.numpy)
        random.setstate(self.python)
