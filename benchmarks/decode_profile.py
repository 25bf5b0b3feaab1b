"""Profile a decode step, and compare it with this core's limits.

    python benchmarks/decode_profile.py --in-flight 32 --dtype bfloat16

The model and the lengths of `generation.py`, in one process without HTTP, with the number of running
sequences held constant. Shares are of the engine thread's time. The linear layers' rate is compared
with the best that the same kernel reaches on one large product, and the bytes that a step must read
(weights once, keys and values of every running sequence) with the rate of a plain sum over memory.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from generation import draw_load, make_model
from measure import report

from headway.contracts.config.model import ModelConfig
from headway.contracts.config.sampling import SamplingConfig
from headway.contracts.config.server import EmbeddedTorchConfig
from headway.contracts.types import LLMRequest
from inference_server.backends.embedded.backend import EmbeddedTorchBackend
from inference_server.backends.embedded.packed_linear import ROWS, PackedWeight, product_dtype
from inference_server.backends.embedded.slab_attention import SlabStep
from inference_server.backends.embedded.slab_decode import SlabDecodeStep

WARM_UP_S = 3.0


class Ledger:
    """Seconds by part."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.flops = 0.0
        self.is_open = False

    def timed(self, name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        """`work`, with its time on the account of `name`."""

        def run(*args: Any, **kwargs: Any) -> Any:
            before = time.perf_counter()
            result = work(*args, **kwargs)
            if self.is_open:
                self.seconds[name] += time.perf_counter() - before
            return result

        return run


def instrument(backend: EmbeddedTorchBackend, ledger: Ledger) -> None:
    """Put clocks around the parts of a step."""
    PackedWeight.product = product_clock(PackedWeight.product, ledger)  # type: ignore[method-assign]
    for step in (SlabStep, SlabDecodeStep):
        step.attend = ledger.timed("attention", step.attend)  # type: ignore[method-assign]
    decoding = backend._decode_loop
    decoding.decoder.sample = ledger.timed("sampling", decoding.decoder.sample)
    decoding.decoder.land = ledger.timed("reading", decoding.decoder.land)
    decoding.scheduler.schedule = ledger.timed("scheduling", decoding.scheduler.schedule)
    decoding.step = ledger.timed("step", decoding.step)


def product_clock(product: Callable[..., Any], ledger: Ledger) -> Callable[..., Any]:
    timed = ledger.timed("linear", product)

    def run(packed: PackedWeight, x: torch.Tensor) -> Any:
        output = timed(packed, x)
        if ledger.is_open:
            ledger.flops += 2.0 * output.numel() * x.shape[-1]
        return output

    return run


async def decode(
    backend: EmbeddedTorchBackend, in_flight: int, ledger: Ledger, seconds: float
) -> tuple[int, float]:
    """Tokens sampled, and tokens held in the cache on average."""
    lengths = draw_load(0, 4096, in_flight).lengths
    rng = random.Random(0)

    async def loop(index: int) -> None:
        for turn in range(10**6):
            await backend.generate(
                LLMRequest(
                    rid=f"r{index}-{turn}",
                    input_ids=tuple(rng.randrange(3, 32_000) for _ in range(64)),
                    gconfig=SamplingConfig(max_new_tokens=rng.choice(lengths), ignore_eos=True),
                )
            )

    await backend.start()
    running = [asyncio.create_task(loop(index)) for index in range(in_flight)]
    await asyncio.sleep(WARM_UP_S)
    before = backend.load().generated_tokens
    ledger.is_open = True
    held = []
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        held.append(backend.load().kv_tokens)
        await asyncio.sleep(0.25)
    ledger.is_open = False
    tokens = backend.load().generated_tokens - before
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    await backend.aclose()
    return tokens, sum(held) / len(held)


def best_rate(work: Callable[[], Any], amount: float) -> float:
    """Amount per second of the fastest of ten runs."""
    times = []
    for _ in range(10):
        before = time.perf_counter()
        work()
        times.append(time.perf_counter() - before)
    return amount / min(times)


def product_limit(dtype: torch.dtype) -> float:
    """FLOP/s of a large packed product."""
    rows, size = 512, 4096
    x, weight = torch.randn(rows, size).to(dtype), torch.randn(size, size).to(dtype)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, ROWS)
    return best_rate(
        lambda: torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], ""),
        2.0 * rows * size * size,
    )


def memory_limit(device: torch.device) -> float:
    """Bytes/s of reading memory."""
    memory = torch.ones(1 << (27 if device.type == "cpu" else 30), device=device)
    return best_rate(lambda: memory.sum().item(), memory.nbytes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--in-flight", type=int, default=32)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=20.0)
    options = parser.parse_args()
    torch.set_num_threads(1)  # helpers of this thread would put those of the engine's to sleep
    ledger = Ledger()
    with tempfile.TemporaryDirectory(prefix="headway-") as folder:
        make_model(Path(folder))
        backend = EmbeddedTorchBackend(
            EmbeddedTorchConfig(max_sequences=options.in_flight, num_threads=options.threads),
            ModelConfig(path=folder, dtype=options.dtype),
            0,
        )
    weight_bytes = sum(p.nbytes for p in backend.model.module.parameters())
    token_bytes = backend.model.kv_shape.token_bytes
    instrument(backend, ledger)
    tokens, held = asyncio.run(decode(backend, options.in_flight, ledger, options.seconds))
    torch.set_num_threads(options.threads)
    peak_bytes = memory_limit(backend.device)
    total = ledger.seconds.pop("step")
    products = {}
    if ledger.flops:
        peak_flops = product_limit(product_dtype(getattr(torch, options.dtype)))
        products = {
            "linear_gflops": round(ledger.flops / ledger.seconds["linear"] / 1e9, 1),
            "best_gflops": round(peak_flops / 1e9, 1),
            "flop_limit_share": round(ledger.flops / peak_flops / total, 3),
        }
    shares = {name: round(seconds / total, 3) for name, seconds in ledger.seconds.items()}
    steps = tokens / options.in_flight
    report(
        "decode_profile",
        "tokens / s of the engine thread",
        [tokens / total],
        dtype=options.dtype,
        in_flight=options.in_flight,
        shares={**shares, "rest": round(1 - sum(shares.values()), 3)},
        device=backend.device.type,
        **products,
        read_gbytes_per_s=round(steps * (weight_bytes + held * token_bytes) / total / 1e9, 2),
        best_gbytes_per_s=round(peak_bytes / 1e9, 2),
    )


if __name__ == "__main__":
    main()
