"""A run over nine hosts with delay and loss: a link is cut, a host goes for good, and one is added."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headway.contracts.config.base import Config
from headway.contracts.config.launch import LaunchConfig
from headway.launch.launchers.roles import gateway_config, server_config, trainer_config
from headway.runtime.config import dump_yaml
from headway.runtime.inference_client import RemoteInferenceEngine
from tests.integration.driving import steps_of
from tests.integration.hosts import Hosts, can_make_hosts, hosts_of_a_network
from tests.integration.real_engines import show
from tests.waiting import eventually

pytestmark = [
    pytest.mark.extended,
    pytest.mark.deploy,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not can_make_hosts(), reason="it wants root, and iproute2"),
    pytest.mark.skipif(shutil.which("redis-server") is None, reason="no redis-server"),
]
REDIS, GATEWAYS, TRAINERS, SERVERS, NEW_SERVER = 1, (2, 3), (4, 5), (6, 7, 8), 9
PORT, RENDEZVOUS, WEIGHTS = 8000, 29500, 29600
LIMIT_S = 120.0
CUT_S = 20.0
DELAY_MS, LOSS_PERCENT = 25, 0.5
"""Of each host's way out: a call and its answer cross one each."""
STEPS = 16


class Site:
    """The processes of a run, each on its own host."""

    def __init__(self, hosts: Hosts, folder: Path, config: LaunchConfig) -> None:
        self.hosts = hosts
        self._folder = folder
        self._config = config
        for host in (REDIS, *GATEWAYS, *TRAINERS, *SERVERS):
            hosts.add(host, DELAY_MS, LOSS_PERCENT)
        redis = shutil.which("redis-server") or ""
        words = [redis, "--bind", hosts.address(REDIS), "--protected-mode", "no", "--save", ""]
        words += ["--appendonly", "yes", "--dir", str(folder)]
        hosts.start(REDIS, "redis", words)
        for host in GATEWAYS:
            self._start(host, "gateway", ["headway.launch.cli", "gateway"], gateway_config)
        for host in SERVERS:
            self.start_server(host)

    @property
    def gateways(self) -> list[str]:
        return [f"http://{self.hosts.address(host)}:{PORT}" for host in GATEWAYS]

    def start_server(self, host: int) -> None:
        self._start(
            host,
            "server",
            ["inference_server"],
            lambda config, ready: server_config(config, None, ready).model_copy(
                update={"gateway": tuple(self.gateways)}
            ),
        )

    def start_trainer(self) -> None:
        """One rank on each of its hosts."""
        config = trainer_config(self._config, None)
        rollout = config.rollout.model_copy(update={"url": tuple(self.gateways)})
        file = self._write("trainer", config.model_copy(update={"rollout": rollout}))
        for rank, host in enumerate(TRAINERS):
            words = ["torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
            words += ["--node-rank", str(rank), "--rdzv-backend", "c10d", "--rdzv-id", "run"]
            words += ["--rdzv-endpoint", f"{self.hosts.address(TRAINERS[0])}:{RENDEZVOUS}"]
            words += ["--local-addr", self.hosts.address(host)]
            # All hosts have one name here, by which torchrun would know the first one.
            words += ["--rdzv-conf", f"is_host={rank == 0}"]
            words += ["-m", "trainer", "--config", str(file)]
            self.hosts.start(host, f"trainer-{host}", words, GLOO_SOCKET_IFNAME="eth0")

    def _start(
        self,
        host: int,
        role: str,
        words: list[str],
        make: Callable[[LaunchConfig, Path], Config],
    ) -> None:
        name = f"{role}-{host}"
        ready = self._folder / f"{name}.ready.json"
        service = ["--service.host", self.hosts.address(host), "--service.port", str(PORT)]
        file = self._write(name, make(self._config, ready))
        words = [*words, "--config", str(file), *service]
        self.hosts.start(host, name, words, ready, GLOO_SOCKET_IFNAME="eth0")

    def _write(self, name: str, config: Config) -> Path:
        file = self._folder / f"{name}.yaml"
        file.write_text(dump_yaml(config))
        return file


def over(transport: str, hosts: Hosts, folder: Path) -> dict[str, Any]:
    """Settings of the transport."""
    address = hosts.address(TRAINERS[0])
    if transport == "http":
        return {"type": "http", "root": str(folder / "weights"), "host": address, "port": WEIGHTS}
    return {"type": "collective", "host": address, "port": WEIGHTS}


@pytest.mark.parametrize("transport", ["http", "collective"])
def test_a_run_outlives_its_network(
    transport: str, tmp_path: Path, make_config: Callable[..., LaunchConfig]
) -> None:
    with hosts_of_a_network(tmp_path) as hosts:
        made = make_config(
            steps=STEPS,
            num_servers=3,
            num_trainer_ranks=2,
            weight_sync=over(transport, hosts, tmp_path),
        )
        gateway = made.gateway.model_copy(
            update={"ledger": f"redis://{hosts.address(REDIS)}:6379/0?prefix=run"}
        )
        opened = {
            name: section.model_copy(
                update={"service": section.service.model_copy(update={"allow_anonymous": True})}
            )
            for name, section in (("gateway", gateway), ("server", made.server))
        }
        config = made.model_copy(update=opened)
        site = Site(hosts, tmp_path, config)
        site.start_trainer()
        client = RemoteInferenceEngine(site.gateways[0], connect_timeout_s=LIMIT_S)

        def until_steps(count: int) -> None:
            eventually(lambda: len(steps_of(config)) >= count, LIMIT_S, f"{count} steps are done")

        until_steps(2)
        begun = time.monotonic()
        hosts.cut(SERVERS[0])
        time.sleep(CUT_S)  # as long as the link is down
        hosts.mend(SERVERS[0])
        until_steps(5)
        hosts.cut(SERVERS[1])  # for good
        hosts.add(NEW_SERVER, DELAY_MS, LOSS_PERCENT)
        site.start_server(NEW_SERVER)
        until_steps(STEPS)
        seconds = time.monotonic() - begun

        def states() -> list[str]:
            return sorted(server.state for server in client.status().servers)

        eventually(lambda: states().count("ready") == 3, LIMIT_S, "three servers are ready")
        audit = client.audit()
        assert (audit.lost, audit.duplicated) == (0, 0)
        steps = steps_of(config)
        assert [step["step"] for step in steps] == list(range(STEPS))
        assert max(step["staleness_max"] for step in steps) <= config.trainer.rollout.max_staleness
        client.destroy()
        rate = (STEPS - 2) * 16 / seconds
        show(f"{transport}, {2 * DELAY_MS} ms and {2 * LOSS_PERCENT} % lost: {rate:.1f}/s")
