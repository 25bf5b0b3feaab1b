"""Measure what others' attacks cost an honest client.

    python benchmarks/attacks.py --pairs 3 --seconds 20

A gateway, two generation servers of the fake backend and a victim that keeps some rollouts in flight;
then the same with attackers beside it (`tests/attack/attacker.py`: small wrong requests, large ones,
programs that burn and sleep, floods of connections), in alternation. No token is required, so that
attackers get as far as they can.

    value              the victim's rollouts/s under attack over those without
    refused_per_s      refused requests per second
    longest_stall_s    stand-still of an event loop since its start, of the gateway and of any server
    memory_mib         of the gateway and the largest server, before all attacks and after each

Attackers run at the lowest priority: in reality they have machines of their own, here they share cores.
`chaos.py --attackers 4` puts the same attackers beside processes that die.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
from measure import report

from headway.contracts.config.base import ComponentConfig
from headway.contracts.config.sampling import SamplingConfig
from headway.contracts.http.paths import STATUS
from headway.contracts.http.status import StatusResponse
from headway.contracts.types import Prompt, RolloutRequest
from headway.launch.quickstart import task
from headway.runtime.inference_client import RemoteInferenceEngine
from headway.runtime.process import Process, ProcessSpec

ROOT = Path(__file__).parent.parent
READY_S = 60.0
NUM_SERVERS = 2
BATCH = 8


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=20.0, help="with and without, each")
    parser.add_argument("--connections", type=int, default=4, help="of attackers")
    parser.add_argument("--per-s", type=float, default=100.0, help="small requests of attackers")
    parser.add_argument("--in-flight", type=int, default=32, help="rollouts of the victim")
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="headway-", dir="/var/tmp") as folder,
        services(Path(folder)) as processes,
    ):
        url = processes[0].wait_ready(READY_S)
        client = RemoteInferenceEngine(url)
        client.initialize()
        wait_for_servers(client)
        run_victim(client, options.seconds / 4, options.in_flight)
        memory = [memory_mib(processes)]
        shares, counts, calm_per_s = [], Counter[str](), []
        for seed in range(options.pairs):
            calm_per_s.append(run_victim(client, options.seconds, options.in_flight))
            with attackers(url, options, seed, counts):
                per_s = run_victim(client, options.seconds, options.in_flight)
            shares.append(per_s / calm_per_s[-1])
            memory.append(memory_mib(processes))
        longest = [status_of(process).longest_stall_s for process in processes]
        client.destroy()
        seconds = counts.pop("seconds")
        report(
            "attacks",
            "victim's rollouts/s under attack / without",
            shares,
            per_s=[round(value, 1) for value in calm_per_s],
            refused_per_s=round(counts["refused"] / seconds, 1),
            counts={name: int(count) for name, count in sorted(counts.items())},
            longest_stall_s={"gateway": longest[0], "server": max(longest[1:])},
            memory_mib={name: [each[name] for each in memory] for name in ("gateway", "server")},
        )


@contextmanager
def services(folder: Path) -> Iterator[list[Process]]:
    """A gateway, which comes first, and its servers."""
    model = folder / "model"
    task.write_model(model, {})
    gateway = {"tokenizer": str(model), "ledger": str(folder / "ledger.sqlite")}
    backend = {"type": "fake", "vocab_size": 10, "token_latency_s": 0.02}
    with ExitStack() as stack:
        started = [start(stack, folder, "gateway", "headway.launch.cli gateway", gateway)]
        server = {
            "model": {"path": str(model)},
            "backend": backend,
            "gateway": [started[0].wait_ready(READY_S)],
        }
        started += [
            start(stack, folder, f"server-{at}", "inference_server", server)
            for at in range(NUM_SERVERS)
        ]
        yield started


def start(
    stack: ExitStack, folder: Path, name: str, module: str, config: dict[str, Any]
) -> Process:
    ready, file = folder / f"{name}-ready.json", folder / f"{name}.yaml"
    file.write_text(json.dumps({**config, "service": {"port": 0, "ready_file": str(ready)}}))
    argv = [sys.executable, "-m", *module.split(), "--config", str(file)]
    process = Process(ProcessSpec(name, argv, folder / f"{name}.log", ready_file=ready))
    stack.callback(process.stop, 5.0)
    return process


def wait_for_servers(client: RemoteInferenceEngine) -> None:
    deadline = time.monotonic() + READY_S
    while [server.state for server in client.status().servers] != ["ready"] * NUM_SERVERS:
        if time.monotonic() > deadline:
            raise RuntimeError("the servers did not become ready")
        time.sleep(0.1)


def run_victim(client: RemoteInferenceEngine, seconds: float, in_flight: int) -> float:
    """Return the rollouts per second of a client that always has `in_flight` in flight."""
    run = uuid.uuid4().hex[:8]
    submitted = received = 0
    began = time.monotonic()
    while (now := time.monotonic()) < began + seconds:
        if missing := received + in_flight - submitted:
            client.submit([request(f"{run}.{submitted + at}") for at in range(missing)])
            submitted += missing
        groups = client.wait(BATCH, READY_S).groups
        client.consumed([group.rollout_id for group in groups], step=0, checkpoint_step=0)
        received += len(groups)
    while received < submitted:
        groups = client.wait(min(BATCH, submitted - received), READY_S).groups
        client.consumed([group.rollout_id for group in groups], step=0, checkpoint_step=0)
        received += len(groups)
    return (received - in_flight) / (now - began)


def request(name: str) -> RolloutRequest:
    return RolloutRequest(
        rollout_id=name,
        prompt=Prompt(group_id=name, input_ids=(1, 2, 3, 4), data={"answer": "1"}),
        reward=ComponentConfig(name="exact", args={"pattern": "[0-9]"}),
        gconfig=SamplingConfig(max_new_tokens=16, ignore_eos=True),
    )


@contextmanager
def attackers(
    url: str, options: argparse.Namespace, seed: int, counts: Counter[str]
) -> Iterator[None]:
    """Run attackers during the block; what they saw is added to `counts`."""
    command = [sys.executable, "-m", "tests.attack.attacker", "--urls", url]
    command += ["--connections", str(options.connections), "--per-s", str(options.per_s)]
    command += ["--seed", str(seed)]
    process = subprocess.Popen(["nice", "-n", "19", *command], cwd=ROOT, stdout=subprocess.PIPE)
    try:
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        printed, _ = process.communicate(timeout=READY_S)
    counts.update(json.loads(printed))


def status_of(process: Process) -> StatusResponse:
    answer = httpx.get(process.wait_ready(READY_S) + STATUS, timeout=READY_S, trust_env=False)
    return StatusResponse.model_validate_json(answer.raise_for_status().content)


def memory_mib(processes: list[Process]) -> dict[str, int]:
    used = [psutil.Process(process.pid).memory_info().rss >> 20 for process in processes]
    return {"gateway": used[0], "server": max(used[1:])}


if __name__ == "__main__":
    main()
