"""Measure how many mathematical answers per second the scorer grades, and what they cost the event
loop.

    python benchmarks/grading.py --data /path/to/data --workers 2 --rounds 5
    python benchmarks/grading.py --bombs        # the same, while every 50th answer would hang a verifier

The answers are those of MATH-500 (`$HEADWAY_DATA_DIR/math500/test.jsonl`; without it, 500 of our own
making), in four forms: boxed and right in the same words, right as a formula that ends the text (both
settled on the event loop), right as a formula inside a sentence (in a worker, by sympy), and wrong, the
answer to another question (two numbers on the event loop, the rest in a worker). Every round has fresh
workers, which remember nothing.
`lag_ms` is the longest stall of the event loop; `cpu_ms` counts this process and its workers, except for
those that were killed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
from measure import report

from gateway.components.shared_services import NoOutbound, NoSandbox, SharedServices
from gateway.rewards.base import Answer
from gateway.rewards.final_answer import plain
from gateway.rewards.scoring import Scorer
from headway.contracts.config.base import ComponentConfig
from headway.contracts.config.gateway import ExecutorConfig
from headway.contracts.types import RewardResult

BOMBS = (
    r"\boxed{9^{9^{9^{9}}}}",
    r"\boxed{(10^{7})!}",
    r"\boxed{\{" + ",".join(f"x+{n}" for n in range(400)) + r"\}}",
)
MATH = ComponentConfig(name="math", args={"timeout_s": 1.0})


@dataclass(frozen=True)
class Case:
    answer: Answer
    form: str
    score: float


def draw_cases(data: Path | None, forms: str) -> list[Case]:
    golds = (
        _math500(data) if data is not None else [rf"\frac{{{n}x+1}}{{{n + 1}}}" for n in range(500)]
    )
    cases = []
    for index, gold in enumerate(golds):
        later = (golds[(index + step) % len(golds)] for step in range(7, len(golds)))
        other = next(text for text in later if plain(text) != plain(gold))
        texts = {
            "quick": (rf"So it is \boxed{{{gold}}}.", 1.0),
            "unboxed": (f"So the answer is ${gold}$.", 1.0),
            "inside": (f"So the answer is ${gold}$, surely.", 1.0),
            "wrong": (rf"So it is \boxed{{{other}}}.", 0.0),
        }
        cases += [
            Case(Answer(f"question {index}", text, {"answer": gold}), form, score)
            for form, (text, score) in texts.items()
            if forms in ("all", form)
        ]
    return cases


def _math500(data: Path) -> list[str]:
    lines = (data / "math500" / "test.jsonl").read_text().splitlines()
    return [json.loads(line)["answer"] for line in lines]


def with_bombs(cases: list[Case], every: int) -> list[Case]:
    mixed = []
    for index, case in enumerate(cases):
        if index % every == 0:
            text = BOMBS[index // every % len(BOMBS)]
            mixed.append(Case(Answer("bomb", text, {"answer": "x+3"}), "bomb", 0.0))
        mixed.append(case)
    return mixed


class LagMeter:
    """The longest pause of the event loop, in seconds."""

    def __init__(self) -> None:
        self.worst_s = 0.0

    async def run(self) -> None:
        before = time.monotonic()
        while True:
            await asyncio.sleep(0.001)
            now = time.monotonic()
            self.worst_s = max(self.worst_s, now - before - 0.001)
            before = now


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and everything it started."""
    me = psutil.Process()
    times = [process.cpu_times() for process in (me, *me.children(recursive=True))]
    return sum(one.user + one.system for one in times)


async def grade(scorer: Scorer, cases: list[Case], callers: int) -> list[RewardResult]:
    results: list[RewardResult | None] = [None] * len(cases)
    numbers = iter(range(len(cases)))

    async def caller() -> None:
        for number in numbers:
            results[number] = await scorer.score(MATH, cases[number].answer)

    await asyncio.gather(*[caller() for _ in range(callers)])
    return [result for result in results if result is not None]


@asynccontextmanager
async def open_scorer(workers: int) -> AsyncIterator[Scorer]:
    """Started, with math-verify in its workers."""
    config = ExecutorConfig(reward_workers=workers)
    scorer = Scorer(config, SharedServices(NoSandbox(), NoOutbound()))
    await scorer.pool.start()
    try:
        first = Case(Answer("first", "$y + y$", {"answer": "2y"}), "first", 1.0)
        await grade(scorer, [first] * workers, workers)
        yield scorer
    finally:
        await scorer.aclose()


async def measure(args: argparse.Namespace) -> None:
    cases = draw_cases(args.data, args.form)
    if args.bombs:
        cases = with_bombs(cases, 50)
    rates, cpu, meter = [], [], LagMeter()
    watching = asyncio.create_task(meter.run())
    for _ in range(args.rounds):
        async with open_scorer(args.workers) as scorer:
            before, cpu_before = time.monotonic(), cpu_seconds()
            results = await grade(scorer, cases, args.callers)
            rates.append(len(cases) / (time.monotonic() - before))
            cpu.append((cpu_seconds() - cpu_before) / len(cases) * 1000)
    watching.cancel()
    pairs = list(zip(cases, results, strict=True))
    report(
        f"grading {args.form}{' with bombs' if args.bombs else ''}",
        "answers/s",
        rates,
        workers=args.workers,
        callers=args.callers,
        answers=len(cases),
        cpu_ms=round(sorted(cpu)[len(cpu) // 2], 3),
        lag_ms=round(meter.worst_s * 1000, 1),
        verdicts=Counter(result.verdict for _, result in pairs),
        unlike=dict(Counter(case.form for case, result in pairs if result.score != case.score)),
        data="math500" if args.data else "made",
    )


def main() -> None:
    folder = os.environ.get("HEADWAY_DATA_DIR")
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data", type=Path, default=folder and Path(folder))
    parser.add_argument(
        "--form", default="all", choices=["all", "quick", "unboxed", "inside", "wrong"]
    )
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--callers", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--bombs", action="store_true")
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
