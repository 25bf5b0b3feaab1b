"""`headway ledger stats|show|requeue|export`: look into a ledger, run failed rollouts once more.

Each command imports what it does when it runs: help answers without the stores.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

import click

from headway.runtime.command_line import Group

STATES = (
    *("queued", "leased", "ready", "delivered", "consumed"),
    *("failed", "filtered", "stale", "cancelled"),
)
"""States of a rollout; a test compares them with the ledger's."""
COMMANDS = "gateway.ledger.commands"
EXAMPLE = """headway ledger stats --ledger ledger.sqlite --audit
headway ledger show sum-1 --ledger ledger.sqlite
headway ledger export failed.jsonl --state failed"""

CommandT = TypeVar("CommandT", bound=Callable[..., Any])


@click.group("ledger", cls=Group, example=EXAMPLE)
def command() -> None:
    """Look into a ledger beside the gateway that works with it, and run failed rollouts once more."""


def _of_a_ledger(function: CommandT) -> CommandT:
    """Give a command the option `ledger`."""
    return click.option(
        "--ledger",
        metavar="LEDGER",
        type=click.Path(),
        default="ledger.sqlite",
        help="`ledger` of the gateway's config: an SQLite file or a redis:// URL.",
    )(function)


@command.command("stats", example="headway ledger stats --audit")
@_of_a_ledger
@click.option("--consumer", metavar="NAME", help="Of this consumer only.")
@click.option("--audit", is_flag=True, help="Also prove them from the event logs; takes longer.")
def stats(ledger: str, consumer: str | None, audit: bool) -> None:
    """Print trajectories by state, as JSON."""
    _run(ledger, "stats", consumer, audit)


@command.command("show", example="headway ledger show sum-1")
@_of_a_ledger
@click.argument("rollout_id", metavar="ID")
def show(ledger: str, rollout_id: str) -> None:
    """Print everything that is known of a rollout, as JSON."""
    _run(ledger, "show", rollout_id)


@command.command("requeue", example="headway ledger requeue sum-1 sum-2")
@_of_a_ledger
@click.argument("rollout_ids", metavar="ID...", nargs=-1, required=True)
def requeue(ledger: str, rollout_ids: Sequence[str]) -> None:
    """Queue failed rollouts once more, with all their attempts.

    A running gateway takes them up when it next looks into its queue; one that shares a ledger looks
    often. POST /v1/ledger/requeue has it look at once.
    """
    _run(ledger, "requeue", rollout_ids)


@command.command("export", example="headway ledger export rollouts.parquet")
@_of_a_ledger
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--state", type=click.Choice(STATES), help="Rollouts in this state only.")
@click.option("--consumer", metavar="NAME", help="Rollouts of this consumer only.")
def export(ledger: str, file: Path, state: str | None, consumer: str | None) -> None:
    """Write one row per rollout to a file, newest submission first.

    As JSON Lines, or as Parquet if the file is named *.parquet (extra 'export').
    """
    _run(ledger, "export", file, state, consumer)


def _run(name: str, command_name: str, *arguments: object) -> None:
    run = getattr(import_module(f"{COMMANDS}.{command_name}"), command_name)
    import_module(f"{COMMANDS}.visit").visit(name, run, arguments)
