"""Measure what log-probabilities without logits save, and what they cost.

    python benchmarks/logprobs.py
    python benchmarks/logprobs.py --hidden 256 --dtype bfloat16 --entropy

Forward and backward pass of the log-probabilities of `--tokens` labels from hidden states and a head's
weight, each way in a process of its own: in tiles (`chunked_logprobs`), and through the whole logits.
The value is the peak of memory above the inputs (`ru_maxrss`; on a GPU torch's counter), tiles over
whole; `mib` and `seconds` are those of both. It includes the gradients of the inputs. Seconds are the
best of `--rounds`.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time

import torch
from measure import report
from torch import Tensor

from trainer.algorithms.logprobs import chunked_logprobs, token_logprobs

TEMPERATURE = 0.7
WAYS = ("tiles", "whole")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--vocabulary", type=int, default=150_000)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--chunk-tokens", type=int, help="by default as in a trainer")
    parser.add_argument("--kept-bytes", type=int, default=1 << 28, help="as in a trainer's config")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--entropy", action="store_true")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way:
        print(json.dumps(measure(options)))
        return
    found = {way: run_child(way) for way in WAYS}
    mib = {way: round(found[way]["mib"], 1) for way in WAYS}
    best = {way: min(found[way]["seconds"]) for way in WAYS}
    report(
        "logprobs_peak_memory",
        "ratio",
        [mib["tiles"] / mib["whole"]],
        mib=mib,
        logits_mib=round(options.tokens * options.vocabulary * 4 / 2**20, 1),
        seconds={way: round(best[way], 3) for way in WAYS},
        time_ratio=round(best["tiles"] / best["whole"], 3),
        **{name: value for name, value in vars(options).items() if name != "way"},
    )


def run_child(way: str) -> dict[str, list[float]]:
    command = [sys.executable, __file__, *sys.argv[1:], "--way", way]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    return dict(json.loads(done.stdout))


def measure(options: argparse.Namespace) -> dict[str, object]:
    """One way, in this process."""
    torch.manual_seed(0)
    torch.set_num_threads(options.threads)
    dtype, device = getattr(torch, options.dtype), torch.device(options.device)
    shapes = (options.tokens, options.hidden), (options.vocabulary, options.hidden)
    hidden, weight = (
        torch.randn(shape, device=device, dtype=dtype).requires_grad_() for shape in shapes
    )
    labels = torch.randint(options.vocabulary, (options.tokens,), device=device)
    compute = tiles if options.way == "tiles" else whole
    before, seconds = peak_mib(device), []
    for _ in range(options.rounds):
        started = time.perf_counter()
        compute(hidden, weight, labels, options).backward()
        after = peak_mib(device)  # waits for the device
        seconds.append(time.perf_counter() - started)
        hidden.grad = weight.grad = None
    return {"mib": after - before, "seconds": seconds}


def tiles(hidden: Tensor, weight: Tensor, labels: Tensor, options: argparse.Namespace) -> Tensor:
    logprobs, entropies = chunked_logprobs(
        hidden,
        weight,
        labels,
        TEMPERATURE,
        options.chunk_tokens,
        with_entropy=options.entropy,
        kept_bytes=options.kept_bytes,
    )
    return logprobs.sum() if entropies is None else logprobs.sum() + entropies.sum()


def whole(hidden: Tensor, weight: Tensor, labels: Tensor, options: argparse.Namespace) -> Tensor:
    logits = hidden @ weight.t()
    total = token_logprobs(logits, labels, TEMPERATURE).sum()
    if options.entropy:
        log_p = (logits.float() / TEMPERATURE).log_softmax(1)
        total = total - (log_p.exp() * log_p).sum()
    return total


def peak_mib(device: torch.device) -> float:
    """Return the peak memory in MiB of this process, or of torch on the GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


if __name__ == "__main__":
    main()
