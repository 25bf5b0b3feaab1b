"""Measure the cost of the rollout service beyond the generations themselves.

    python benchmarks/orchestration.py --delays-ms 0 20 --in-flight 64 256 1024

One trajectory is submit -> workflow with 4 generations -> reward -> wait. The floor is a bare loop of
asyncio and aiohttp in one process that calls the same generation server four times and compares a
string. Ours is a client process, a gateway with a ledger on disk and its reward workers, over HTTP. The
generation server (`generation_stub.py`) costs the same in both and is not counted. Floor and ours
alternate, with the same number of trajectories in flight.

`cpu_ms` is the CPU time of all counted processes per trajectory; `cpu_ms_beyond` is ours less the
floor's; `rate_share` is trajectories/s of ours over the floor's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import uvloop
from measure import report

from headway.contracts.config.base import ComponentConfig, WorkflowRef
from headway.contracts.config.sampling import SamplingConfig
from headway.contracts.http.paths import GENERATE
from headway.contracts.types import LLMRequest, Prompt, RolloutRequest
from headway.launch.quickstart import task
from headway.runtime.inference_client import RemoteInferenceEngine

HERE = Path(__file__).parent
PROMPT = tuple(1 + position % 8 for position in range(32))
GCONFIG = SamplingConfig(max_new_tokens=16)
READY_S = 60.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--delays-ms", type=float, nargs="+", default=[0.0, 20.0])
    parser.add_argument("--in-flight", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--trajectories", type=int, default=2048, help="per measurement")
    parser.add_argument(
        "--batches", type=int, default=2, help="that are in flight: 1 + max_staleness of a trainer"
    )
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="headway-", dir="/var/tmp") as folder:
        task.write_model(Path(folder) / "model", {})
        for delay_ms in options.delays_ms:
            for in_flight in options.in_flight:
                compare(Path(folder), delay_ms, in_flight, options)


def compare(folder: Path, delay_ms: float, in_flight: int, options: argparse.Namespace) -> None:
    floors, ours = [], []
    count = max(options.trajectories, 2 * in_flight)
    with gateway(folder, in_flight) as (process, url), stub(delay_ms, url) as server:
        client = RemoteInferenceEngine(url)
        client.initialize()
        wait_for_server(client)
        batch = max(1, in_flight // options.batches)
        measure_ours(client, process, 2 * in_flight, in_flight, batch)  # warm up
        for _ in range(options.rounds):
            floors.append(measure_floor(server, count, in_flight))
            ours.append(measure_ours(client, process, count, in_flight, batch))
        client.destroy()
    beyond = [b[1] - a[1] for a, b in zip(floors, ours, strict=True)]
    report(
        "orchestration",
        "CPU ms per trajectory beyond the bare loop",
        beyond,
        delay_ms=delay_ms,
        in_flight=in_flight,
        batch=batch,
        trajectories=count,
        rate_share=round(
            statistics.median(b[0] / a[0] for a, b in zip(floors, ours, strict=True)), 3
        ),
        floor={"per_s": round(median(floors, 0), 1), "cpu_ms": round(median(floors, 1), 3)},
        ours={
            "per_s": round(median(ours, 0), 1),
            "cpu_ms": round(median(ours, 1), 3),
            "client_ms": round(median(ours, 2), 3),
        },
    )


def median(metrics: Sequence[Sequence[float]], at: int) -> float:
    return statistics.median(figure[at] for figure in metrics)


def measure_floor(server: str, count: int, in_flight: int) -> tuple[float, float]:
    """Trajectories/s and CPU ms per trajectory of the bare loop, in a process of its own."""
    command = [sys.executable, __file__, "floor", server, str(count), str(in_flight)]
    answer = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    return float(answer[0]), float(answer[1])


async def floor(server: str, count: int, in_flight: int) -> None:
    body = LLMRequest(rid="floor", input_ids=PROMPT, gconfig=GCONFIG).model_dump_json().encode()
    headers = {"content-type": "application/json"}
    left = iter(range(count))

    async def worker(session: aiohttp.ClientSession) -> None:
        for _ in left:
            for _ in range(4):
                async with session.post(server + GENERATE, data=body, headers=headers) as answer:
                    content = await answer.json()
            str(content["output_tokens"]).strip() == "x"  # noqa: B015 - the reward

    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:
        wall, cpu = time.monotonic(), time.process_time()
        await asyncio.gather(*(worker(session) for _ in range(in_flight)))
        wall, cpu = time.monotonic() - wall, time.process_time() - cpu
    print(count / wall, 1e3 * cpu / count)


def measure_ours(
    client: RemoteInferenceEngine,
    process: subprocess.Popen[str],
    count: int,
    in_flight: int,
    batch: int,
) -> tuple[float, float, float]:
    """The same through the service; a client that keeps `in_flight` of them and a batch submitted."""
    run = uuid.uuid4().hex[:8]
    wall, cpu, theirs = time.monotonic(), time.process_time(), cpu_of(process.pid)
    submitted = received = 0
    while received < count:
        if (room := min(count, received + in_flight + batch) - submitted) > 0:
            client.submit([request(f"{run}.{submitted + i}", run) for i in range(room)])
            submitted += room
        wanted = min(batch, count - received)
        groups = client.wait(wanted, READY_S).groups
        client.consumed([group.rollout_id for group in groups], step=0, checkpoint_step=0)
        received += len(groups)
    wall = time.monotonic() - wall
    cpu, theirs = time.process_time() - cpu, cpu_of(process.pid) - theirs
    return count / wall, 1e3 * (cpu + theirs) / count, 1e3 * cpu / count


def request(rollout_id: str, run: str) -> RolloutRequest:
    return RolloutRequest(
        rollout_id=rollout_id,
        prompt=Prompt(group_id=rollout_id, input_ids=PROMPT, data={"answer": "x"}),
        workflow=WorkflowRef(name="four_generations"),
        reward=ComponentConfig(name="exact"),
        gconfig=GCONFIG,
    )


def cpu_of(pid: int) -> float:
    """CPU seconds of a process and its children."""
    total = 0.0
    root = psutil.Process(pid)
    for process in (root, *root.children(recursive=True)):
        times = process.cpu_times()
        total += times.user + times.system
    return total


@contextmanager
def gateway(folder: Path, in_flight: int) -> Iterator[tuple[subprocess.Popen[str], str]]:
    name = uuid.uuid4().hex[:8]
    ready = folder / f"ready-{name}.json"
    config: dict[str, Any] = {
        "service": {"port": 0, "ready_file": str(ready)},
        "tokenizer": str(folder / "model"),
        "ledger": str(folder / f"ledger-{name}.sqlite"),
        "modules": ["four_generations"],
        "executor": {"max_concurrent": in_flight, "adapt": False},
    }
    file = folder / f"gateway-{name}.yaml"
    file.write_text(json.dumps(config))
    command = [sys.executable, "-m", "headway.launch.cli", "gateway", "--config", str(file)]
    environment = {**os.environ, "PYTHONPATH": str(HERE)}
    process = subprocess.Popen(command, env=environment, text=True)
    try:
        deadline = time.monotonic() + READY_S
        while not ready.is_file():
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError("the gateway did not start")
            time.sleep(0.05)
        yield process, json.loads(ready.read_text())["url"]
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(READY_S)


@contextmanager
def stub(delay_ms: float, gateway_url: str) -> Iterator[str]:
    command = [sys.executable, str(HERE / "generation_stub.py"), "--delay-ms", str(delay_ms)]
    command += ["--gateway", gateway_url]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
    finally:
        process.kill()
        process.wait()


def wait_for_server(client: RemoteInferenceEngine) -> None:
    deadline = time.monotonic() + READY_S
    while not any(server.state == "ready" for server in client.status().servers):
        if time.monotonic() > deadline:
            raise RuntimeError("no server became ready")
        time.sleep(0.1)


if __name__ == "__main__":
    if sys.argv[1:2] == ["floor"]:
        uvloop.run(floor(sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))
    else:
        main()
