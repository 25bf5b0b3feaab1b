"""A fleet that grows and shrinks under load, and gateways that share a ledger; all real processes.

The servers run the fake backend, whose tokens are a function of the prompt: whatever was interrupted,
moved or restarted must come out as long as it was asked for.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.fleet.resume import generate_whole
from headway.contracts.config.gateway import GatewayConfig
from headway.contracts.config.server import ServerConfig
from headway.contracts.http.servers import ServerStatus
from headway.contracts.types import RolloutRequest
from headway.launch.cli import main as headway
from headway.launch.launchers.preload import child_environment
from headway.runtime.config import dump_yaml, validate_config
from headway.runtime.inference_client import RemoteInferenceEngine
from headway.runtime.process import Process, ProcessSpec
from tests.integration.builders import generation, rollout
from tests.kubernetes_api import KubernetesApi, serving
from tests.processes import start_process
from tests.unit.gateway.ledger_suite import RedisServer
from tests.waiting import eventually

pytestmark = pytest.mark.extended

LIMIT_S = 60.0
TOKENS = 60
NUM_STREAMS = 8
TOKEN_LATENCY_S = 0.01


class Site:
    """Gateways and servers, started and ended one by one."""

    def __init__(self, folder: Path, model_dir: Path, ledger: str) -> None:
        self._folder = folder
        self._model_dir = model_dir
        self._ledger = ledger
        self._processes: dict[str, Process] = {}
        self._clients: list[RemoteInferenceEngine] = []

    def start_gateway(self, name: str, **executor: Any) -> str:
        """Its URL, once it answers."""
        tree = {
            "service": self._service(name),
            "tokenizer": str(self._model_dir),
            "ledger": self._ledger,
            "fleet": {"lease_s": 3.0},
            "executor": {"lease_s": 3.0, **executor},
        }
        config = validate_config(GatewayConfig, tree)
        self._start(name, ["headway.launch.cli", "gateway"], config)
        return self.process(name).wait_ready(LIMIT_S)

    def start_server(self, name: str, *gateways: str, latency_s: float = TOKEN_LATENCY_S) -> None:
        """Begin to start; it is there when it has reported itself."""
        tree = {
            "service": self._service(name),
            "model": {"path": str(self._model_dir)},
            "backend": {"type": "fake", "vocab_size": 10, "token_latency_s": latency_s},
            "gateway": list(gateways),
            "heartbeat_s": 0.2,
        }
        self._start(name, ["inference_server"], validate_config(ServerConfig, tree))

    def url(self, name: str) -> str:
        return self.process(name).wait_ready(LIMIT_S)

    def process(self, name: str) -> Process:
        return self._processes[name]

    def kill(self, name: str, how: signal.Signals = signal.SIGKILL) -> None:
        """Returns once its process is gone."""
        os.kill(self.process(name).pid, how)
        assert self.process(name).wait(LIMIT_S) in (-how, 130), self.process(name).log_tail()

    def connect(self, url: str) -> RemoteInferenceEngine:
        client = RemoteInferenceEngine(url, connect_timeout_s=LIMIT_S)
        client.initialize()
        self._clients.append(client)
        return client

    def close(self) -> None:
        for client in self._clients:
            client.destroy()
        for process in reversed(self._processes.values()):
            process.stop(10.0)

    def _service(self, name: str) -> dict[str, Any]:
        return {"port": 0, "ready_file": str(self._folder / f"{name}.ready.json")}

    def start_scaler(self, gateway: str, api: str) -> None:
        words = {"deployment": "headway-server", "namespace": "rl", "api": api, "every-s": "0.2"}
        flags = [part for name, word in words.items() for part in (f"--{name}", word)]
        self._run("scaler", ["headway.launch.cli", "scale", gateway, *flags])

    def _start(self, name: str, module: list[str], config: GatewayConfig | ServerConfig) -> None:
        file = self._folder / f"{name}.yaml"
        file.write_text(dump_yaml(config))
        self._run(name, [*module, "--config", str(file)])

    def _run(self, name: str, words: list[str]) -> None:
        spec = ProcessSpec(
            name=name,
            argv=[sys.executable, "-m", *words],
            log=self._folder / f"{name}.log",
            env=child_environment(1),
            ready_file=self._folder / f"{name}.ready.json",
        )
        self._processes[name] = start_process(spec)


@pytest.fixture
def site(tmp_path: Path, model_dir: Path) -> Iterator[Callable[[str], Site]]:
    """A site over a ledger; everything of it is ended after the test."""
    sites: list[Site] = []

    def make(ledger: str) -> Site:
        sites.append(Site(tmp_path, model_dir, ledger))
        return sites[-1]

    yield make
    for one in sites:
        one.close()


@pytest.fixture
def redis_address() -> Iterator[str]:
    if not RedisServer.is_installed():
        pytest.skip("redis-server is not installed: apt-get install redis-server")
    with tempfile.TemporaryDirectory() as folder:  # a socket's path must be short
        server = RedisServer(Path(folder))
        yield server.address()
        server.stop()


class Traffic(threading.Thread):
    """Requests and rollouts without a pause, until it is ended; nothing may fail."""

    def __init__(self, client: RemoteInferenceEngine, player: RemoteInferenceEngine) -> None:
        super().__init__()
        self._client = client
        self._runner = player
        self._is_over = threading.Event()
        self._failure: BaseException | None = None
        self.num_answers = 0
        self.num_groups = 0

    def run(self) -> None:
        try:
            asyncio.run(self._flow())
        except BaseException as error:  # noqa: BLE001 - the test's to judge
            self._failure = error

    def end(self) -> None:
        """Returns when all that was begun has been answered; raises what went wrong."""
        self._is_over.set()
        self.join(LIMIT_S)
        assert not self.is_alive()
        if self._failure is not None:
            raise self._failure

    async def _flow(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for number in range(NUM_STREAMS):
                tasks.create_task(self._stream(number))
            tasks.create_task(self._play())
        await self._client.aclose()

    async def _stream(self, number: int) -> None:
        count = 0
        while not self._is_over.is_set():
            count += 1
            request = generation(f"s{number}.{count}", TOKENS)
            response = await generate_whole(self._client.agenerate, str, request)
            assert response.stop_reason == "length"
            assert len(response.output_tokens) == len(response.output_logprobs) == TOKENS
            assert response.output_versions == [0] * TOKENS
            self.num_answers += 1

    async def _play(self) -> None:
        while not self._is_over.is_set():
            names = [f"r{self.num_groups + n}" for n in range(4)]
            requests = [rollout(name, max_new_tokens=TOKENS) for name in names]
            batch = await asyncio.to_thread(self._runner.rollout, requests, LIMIT_S)
            assert batch.rollout_ids == names
            assert all(t.loss_mask.sum() == TOKENS for t in batch.trajectories)
            self.num_groups += len(names)

    def until_more(self) -> None:
        """Something of each kind that began after this call was answered."""
        answers, groups = self.num_answers + 2 * NUM_STREAMS, self.num_groups + 8

        def is_more() -> bool:
            return not self.is_alive() or (
                self.num_answers >= answers and self.num_groups >= groups
            )

        eventually(is_more, LIMIT_S, "traffic flows")


def states(client: RemoteInferenceEngine) -> list[str]:
    return sorted(server.state for server in client.status().servers)


def server_at(client: RemoteInferenceEngine, url: str) -> ServerStatus:
    return next(server for server in client.status().servers if server.url == url)


def until_states(client: RemoteInferenceEngine, *wanted: str) -> None:
    eventually(lambda: states(client) == sorted(wanted), LIMIT_S, f"servers are {wanted}")


def test_one_server_becomes_four_and_one_again_under_load(
    site: Callable[[str], Site], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    here = site(str(tmp_path / "ledger.sqlite"))
    gateway = here.start_gateway("gateway")
    here.start_server("s0", gateway)
    client = here.connect(gateway)
    until_states(client, "ready")
    traffic = Traffic(here.connect(gateway), here.connect(gateway))
    traffic.start()
    try:
        traffic.until_more()
        for name in ("s1", "s2", "s3"):
            here.start_server(name, gateway)
        until_states(client, *["ready"] * 4)
        traffic.until_more()
        assert all(server.generated_tokens > 0 for server in client.status().servers)

        drained = server_at(client, here.url("s0"))
        headway(["drain", gateway, drained.server_id])
        assert capsys.readouterr().out == f"server {drained.server_id} is draining\n"
        reports = []

        def has_come_to_rest() -> bool:
            """Also what was on its way when it was told to drain, and reported later."""
            report = server_at(client, drained.url)
            reports.append(report.generated_tokens)
            return report.running == 0 and len(set(reports[-20:])) == 1 and len(reports) >= 20

        eventually(has_come_to_rest, LIMIT_S, "s0 has nothing to do")
        before = server_at(client, drained.url).generated_tokens
        traffic.until_more()
        after = server_at(client, drained.url)
        assert (after.state, after.generated_tokens) == ("draining", before)
        headway(["drain", gateway, drained.server_id, "--undo"])
        until_states(client, *["ready"] * 4)
        eventually(
            lambda: server_at(client, drained.url).generated_tokens > before, LIMIT_S, "it is back"
        )

        headway(["drain", gateway, drained.server_id])
        here.kill("s1", signal.SIGTERM)
        traffic.until_more()
        here.kill("s2", signal.SIGKILL)
        until_states(client, "draining", "lost", "lost", "ready")
        traffic.until_more()
    finally:
        traffic.end()
    audit = client.audit()
    assert (audit.lost, audit.duplicated, audit.counts.failed) == (0, 0, 0)
    assert audit.counts.delivered == audit.counts.submitted == 2 * traffic.num_groups


def test_a_deployment_grows_from_nothing_for_the_work_that_waits(
    site: Callable[[str], Site],
) -> None:
    here = site(":memory:")
    gateway = here.start_gateway("gateway")
    client = here.connect(gateway)

    def resized(count: int) -> None:
        for number in range(count):
            here.start_server(f"pod-{number}", gateway)

    client.submit([rollout(f"r{n}", max_new_tokens=TOKENS) for n in range(8)])
    cluster = KubernetesApi(0, resized)
    with serving(cluster) as api:
        here.start_scaler(gateway, api)
        assert len(client.wait(8, LIMIT_S).groups) == 8
        here.kill("scaler", signal.SIGTERM)
    assert cluster.sizes == [1]


def test_a_faster_server_does_more(site: Callable[[str], Site]) -> None:
    here = site(":memory:")
    gateway = here.start_gateway("gateway", max_concurrent=16, adapt=False)
    here.start_server("fast", gateway, latency_s=0.002)
    here.start_server("slow", gateway, latency_s=0.06)
    client = here.connect(gateway)
    until_states(client, "ready", "ready")
    requests = [rollout(f"r{n}", max_new_tokens=30, group_size=2) for n in range(64)]
    client.rollout(requests, LIMIT_S)  # a place that becomes free goes to who has less to do
    done = {name: server_at(client, here.url(name)).generated_tokens for name in ("fast", "slow")}
    assert done["fast"] > 1.5 * done["slow"]


def test_a_gateway_dies_and_another_ends_its_rollouts(
    site: Callable[[str], Site], redis_address: str
) -> None:
    here = site(redis_address)
    # Neither has room for all of it.
    one, other = (here.start_gateway(name, max_concurrent=12) for name in ("one", "other"))
    here.start_server("s0", one, other)
    here.start_server("s1", other, one)
    clients = [here.connect(one), here.connect(other)]
    for client in clients:
        until_states(client, "ready", "ready")
    names = [f"r{n}" for n in range(24)]
    requests = [rollout(name, max_new_tokens=200) for name in names]
    submit_to_both(clients, requests)
    eventually(lambda: all(c.status().running > 0 for c in clients), LIMIT_S, "both are playing")
    here.kill("one")
    survivor = clients[1]
    batch = survivor.wait(len(names), timeout=LIMIT_S)
    assert sorted(batch.rollout_ids) == sorted(names)
    until_states(survivor, "ready", "ready")  # also the one that had reported to the other
    audit = survivor.audit()
    assert (audit.lost, audit.duplicated, audit.counts.failed) == (0, 0, 0)
    assert audit.counts.delivered == audit.counts.submitted == 2 * len(names)


def test_an_abort_and_a_pause_reach_the_gateway_that_has_the_request(
    site: Callable[[str], Site], redis_address: str
) -> None:
    here = site(redis_address)
    one, other = (here.start_gateway(name) for name in ("one", "other"))
    here.start_server("s0", one, other)
    for url in (one, other):
        until_states(here.connect(url), "ready")
    with ThreadPoolExecutor(1) as background, httpx.Client(timeout=LIMIT_S) as http:

        def post(url: str, path: str, **body: Any) -> httpx.Response:
            answer = http.post(url + path, json=body)
            assert answer.status_code == 200, answer.text
            return answer

        def is_running() -> bool:
            return here.connect(other).status().servers[0].running > 0

        sampled = {"max_new_tokens": 5000, "ignore_eos": True}
        asked = background.submit(
            post, one, "/generate", rid="mine", input_ids=[3, 4], sampling_params=sampled
        )
        eventually(is_running, LIMIT_S, "the request runs")
        post(other, "/pause_generation", mode="in_place")
        eventually(lambda: http.get(one + "/health_generate").status_code == 503, LIMIT_S, "paused")
        assert not asked.done()
        post(one, "/continue_generation")
        eventually(lambda: http.get(other + "/health_generate").is_success, LIMIT_S, "goes on")
        post(other, "/abort_request", rid="mine")
        meta = asked.result(LIMIT_S).json()["meta_info"]
        assert meta["finish_reason"]["type"] == "abort" and meta["completion_tokens"] < 5000


def submit_to_both(clients: list[RemoteInferenceEngine], requests: list[RolloutRequest]) -> None:
    """Half of them each; and what one was told already is known to the other."""
    for client, part in zip(clients, (requests[::2], requests[1::2]), strict=True):
        assert all(handle.is_new for handle in client.submit(part))
    assert not any(handle.is_new for handle in clients[0].submit(requests[1::2]))
