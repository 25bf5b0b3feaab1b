"""Measure scaled-dot-product attention for lengths that are new to it, and once more.

    python benchmarks/gpu_attention.py
    TORCH_CUDNN_SDPA_DEPRIORITIZED=1 python benchmarks/gpu_attention.py

Some kernels plan for every new shape. Lengths from `--first` on run one after the other, forward and
backward, then all once more; the values are the medians of the first and of the second time, in ms.
"""

from __future__ import annotations

import argparse
import time

import torch
from measure import report
from torch.nn.functional import scaled_dot_product_attention


def main() -> None:
    """Measure and print both values."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--first", type=int, default=300)
    parser.add_argument("--shapes", type=int, default=21)
    parser.add_argument("--heads", type=int, default=16)
    options = parser.parse_args()
    lengths = range(options.first, options.first + options.shapes)
    run(options, 64)  # libraries are loaded
    new = [run(options, length) for length in lengths]
    seen = [run(options, length) for length in lengths]
    for name, values in (("attention_new_length", new), ("attention_seen_length", seen)):
        report(name, "ms", values, device=options.device, heads=options.heads)


def run(options: argparse.Namespace, length: int) -> float:
    """Milliseconds of one forward and backward pass."""
    shape = (1, options.heads, length, 128)
    query, key, value = (
        torch.randn(shape, device=options.device, dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    )
    wait(options.device)
    before = time.perf_counter()
    scaled_dot_product_attention(query, key, value, is_causal=True).sum().backward()
    wait(options.device)
    return 1e3 * (time.perf_counter() - before)


def wait(device: str) -> None:
    """Wait for what was launched."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
