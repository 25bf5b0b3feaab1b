"""Does anything get lost, done twice, done too late or stuck while processes die?

    python benchmarks/chaos.py --minutes 10

Two gateways share a Redis (append-only file); generation servers of the fake backend come and go; a
consumer submits, consumes, checkpoints and publishes versions. First a fault-free stretch, then as long
again under faults: every few seconds one of them, drawn from a seed, hits a random process: kill -9,
SIGSTOP for some seconds, a server more, a server less (SIGTERM), a reward worker killed. What is killed
is started again. In the end the faults stop, the consumer is told to end, and everybody is asked:

    lost, duplicated, max_staleness   the ledger's own audit, recomputed from its events
    trained_twice                     rollouts in two steps of the history that checkpoints kept
    over_stale                        steps that trained on something staler than eta
    stuck                             trajectories that are leased, or delivered and not consumed
    goodput_share                     trajectories/s consumed under faults over those without
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from measure import report

from headway.contracts.errors import ServiceError
from headway.launch.quickstart import task
from headway.runtime.inference_client import RemoteInferenceEngine

HERE = Path(__file__).parent
ETA = 2
READY_S = 60.0
SETTLE_S = 120.0


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
    world = World(folder, options.servers, random.Random(options.seed))
    try:
        found = run(world, options.minutes * 60.0, options.every_s)
    finally:
        world.end()
    if options.dir is None:
        shutil.rmtree(folder)
    share = found.pop("goodput_share")
    report("chaos", "goodput under faults / without", [share], seed=options.seed, **found)
    if any(found[name] for name in ("lost", "duplicated", "trained_twice", "over_stale", "stuck")):
        raise SystemExit("the promises do not hold")


def run(world: World, seconds: float, every_s: float) -> dict[str, Any]:
    """Both stretches, then the questions."""
    world.start()
    world.until_steps(3)
    calm = world.goodput(seconds / 2, lambda: None)
    faults: Counter[str] = Counter()
    due = time.monotonic()

    def tick() -> None:
        nonlocal due
        if time.monotonic() >= due:
            faults[world.fault()] += 1
            due = time.monotonic() + world.random.uniform(0.5, 1.5) * every_s
        world.repair()

    stormy = world.goodput(seconds / 2, tick)
    world.settle()
    return {
        "goodput_share": stormy / calm,
        "per_s": {"calm": round(calm, 2), "stormy": round(stormy, 2)},
        "faults": dict(faults),
        **world.questions(),
    }


class World:
    """All processes."""

    def __init__(self, folder: Path, servers: int, source: random.Random) -> None:
        self.random = source
        self._folder = folder
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._commands: dict[str, list[str]] = {}
        self._servers = [f"server-{n}" for n in range(servers)]
        self._born = servers
        self._stopped: dict[str, float] = {}
        self._redis_port, *gateway_ports = _free_ports(3)
        self._gateways = dict(zip(("gateway-0", "gateway-1"), gateway_ports, strict=True))
        self.urls = [f"http://127.0.0.1:{port}" for port in gateway_ports]

    def start(self) -> None:
        task.write_model(self._folder / "model", {})
        (self._folder / "run").mkdir(exist_ok=True)
        redis = ["redis-server", "--port", str(self._redis_port), "--dir", str(self._folder)]
        redis += ["--appendonly", "yes", "--appendfsync", "everysec", "--save", ""]
        self._launch("redis", [*redis, "--maxmemory-policy", "noeviction"])
        for name, port in self._gateways.items():
            self._launch(
                name, self._command("headway.launch.cli gateway", name, self._gateway(port))
            )
        for name in self._servers:
            self._launch_server(name)
        consumer = [sys.executable, str(HERE / "chaos_consumer.py"), "--urls", *self.urls]
        consumer += ["--dir", str(self._folder / "run"), "--eta", str(ETA)]
        self._launch("consumer", consumer)

    def _gateway(self, port: int) -> dict[str, Any]:
        return {
            "service": {"port": port},
            "tokenizer": str(self._folder / "model"),
            "ledger": f"redis://127.0.0.1:{self._redis_port}/0",
            "executor": {"lease_s": 3.0, "max_attempts": 50, "rollout_timeout_s": 60.0},
            "fleet": {
                "lease_s": 3.0,
                "quorum": 0.3,
                "straggler_s": 2.0,
                "update_timeout_s": 20.0,
                "commit_timeout_s": 10.0,
                "quarantine_s": 1.0,
                "server_wait_s": 60.0,
            },
        }

    def _launch_server(self, name: str) -> None:
        config = {
            "service": {"port": 0, "drain_timeout_s": 2.0},
            "model": {"path": str(self._folder / "model")},
            "backend": {"type": "fake", "vocab_size": 10, "token_latency_s": 0.02},
            "gateway": self.urls,
            "heartbeat_s": 0.5,
            "weights": {"allow": [str(self._folder / "run" / "weights")]},
        }
        self._launch(name, self._command("inference_server", name, config))

    def _command(self, module: str, name: str, config: dict[str, Any]) -> list[str]:
        file = self._folder / f"{name}.yaml"
        file.write_text(json.dumps(config))
        return [sys.executable, "-m", *module.split(), "--config", str(file)]

    def _launch(self, name: str, command: list[str]) -> None:
        self._commands[name] = command
        with (self._folder / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(command, stdout=log, stderr=log)

    def fault(self) -> str:
        """One fault; its name."""
        kind = self.random.choice(
            ["kill", "kill", "stop", "worker", "join", "leave", "kill-redis", "kill-consumer"]
        )
        if kind == "join" and len(self._servers) < 6:
            name = f"server-{self._born}"
            self._born += 1
            self._servers.append(name)
            self._launch_server(name)
            return "join"
        if kind == "leave" and len(self._servers) > 2:
            name = self.random.choice(self._servers)
            self._servers.remove(name)
            self._wake(name)
            self._processes[name].send_signal(signal.SIGTERM)
            return "leave"
        if kind == "worker":
            return self._kill_worker()
        if kind in ("kill-redis", "kill-consumer"):
            return self._kill(kind[5:])
        name = self.random.choice([*self._gateways, *self._servers])
        if kind == "stop":
            name = self.random.choice([*self._gateways, *self._servers, "redis", "consumer"])
            self._processes[name].send_signal(signal.SIGSTOP)
            self._stopped[name] = time.monotonic() + self.random.uniform(1.0, 5.0)
            return "stop " + name.partition("-")[0]
        return self._kill(name)

    def _kill(self, name: str) -> str:
        self._processes[name].kill()
        return "kill " + name.partition("-")[0]

    def _kill_worker(self) -> str:
        gateway = self._processes[self.random.choice(list(self._gateways))]
        try:
            workers = psutil.Process(gateway.pid).children(recursive=True)
            if workers:
                self.random.choice(workers).kill()
        except psutil.NoSuchProcess:
            pass  # it was killed a moment ago
        return "kill worker"

    def repair(self) -> None:
        """Wake what slept long enough, and start again what was killed."""
        now = time.monotonic()
        for name in [name for name, until in self._stopped.items() if until <= now]:
            self._wake(name)
        for name, process in list(self._processes.items()):
            if process.poll() is None:
                continue
            if name.startswith("server") and name not in self._servers:
                del self._processes[name]
            else:
                self._launch(name, self._commands[name])

    def _wake(self, name: str) -> None:
        self._stopped.pop(name, None)
        self._processes[name].send_signal(signal.SIGCONT)

    def goodput(self, seconds: float, tick: Callable[[], None]) -> float:
        """Trajectories consumed per second, while `tick` is called often."""
        began, before = time.monotonic(), self._rows()
        while time.monotonic() - began < seconds:
            tick()
            time.sleep(0.05)
        return (self._rows() - before) / (time.monotonic() - began)

    def _history(self) -> list[dict[str, Any]]:
        """The steps that count, in order."""
        steps: dict[int, dict[str, Any]] = {}
        file = self._folder / "run" / "trained.jsonl"
        for line in file.read_text().splitlines() if file.is_file() else ():
            try:
                entry = json.loads(line)
            except json.JSONDecodeError:
                continue  # its writer was killed
            steps[entry["step"]] = entry
        return [steps[step] for step in sorted(steps)]

    def _rows(self) -> int:
        return sum(entry["rows"] for entry in self._history())

    def until_steps(self, count: int) -> None:
        deadline = time.monotonic() + READY_S
        while len(self._history()) < count:
            if time.monotonic() > deadline:
                raise RuntimeError(f"the consumer did not get through {count} steps; see its log")
            time.sleep(0.1)

    def settle(self) -> None:
        """No more faults; the consumer ends after its step, and then nothing may move any more."""
        for name in list(self._stopped):
            self._wake(name)
        self.repair()
        (self._folder / "run" / "stop").touch()
        deadline = time.monotonic() + SETTLE_S
        while (code := self._processes["consumer"].poll()) != 0 and time.monotonic() < deadline:
            if code is not None:
                self.repair()
            time.sleep(0.2)
        client = RemoteInferenceEngine(self.urls)
        while time.monotonic() < deadline:
            try:
                counts = client.status().counts
                if not (counts.leased or counts.delivered):
                    break
            except ServiceError:
                pass
            self.repair_gateways()
            time.sleep(0.5)
        client.destroy()

    def repair_gateways(self) -> None:
        for name in (*self._gateways, *self._servers, "redis"):
            if self._processes[name].poll() is not None:
                self._launch(name, self._commands[name])

    def questions(self) -> dict[str, Any]:
        client = RemoteInferenceEngine(self.urls)
        audit = client.audit()
        client.destroy()
        history = self._history()
        times = Counter(name for entry in history for name in entry["ids"])
        return {
            "lost": audit.lost,
            "duplicated": audit.duplicated,
            "trained_twice": sum(count - 1 for count in times.values()),
            "over_stale": sum(entry["staleness"] > ETA for entry in history),
            "stuck": audit.counts.leased + audit.counts.delivered,
            "max_staleness": audit.max_staleness,
            "steps": len(history),
            "versions": history[-1]["version"] if history else 0,
            "requeues": audit.requeues,
            "counts": audit.counts.model_dump(),
        }

    def end(self) -> None:
        for process in self._processes.values():
            process.send_signal(signal.SIGCONT)
            process.kill()
        for process in self._processes.values():
            process.wait()


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
