"""Check that nothing gets lost, done twice, done too late or stuck while processes die.

    python benchmarks/chaos.py --minutes 10

Two gateways share a Redis (append-only file); generation servers of the fake backend come and go; a
consumer submits, consumes, checkpoints and publishes versions, as fast as it can. A quarter of the time
is free of faults, a half has one every few seconds (`chaos_faults`: every kind once before any comes
again, in an order drawn from a seed), and a last quarter is free again, since machines change their pace.
`--calm-s` sets how long the first and the last part take, where only the promises matter.
What is killed is started again at once. In the end the consumer is stopped, and these are counted:

    lost, duplicated   the ledger's own audit, recomputed from its events
    unaccounted        rollouts that were acknowledged and that the ledger does not know, and the
                       difference of its states from their sum
    disagreeing        rollouts whose step in the ledger is not the one in the consumer's history
    trained_twice      rollouts in two steps of the history that checkpoints kept
    over_stale         steps that trained on something staler than eta
    stuck              trajectories that are leased, delivered, or queued although they could
                       start, after the faults are over (`ready` does not count: the consumer has ended)
    goodput_share      trajectories/s consumed under faults over those without
    cost               the same for each kind of fault, from one to the next fault of any kind; `cost_s`
                       is the mean time in which nothing would have been consumed

Everything up to `stuck` must be 0; if not, the exit status says so, and logs and files are kept.

With `--attackers 2` attackers are there all the time (`tests/attack/attacker.py`); `attack` counts the
outcomes of their requests. `goodput_share` is then under attack, too.

By default a fault comes every 15 s: each of eight processes fails about once in two minutes. What a
fault costs is mostly the start of a process, which takes 1 s of CPU for a gateway and 2 s for a server or
a trainer (they import torch); and Redis or both gateways, while they sleep, stop everything. Faults that
come faster than processes start measure the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from chaos_costs import Consumed, cost_per_kind, per_s
from chaos_faults import Faults
from chaos_world import ETA, History, World
from measure import report

from gateway.ledger.make import make_ledger
from gateway.ledger.records import Entry
from headway.contracts.http.ledger import LedgerCounts
from headway.contracts.http.status import StatusResponse

Span = tuple[float, float]

PAGE = 500
STEPS_BEFORE = 3
"""Steps of the consumer before anything is measured."""
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
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--minutes", type=float, default=10.0, help="with and without faults, together"
    )
    parser.add_argument(
        "--calm-s", type=float, help="without faults, before and after; a quarter unless told"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--servers", type=int, default=3)
    parser.add_argument("--every-s", type=float, default=15.0, help="mean time between faults")
    parser.add_argument("--attackers", type=int, default=0, help="connections of attackers")
    parser.add_argument("--dir", type=Path, default=None, help="keep logs and files here")
    options = parser.parse_args()
    folder = options.dir or Path(tempfile.mkdtemp(prefix="headway-chaos-", dir="/var/tmp"))
    folder.mkdir(parents=True, exist_ok=True)
    world = World(folder, options.servers, options.attackers)
    faults = Faults(world, random.Random(options.seed), options.every_s)
    try:
        seconds = options.minutes * 60.0
        calm_s = seconds / 4 if options.calm_s is None else options.calm_s
        found = run(world, faults, seconds / 2, calm_s)
    except BaseException:
        print(f"logs and files are in {folder}", file=sys.stderr)
        raise
    finally:
        world.end()
        note(folder / "faults.jsonl", faults)
    share = found.pop("goodput_share")
    report("chaos", "goodput under faults / without", [share], seed=options.seed, **found)
    if any(found[name] for name in PROMISES):
        raise SystemExit(f"the promises do not hold; logs and files are in {folder}")
    if options.dir is None:
        shutil.rmtree(folder)


def run(world: World, faults: Faults, stormy_s: float, calm_s: float) -> dict[str, Any]:
    """A while without faults, one with them, another one without; then the questions."""
    world.start()
    world.until_steps(STEPS_BEFORE)
    calm = [spend(calm_s, world.repair)]

    def tick() -> None:
        faults.tick()
        world.repair()

    stormy = spend(stormy_s, tick)
    world.calm_down()
    calm.append(spend(calm_s, world.repair))
    attack = world.end_attack()
    status = world.settle()
    return {
        **({"attack": attack} if attack else {}),
        **goodput(calm, stormy, faults, world.history()),
        "exits": dict(world.exits),
        **questions(world, status),
    }


def spend(seconds: float, tick: Callable[[], None]) -> Span:
    """Call `tick` often, for so long; when that was (`time.time`)."""
    began = time.time()
    while time.time() - began < seconds:
        tick()
        time.sleep(0.05)
    return began, time.time()


def goodput(calm: Sequence[Span], stormy: Span, faults: Faults, history: History) -> dict[str, Any]:
    """Return the rate of consumption with and without faults, and the cost of each kind of fault."""
    consumed = [Consumed(step["rows"], step["at"]) for step in history.steps]
    calm_per_s, stormy_per_s = per_s(consumed, calm), per_s(consumed, [stormy])
    costs = cost_per_kind(faults.done, consumed, stormy[1])
    return {
        "goodput_share": stormy_per_s / calm_per_s,
        "per_s": {
            "calm": [round(per_s(consumed, [span]), 2) for span in calm],
            "stormy": round(stormy_per_s, 2),
        },
        "faults": {kind: costs[kind].count for kind in sorted(costs)},
        "cost": {kind: costs[kind].shown(calm_per_s) for kind in sorted(costs)},
    }


def note(file: Path, faults: Faults) -> None:
    """Write the faults to a file; `trained.jsonl` has the times of steps."""
    file.write_text("".join(json.dumps(asdict(fault)) + "\n" for fault in faults.done))


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
    counted = counts.model_dump(exclude={"submitted"})
    differences = sum(abs(counted[state] - by_state[state]) for state in counted)
    return len(acknowledged - entries.keys()) + differences


def disagreeing(history: History, entries: dict[str, Entry]) -> int:
    """Rollouts that the ledger has in one step and the consumer in another, or in none."""
    trained = {name: step["step"] for step in history.steps for name in step["ids"]}
    consumed = {name: one.step for name, one in entries.items() if one.state == "consumed"}
    return len(trained.items() ^ consumed.items())


def stuck(status: StatusResponse) -> int:
    """Return the number of rollouts that should have moved on by now."""
    return status.counts.leased + status.counts.delivered + World.startable(status)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
