"""`headway weights ls|verify|diff|gc`: look at published versions, and delete old ones.

Each command imports what it does when it runs: help answers without torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, TypeVar

import click

from headway.runtime.command_line import Group, VersionType

COMMANDS = "weight_sync.commands"
ROOT = """ROOT holds the versions (weight_sync.root): a directory, shm://DIRECTORY or an fsspec
    URL. What is served over HTTP cannot be listed: name the directory it is served from."""
EXAMPLE = """headway weights ls /dev/shm/headway-versions
headway weights verify s3://bucket/run 7
headway weights gc runs/x/weights --keep 3 --dry-run"""

COUNT = click.IntRange(min=1)
CommandT = TypeVar("CommandT", bound=Callable[..., Any])


@click.group("weights", cls=Group, example=EXAMPLE)
def command() -> None:
    """Look at published versions, and delete old ones."""


def _of_a_root(function: CommandT) -> CommandT:
    """Give a command the argument `root` and the option `as_json`."""
    function.__doc__ = f"{function.__doc__}\n\n    {ROOT}"
    as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
    return click.argument("root", type=click.Path(file_okay=False))(as_json(function))


@command.command("ls", example="headway weights ls runs/x/weights")
@_of_a_root
def ls(root: str, as_json: bool) -> None:
    """List the versions, also those that are being written."""
    import_module(f"{COMMANDS}.listing").list_versions(root, as_json)


@command.command("verify", example="headway weights verify runs/x/weights 7 8")
@_of_a_root
@click.argument("versions", metavar="[VERSION]...", nargs=-1, type=VersionType())
def verify(root: str, versions: Sequence[int], as_json: bool) -> None:
    """Verify versions against their checksums; fail if one is damaged.

    Without VERSION, all that are complete.
    """
    import_module(f"{COMMANDS}.verification").verify_versions(root, list(versions), as_json)


@command.command("diff", example="headway weights diff runs/x/weights 5 6 --top 3")
@_of_a_root
@click.argument("old", metavar="A", type=VersionType())
@click.argument("new", metavar="B", type=VersionType())
@click.option("--top", metavar="N", type=COUNT, help="Show the N largest changes only.")
def diff(root: str, old: int, new: int, top: int | None, as_json: bool) -> None:
    """Show what changed between two versions."""
    import_module(f"{COMMANDS}.difference").print_difference(root, old, new, top, as_json)


@command.command("gc", example="headway weights gc runs/x/weights --keep 3 --dry-run")
@_of_a_root
@click.option("--keep", metavar="N", type=COUNT, required=True, help="Newest versions to keep.")
@click.option(
    "--keep-version",
    "kept",
    metavar="VERSION",
    type=VersionType(),
    multiple=True,
    help="Keep this one, too; may be repeated.",
)
@click.option("--dry-run", is_flag=True, help="Show what would go, delete nothing.")
@click.option("--no-publisher", is_flag=True, help="Object stores: no publisher is alive.")
def gc(
    root: str, keep: int, kept: Sequence[int], dry_run: bool, no_publisher: bool, as_json: bool
) -> None:
    """Delete complete versions beyond the newest N, and what a publisher that died left unfinished.

    Never deleted: the newest N, versions of --keep-version, and whatever those build on (bases of deltas
    and adapters). The newest version need not be the one that serves: a trainer may have died before its
    servers committed it. Keep at least 2, or name the version that `headway status` shows.

    While a publisher is alive nothing is deleted: it alone knows which version its next delta is against,
    and deletes old ones by itself (weight_sync.keep). An object store has no lock that would tell:
    --no-publisher says that you have looked.
    """
    import_module(f"{COMMANDS}.garbage_collection").collect_garbage(
        root, keep, list(kept), dry_run, no_publisher, as_json
    )
