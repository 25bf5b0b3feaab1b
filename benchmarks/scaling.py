"""Measure a fleet's throughput with one and with four servers, and check that no rollout suffers.

    python benchmarks/scaling.py --seconds 20

Rollouts flow through a gateway without a pause while generation servers become four and one again. The
servers run the fake backend; each holds a fixed number of sequences, and a sequence takes a fixed time,
so a server's throughput is bounded (`bound_per_s`). More is always offered than all of them can take: the
gateway has to handle refusals. Sequences differ in length, from a quarter to seven quarters of the mean.

The value is trajectories/s with four servers over that with one; `per_s` are those of the three
phases, each after the fleet has become what it is. `joined_s` is counted from the start of a server's
process, `listed_s` from when the gateway knows it, both until it has generated its first token;
`drained_s` from the order to drain until nothing runs there. `failed` and `requeued` must be 0.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

from measure import report

from headway.contracts.config.base import ComponentConfig
from headway.contracts.config.sampling import SamplingConfig
from headway.contracts.http.servers import ServerStatus
from headway.contracts.types import Prompt, RolloutRequest
from headway.launch.quickstart import task
from headway.runtime.inference_client import RemoteInferenceEngine

T = TypeVar("T")

MOST = 4
READY_S = 90.0
POLL_S = 0.05
BATCH = 4
GOLDEN = 0.618034
"""Multiples of it, less their whole part, are spread evenly over [0, 1)."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each phase")
    parser.add_argument("--in-flight", type=int, default=32, help="sequences that a server holds")
    parser.add_argument("--tokens", type=int, default=40, help="of a sequence, in the mean")
    parser.add_argument("--token-latency-s", type=float, default=0.05)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="headway-", dir="/var/tmp") as folder:
        found = run(Site(Path(folder), options), options)
    ratio = found["per_s"][1] / found["per_s"][0]
    report(
        "scaling",
        f"trajectories/s with {MOST} servers over 1",
        [ratio],
        bound_per_s=round(bound_of(options), 2),
        **found,
    )
    if found["failed"] or found["requeued"]:
        raise SystemExit("rollouts failed or were begun again")


def bound_of(options: argparse.Namespace) -> float:
    """Trajectories/s that one server can do."""
    bound: float = options.in_flight / (options.tokens * options.token_latency_s)
    return bound


def run(site: Site, options: argparse.Namespace) -> dict[str, Any]:
    """The three phases."""
    with ExitStack() as stack:
        stack.callback(site.close)
        url = site.start_gateway()
        client = RemoteInferenceEngine(url)
        stack.callback(client.destroy)
        client.initialize()
        site.join("s0", client)
        load = Load(RemoteInferenceEngine(url), 2 * MOST * options.in_flight, options.tokens)
        stack.enter_context(load.flowing())
        settle_s = 2 * options.tokens * options.token_latency_s
        one = load.rate(settle_s, options.seconds)
        joins = in_parallel(site.join, [(f"s{n}", client) for n in range(1, MOST)])
        four = load.rate(settle_s, options.seconds)
        drains = [site.drain(f"s{n}", client) for n in range(1, MOST)]
        again = load.rate(settle_s, options.seconds)
    return {
        "per_s": [round(rate, 2) for rate in (one, four, again)],
        "joined_s": [round(join[0], 2) for join in joins],
        "listed_s": [round(join[1], 2) for join in joins],
        "drained_s": [round(seconds, 2) for seconds in drains],
        "trajectories": load.completed,
        "failed": load.failed,
        "requeued": load.requeued,
    }


