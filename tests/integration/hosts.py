"""Hosts with addresses of their own on this machine: network namespaces on one bridge, in another one.

The tests' own process is on the bridge, too, as host 254.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from headway.launch.launchers.preload import child_environment
from headway.runtime.process import Process, ProcessSpec
from tests.integration.wire import Wire

NETWORK = "10.77.{}"
LIMIT_S = 30.0
NO_NETEM = "Error: Specified qdisc kind is unknown."


def can_make_hosts() -> bool:
    """True for root where iproute2 is installed."""
    return os.geteuid() == 0 and bool(shutil.which("ip")) and bool(shutil.which("tc"))


class Hosts:
    """Hosts by number, from 1, and what runs there."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._name = f"hw{os.getpid() % 100_000}"
        self._network = NETWORK.format(os.getpid() % 250)
        self._numbers: set[int] = set()
        self._processes: list[Process] = []
        self._wires: list[Wire] = []
        _do(f"ip netns add {self._name}")
        _do(f"ip -n {self._name} link add bridge type bridge")
        _do(f"ip -n {self._name} link set bridge up")
        _do(f"ip link add {self._name} type veth peer name here netns {self._name}")
        self._join(self._name, "here", 254, None)

    def address(self, host: int) -> str:
        return f"{self._network}.{host}"

    def add(self, host: int, delay_ms: int = 0, loss_percent: float = 0.0) -> None:
        """Add a host; what it sends comes late, and some of it not at all."""
        space = self.namespace(host)
        _do(f"ip netns add {space}")
        self._numbers.add(host)
        _do(f"ip -n {space} link set lo up")
        _do(f"ip link add name eth0 netns {space} type veth peer name p{host} netns {self._name}")
        if delay_ms or loss_percent:
            shape = f"netem delay {delay_ms}ms loss {loss_percent}% limit 100000"
            told = _try(f"tc -n {space} qdisc add dev eth0 root {shape}")
            assert told in ("", NO_NETEM), told
            if told:
                self._lay_wire(host, delay_ms, loss_percent)
        self._join("eth0", f"p{host}", host, space)

    def _lay_wire(self, host: int, delay_ms: int, loss_percent: float) -> None:
        """Replace the two ends of a host's link."""
        space = self.namespace(host)
        _do(f"ip -n {space} link delete eth0")
        near, far = f"{self._name}n{host}", f"{self._name}f{host}"
        self._wires.append(Wire(near, far, delay_ms, loss_percent))
        _do(f"ip link set {near} netns {space} name eth0")
        _do(f"ip link set {far} netns {self._name} name p{host}")

    def cut(self, host: int) -> None:
        """Let nothing through to a host, or from it."""
        _do(f"ip -n {self._name} link set p{host} down")

    def mend(self, host: int) -> None:
        """Undo `cut`."""
        _do(f"ip -n {self._name} link set p{host} up")

    def start(
        self,
        host: int,
        name: str,
        words: Sequence[str],
        ready_file: Path | None = None,
        **environment: str,
    ) -> Process:
        """Start a module, or with a first word that is a path a program, on a host."""
        program = list(words) if "/" in words[0] else [sys.executable, "-m", *words]
        spec = ProcessSpec(
            name=name,
            argv=["ip", "netns", "exec", self.namespace(host), *program],
            log=self._folder / f"{name}.log",
            env={**child_environment(1), **environment},
            ready_file=ready_file,
        )
        process = Process(spec)
        self._processes.append(process)
        return process

    def close(self) -> None:
        for process in reversed(self._processes):
            process.stop(10.0)
        for wire in self._wires:
            wire.close()
        for host in self._numbers:
            _do(f"ip netns delete {self.namespace(host)}")
        _do(f"ip link delete {self._name}")
        _do(f"ip netns delete {self._name}")

    def namespace(self, host: int) -> str:
        """Name of a host's network namespace."""
        return f"{self._name}h{host}"

    def _join(self, link: str, port: str, host: int, space: str | None) -> None:
        _do(f"ip -n {self._name} link set {port} master bridge up")
        inside = "ip" if space is None else f"ip -n {space}"
        _do(f"{inside} address add {self.address(host)}/24 dev {link}")
        _do(f"{inside} link set {link} up")


@contextmanager
def hosts_of_a_network(folder: Path) -> Iterator[Hosts]:
    """Make them; all of it is gone at the end."""
    hosts = Hosts(folder)
    try:
        yield hosts
    finally:
        hosts.close()


def _do(command: str) -> None:
    told = _try(command)
    assert not told, f"{command}: {told}"


def _try(command: str) -> str:
    """What a command says of its failure; empty if it did it."""
    done = subprocess.run(
        command.split(), capture_output=True, text=True, check=False, timeout=LIMIT_S
    )
    return (done.stderr.strip() or "it failed") if done.returncode else ""
