"""What training would draw next, set aside while something else draws."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RandomState:
    """Of the generators that a process has without asking: PyTorch's, NumPy's and Python's."""

    torch_cpu: Tensor
    torch_cuda: Tensor | None
    """Of the current device."""
    numpy: Any
    python: Any

    @staticmethod
    def capture() -> RandomState:
        """As it is now."""
        is_cuda = torch.cuda.is_available()
        return RandomState(
            torch.get_rng_state(),
            torch.cuda.get_rng_state() if is_cuda else None,
            np.random.get_state(),
            random.getstate(),
        )

    def restore(self) -> None:
        """As it was."""
        torch.set_rng_state(self.torch_cpu)
        if self.torch_cuda is not None:
            torch.cuda.set_rng_state(self.torch_cuda)
        np.random.set_state(self.numpy)
        random.setstate(self.python)
