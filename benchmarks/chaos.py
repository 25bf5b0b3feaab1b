"""Does anything get lost, done twice, done too late or stuck while processes die?

    python benchmarks/chaos.py --minutes 10

Two gateways share a Redis (append-only file); generation servers of the fake backend come and go; a
consumer submits, consumes, checkpoints and publishes versions. First a fault-free stretch, then as long
again under faults (`chaos_faults`), a fault every few seconds in an order drawn from a seed. What is
killed is started again. In the end the faults stop, the consumer is told to end, and everybody is asked:

    lost, duplicated   the ledger's own audit, recomputed from its events
    unaccounted        what the consumer was told is submitted and the ledger does not know, and what
                       its states do not add up to
    disagreeing        rollouts whose step in the ledger is not the one in the consumer's history
    trained_twice      rollouts in two steps of the history that checkpoints kept
    over_stale         steps that trained on something staler than eta
    stuck              trajectories that are leased, delivered, or queued with room to start them,
                       though nobody disturbs any more (`ready` is not: who would take it has ended)
    goodput_share      trajectories/s consumed under faults over those without

Everything but the last must be 0; if not, the exit status says so, and logs and files are kept.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from chaos_faults import Faults
from chaos_world import ETA, History, World
from measure import report

from headway.contracts.http.ledger import LedgerCounts
from headway.contracts.http.status import StatusResponse
from headway.rollout.ledger.base import Entry
from headway.rollout.ledger.make import make_ledger

PAGE = 500
STEPS_BEFORE = 3
"""Of the consumer, before anything is measured."""
PROMISES = (
    "lost",
    "duplicated",
    "unaccounted",
    "disagreeing",
    "trained_twice",
    "over_stale",
    "stuck",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--minutes", type=float, default=10.0, help="with and without faults, together"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--servers", type=int, default=3)
    parser.add_argument("--every-s", type=float, default=4.0, help="mean time between faults")
    parser.add_argument("--dir", type=Path, default=None, help="keep logs and files here")
    options = parser.parse_args()
    folder = options.dir or Path(tempfile.mkdtemp(prefix="headway-chaos-", dir="/var/tmp"))
    folder.mkdir(parents=True, exist_ok=True)
    world = World(folder, options.servers)
    try:
        faults = Faults(world, random.Random(options.seed), options.every_s)
        found = run(world, faults, options.minutes * 60.0)
    except BaseException:
        print(f"logs and files are in {folder}", file=sys.stderr)
        raise
    finally:
        world.end()
    share = found.pop("goodput_share")
    report("chaos", "goodput under faults / without", [share], seed=options.seed, **found)
    if any(found[name] for name in PROMISES):
        raise SystemExit(f"the promises do not hold; logs and files are in {folder}")
    if options.dir is None:
        shutil.rmtree(folder)


def run(world: World, faults: Faults, seconds: float) -> dict[str, Any]:
    """Both stretches, then the questions."""
    world.start()
    world.until_steps(STEPS_BEFORE)
    calm = goodput(world, seconds / 2, world.repair)

    def tick() -> None:
        faults.tick()
        world.repair()

    stormy = goodput(world, seconds / 2, tick)
    status = world.settle()
    return {
        "goodput_share": stormy / calm,
        "per_s": {"calm": round(calm, 2), "stormy": round(stormy, 2)},
        "faults": dict(faults.done),
        "exits": dict(world.exits),
        **questions(world, status),
    }


def goodput(world: World, seconds: float, tick: Callable[[], None]) -> float:
    """Trajectories consumed per second, while `tick` is called often."""
    began, before = time.monotonic(), world.history().rows
    while time.monotonic() - began < seconds:
        tick()
        time.sleep(0.05)
    return (world.history().rows - before) / (time.monotonic() - began)


def questions(world: World, status: StatusResponse) -> dict[str, Any]:
    """The promises, asked of all who know something."""
    audit, history = world.audit(), world.history()
    entries = asyncio.run(read_ledger(world.ledger))
    times = Counter(name for step in history.steps for name in step["ids"])
    return {
        "lost": audit.lost,
        "duplicated": audit.duplicated,
        "unaccounted": unaccounted(world.acknowledged(), entries, audit.counts),
        "disagreeing": disagreeing(history, entries),
        "trained_twice": sum(count - 1 for count in times.values()),
        "over_stale": sum(step["staleness"] > ETA for step in history.steps),
        "stuck": stuck(status),
        "max_staleness": audit.max_staleness,
        "steps": len(history.steps),
        "versions": status.version,
        "requeues": audit.requeues,
        "counts": audit.counts.model_dump(),
    }


async def read_ledger(name: str) -> dict[str, Entry]:
    """Every rollout that the ledger knows."""
    ledger = make_ledger(name)
    await ledger.connect()
    entries: dict[str, Entry] = {}
    before = None
    while page := await ledger.find(limit=PAGE, before=before):
        entries |= {entry.request.rollout_id: entry for entry in page}
        before = page[-1].request.rollout_id
    await ledger.close()
    return entries


def unaccounted(acknowledged: set[str], entries: dict[str, Entry], counts: LedgerCounts) -> int:
    """Rollouts that are nowhere, and trajectories that are in no state or in two."""
    by_state: Counter[str] = Counter()
    for entry in entries.values():
        by_state[entry.state] += entry.request.prompt.group_size
    told = counts.model_dump(exclude={"submitted"})
    differences = sum(abs(told[state] - by_state[state]) for state in told)
    return len(acknowledged - entries.keys()) + differences


def disagreeing(history: History, entries: dict[str, Entry]) -> int:
    """Rollouts that the ledger has in one step and the consumer in another, or in none."""
    trained = {name: step["step"] for step in history.steps for name in step["ids"]}
    consumed = {name: one.step for name, one in entries.items() if one.state == "consumed"}
    return len(trained.items() ^ consumed.items())


def stuck(status: StatusResponse) -> int:
    """What ought to have moved on by now."""
    return status.counts.leased + status.counts.delivered + World.startable(status)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
