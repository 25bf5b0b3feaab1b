"""The same steps in float64: what still differs there, however a batch is cut, is no rounding.

Where float32 is asked for, two ways to compute one step differ by the rounding of their forwards (other
shapes, other kernels) and, from the second step on, by that of the parameters, which a model of large
random weights makes larger. In float64 both are a billion times smaller, and an error of the algebra is
as large as ever.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm


@contextmanager
def float64_norms(is_wanted: bool = True) -> Iterator[None]:
    """Within it norms stay in the type of what they are given; transformers takes them in float32."""
    before = {kind: kind.forward for kind in (LlamaRMSNorm, Qwen3RMSNorm)}
    try:
        for kind in before if is_wanted else ():
            kind.forward = _norm
        yield
    finally:
        for kind, forward in before.items():
            kind.forward = forward


def _norm(self: LlamaRMSNorm, hidden: Tensor) -> Tensor:
    spread = hidden.square().mean(-1, keepdim=True) + self.variance_epsilon
    return self.weight * (hidden * torch.rsqrt(spread))
