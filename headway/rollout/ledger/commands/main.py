"""`headway ledger stats|show|requeue|export`: look into a ledger, play failed rollouts once more."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from headway.contracts.errors import ConfigError
from headway.rollout.ledger.base import Ledger
from headway.rollout.ledger.commands.export import export
from headway.rollout.ledger.commands.requeue import requeue
from headway.rollout.ledger.commands.show import show
from headway.rollout.ledger.commands.stats import stats
from headway.rollout.ledger.make import make_ledger
from headway.rollout.ledger.transitions import STATES

LEDGER = "the ledger (`ledger` of the gateway's config): an SQLite file or a redis:// URL"
REQUEUE = """Queue failed rollouts once more, with all their attempts.

A running gateway takes them up when it next looks into its queue; one that shares a ledger looks often.
Over HTTP, POST /v1/ledger/requeue tells it at once."""
EXPORT = """Write one row per rollout, newest submission first.

As JSON Lines, or as Parquet if the file is named *.parquet (pip install 'headway-rl[export]')."""

Run = Callable[[Ledger, argparse.Namespace], Awaitable[None]]


def main(argv: Sequence[str]) -> None:
    """Run one command."""
    options = _parser().parse_args(argv)
    if "://" not in options.ledger and not Path(options.ledger).is_file():
        raise ConfigError(f"no ledger at {options.ledger!r}; name one with --ledger")
    asyncio.run(_run(options.run, options))


async def _run(run: Run, options: argparse.Namespace) -> None:
    async with _visited(options.ledger) as ledger:
        await run(ledger, options)


@asynccontextmanager
async def _visited(name: str) -> AsyncIterator[Ledger]:
    """The ledger, whoever works with it meanwhile."""
    ledger = make_ledger(name)
    await ledger.connect()
    try:
        yield ledger
    finally:
        await ledger.close()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="headway ledger", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, text: str, run: Run, description: str = "") -> argparse.ArgumentParser:
        added = commands.add_parser(
            name,
            help=text,
            description=description or f"{text[0].upper()}{text[1:]}.",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        added.add_argument("--ledger", default="ledger.sqlite", help=LEDGER)
        added.set_defaults(run=run)
        return added

    counted = command("stats", "print trajectories by state, as JSON", stats)
    counted.add_argument("--consumer", help="of this consumer only")
    counted.add_argument(
        "--audit", action="store_true", help="also prove them from the event logs; takes longer"
    )
    shown = command("show", "print everything that is known of a rollout, as JSON", show)
    shown.add_argument("rollout_id", metavar="ID")
    requeued = command("requeue", "queue failed rollouts once more", requeue, REQUEUE)
    requeued.add_argument("rollout_ids", metavar="ID", nargs="+")
    exported = command("export", "write one row per rollout to a file", export, EXPORT)
    exported.add_argument("file", metavar="FILE", type=Path)
    exported.add_argument("--state", choices=STATES, help="rollouts in this state only")
    exported.add_argument("--consumer", help="rollouts of this consumer only")
    return parser
