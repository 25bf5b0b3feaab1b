"""A gateway and two servers that can be found in any state of a publication, and what was seen of them.

Everything that serves is watched all the time: which version, with which digest. Rollouts are played
all the time. What was seen is compared, in the end, with what trainers have published.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import torch

from headway.contracts.config.launch import LaunchConfig
from headway.contracts.config.model import ModelConfig
from headway.contracts.config.weight_sync import ReceiverConfig
from headway.contracts.http.paths import SERVERS as SERVERS_PATH
from headway.contracts.http.paths import STATUS, WEIGHTS, WEIGHTS_HELD
from headway.contracts.http.servers import ServerStatus
from headway.contracts.http.status import StatusResponse
from headway.contracts.http.weights import WeightRecord, WeightStatus
from headway.contracts.types import LLMResponse
from headway.launch.launchers.local import LocalRun
from headway.runtime.inference_client import RemoteInferenceEngine
from tests.integration.builders import generation, rollout
from tests.integration.publishing_trainer import LIMIT_S, Plan, Sync, Trainer, weights
from tests.integration.traps import Traps, is_stopped
from tests.processes import template
from tests.waiting import eventually
from weight_sync.manifest import MANIFEST_NAME, bytes_of, parse_manifest
from weight_sync.model_dir import load_model

ROOT = Path(__file__).parents[2]
SERVERS = ("server-0", "server-1")
LOOK_S = 0.05
TRAFFIC_S = 0.2
NUM_GREEDY = 12
TOKENS = 50
"""Of every sequence in the traffic."""


class TrappedRun(LocalRun):
    """`LocalRun` of the same programs, with traps, and servers that take versions from several places."""

    def __init__(self, config: LaunchConfig, traps: Path, origins: tuple[str, ...]) -> None:
        super().__init__(config, template())
        self._traps = traps
        self._origins = origins

    def _launch(self, name, command, config) -> None:
        kind = "gateway" if name == "gateway" else "server"
        if kind == "server":
            receiver: ReceiverConfig = config.weights.model_copy(update={"allow": self._origins})
            config = config.model_copy(update={"weights": receiver})
        program = [sys.executable, "-m", "tests.integration.trapped_service"]
        super()._launch(name, [*program, str(self._traps / name), kind], config)


class Sightings(threading.Thread):
    """Asks servers and gateway what serves, again and again."""

    def __init__(self, run: LocalRun, configs: Path) -> None:
        super().__init__(name="shared_reports", daemon=True)
        self.digests: dict[int, set[str]] = defaultdict(set)
        """Of every version that was ever said to serve or to be committed."""
        self.steps_back: list[str] = []
        self._newest: dict[tuple[str, int], int] = {}
        self._url = run.url
        self._configs = configs
        self._over = threading.Event()

    def run(self) -> None:
        with httpx.Client(timeout=0.5) as client:
            while not self._over.wait(LOOK_S):
                for name in SERVERS:
                    with suppress(OSError, ValueError, httpx.HTTPError):
                        ready = json.loads((self._configs / f"{name}.ready.json").read_text())
                        text = client.get(ready["url"] + STATUS).content
                        served = StatusResponse.model_validate_json(text).servers[0]
                        self._note(name, ready["pid"], served.version, served.digest)
                with suppress(httpx.HTTPError):
                    text = client.get(self._url + WEIGHTS).content
                    for record in _committed(WeightStatus.model_validate_json(text)):
                        # A gateway that is started again goes on where it was: no process id here.
                        self._note("gateway", 0, record.version, record.digest or "")

    def end(self) -> None:
        self._over.set()
        self.join()

    def _note(self, name: str, pid: int, version: int, digest: str) -> None:
        if digest:
            self.digests[version].add(digest)
        if version < self._newest.get((name, pid), 0):
            self.steps_back.append(f"{name} from {self._newest[name, pid]} to {version}")
        self._newest[name, pid] = version


class Misled(threading.Thread):
    """Tells a gateway of servers that belong to another one."""

    def __init__(self, fleet: Fleet, url: str) -> None:
        super().__init__(name="misled", daemon=True)
        self._fleet = fleet
        self._url = url
        self._over = threading.Event()

    def run(self) -> None:
        while not self._over.wait(LOOK_S):
            for name in SERVERS:
                with suppress(httpx.HTTPError):
                    facts = self._fleet.served(name).model_dump(exclude={"state", "reason"})
                    report = facts | {"server_id": name, "url": self._fleet.url(name)}
                    httpx.post(self._url + SERVERS_PATH, json=report, timeout=5.0)

    def end(self) -> None:
        self._over.set()
        self.join()


class Traffic(threading.Thread):
    """Submits rollouts until it is told to end; then all must have been answered."""

    def __init__(self, url: str, name: str) -> None:
        super().__init__(name="traffic", daemon=True)
        self._client = RemoteInferenceEngine(url, LIMIT_S)
        self._name = name
        self._ids: list[str] = []
        self._over = threading.Event()
        self._failure: Exception | None = None

    def run(self) -> None:
        try:
            while not self._over.wait(TRAFFIC_S):
                self._ids.append(f"{self._name}.{len(self._ids)}")
                self._client.submit([self._rollout(self._ids[-1])])
        except Exception as error:  # noqa: BLE001 - the test's to judge
            self._failure = error

    def end(self) -> list[list[int]]:
        """The versions of every answered sequence's tokens."""
        self._over.set()
        self.join()
        if self._failure is not None:
            raise self._failure
        batch = self._client.rollout([self._rollout(name) for name in self._ids], LIMIT_S)
        self._client.destroy()
        return [t.versions[t.loss_mask].tolist() for t in batch.trajectories]

    def _rollout(self, name: str):
        return rollout(name, max_new_tokens=TOKENS)


