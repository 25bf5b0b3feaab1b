"""`headway`: one command, its parts imported only when they are called."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NoReturn

from headway import __version__
from headway.contracts.errors import ConfigError
from headway.runtime.command import import_main, run_command

COMMANDS = {
    "quickstart": ("headway.launch.quickstart.command", "train a tiny policy here, end to end"),
    "run": ("headway.launch.run", "gateway, servers and trainer of a config, on this machine"),
    "gateway": ("headway.rollout.gateway", "one gateway"),
    "serve": ("inference_server.main", "one generation server (python -m inference_server)"),
    "train": ("trainer.main", "one trainer rank (python -m trainer)"),
    "slurm": ("headway.launch.slurm", "a batch script for a trainer's ranks on Slurm"),
    "config": ("headway.launch.show_config", "every setting of a process or experiment"),
    "status": ("headway.launch.status", "what a gateway is doing"),
    "ledger": ("headway.rollout.ledger.commands.main", "look into a ledger, requeue, export"),
    "weights": ("weight_sync.commands.main", "list, prove, compare, delete published versions"),
    "pin": ("headway.launch.pin", "hold a version while others are published"),
    "rollback": ("headway.launch.rollback", "serve an earlier version until the next one"),
    "drain": ("headway.launch.drain", "take a generation server out of traffic"),
    "detach": ("headway.launch.detach", "end a consumer that will not come back"),
}


def entry() -> NoReturn:
    """The console script."""
    run_command(main, sys.argv[1:])


def main(argv: Sequence[str]) -> None:
    """Hand over to a command."""
    if not argv or argv[0] in ("-h", "--help"):
        sys.stdout.write(usage())
        return
    if argv[0] == "--version":
        sys.stdout.write(f"headway {__version__}\n")
        return
    name, *rest = argv
    if name not in COMMANDS:
        raise ConfigError(f"no command {name!r}; known: {', '.join(COMMANDS)}")
    module, _ = COMMANDS[name]
    import_main(module)(rest)


def usage() -> str:
    """The help text."""
    lines = [f"  {name:<11} {text}" for name, (_, text) in COMMANDS.items()]
    return "\n".join(["usage: headway COMMAND [options]", "", *lines, ""])


if __name__ == "__main__":
    entry()
