"""Faults that `chaos.py` makes: one after the other, in an order drawn from a seed.

Every kind comes once before any comes again. `kill` is SIGKILL, `stop` is SIGSTOP for a while.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import psutil
from chaos_costs import Fault
from chaos_world import LEASE_S, MAX_SERVERS, MIN_SERVERS, World

MOMENTS = ("", "trained", "consumed", "saved", "announced", "published", "committed")
"""Moments of the consumer's step at which it is killed; the first one means now."""
STOP_S = (1.0, 5.0)
ABSENCE_S = (6.0, 12.0)
"""About as long as another consumer takes to start, or longer."""
OUTAGE_S = (1.3 * LEASE_S, 2.0 * LEASE_S)


class Faults:
    """Draws them, does them and remembers them."""

    def __init__(self, world: World, source: random.Random, every_s: float) -> None:
        self.done: list[Fault] = []
        self._world = world
        self._random = source
        self._every_s = every_s
        self._due = 0.0
        self._bag: list[Callable[[], str | None]] = []
        self._moments: list[str] = []

    def tick(self) -> None:
        """Do the next one, if it is time."""
        if time.monotonic() < self._due:
            return
        while (name := self._draw()()) is None:
            pass
        self.done.append(Fault(name, time.time()))
        self._due = time.monotonic() + self._random.uniform(0.5, 1.5) * self._every_s

    def _draw(self) -> Callable[[], str | None]:
        if not self._bag:
            self._bag = [
                self._kill_server,
                self._kill_servers,
                self._kill_gateway,
                self._kill_gateways,
                self._kill_consumer,
                self._kill_consumer,
                self._kill_redis,
                self._kill_worker,
                self._stop_any,
                self._stop_any,
                self._stop_redis,
                self._kill_consumer_of_stopped_gateways,
                self._replace_consumer,
                self._join,
                self._leave,
            ]
            self._random.shuffle(self._bag)
        return self._bag.pop()

    def _kill_server(self) -> str:
        self._world.kill(self._random.choice(self._world.servers))
        return "kill server"

    def _kill_servers(self) -> str:
        for name in self._world.servers:
            self._world.kill(name)
        return "kill all servers"

    def _kill_gateway(self) -> str:
        self._world.kill(self._random.choice(self._world.gateways))
        return "kill gateway"

    def _kill_gateways(self) -> str:
        for name in self._world.gateways:
            self._world.kill(name)
        return "kill both gateways"

    def _kill_consumer(self) -> str:
        if not self._moments:
            self._moments = self._random.sample(MOMENTS, len(MOMENTS))
        moment = self._moments.pop()
        if not moment:
            self._world.kill("consumer")
            return "kill consumer"
        self._world.let_consumer_die(moment)
        return f"kill consumer: {moment}"

    def _kill_redis(self) -> str:
        self._world.kill("redis")
        return "kill redis"

    def _kill_worker(self) -> str | None:
        """None: no verifier runs in a process of its own now."""
        pid = self._world.pid(self._random.choice(self._world.gateways))
        try:
            workers = psutil.Process(pid).children(recursive=True)
            if not workers:
                return None
            self._random.choice(workers).kill()
        except psutil.NoSuchProcess:
            return None
        return "kill worker"

    def _stop_any(self) -> str:
        world = self._world
        name = self._random.choice([*world.gateways, *world.servers, "redis", "consumer"])
        world.stop(name, self._random.uniform(*STOP_S))
        return "stop " + name.partition("-")[0]

    def _stop_redis(self) -> str:
        """Stop Redis for longer than any lease."""
        self._world.stop("redis", self._random.uniform(*OUTAGE_S))
        return "stop redis long"

    def _kill_consumer_of_stopped_gateways(self) -> str:
        """Kill the consumer while the gateways are stopped: when they wake, they may give out what
        is not waited for any more.
        """
        for name in self._world.gateways:
            self._world.stop(name, self._random.uniform(*STOP_S))
        self._world.kill("consumer")
        return "kill consumer of stopped gateways"

    def _replace_consumer(self) -> str | None:
        """The old one wakes when the new one is at work."""
        if not self._world.replace_consumer(self._random.uniform(*ABSENCE_S)):
            return None
        return "replace sleeping consumer"

    def _join(self) -> str | None:
        if len(self._world.servers) >= MAX_SERVERS:
            return None
        self._world.add_server()
        return "join"

    def _leave(self) -> str | None:
        if len(self._world.servers) <= MIN_SERVERS:
            return None
        self._world.dismiss(self._random.choice(self._world.servers))
        return "leave"