class Fleet:
    """What the cases are played on, one after the other."""

    def __init__(
        self,
        config: LaunchConfig,
        folder: Path,
        origins: tuple[str, ...],
        model_dir: str | None = None,
    ) -> None:
        self.folder = folder
        self.model_dir = model_dir
        """Of servers that have a model."""
        self.is_whole = False
        self._trainers: list[Trainer] = []
        self._num_cases = 0
        self.run = TrappedRun(config, folder / "traps", origins)
        self.run.start_gateway()
        self.run.start_servers()
        self.client = RemoteInferenceEngine(self.run.url, LIMIT_S)
        self.shared_reports = Sightings(self.run, Path(config.trainer.run_dir) / "configs")
        self.shared_reports.start()
        self.until(lambda: len(self.ready()) == len(SERVERS), "both servers are ready")
        self.is_whole = True

    def close(self) -> None:
        self.shared_reports.end()
        for trainer in self._trainers:
            trainer.end()
        self.client.destroy()
        for name in ("gateway", *SERVERS):
            self.go_on(name)
        self.run.stop()

    @contextmanager
    def case(self) -> Iterator[None]:
        """One that fails may leave anything behind."""
        self.is_whole = False
        yield
        self.is_whole = True

    def train(self, sync: Sync, traps: str = "trainer", **plan: Any) -> Trainer:
        """Start a trainer with weights of its own."""
        seed = len(self._trainers) + 1
        folder = str(self.folder / "traps" / traps)
        given = {"url": self.run.url, "model_dir": self.model_dir} | plan
        trainer = Trainer(Plan(sync=sync, seed=seed, traps=folder, **given))
        self._trainers.append(trainer)
        return trainer

    def traffic(self) -> Traffic:
        self._num_cases += 1
        traffic = Traffic(self.run.url, f"case-{self._num_cases}")
        traffic.start()
        return traffic

    def traps(self, name: str) -> Traps:
        return Traps(self.folder / "traps" / name)

    def pid(self, name: str) -> int:
        if name == "trainer":
            return self._trainers[-1].pid
        return self.run.process(name).pid

    def until_stopped(self, name: str) -> None:
        self.until(lambda: is_stopped(self.pid(name)), f"{name} is in its trap")

    def stop(self, name: str) -> None:
        os.kill(self.pid(name), signal.SIGSTOP)

    def go_on(self, name: str) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid(name), signal.SIGCONT)

    def kill(self, *names: str) -> None:
        """Kill -9; a supervisor then starts gateway and servers again."""
        for name in names:
            os.kill(self.pid(name), signal.SIGKILL)
        self.until(lambda: not any(map(self._is_running, names)), f"{names} are dead")
        self.run.watch()

    def _is_running(self, name: str) -> bool:
        if name == "trainer":
            return self._trainers[-1].is_running
        return self.run.process(name).exit_code() is None

    def url(self, name: str) -> str:
        return self.run.process(name).wait_ready(LIMIT_S)

    def served(self, name: str) -> ServerStatus:
        """What a server says of itself."""
        answer = httpx.get(self.url(name) + STATUS, timeout=5.0)
        return StatusResponse.model_validate_json(answer.content).servers[0]

    def state(self, name: str) -> str:
        """How the gateway sees it; empty if it does not."""
        url = self.url(name)
        known = [server.state for server in self.client.status().servers if server.url == url]
        return known[-1] if known else ""

    def ready(self) -> list[ServerStatus]:
        return [server for server in self.client.status().servers if server.state == "ready"]

    def committed(self) -> int:
        return self.client.status().version

    def kept(self) -> list[WeightRecord]:
        return self.client.weights().kept

    def generate(self, url: str, num_tokens: int) -> LLMResponse:
        """One greedy sequence, from the gateway or from a server."""

        async def ask() -> LLMResponse:
            client = RemoteInferenceEngine(url, LIMIT_S)
            answer = await client.agenerate(generation("direct", num_tokens, temperature=0.0))
            await client.aclose()
            client.destroy()
            return answer

        return asyncio.run(ask())

    def until_served(self, trainer: Trainer) -> None:
        """Both servers take traffic with exactly what it published, and the gateway has recorded it."""
        version, digest = trainer.version, trainer.digest

        def is_served() -> bool:
            status = self.client.status()
            here = [server for server in status.servers if server.state != "lost"]
            facts = {(server.state, server.version, server.digest) for server in here}
            return len(here) == len(SERVERS) and facts == {("ready", version, digest)}

        self.until(is_served, f"both servers serve version {version}")
        record = self.client.weights().committed
        assert record is not None
        assert (record.version, record.digest) == (version, digest)

    def check_held(self, name: str, trainer: Trainer) -> None:
        """What a server gives to peers is what the trainer published, bit by bit."""
        published = weights(trainer.plan.seed, self.model_dir)
        manifest = parse_manifest(self._held(name, trainer.version, MANIFEST_NAME), name)
        assert manifest.digest == trainer.digest
        assert {entry.name for entry in manifest.tensors} == published.keys()
        for entry in manifest.tensors[:2]:
            blob = self._held(name, trainer.version, entry.blob)
            assert blob == bytes(bytes_of(published[entry.name]))

    def check_tokens(self, name: str, trainer: Trainer) -> None:
        """What a server samples greedily is what the published weights say."""
        assert self.model_dir is not None
        answer = self.generate(self.url(name), NUM_GREEDY)
        wanted = greedy(trainer.plan.seed, self.model_dir, generation("same", 1).input_ids)
        assert answer.output_tokens == wanted
        assert answer.version_runs == [(trainer.version, 0, NUM_GREEDY)]

    def check_sightings(self) -> None:
        """One digest per version, one that a trainer published under this number; no step back."""
        self.check_digests()
        assert self.shared_reports.steps_back == []

    def check_digests(self) -> None:
        published = {(trainer.version, trainer.digest) for trainer in self._trainers}
        for version, digests in dict(self.shared_reports.digests).items():
            assert len(digests) == 1, f"version {version} was seen with several weights"
            assert {(version, digest) for digest in digests} <= published

    def until(self, condition: Callable[[], bool], what: str) -> None:
        eventually(condition, LIMIT_S, what)

    def _held(self, name: str, version: int, blob: str) -> bytes:
        path = WEIGHTS_HELD.format(version=version, blob=blob)
        return httpx.get(self.url(name) + path, timeout=LIMIT_S).raise_for_status().content


def greedy(seed: int, model_dir: str, prompt: tuple[int, ...]) -> list[int]:
    """What the model of a seed goes on with, one forward per token."""
    model = load_model(ModelConfig(path=model_dir)).eval()
    model.load_state_dict(weights(seed, model_dir), strict=False)
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(NUM_GREEDY):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def _committed(status: WeightStatus) -> list[WeightRecord]:
    return [] if status.committed is None else [status.committed]
