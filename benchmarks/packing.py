"""Measure how full micro-batches are, how level the ranks are, and what computing them costs.

    python benchmarks/packing.py
    python benchmarks/packing.py --median 4000 --sigma 0.6

Lengths are lognormal. Three lines, each over `--rounds` draws:

- bins over the lower bound ceil(sum / budget) of `--sequences` sequences; `largest_over_mean` is the
  fullest bin over the mean of all, `cpu_ms` the time of one call. Beside it first-fit decreasing as a
  loop over the bins.
- the heaviest share over the mean of `--ranks` ranks with `--per-rank` sequences each, costs in tokens;
  `attention` with attention's part for a hidden size of 4096, `equal_counts` with as many sequences for
  each. Beside it the longest sequence to the lightest rank.
- milliseconds to take all micro-batches out of a packed batch of 8 columns.
"""

from __future__ import annotations

import argparse
import heapq
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from measure import report

from trainer.batching.balance import partition_by_tokens
from trainer.batching.packing import pack_by_tokens
from trainer.batching.sequences import SequenceBatch

HIDDEN_SIZE = 4096
COLUMNS = 8
Bins = list[list[int]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sequences", type=int, default=4096)
    parser.add_argument("--median", type=float, default=1024, help="tokens of a sequence")
    parser.add_argument("--sigma", type=float, default=1.0, help="of the logarithm")
    parser.add_argument("--budget", type=int, default=32768, help="tokens of a micro-batch")
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--per-rank", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    torch.set_num_threads(1)
    shape = {"median": options.median, "sigma": options.sigma}
    draws = [draw(options.sequences, options, seed) for seed in range(options.rounds)]
    report_packing(draws, options.budget, shape)
    many = options.ranks * options.per_rank
    report_balance(
        [draw(many, options, seed) for seed in range(min(3, options.rounds))], options.ranks, shape
    )
    report_select(draws[0], options.budget, options.rounds, shape)


def draw(count: int, options: argparse.Namespace, seed: int) -> list[int]:
    """Lengths between 1 and the budget."""
    lengths = np.random.default_rng(seed).lognormal(math.log(options.median), options.sigma, count)
    return list(np.clip(lengths.astype(int), 1, options.budget).tolist())


def report_packing(draws: list[list[int]], budget: int, shape: dict[str, float]) -> None:
    def metrics(pack: Callable[[list[int], int], Bins]) -> tuple[list[float], dict[str, Any]]:
        over, uneven, spent = list[float](), list[float](), list[float]()
        for lengths in draws:
            bins, cpu_ms = timed(lambda lengths=lengths: pack(lengths, budget))
            over.append(len(bins) / -(-sum(lengths) // budget))
            uneven.append(largest_over_mean(bins, lengths))
            spent.append(cpu_ms)
        return over, {
            "mean": round(statistics.mean(over), 5),
            "largest_over_mean": round(statistics.median(uneven), 4),
            "cpu_ms": round(statistics.median(spent), 2),
        }

    values, ours = metrics(pack_by_tokens)
    _, loop = metrics(first_fit_decreasing)
    bound = -(-sum(draws[0]) // budget)
    report(
        "bins_over_lower_bound",
        "ratio",
        values,
        **ours,
        first_fit_loop=loop,
        sequences=len(draws[0]),
        budget=budget,
        lower_bound=bound,
        **shape,
    )


def report_balance(draws: list[list[int]], ranks: int, shape: dict[str, float]) -> None:
    weight = 1 / (12 * HIDDEN_SIZE)
    over, attention, equal = list[float](), list[float](), list[float]()
    longest_first, spent = list[float](), list[float]()
    for lengths in draws:
        parts, cpu_ms = timed(lambda lengths=lengths: partition_by_tokens(lengths, ranks))
        spent.append(cpu_ms)
        over.append(largest_over_mean(parts, lengths))
        costs = [n + weight * n * n for n in lengths]
        parts = partition_by_tokens(lengths, ranks, attention_weight=weight)
        attention.append(largest_over_mean(parts, costs))
        equal.append(
            largest_over_mean(partition_by_tokens(lengths, ranks, equal_counts=True), lengths)
        )
        longest_first.append(largest_over_mean(to_the_lightest(lengths, ranks), lengths))
    report(
        "heaviest_rank_over_mean",
        "ratio",
        over,
        worst=round(max(over), 6),
        attention=round(max(attention), 6),
        equal_counts=round(max(equal), 6),
        longest_first=round(max(longest_first), 6),
        cpu_ms=round(statistics.median(spent), 1),
        ranks=ranks,
        per_rank=len(draws[0]) // ranks,
        **shape,
    )


def report_select(lengths: list[int], budget: int, rounds: int, shape: dict[str, float]) -> None:
    num_tokens = sum(lengths)
    columns = {str(number): torch.zeros(num_tokens) for number in range(COLUMNS)}
    batch = SequenceBatch(tuple(lengths), columns)
    bins = pack_by_tokens(lengths, budget)
    spent = [timed(lambda: [batch.select(members) for members in bins])[1] for _ in range(rounds)]
    whole = [timed(lambda: batch.select(range(len(lengths))))[1] for _ in range(rounds)]
    report(
        "select_all_micro_batches",
        "ms",
        spent,
        all_at_once_ms=round(statistics.median(whole), 1),
        micro_batches=len(bins),
        tokens=num_tokens,
        columns=COLUMNS,
        **shape,
    )


def timed(call: Callable[[], Any]) -> tuple[Any, float]:
    """The result, and milliseconds of CPU."""
    started = time.process_time()
    result = call()
    return result, (time.process_time() - started) * 1e3


def largest_over_mean(parts: Bins, costs: list[float] | list[int]) -> float:
    loads = [sum(costs[index] for index in part) for part in parts]
    return max(loads) / statistics.mean(loads)


def first_fit_decreasing(lengths: list[int], budget: int) -> Bins:
    """Longest first to the first bin with room, asking one after the other."""
    bins: Bins = []
    rooms: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        for number, room in enumerate(rooms):
            if lengths[index] <= room:
                bins[number].append(index)
                rooms[number] -= lengths[index]
                break
        else:
            bins.append([index])
            rooms.append(budget - lengths[index])
    return bins


def to_the_lightest(lengths: list[int], num_parts: int) -> Bins:
    parts: Bins = [[] for _ in range(num_parts)]
    heap = [(0, number) for number in range(num_parts)]
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        load, number = heap[0]
        parts[number].append(index)
        heapq.heapreplace(heap, (load + lengths[index], number))
    return parts


if __name__ == "__main__":
    main()
