"""The processes of `chaos.py`: started, hit, woken and started again."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.contracts.errors import ServiceError
from headway.contracts.http.ledger import LedgerAudit
from headway.contracts.http.status import StatusResponse
from headway.launch.quickstart import task
from headway.runtime.inference_client import RemoteInferenceEngine

HERE = Path(__file__).parent
ETA = 2
GROUP = 4
LEASE_S = 3.0
HEDGE_S = 1.0
"""A sequence takes a third of that: if its server sleeps, another one runs it, too."""
MIN_SERVERS, MAX_SERVERS = 2, 6
OLD = "consumer (old)"
READY_S = 90.0
SETTLE_S = 120.0
STEPS_AGAIN = 3
"""Steps of the consumer after which it counts as working again."""


@dataclass(frozen=True)
class History:
    """Steps that the consumer trained on, as stored in its checkpoint."""

    steps: list[dict[str, Any]]

    @property
    def rows(self) -> int:
        """Trajectories."""
        return sum(step["rows"] for step in self.steps)


class World:
    """All processes."""

    def __init__(self, folder: Path, num_servers: int, num_attackers: int = 0) -> None:
        """Args:
        num_attackers: connections over which wrong requests come all the time.
        """
        self.exits: Counter[str] = Counter()
        """Processes that ended without being killed: a gateway that found no Redis, for example."""
        self.servers = [f"server-{n}" for n in range(num_servers)]
        """Names of the servers that should run."""
        self._folder = folder
        self._run = folder / "run"
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._commands: dict[str, list[str]] = {}
        self._num_born = num_servers
        self._num_replaced = 0
        self._stopped: dict[str, float] = {}
        self._num_attackers = num_attackers
        self._attacker: subprocess.Popen[bytes] | None = None
        self._redis_port, *ports = _free_ports(3)
        self._gateway_ports = dict(zip(("gateway-0", "gateway-1"), ports, strict=True))
        self._urls = [f"http://127.0.0.1:{port}" for port in ports]

    @property
    def gateways(self) -> list[str]:
        """Their names."""
        return list(self._gateway_ports)

    @property
    def ledger(self) -> str:
        """URL of the ledger that the gateways share."""
        return f"redis://127.0.0.1:{self._redis_port}/0"

    def start(self) -> None:
        task.write_model(self._folder / "model", {})
        self._run.mkdir(exist_ok=True)
        redis = ["redis-server", "--port", str(self._redis_port), "--dir", str(self._folder)]
        redis += ["--appendonly", "yes", "--appendfsync", "everysec", "--save", ""]
        self._launch("redis", [*redis, "--maxmemory-policy", "noeviction"])
        for name, port in self._gateway_ports.items():
            command = self._command("headway.launch.cli gateway", name, self._gateway(port))
            self._launch(name, command)
        for name in self.servers:
            self._launch_server(name)
        self._launch("consumer", self._consumer())
        if self._num_attackers:
            command = [sys.executable, "-m", "tests.attack.attacker", "--urls", *self._urls]
            command += ["--connections", str(self._num_attackers)]
            self._attacker = subprocess.Popen(
                ["nice", "-n", "19", *command], cwd=HERE.parent, stdout=subprocess.PIPE
            )

    def end_attack(self) -> dict[str, float]:
        """End the attackers and return what they measured."""
        if self._attacker is None:
            return {}
        self._attacker.terminate()
        printed, _ = self._attacker.communicate(timeout=READY_S)
        self._attacker = None
        counts: dict[str, float] = json.loads(printed)
        return counts

    def kill(self, name: str) -> None:
        """SIGKILL; `repair` starts it again."""
        self._processes[name].kill()

    def stop(self, name: str, seconds: float) -> None:
        """SIGSTOP; `repair` wakes it after that."""
        self._processes[name].send_signal(signal.SIGSTOP)
        self._stopped[name] = time.monotonic() + seconds

    def replace_consumer(self, seconds: float) -> bool:
        """SIGSTOP, and another one is started meanwhile; false if there is no one to replace."""
        old = self._processes["consumer"]
        is_old_there = OLD in self._processes and self._processes[OLD].poll() is None
        if is_old_there or old.poll() is not None:
            return False
        self._processes[OLD] = old
        self.stop(OLD, seconds)
        self._stopped.pop("consumer", None)
        self._num_replaced += 1
        self._launch("consumer", self._consumer())
        return True

    def let_consumer_die(self, moment: str) -> None:
        """It kills itself when it comes to this point of a step."""
        partial = self._run / "die-at.partial"
        partial.write_text(moment)
        partial.replace(self._run / "die-at")

    def pid(self, name: str) -> int:
        return self._processes[name].pid

    def add_server(self) -> None:
        name = f"server-{self._num_born}"
        self._num_born += 1
        self.servers.append(name)
        self._launch_server(name)

    def dismiss(self, name: str) -> None:
        """SIGTERM: it drains and goes."""
        self.servers.remove(name)
        self._wake(name)
        self._processes[name].terminate()

    def repair(self) -> None:
        """Wake what slept long enough, and start again what has ended."""
        now = time.monotonic()
        for name in [name for name, until in self._stopped.items() if until <= now]:
            self._wake(name)
        for name, process in list(self._processes.items()):
            code = process.poll()
            if code is None:
                continue
            if code not in (0, -signal.SIGKILL):
                self.exits[f"{name.partition('-')[0]}: {code}"] += 1
            if name == OLD or (name.startswith("server") and name not in self.servers):
                del self._processes[name]
            elif name != "consumer" or code != 0:
                self._launch(name, self._commands[name])

    def until_steps(self, count: int) -> None:
        deadline = time.monotonic() + READY_S
        while len(self.history().steps) < count:
            if time.monotonic() > deadline:
                raise RuntimeError(f"the consumer did not get through {count} steps; see its log")
            self.repair()
            time.sleep(0.1)

    def calm_down(self) -> None:
        """No more faults: who sleeps is woken, who was dismissed goes, and steps are done again."""
        for name in list(self._stopped):
            self._wake(name)
        (self._run / "die-at").unlink(missing_ok=True)
        self._until(lambda: not self._leaving(), time.monotonic() + SETTLE_S)
        self.until_steps(len(self.history().steps) + STEPS_AGAIN)

    def settle(self) -> StatusResponse:
        """The consumer ends after a last step, and then all that can move may do so; what is left after
        `SETTLE_S`."""
        deadline = time.monotonic() + SETTLE_S
        (self._run / "stop").touch()
        self._until(lambda: self._processes["consumer"].poll() == 0, deadline)
        return self._until_still(deadline)

    def _leaving(self) -> list[str]:
        """Processes that are to end by themselves."""
        servers = [name for name in self._processes if name.startswith("server")]
        leaving = [name for name in servers if name not in self.servers]
        return [*leaving, OLD] if OLD in self._processes else leaving

    def _until(self, is_over: Callable[[], bool], deadline: float) -> None:
        while not is_over():
            if time.monotonic() > deadline:
                waited_for = ["consumer", *self._leaving()]
                raise RuntimeError(f"not all of {waited_for} ended within {SETTLE_S:g} s; see logs")
            self.repair()
            time.sleep(0.1)

    def _until_still(self, deadline: float) -> StatusResponse:
        client = RemoteInferenceEngine(self._urls)
        try:
            while True:
                status = client.status()
                counts = status.counts
                is_still = not (counts.leased or counts.delivered or self.startable(status))
                if is_still or time.monotonic() > deadline:
                    return status
                time.sleep(0.2)
        except ServiceError as error:
            raise RuntimeError("the gateways do not answer; see their logs") from error
        finally:
            client.destroy()

    @staticmethod
    def startable(status: StatusResponse) -> int:
        """Return the number of queued trajectories that capacity allows to start."""
        return min(status.counts.queued, max(0, status.capacity // GROUP) * GROUP)

    def audit(self) -> LedgerAudit:
        """Return the ledger's audit."""
        client = RemoteInferenceEngine(self._urls)
        try:
            return client.audit()
        finally:
            client.destroy()

    def history(self) -> History:
        """The consumer's steps that its checkpoint holds: what it did after that does not count."""
        checkpoint = self._run / "checkpoint.json"
        num_steps = json.loads(checkpoint.read_text())["step"] if checkpoint.is_file() else 0
        steps: dict[int, dict[str, Any]] = {}
        file = self._run / "trained.jsonl"
        whole, _, _ = file.read_text().rpartition("\n") if num_steps else ("", "", "")
        for line in whole.splitlines():
            entry = json.loads(line)
            known = steps.get(entry["step"])
            if known is None or known["version"] <= entry["version"]:
                steps[entry["step"]] = entry
        return History([steps[step] for step in range(num_steps)])

    def acknowledged(self) -> set[str]:
        """Return the rollouts whose submission was acknowledged to the consumer."""
        targets = (self._run / "submitted").read_text().split()
        return {f"chaos.{at}" for at in range(max(map(int, targets)))}

    def end(self) -> None:
        if self._attacker is not None:
            self._attacker.kill()
            self._attacker.communicate()
        for process in self._processes.values():
            process.send_signal(signal.SIGCONT)
            process.kill()
        for process in self._processes.values():
            process.wait()

    def _wake(self, name: str) -> None:
        self._stopped.pop(name, None)
        self._processes[name].send_signal(signal.SIGCONT)

    def _gateway(self, port: int) -> dict[str, Any]:
        return {
            "service": {"port": port},
            "tokenizer": str(self._folder / "model"),
            "ledger": self.ledger,
            "executor": {"lease_s": LEASE_S, "max_attempts": 50, "rollout_timeout_s": 60.0},
            "fleet": {
                "lease_s": LEASE_S,
                "quorum": 0.3,
                "straggler_s": 0.5,
                "update_timeout_s": 20.0,
                "commit_timeout_s": 10.0,
                "quarantine_s": 1.0,
                "server_wait_s": 60.0,
                "hedge_after_s": HEDGE_S,
            },
        }

    def _consumer(self) -> list[str]:
        """A replacement publishes to a place of its own: the old one holds the lock of the other."""
        command = [sys.executable, str(HERE / "chaos_consumer.py"), "--urls", *self._urls]
        command += ["--dir", str(self._run), "--weights", f"weights-{self._num_replaced}"]
        return [*command, "--eta", str(ETA), "--group", str(GROUP)]

    def _launch_server(self, name: str) -> None:
        config = {
            "service": {"port": 0, "drain_timeout_s": 2.0},
            "model": {"path": str(self._folder / "model")},
            "backend": {"type": "fake", "vocab_size": 10, "token_latency_s": 0.02},
            "gateway": self._urls,
            "heartbeat_s": 0.5,
            "weights": {"allow": [str(self._run)]},
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


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports
