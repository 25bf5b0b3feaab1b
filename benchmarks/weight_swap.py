"""Measure how long generation pauses when a version is swapped in.

    python benchmarks/weight_swap.py --size 40M --swaps 200
    python benchmarks/weight_swap.py --size 500M --swaps 60

A random Qwen3-style model decodes sequences without end while versions are staged on a thread and
swapped in (policy `keep`; published in float32, so that staging converts and packs them). The pause
is the time between the last token of the old version and the first token of the new one; it holds
one decode step by nature. Beside it, from the same run: the time between two tokens without a swap,
and an in-place copy of as many bytes as the weights have. `limit` is one decode step + that copy, of
the median and of the 99th percentile of steps without a swap.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from measure import report
from transformers import Qwen3Config, Qwen3ForCausalLM

from headway.contracts.config.model import ModelConfig
from headway.contracts.config.sampling import SamplingConfig
from headway.contracts.config.server import EmbeddedTorchConfig
from headway.contracts.types import LLMDelta, LLMRequest
from inference_server.backends.embedded.backend import EmbeddedTorchBackend
from weight_sync.channel import StagedWeights

SHAPES = {
    "40M": {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8},
    "500M": {"hidden_size": 1280, "intermediate_size": 3840, "num_hidden_layers": 22},
}
CONTEXT = 2048


def make_model(folder: Path, size: str) -> int:
    """Write a random model; its number of parameters."""
    torch.manual_seed(0)
    heads = SHAPES[size]["hidden_size"] // 64
    config = Qwen3Config(
        **SHAPES[size],
        vocab_size=32_000,
        num_attention_heads=heads,
        num_key_value_heads=heads // 4,
        head_dim=64,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
    )
    model = Qwen3ForCausalLM(config)
    model.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


class Clock:
    """Records when each token of one sequence came, and under which version."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.versions: list[int] = []
        self._left = 0
        self._reached = asyncio.Event()

    def __call__(self, delta: LLMDelta) -> None:
        self.times.append(time.monotonic())
        self.versions.append(delta.version)
        if self._left:
            self._left -= 1
            if not self._left:
                self._reached.set()

    async def after(self, count: int) -> None:
        """Wait for `count` more tokens."""
        self._left = count
        self._reached.clear()
        await self._reached.wait()

    def gaps(self, is_wanted: Callable[[int, int], bool]) -> list[float]:
        """Seconds between neighbours whose versions are wanted."""
        return [
            self.times[i + 1] - self.times[i]
            for i in range(len(self.times) - 1)
            if is_wanted(self.versions[i], self.versions[i + 1])
        ]


def random_weights(backend: EmbeddedTorchBackend, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator) * 0.02
        for name, shape in backend.parameters.items()
    }


async def measure(backend: EmbeddedTorchBackend, sequences: int, swaps: int) -> Clock:
    """Swap while `sequences` decode; a sequence that ends is replaced.

    Each version is staged as a server does it, on a thread and into memory of its own, and the one
    that it replaces is freed.
    """
    weights = [random_weights(backend, seed) for seed in (1, 2)]
    await backend.start()
    clock = Clock()
    gconfig = SamplingConfig(max_new_tokens=CONTEXT - 8, ignore_eos=True)

    async def decode(index: int) -> None:
        while True:
            request = LLMRequest(rid=f"r{index}", input_ids=(1, 2, 3, 4), gconfig=gconfig)
            await backend.generate(request, clock if index == 0 else None)

    running = [asyncio.create_task(decode(index)) for index in range(sequences)]
    for version in range(1, swaps + 1):
        staged = StagedWeights(version, "0" * 64, weights[version % 2])
        fitted = await asyncio.to_thread(backend.model.fit, staged)
        await clock.after(4)
        await backend.swap(fitted)
    for task in running:
        task.cancel()
    await backend.aclose()
    return clock


def copy_seconds(num_bytes: int, device: torch.device) -> float:
    """Median time of an in-place copy of as many bytes."""
    source, target = (torch.ones(num_bytes, dtype=torch.uint8, device=device) for _ in range(2))
    times = []
    for _ in range(5):
        before = time.monotonic()
        target.copy_(source)
        target[-1].item()  # waits for the device
        times.append(time.monotonic() - before)
    return statistics.median(times)


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=sorted(SHAPES), default="40M")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--swaps", type=int, default=200)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="headway-") as folder:
        num_parameters = make_model(Path(folder), options.size)
        backend = EmbeddedTorchBackend(
            EmbeddedTorchConfig(max_context=CONTEXT, num_threads=1),
            ModelConfig(path=folder, dtype=options.dtype),
            0,
        )
    clock = asyncio.run(measure(backend, options.sequences, options.swaps))
    step_ms = [1000 * gap for gap in clock.gaps(lambda old, new: old == new)]
    pause_ms = [1000 * gap for gap in clock.gaps(lambda old, new: new == old + 1)]
    num_bytes = num_parameters * getattr(torch, options.dtype).itemsize
    copy_ms = 1000 * copy_seconds(num_bytes, backend.device)
    report(
        "weight_swap",
        "ms between the last token of the old and the first of the new version",
        pause_ms,
        parameters=num_parameters,
        dtype=options.dtype,
        device=backend.device.type,
        sequences=options.sequences,
        pause_p99_ms=round(percentile(pause_ms, 0.99), 2),
        step_p50_ms=round(statistics.median(step_ms), 2),
        step_p99_ms=round(percentile(step_ms, 0.99), 2),
        copy_ms=round(copy_ms, 2),
        limit_ms=round(statistics.median(step_ms) + copy_ms, 2),
        limit_p99_ms=round(percentile(step_ms, 0.99) + copy_ms, 2),
    )


if __name__ == "__main__":
    main()
