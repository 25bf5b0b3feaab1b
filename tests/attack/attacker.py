"""Somebody who wants others to lose their service: random attacks on gateways and their servers.

    python -m tests.attack.attacker --urls GATEWAY [GATEWAY ...] --connections 4 --per-s 100

On so many connections it sends small requests with something wrong in them, so many a second at most; on
one more, requests that are large or long to judge; and now and then it floods somebody. It goes on until
it is told to end (SIGTERM), and then prints one JSON line: how many requests were `refused` (4xx),
`answered` (2xx), `overloaded` (429 and 5xx) and `unanswered` (refused or cut connections, dead
processes), and what it flooded with. Without `--token` it attacks whom nothing protects; what it submits
is its own consumer's.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import httpx

from headway.contracts.http import paths
from headway.runtime.secret import authorization
from tests.attack.corpus import JUDGEMENTS, SUBMISSIONS, TO_THE_SERVER, asking, judging
from tests.attack.floods import FLOODS
from tests.attack.mutations import EVIL, places, replaced

DEADLINE_S = 20.0
LOOK_S = 2.0
"""From one look at who is there to the next."""
FLOOD_S = 3.0
"""From one flood to the next."""
SMALL = (
    (paths.ROLLOUTS, asking({"prompt": {"text": "1"}})),
    (paths.ROLLOUTS_CANCEL, {"rollout_ids": ["attack-0"]}),
    (paths.REWARDS_SCORE, judging("exact", "1", {"answer": "1"}, pattern="[0-9]")),
)
SMALL_VALUES = [value for value in EVIL if len(repr(value)) < 3_000]
BURN = judging(
    "code", "def f(x):\n    while True: pass", {"test_list": ["assert f(1) == 1"]}, cpu_s=1.0
)
SLEEP = judging(
    "code",
    "import time\ndef f(x):\n    time.sleep(60)",
    {"test_list": ["assert f(1) == 1"]},
    cpu_s=1.0,
)


@dataclass(frozen=True)
class Attack:
    """A request that is ready to be sent."""

    whom: str
    path: str
    body: bytes


def large_attacks() -> list[Attack]:
    """Encoded once: attackers need not be slow."""
    to_gateways = [
        *((paths.ROLLOUTS, body) for body, _, _ in SUBMISSIONS.values()),
        *((paths.REWARDS_SCORE, body) for body in (*JUDGEMENTS.values(), BURN, SLEEP)),
    ]
    to_servers = [(path, body) for path, body, _ in TO_THE_SERVER.values()]
    return [
        Attack(whom, path, json.dumps(body).encode())
        for whom, attacks in (("gateway", to_gateways), ("server", to_servers))
        for path, body in attacks
    ]


def small_attack(rng: random.Random) -> Attack:
    """A request with one value replaced by a small one."""
    path, body = rng.choice(SMALL)
    place = rng.choice([place for place in places(body) if place[-1:] != ("consumer",)])
    body = replaced(body, place, rng.choice(SMALL_VALUES))
    return Attack("gateway", path, json.dumps(body).encode())


@dataclass
class Attacker:
    """All connections of one."""

    urls: Sequence[str]
    token: str | None
    seed: int
    counts: Counter[str] = field(default_factory=Counter)
    _servers: list[str] = field(default_factory=list)
    _over: threading.Event = field(default_factory=threading.Event)

    def end(self) -> None:
        """Soon."""
        self._over.set()

    def attack(self, connections: int, per_s: float) -> None:
        """Until `end`.

        Args:
            per_s: small requests a second over all connections, at most.
        """
        works: list[Callable[[], None]] = [self._look, self._flood, self._send_large]
        works += [partial(self._send_small, at, connections / per_s) for at in range(connections)]
        threads = [threading.Thread(target=work) for work in works]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _look(self) -> None:
        rng = random.Random(self.seed)
        headers = authorization(self.token)
        while not self._over.wait(LOOK_S if self._servers else 0.1):
            with suppress(httpx.HTTPError, KeyError, ValueError):
                url = rng.choice(self.urls) + paths.STATUS
                answer = httpx.get(url, headers=headers, timeout=DEADLINE_S, trust_env=False)
                self._servers = [server["url"] for server in answer.json()["servers"]]

    def _send_small(self, at: int, every_s: float) -> None:
        rng = random.Random(f"{self.seed}-{at}")
        due = time.monotonic()
        with self._client() as http:
            while not self._over.wait(max(0.0, due - time.monotonic())):
                due = max(due, time.monotonic() - every_s) + every_s
                self._send(http, rng, small_attack(rng))

    def _send_large(self) -> None:
        rng = random.Random(f"{self.seed}-large")
        attacks = large_attacks()
        with self._client() as http:
            while not self._over.is_set():
                self._send(http, rng, rng.choice(attacks))

    def _client(self) -> httpx.Client:
        headers = {**authorization(self.token), "content-type": "application/json"}
        return httpx.Client(timeout=DEADLINE_S, trust_env=False, headers=headers)

    def _send(self, http: httpx.Client, rng: random.Random, attack: Attack) -> None:
        urls = self.urls if attack.whom == "gateway" else self._servers
        if not urls:
            return
        try:
            answer = http.post(rng.choice(urls) + attack.path, content=attack.body)
            status = answer.status_code
        except httpx.HTTPError:
            self.counts["unanswered"] += 1
            return
        if status == 429 or status >= 500:
            self.counts["overloaded"] += 1
        else:
            self.counts["refused" if status >= 400 else "answered"] += 1

    def _flood(self) -> None:
        rng = random.Random(self.seed + 1)
        while not self._over.wait(FLOOD_S):
            address = httpx.URL(rng.choice([*self.urls, *self._servers]))
            flood = rng.choice(FLOODS)
            with (
                suppress(OSError),
                socket.create_connection((address.host, address.port or 80), DEADLINE_S) as peer,
            ):
                self.counts[f"flood: {flood.__name__}"] += 1
                flood(peer)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--urls", nargs="+", required=True, help="gateways")
    parser.add_argument("--connections", type=int, default=4)
    parser.add_argument("--per-s", type=float, default=100.0, help="small requests, at most")
    parser.add_argument("--token", default=None)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    attacker = Attacker(options.urls, options.token, options.seed)
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, lambda *_: attacker.end())
    began = time.monotonic()
    attacker.attack(options.connections, options.per_s)
    result: dict[str, Any] = {"seconds": time.monotonic() - began, **attacker.counts}
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