class Site:
    """A gateway and its servers, each a process."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        self._folder = folder
        self._options = options
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._gateway_url = ""
        task.write_model(folder / "model", {})

    def start_gateway(self) -> str:
        """Its URL."""
        tree = {
            "tokenizer": str(self._folder / "model"),
            "ledger": str(self._folder / "ledger.sqlite"),
            "executor": {"max_concurrent": 2 * MOST * self._options.in_flight},
            "fleet": {"lease_s": 5.0},
        }
        self._start("gateway", ["headway.launch.cli", "gateway"], tree)
        self._gateway_url = self._url("gateway")
        return self._gateway_url

    def join(self, name: str, client: RemoteInferenceEngine) -> tuple[float, float]:
        """Seconds from the start, and from when the gateway knew it, to its first token."""
        began = time.monotonic()
        tree = {
            "model": {"path": str(self._folder / "model")},
            "backend": {
                "type": "fake",
                "vocab_size": 10,
                "token_latency_s": self._options.token_latency_s,
            },
            "max_in_flight": self._options.in_flight,
            "gateway": self._gateway_url,
            "heartbeat_s": 0.1,
        }
        self._start(name, ["inference_server"], tree)
        url = self._url(name)
        until(lambda: find(client, url))
        listed = time.monotonic()
        if name != "s0":  # nothing flows before the first one is there
            until(lambda: (server := find(client, url)) and server.generated_tokens)
        return time.monotonic() - began, time.monotonic() - listed

    def drain(self, name: str, client: RemoteInferenceEngine) -> float:
        """Seconds until it was empty; then it is ended."""
        url = self._url(name)
        server = until(lambda: find(client, url))
        began = time.monotonic()
        client.drain_server(server.server_id)
        until(lambda: (server := find(client, url)) and not server.running)
        drained_s = time.monotonic() - began
        process = self._processes.pop(name)
        process.terminate()
        process.wait(READY_S)
        return drained_s

    def close(self) -> None:
        for process in reversed(self._processes.values()):
            process.terminate()
            process.wait(READY_S)

    def _url(self, name: str) -> str:
        ready = self._folder / f"{name}.ready.json"
        process = self._processes[name]
        until(lambda: ready.is_file() or process.poll() is not None)
        if not ready.is_file():
            raise RuntimeError(f"{name} ended with {process.returncode}")
        url: str = json.loads(ready.read_text())["url"]
        return url

    def _start(self, name: str, module: list[str], tree: dict[str, Any]) -> None:
        ready = self._folder / f"{name}.ready.json"
        file = self._folder / f"{name}.yaml"
        file.write_text(json.dumps({"service": {"port": 0, "ready_file": str(ready)}, **tree}))
        command = [sys.executable, "-m", *module, "--config", str(file)]
        with (self._folder / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(command, stdout=log, stderr=log)


class Load:
    """Keeps enough rollouts outstanding that no server is ever idle."""

    def __init__(self, client: RemoteInferenceEngine, outstanding: int, tokens: int) -> None:
        self.completed = 0
        self.failed = self.requeued = -1
        """Known in the end."""
        self._client = client
        self._outstanding = outstanding
        self._tokens = tokens
        self._is_over = threading.Event()
        self._failure: BaseException | None = None

    @contextmanager
    def flowing(self) -> Iterator[None]:
        """During the block."""
        thread = threading.Thread(target=self._flow)
        thread.start()
        try:
            yield
        finally:
            self._is_over.set()
            thread.join()
            audit = self._client.audit()
            self.failed = audit.counts.failed + audit.lost + audit.duplicated
            self.requeued = audit.requeues
            self._client.destroy()
        if self._failure is not None:
            raise self._failure

    def rate(self, settle_s: float, seconds: float) -> float:
        """Trajectories/s over some time, after another."""
        self._is_over.wait(settle_s)
        began, before = time.monotonic(), self.completed
        self._is_over.wait(seconds)
        return (self.completed - before) / (time.monotonic() - began)

    def _flow(self) -> None:
        submitted = 0
        try:
            while not self._is_over.is_set():
                if (room := self.completed + self._outstanding - submitted) > 0:
                    self._client.submit([self._request(submitted + n) for n in range(room)])
                    submitted += room
                groups = self._client.wait(BATCH, READY_S).groups
                self._client.consumed([group.rollout_id for group in groups], 0, 0)
                self.completed += len(groups)
        except BaseException as error:  # noqa: BLE001 - raised where the block ends
            self._failure = error
            self._is_over.set()

    def _request(self, number: int) -> RolloutRequest:
        name = f"r{number}"
        return RolloutRequest(
            rollout_id=name,
            prompt=Prompt(group_id=name, input_ids=(1, 2, 3, number % 10), data={"answer": "1"}),
            reward=ComponentConfig(name="exact", args={"pattern": "[0-9]"}),
            gconfig=SamplingConfig(max_new_tokens=self._length(number), ignore_eos=True),
        )

    def _length(self, number: int) -> int:
        return max(1, round(self._tokens * (0.25 + 1.5 * (number * GOLDEN % 1.0))))


def in_parallel(work: Callable[..., T], calls: list[tuple[Any, ...]]) -> list[T]:
    """The results, in the order of the calls."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result() for future in [pool.submit(work, *call) for call in calls]]


def find(client: RemoteInferenceEngine, url: str) -> ServerStatus | None:
    """Return the gateway's status of a server; None if it does not know it."""
    return next((one for one in client.status().servers if one.url == url), None)


def until(look: Callable[[], T | None]) -> T:
    """Poll `look` until it returns something true, and return that."""
    deadline = time.monotonic() + READY_S
    while not (seen := look()):
        if time.monotonic() > deadline:
            raise RuntimeError(f"nothing was seen within {READY_S:g} s")
        time.sleep(POLL_S)
    return seen


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
