"""Measure how much of a version changes in a training step, and how fast a delta of it is.

    python benchmarks/weight_delta.py
    python benchmarks/weight_delta.py --text lines.txt --warmup 300

A Qwen3-style model is trained from random weights on lines of arithmetic (or on the bytes of `--text`).
From there every learning rate starts again, as in reinforcement learning: fp32 master weights, an
Adam without memory, and after every step the weights cast to bfloat16 as a version. Adam's first step
moves every element by the whole learning rate; it is reported (`first_step_percent`) but not counted:
the metrics are of the steps after `--settle`. `update_per_lr` says how large these are: the root mean
square of an element's change, in learning rates.

Every version is encoded tensor by tensor against the one before, decoded on top of what a receiver
holds, and compared bit by bit. For comparison, of the same steps: xor of all bytes as one zstd stream of
the same level. Speeds are GB of full weights per second on one core (the encoder's with checksums);
sizes are without the manifest.
"""

from __future__ import annotations

import argparse
import copy
import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import zstandard
from measure import report
from transformers import Qwen3Config, Qwen3ForCausalLM

from headway.contracts.config.optimizer import OptimizerConfig
from weight_sync.codecs import Encoded, decode, encode_delta
from weight_sync.manifest import TensorEntry, bytes_of, dtype_name

BATCH, LENGTH = 8, 64
Version = dict[str, torch.Tensor]


