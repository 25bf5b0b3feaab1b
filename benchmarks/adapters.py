"""What does it cost to serve eight adapters at once?

    python benchmarks/adapters.py
    python benchmarks/adapters.py --size 40M --dtype bfloat16 --in-flight 32 --requests 64

One embedded server, in this process, with eight random adapters of all linear layers over a random Llama.
Three loads take turns in every round, with the same prompts and lengths: each request with an adapter
drawn at random, all with the same adapter, and all with the base alone. `value` is the median of tokens /
second of the mixture; `ratio` compares it with the other two, round by round, and `cpu_ratio` by CPU
time, which a busy machine does not change.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from generation import VOCAB_SIZE, draw_load
from measure import report
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from headway.contracts.config.model import ModelConfig
from headway.contracts.config.sampling import SamplingConfig
from headway.contracts.config.server import EmbeddedTorchConfig
from headway.contracts.types import LLMRequest
from inference_server.backends.embedded.backend import EmbeddedTorchBackend
from weight_sync.adapter import CONFIG_NAME, LORA_A, LORA_B, PREFIX, adapter_config
from weight_sync.adapter_dir import WEIGHTS_NAME
from weight_sync.manifest import Adapter

NUM_ADAPTERS = 8
SHAPES = {
    "11M": {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4},
    "40M": {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8},
}


def make_model(folder: Path, size: str) -> dict[str, torch.Size]:
    """Write a random model; return the weights' shapes of the linear layers of its blocks, by module."""
    torch.manual_seed(0)
    heads = SHAPES[size]["hidden_size"] // 64
    config = LlamaConfig(
        **SHAPES[size],
        vocab_size=VOCAB_SIZE,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    return {
        name: module.weight.shape
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and ".layers." in name
    }


def save_adapter(folder: Path, shapes: dict[str, torch.Size], rank: int, seed: int) -> None:
    """Write a random adapter.

    Args:
        shapes: of the weights that it changes, by module.
    """
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for module, (height, width) in shapes.items():
        halves = {LORA_A: (rank, width), LORA_B: (height, rank)}
        for half, shape in halves.items():
            tensors[PREFIX + module + half] = torch.randn(shape, generator=generator) * 0.02
    folder.mkdir()
    save_file(tensors, folder / WEIGHTS_NAME)
    config = adapter_config(Adapter(rank=rank, alpha=2.0 * rank), shapes)
    (folder / CONFIG_NAME).write_text(config)


@dataclass(frozen=True)
class Rate:
    """Tokens per second."""

    wall: float
    cpu: float


async def generate(
    backend: EmbeddedTorchBackend,
    adapters: Sequence[str | None],
    options: argparse.Namespace,
    seed: int,
) -> Rate:
    """Generate for one load, a request with each of `adapters`."""
    load = draw_load(seed, len(adapters), options.in_flight)
    places = asyncio.Semaphore(options.in_flight)

    async def one(index: int) -> None:
        length = min(load.lengths[index], options.max_tokens)
        gconfig = SamplingConfig(max_new_tokens=length, ignore_eos=True)
        request = LLMRequest(
            rid=f"r{index}",
            input_ids=tuple(load.prompts[index]),
            gconfig=gconfig,
            adapter=adapters[index],
        )
        async with places:
            await backend.generate(request)

    await backend.flush()
    before = backend.load().generated_tokens
    started, cpu_started = time.monotonic(), time.process_time()
    await asyncio.gather(*(one(index) for index in range(len(adapters))))
    seconds, cpu_seconds = time.monotonic() - started, time.process_time() - cpu_started
    tokens = backend.load().generated_tokens - before
    return Rate(tokens / seconds, tokens / cpu_seconds)


async def measure(
    backend: EmbeddedTorchBackend, folders: Sequence[Path], options: argparse.Namespace
) -> dict[str, list[Rate]]:
    """Return the rates of each kind of load, round by round."""
    await backend.start()
    rng = random.Random(0)
    names = [folder.name for folder in folders]
    loads: dict[str, list[str | None]] = {
        "base": [None] * options.requests,
        "one": [names[0]] * options.requests,
        "mixed": [rng.choice(names) for _ in range(options.requests)],
    }
    for folder in folders:
        await backend.load_adapter(folder.name, folder, 1)
    await generate(backend, loads["mixed"], options, 0)
    rates: dict[str, list[Rate]] = {name: [] for name in loads}
    for round_ in range(options.rounds):
        for name in list(loads) if round_ % 2 == 0 else list(loads)[::-1]:
            rates[name].append(await generate(backend, loads[name], options, round_))
    await backend.aclose()
    return rates


def ratio(ours: Sequence[float], others: Sequence[float]) -> float:
    return round(statistics.median([a / b for a, b in zip(ours, others, strict=True)]), 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=sorted(SHAPES), default="11M")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--in-flight", type=int, default=16)
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", default="float32", choices=["bfloat16", "float32"])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="headway-") as folder:
        model = Path(folder) / "model"
        shapes = make_model(model, options.size)
        folders = [Path(folder) / f"a{seed}" for seed in range(NUM_ADAPTERS)]
        for seed, adapter in enumerate(folders):
            save_adapter(adapter, shapes, options.rank, seed)
        backend = EmbeddedTorchBackend(
            EmbeddedTorchConfig(max_sequences=options.in_flight, num_threads=1),
            ModelConfig(path=str(model), dtype=options.dtype),
            0,
        )
        rates = asyncio.run(measure(backend, folders, options))
    wall = {name: [rate.wall for rate in found] for name, found in rates.items()}
    cpu = {name: [rate.cpu for rate in found] for name, found in rates.items()}
    report(
        "adapters",
        "tokens / s with eight adapters at random",
        wall["mixed"],
        size=options.size,
        dtype=options.dtype,
        rank=options.rank,
        in_flight=options.in_flight,
        requests=options.requests,
        others={name: round(statistics.median(wall[name]), 1) for name in ("one", "base")},
        ratio={name: ratio(wall["mixed"], wall[name]) for name in ("one", "base")},
        cpu_ratio={name: ratio(cpu["mixed"], cpu[name]) for name in ("one", "base")},
    )


if __name__ == "__main__":
    main()
