"""Log-probabilities without logits on a GPU: halves are multiplied there as they are."""

from __future__ import annotations

import pytest
import torch

from trainer.algorithms.logprobs import chunked_logprobs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, there is none"),
]
T, V, H = 300, 10_007, 128


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_values_and_gradients_equal_those_of_the_cpu(dtype):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(T, H, generator=generator).to(dtype)
    weight = (torch.randn(V, H, generator=generator) / H**0.5).to(dtype)
    labels = torch.randint(V, (T,), generator=generator)
    results = []
    for device in ("cpu", "cuda"):
        leaves = [x.detach().to(device).requires_grad_() for x in (hidden, weight)]
        values = chunked_logprobs(*leaves, labels.to(device), 0.7, 128, with_entropy=True)
        (values[0].sum() + 0.1 * values[1].sum()).backward()
        results.append([x.detach().cpu().float() for x in (*values, *(y.grad for y in leaves))])
    for name, cpu, gpu in zip(("logprobs", "entropies", "hidden", "weight"), *results, strict=True):
        error = (gpu - cpu).norm() / cpu.norm()
        # A half product rounds the slopes of the backward pass, once, to 8 bits.
        assert error < (4e-3 if dtype == torch.bfloat16 and name in ("hidden", "weight") else 1e-4)


def test_a_gpu_never_holds_the_logits():
    hidden, weight = (
        torch.randn(size, 256, device="cuda", dtype=torch.bfloat16).requires_grad_()
        for size in (4096, 150_000)
    )
    labels = torch.randint(150_000, (4096,), device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    chunked_logprobs(hidden, weight, labels)[0].sum().backward()
    peak = torch.cuda.max_memory_allocated() - before
    assert peak < 4096 * 150_000 * 4 / 3  # three tiles of 128 MiB, and the gradient of the weight