def make_model(hidden_size: int, layers: int) -> Qwen3ForCausalLM:
    config = Qwen3Config(
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=hidden_size // 64,
        num_key_value_heads=max(1, hidden_size // 256),
        head_dim=64,
        vocab_size=256,
        max_position_embeddings=LENGTH,
        tie_word_embeddings=True,
    )
    return Qwen3ForCausalLM(config)


def arithmetic(num_bytes: int) -> bytes:
    """Lines such as `37 + 5 = 42`."""
    lines, size = list[str](), 0
    while size < num_bytes:
        left, right, sign = random.randrange(1000), random.randrange(1000), random.choice("+-*")
        result = {"+": left + right, "-": left - right, "*": left * right}[sign]
        lines.append(f"{left} {sign} {right} = {result}\n")
        size += len(lines[-1])
    return "".join(lines).encode()


def batches(text: bytes) -> Iterator[torch.Tensor]:
    """[BATCH, LENGTH] bytes from random places, without end."""
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    while True:
        starts = torch.randint(len(tokens) - LENGTH, (BATCH,)).tolist()
        yield torch.stack([tokens[start : start + LENGTH] for start in starts])


def make_optimizer(model: Qwen3ForCausalLM, lr: float) -> torch.optim.AdamW:
    """Build the optimizer that the trainer uses."""
    config = OptimizerConfig()
    return torch.optim.AdamW(
        model.parameters(),
        lr=lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        weight_decay=config.weight_decay,
    )


def train_step(
    model: Qwen3ForCausalLM, optimizer: torch.optim.Optimizer, tokens: torch.Tensor
) -> float:
    """One step of next-token prediction; the loss."""
    optimizer.zero_grad()
    loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return float(loss.detach())


def masters(model: Qwen3ForCausalLM) -> Version:
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def published(model: Qwen3ForCausalLM) -> Version:
    return {name: value.detach().bfloat16() for name, value in model.named_parameters()}


@dataclass(frozen=True, slots=True)
class Measured:
    """One form of the difference between two versions."""

    num_bytes: int
    encode_s: float
    decode_s: float


def measure_delta(new: Version, old: Version, level: int) -> tuple[Measured, Version]:
    """Measure encoding and decoding; also return the version that a receiver with `old` ends up with."""
    started = time.perf_counter()
    encoded = {name: encode_delta(new[name], old[name], level) for name in new}
    encode_s = time.perf_counter() - started
    entries = {name: entry_of(name, new[name], encoded[name]) for name in new}
    started = time.perf_counter()
    found = {name: decode(entries[name], encoded[name].payload, old[name]) for name in new}
    decode_s = time.perf_counter() - started
    assert all(bytes_of(found[name]) == bytes_of(new[name]) for name in new)
    num_bytes = sum(one.payload.nbytes for one in encoded.values())
    return Measured(num_bytes, encode_s, decode_s), found


def entry_of(name: str, tensor: torch.Tensor, encoded: Encoded) -> TensorEntry:
    return TensorEntry(
        name=name,
        shape=tuple(tensor.shape),
        dtype=dtype_name(tensor.dtype),
        checksum=encoded.checksum,
        blob="blob",
        size=encoded.payload.nbytes,
        codec=encoded.codec,
    )


def measure_xor(new: Version, old: Version, level: int) -> Measured:
    """All bytes as one stream."""
    after, before = (
        np.concatenate([np.frombuffer(bytes_of(value), np.uint8) for value in version.values()])
        for version in (new, old)
    )
    started = time.perf_counter()
    payload = zstandard.ZstdCompressor(level=level).compress((after ^ before).data)
    encode_s = time.perf_counter() - started
    started = time.perf_counter()
    change = np.frombuffer(zstandard.ZstdDecompressor().decompress(payload), np.uint8)
    found = before ^ change
    decode_s = time.perf_counter() - started
    assert np.array_equal(found, after)
    return Measured(len(payload), encode_s, decode_s)


def changed_share(new: Version, old: Version) -> float:
    """Return the share of the elements with other bits."""
    changed = sum(
        int((new[name].view(torch.int16) != old[name].view(torch.int16)).sum()) for name in new
    )
    return changed / sum(value.numel() for value in new.values())


def root_mean_square(new: Version, old: Version) -> float:
    squares = sum(float((new[name] - old[name]).square().sum()) for name in new)
    return (squares / sum(value.numel() for value in new.values())) ** 0.5


def measure_rate(
    model: Qwen3ForCausalLM, lr: float, data: Iterator[torch.Tensor], options: argparse.Namespace
) -> None:
    """Train on with this learning rate and print what its deltas are like."""
    optimizer = make_optimizer(model, lr)
    held = published(model)
    full_bytes = sum(value.nbytes for value in held.values())
    deltas, xors, shares, moves = [], [], [], []
    first_step_percent = 0.0
    for step in range(options.settle + options.steps):
        before = masters(model)
        train_step(model, optimizer, next(data))
        new = published(model)
        delta, received = measure_delta(new, held, options.level)
        if step == 0:
            first_step_percent = 100 * delta.num_bytes / full_bytes
        if step >= options.settle:
            deltas.append(delta)
            xors.append(measure_xor(new, held, options.level))
            shares.append(100 * changed_share(new, held))
            moves.append(root_mean_square(masters(model), before) / lr)
        held = received  # from version to version, as a receiver's chain of deltas
    sizes = [100 * delta.num_bytes / full_bytes for delta in deltas]

    def speed(seconds: list[float]) -> float:
        return round(full_bytes / statistics.median(seconds) / 1e9, 2)

    report(
        "weight_delta",
        "% of a full version's bytes, per step",
        sizes,
        lr=lr,
        max_percent=round(max(sizes), 3),
        changed_percent=round(statistics.median(shares), 3),
        max_changed_percent=round(max(shares), 3),
        update_per_lr=round(statistics.median(moves), 3),
        first_step_percent=round(first_step_percent, 3),
        encode_gb_per_s=speed([delta.encode_s for delta in deltas]),
        decode_gb_per_s=speed([delta.decode_s for delta in deltas]),
        xor_percent=round(statistics.median(100 * xor.num_bytes / full_bytes for xor in xors), 3),
        xor_encode_gb_per_s=speed([xor.encode_s for xor in xors]),
        xor_decode_gb_per_s=speed([xor.decode_s for xor in xors]),
        bit_equal=True,
        full_bytes=full_bytes,
        parameters=sum(value.numel() for value in model.parameters()),
        text=options.text.name if options.text else "arithmetic",
        batch_tokens=BATCH * LENGTH,
        warmup_steps=options.warmup,
        warmup_lr=options.warmup_lr,
        warmup_loss=options.warmup_loss,
        settle_steps=options.settle,
        level=options.level,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lr", type=float, nargs="+", default=[1e-6, 3e-6, 1e-5])
    parser.add_argument("--text", type=Path, help="file whose bytes are learned")
    parser.add_argument("--hidden-size", type=int, default=384)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--warmup", type=int, default=100, help="steps from random weights")
    parser.add_argument("--warmup-lr", type=float, default=1e-3)
    parser.add_argument("--settle", type=int, default=20, help="uncounted steps per rate")
    parser.add_argument("--steps", type=int, default=10, help="counted steps per rate")
    parser.add_argument("--level", type=int, default=1)
    options = parser.parse_args()
    random.seed(0)
    torch.manual_seed(0)
    data = batches(options.text.read_bytes() if options.text else arithmetic(1 << 20))
    model = make_model(options.hidden_size, options.layers)
    optimizer = make_optimizer(model, options.warmup_lr)
    losses = [train_step(model, optimizer, next(data)) for _ in range(options.warmup)]
    options.warmup_loss = [round(loss, 3) for loss in (losses[0], losses[-1])] if losses else []
    for lr in options.lr:
        measure_rate(copy.deepcopy(model), lr, data, options)


if __name__ == "__main__":
    main()
