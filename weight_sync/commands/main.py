"""`headway weights ls|verify|diff|gc`: look at published versions, and delete old ones."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

from weight_sync.commands.collection import collect_garbage
from weight_sync.commands.difference import print_difference
from weight_sync.commands.listing import list_versions
from weight_sync.commands.verification import verify_versions

ROOT = (
    "where the versions lie (weight_sync.root): a directory, shm://DIRECTORY or an fsspec URL; what "
    "is served over HTTP cannot be listed, name the directory it is served from"
)
GC = """Delete complete versions beyond the newest N, and what a publisher that died left unfinished.

Never deleted: the newest N, versions of --keep-version, and whatever those build on (bases of deltas
and adapters). The newest version need not be the one that serves: a trainer may have died before its
servers committed it. Keep at least 2, or name the version that `headway status` shows.

While a publisher is alive nothing is deleted: it alone knows which version its next delta is against,
and deletes old ones by itself (weight_sync.keep). An object store has no lock that would tell:
--no-publisher says that you have looked."""


def main(argv: Sequence[str]) -> None:
    """Run one command."""
    options = _parser().parse_args(argv)
    run: Callable[[argparse.Namespace], None] = options.run
    run(options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="headway weights", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(
        name: str, text: str, run: Callable[[argparse.Namespace], None], description: str = ""
    ) -> argparse.ArgumentParser:
        added = commands.add_parser(
            name,
            help=text,
            description=description or f"{text[0].upper()}{text[1:]}.",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        added.add_argument("root", metavar="ROOT", help=ROOT)
        added.add_argument("--json", action="store_true", help="print JSON")
        added.set_defaults(run=run)
        return added

    command("ls", "list the versions, also those that are being written", _ls)
    verify = command(
        "verify", "prove versions against their checksums; fail if one is damaged", _verify
    )
    verify.add_argument(
        "versions",
        metavar="VERSION",
        type=_version,
        nargs="*",
        help="all that are complete if none",
    )
    diff = command("diff", "show what changed between two versions", _diff)
    diff.add_argument("old", metavar="A", type=_version)
    diff.add_argument("new", metavar="B", type=_version)
    diff.add_argument("--top", metavar="N", type=_positive, help="show the N largest changes only")
    gc = command("gc", "delete old versions", _gc, GC)
    gc.add_argument(
        "--keep", metavar="N", type=_positive, required=True, help="newest versions to keep"
    )
    gc.add_argument(
        "--keep-version",
        metavar="VERSION",
        type=_version,
        action="append",
        default=[],
        help="keep this one, too; may be repeated",
    )
    gc.add_argument("--dry-run", action="store_true", help="show what would go, delete nothing")
    gc.add_argument(
        "--no-publisher", action="store_true", help="object stores: no publisher is alive"
    )
    return parser


def _ls(options: argparse.Namespace) -> None:
    list_versions(options.root, options.json)


def _verify(options: argparse.Namespace) -> None:
    verify_versions(options.root, options.versions, options.json)


def _diff(options: argparse.Namespace) -> None:
    print_difference(options.root, options.old, options.new, options.top, options.json)


def _gc(options: argparse.Namespace) -> None:
    collect_garbage(
        options.root,
        options.keep,
        options.keep_version,
        options.dry_run,
        options.no_publisher,
        options.json,
    )


def _version(text: str) -> int:
    number = text.removeprefix("v")
    if not number.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no version; give its number, for example 7")
    return int(number)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} should be a number from 1")
    return int(text)
