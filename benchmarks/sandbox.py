"""Measure how many untrusted programs the sandbox scores per second.

    python benchmarks/sandbox.py
    python benchmarks/sandbox.py --rows shared/data/mbpp/mbpp.jsonl --backend landlock

Every program is the reference solution of a row with its tests, scored by the reward `code`: one forked
process each, calls evaluated inside, values compared outside. Without `--rows` (MBPP's format) the
programs are small ones of this file. The clock starts when the workers are ready; `start_s` is how long
that took. `extra_gb` is memory that this process holds meanwhile: starting workers must not depend on
it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from pathlib import Path
from typing import Any

from measure import report

from gateway.components.shared_services import NoOutbound, SharedServices
from gateway.rewards.base import Answer
from gateway.rewards.code import CodeReward
from gateway.sandbox.choice import make_sandbox
from headway.contracts.config.gateway import SandboxConfig

OWN = [
    {
        "code": f"def f(xs):\n    return sorted(x * {factor} for x in xs if x % 2)\n",
        "test_list": [
            f"assert f([3, 2, 1]) == [{factor}, {3 * factor}]",
            "assert f([]) == []",
            f"assert f(list(range(100)))[-1] == {99 * factor}",
        ],
    }
    for factor in range(1, 201)
]


async def judge_all(rows: list[dict[str, Any]], services: SharedServices) -> float:
    """Seconds for all of them at once."""
    reward = CodeReward(cpu_s=20.0)
    started = time.perf_counter()
    scored = (reward.score(Answer("", row["code"], row), services) for row in rows)
    results = await asyncio.gather(*scored)
    seconds = time.perf_counter() - started
    refused = [result for result in results if result.verdict != "accepted"]
    if refused:
        raise SystemExit(f"{len(refused)} reference solutions were refused, first {refused[0]}")
    return seconds


async def main(options: argparse.Namespace) -> None:
    rows = OWN
    if options.rows is not None:
        rows = [json.loads(line) for line in options.rows.read_text().splitlines()]
    held = bytearray(b"x" * int(options.extra_gb * (1 << 30)))
    config = SandboxConfig(
        type=options.backend, workers=options.workers, allow_unsafe=options.backend == "unsafe"
    )
    sandbox = make_sandbox(config, NoOutbound())
    started = time.perf_counter()
    await sandbox.start()
    start_s = time.perf_counter() - started
    try:
        services = SharedServices(sandbox, NoOutbound())
        seconds = [await judge_all(rows, services) for _ in range(options.repeats)]
    finally:
        await sandbox.aclose()
    report(
        "sandbox_programs",
        "programs/s",
        [len(rows) / taken for taken in seconds],
        backend=options.backend,
        workers=options.workers,
        programs=len(rows),
        start_s=round(start_s, 3),
        extra_gb=len(held) >> 30,
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="bubblewrap")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rows", type=Path)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--extra-gb", type=float, default=0.0)
    asyncio.run(main(parser.parse_args()))
