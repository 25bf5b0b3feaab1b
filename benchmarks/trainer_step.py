"""Measure the tokens per second of a training step, beside a padded loop and TRL.

    python benchmarks/trainer_step.py
    python benchmarks/trainer_step.py --hidden 128 --layers 3 --vocabulary 64 --sequences 128
    python benchmarks/trainer_step.py --vocabulary 151936 --layers 4 --sequences 8

`FSDP2Engine.train_batch`, a plain padded PyTorch loop and the training step of TRL's `GRPOTrainer` (see
`trainer_step_ways.py`; without the package `trl` the loop alone is beside) each live in a process of
their own with `--threads`, and take turns in every round, on the same random Llama and rollouts with
lognormal lengths. The first step is not timed: its loss and clipped gradient must be the same
for all, else nothing is measured. Tokens are those of prompts and responses, without padding; a line for
each way has `per_cpu_second` and `peak_mib`, the process's memory above the loaded model, and a
line for each rival the ratio, round by round.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import statistics
import sys
import tempfile
import time
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import torch
from measure import report
from torch import Tensor
from trainer_step_ways import WAYS, Lengths, Rollout, Setup, draw_rollouts, make_model

TOLERANCE = {"float32": 2e-4, "bfloat16": 5e-2}
"""Relative, of loss and gradient; 1.1e-4 was seen in float32 on AVX2."""


def main() -> None:
    options = parse()
    lengths = Lengths(
        options.prompt_median,
        options.response_median,
        options.sigma,
        options.max_prompt,
        options.max_response,
    )
    rollouts = draw_rollouts(
        options.seed, options.sequences, options.micro_batch, options.vocabulary, lengths
    )
    names = [name for name in WAYS if name != "trl" or find_spec("trl")]
    if "trl" not in names:
        print("no trl here: only the padded loop is beside; see extra benchmarks", file=sys.stderr)
    with tempfile.TemporaryDirectory() as place:
        make_model(Path(place), options.hidden, options.layers, options.vocabulary)
        setup = Setup(Path(place), options.dtype, options.micro_batch, options.budget)
        ways = {name: Child(name, setup, rollouts, options.threads) for name in names}
        try:
            gap = largest_gap(ways, Path(place), TOLERANCE[options.dtype])
            rounds = take_turns(ways, options.rounds)
        finally:
            peaks = {name: child.close() for name, child in ways.items()}
    tell(options, rollouts, rounds, peaks, gap)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--vocabulary", type=int, default=32_000)
    parser.add_argument("--dtype", choices=tuple(TOLERANCE), default="float32")
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--micro-batch", type=int, default=8, help="sequences; also of a group")
    parser.add_argument("--budget", type=int, default=4096, help="tokens of the engine's")
    parser.add_argument("--prompt-median", type=float, default=64)
    parser.add_argument("--response-median", type=float, default=128)
    parser.add_argument("--sigma", type=float, default=0.8, help="of the logarithm")
    parser.add_argument("--max-prompt", type=int, default=256)
    parser.add_argument("--max-response", type=int, default=512)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.sequences % options.micro_batch:
        parser.error("--sequences must be a multiple of --micro-batch")
    return options


class Child:
    """A way in a process of its own, which waits while others are measured."""

    def __init__(self, name: str, setup: Setup, rollouts: list[Rollout], threads: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._name = name
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=serve, args=(theirs, name, setup, rollouts, threads), daemon=True
        )
        self._process.start()
        theirs.close()
        self.ask("")  # until it is ready: no two load at a time

    def ask(self, what: str) -> Any:
        """Answer to `step`, or to a path where gradients are to be stored."""
        self._pipe.send(what)
        try:
            return self._pipe.recv()
        except EOFError:
            raise SystemExit(f"{self._name} ended; see above") from None

    def close(self) -> float:
        """MiB that it took at its peak."""
        if not self._process.is_alive():
            return float("nan")
        peak = float(self.ask("peak"))
        self._pipe.close()
        self._process.join()
        return peak


def serve(pipe: Connection, name: str, setup: Setup, rollouts: list[Rollout], threads: int) -> None:
    torch.set_num_threads(threads)
    way = WAYS[name](setup, rollouts)
    before = psutil.Process().memory_info().rss / 2**20
    while True:
        try:
            what = pipe.recv()
        except EOFError:
            return
        if what == "step":
            started, cpu = time.perf_counter(), time.process_time()
            found = way.step()
            pipe.send((time.perf_counter() - started, time.process_time() - cpu, *found))
        elif what == "peak":
            pipe.send(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10 - before)
        elif what:
            torch.save(way.gradients(), what)
            pipe.send(None)
        else:
            pipe.send(None)


def largest_gap(ways: dict[str, Child], place: Path, tolerance: float) -> float:
    """Return the largest relative gap in loss, gradient norm and gradient between the engine and the
    others.
    """
    first = {name: child.ask("step")[2:] for name, child in ways.items()}
    gradients: dict[str, dict[str, Tensor]] = {}
    for name, child in ways.items():
        stored = place / f"{name}.pt"
        child.ask(str(stored))
        gradients[name] = torch.load(stored, mmap=True)
    gaps = [0.0]
    for name in list(ways)[1:]:
        pairs = zip(first["engine"], first[name], strict=True)
        gaps += [abs(ours - theirs) / abs(theirs) for ours, theirs in pairs]
        gaps.append(distance(gradients["engine"], gradients[name]))
        if max(gaps) > tolerance:
            raise SystemExit(
                f"engine and {name} do not compute the same: loss and norm {first}, relative "
                f"distances up to {max(gaps):.1e}, wanted {tolerance}"
            )
    return max(gaps)


def distance(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """Return the distance between two gradients, over the norm of the second."""
    if ours.keys() != theirs.keys():
        raise SystemExit(f"gradients of different parameters: {ours.keys() ^ theirs.keys()}")
    apart = sum(float((ours[n].float() - theirs[n].float()).square().sum()) for n in ours)
    whole = sum(float(theirs[n].float().square().sum()) for n in ours)
    return (apart / whole) ** 0.5


def take_turns(ways: dict[str, Child], rounds: int) -> list[dict[str, tuple[float, float]]]:
    """Seconds and CPU seconds of every way, per round; another one begins each round."""
    names, found = list(ways), []
    for number in range(rounds):
        turn = number % len(names)
        order = names[turn:] + names[:turn]
        found.append({name: ways[name].ask("step")[:2] for name in order})
    return found


def tell(
    options: argparse.Namespace,
    rollouts: list[Rollout],
    rounds: list[dict[str, tuple[float, float]]],
    peaks: dict[str, float],
    gap: float,
) -> None:
    tokens = sum(rollout.num_tokens for rollout in rollouts)
    sampled = sum(len(rollout.response) for rollout in rollouts)
    for name, peak in peaks.items():
        report(
            "train_step",
            "tokens/s",
            [tokens / found[name][0] for found in rounds],
            way=name,
            per_cpu_second=round(statistics.median(tokens / found[name][1] for found in rounds), 1),
            peak_mib=round(peak),
            tokens=tokens,
            sampled=sampled,
            **vars(options),
        )
    for name in list(peaks)[1:]:
        report(
            "train_step_speedup",
            "ratio",
            [found[name][0] / found["engine"][0] for found in rounds],
            over=name,
            of_cpu=round(statistics.median(f[name][1] / f["engine"][1] for f in rounds), 2),
            of_peak=round(peaks["engine"] / peaks[name], 2),
            largest_gap=float(f"{gap:.1e}"),
        )


if __name__ == "__main__":
    main()
