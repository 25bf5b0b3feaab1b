"""Test of a back-end on this machine: a small attack, evaluated from outside."""

from __future__ import annotations

import asyncio
import os
import secrets
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from gateway.components.shared_services import Program
from gateway.sandbox.backends import Unavailable
from gateway.sandbox.pool import SandboxPool
from headway.contracts.errors import RewardOutage

MAX_FORKS = 24
"""More than any back-end allows."""

_WORKS = """
import json, math, decimal, collections, threading
started = []
thread = threading.Thread(target=started.append, args=(1,))
thread.start(); thread.join()
"""
_ATTACK = """
import os, socket, time
def read(path):
    return open(path).read()
def write(path):
    open(path, "a").write("!")
    return "written"
def call(port):
    socket.create_connection(("127.0.0.1", port), 0.5).close()
    return "connected"
def fork(count):
    for done in range(count):
        try:
            if os.fork() == 0:
                time.sleep(5); os._exit(0)
        except OSError:
            return done
    return count
"""


@dataclass
class Bait:
    """Targets of the attack."""

    secret: str
    path: str
    port: int
    connections: list[None] = field(default_factory=list)


async def probe(pool: SandboxPool) -> None:
    """Run a program that must work and one that must not.

    Raises:
        Unavailable: with what the back-end does not hold.
    """
    try:
        works = await pool.run(Program(_WORKS, calls=("started", "[json.dumps(1), math.pi > 3]")))
        if [result.get("value") for result in works.results] != [[1], ["1", True]]:
            raise Unavailable(f"a plain program ended with {works.status}: {works.stderr[-300:]}")
        async with _bait() as bait:
            calls = (f"read({bait.path!r})", f"write({bait.path!r})", f"call({bait.port})")
            attack = await pool.run(Program(_ATTACK, calls=(*calls, f"fork({MAX_FORKS})")))
            breaches = _breaches(bait, str(attack.results), attack.results[3:])
    except RewardOutage as outage:
        raise Unavailable(str(outage)) from outage
    if breaches:
        raise Unavailable(f"a program {', '.join(breaches)}")


def _breaches(bait: Bait, printed: str, forks: tuple[dict[str, object], ...]) -> list[str]:
    with open(bait.path) as file:
        content = file.read()
    found = {
        "read a file of this machine": bait.secret in printed,
        "wrote to a file of this machine": content != bait.secret,
        "reached a port of this machine": bool(bait.connections),
        "started processes without limit": not forks or forks[0].get("value") == MAX_FORKS,
    }
    return [breach for breach, is_true in found.items() if is_true]


@asynccontextmanager
async def _bait() -> AsyncIterator[Bait]:
    """A file that everybody may read and write, and a port that everybody may call."""
    with tempfile.NamedTemporaryFile("w", prefix="headway-probe-") as file:
        os.fchmod(file.fileno(), 0o666)
        bait = Bait(secrets.token_hex(8), file.name, 0)
        file.write(bait.secret)
        file.flush()

        def note(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            bait.connections.append(None)
            writer.close()

        async with await asyncio.start_server(note, "127.0.0.1", 0) as server:
            bait.port = server.sockets[0].getsockname()[1]
            yield bait
