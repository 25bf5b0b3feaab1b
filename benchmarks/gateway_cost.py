"""Measure what a gateway in front of one generation server adds to its answers.

    python benchmarks/gateway_cost.py --in-flight 32 256
    python benchmarks/gateway_cost.py --stream
    python benchmarks/gateway_cost.py --engine embedded_torch --size 1.5b   # a real engine

One client asks the server itself and the gateway by turns, with the same bodies on the same route
(SGLang's `/generate`) and as many requests in flight. The engine `fake` takes as long for each as
`--tokens` times `--token-ms`; `embedded_torch` generates with a random model of `--size`. `value` is what
the gateway adds to the median latency; `p99_ms` what it adds there, `rate_share` its requests per second
over the server's, `gateway_cpu_ms` the CPU time of the gateway per request.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import uvloop
from day.models import SHAPES, write_model
from measure import report

from headway.contracts.http.paths import SGLANG_GENERATE, SGLANG_READY

READY_S = 120.0
PAUSE_S = 0.04
"""Maximum wait of a client between two requests. Without any, requests that once meet stay together, and
each reading is that of its bursts."""
PROMPT = list(range(3, 11)) * 24


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--in-flight", type=int, nargs="+", default=[32, 256])
    parser.add_argument("--requests", type=int, default=16, help="of each in flight, per round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--token-ms", type=float, default=20.0)
    parser.add_argument("--stream", action="store_true")
    parser.add_argument("--engine", choices=["fake", "embedded_torch"], default="fake")
    parser.add_argument("--size", choices=sorted(SHAPES), default="tiny", help="of a real model")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="headway-") as name, ExitStack() as stack:
        folder = Path(name)
        write_model(folder / "model", options.size)
        gateway, process = stack.enter_context(
            service(
                folder,
                "gateway",
                tokenizer=str(folder / "model"),
                ledger=":memory:",
            )
        )
        server, _ = stack.enter_context(
            service(
                folder,
                "serve",
                **engine(folder, options),
                gateway=gateway,
                max_in_flight=4096,
            )
        )
        gc.freeze()  # of what this client has loaded: its collections would show as tens of ms of latency
        uvloop.run(compare(server, gateway, process, options))


def engine(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Settings of the server's model and backend."""
    model: dict[str, Any] = {"path": str(folder / "model")}
    if options.engine == "fake":
        latency = options.token_ms / 1e3
        backend = {"type": "fake", "vocab_size": 14, "token_latency_s": latency}
        return {"model": model, "backend": backend}
    size = {"max_sequences": max(options.in_flight), "max_context": len(PROMPT) + options.tokens}
    return {
        "model": {**model, "dtype": "bfloat16"},
        "backend": {"type": options.engine, **size},
    }


async def compare(
    server: str, gateway: str, process: subprocess.Popen[str], options: argparse.Namespace
) -> None:
    body = {
        "input_ids": PROMPT,
        "sampling_params": {"max_new_tokens": options.tokens, "ignore_eos": True},
        "return_logprob": True,
        "stream": options.stream,
    }
    content = json.dumps(body).encode()
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        await until_ready(session, gateway)
        for in_flight in options.in_flight:
            count = in_flight * options.requests
            rounds: list[dict[str, float]] = []
            for number in range(options.rounds + 1):
                bare = await measure(session, server, content, count, in_flight)
                before = cpu_of(process.pid)
                ours = await measure(session, gateway, content, count, in_flight)
                cpu = cpu_of(process.pid) - before
                if number:  # the first one warms up
                    rounds.append(
                        {
                            "median_ms": 1e3 * (ours[1] - bare[1]),
                            "p99_ms": 1e3 * (ours[2] - bare[2]),
                            "rate_share": ours[0] / bare[0],
                            "gateway_cpu_ms": 1e3 * cpu / count,
                            "bare_median_ms": 1e3 * bare[1],
                        }
                    )
            more = {
                name: round(statistics.median(each[name] for each in rounds), 3)
                for name in rounds[0]
                if name != "median_ms"
            }
            report(
                "gateway_cost",
                "ms added to the median latency",
                [each["median_ms"] for each in rounds],
                in_flight=in_flight,
                requests=count,
                tokens=options.tokens,
                engine=options.engine,
                **({"token_ms": options.token_ms} if options.engine == "fake" else {}),
                stream=options.stream,
                **more,
            )


async def measure(
    session: aiohttp.ClientSession, url: str, content: bytes, count: int, in_flight: int
) -> tuple[float, float, float]:
    """Requests per second, and the median and 99th percentile of their seconds."""
    left, seconds, pauses = iter(range(count)), [], random.Random(0)
    headers = {"content-type": "application/json"}

    async def worker(number: int) -> None:
        await asyncio.sleep(0.32 * number / in_flight)  # not all in the same moment
        for _ in left:
            await asyncio.sleep(pauses.uniform(0.0, PAUSE_S))
            start = time.perf_counter()
            async with session.post(url + SGLANG_GENERATE, data=content, headers=headers) as answer:
                await answer.read()
                answer.raise_for_status()
            seconds.append(time.perf_counter() - start)

    start = time.perf_counter()
    await asyncio.gather(*(worker(number) for number in range(in_flight)))
    rate = count / (time.perf_counter() - start)
    cuts = statistics.quantiles(seconds, n=100)
    return rate, cuts[49], cuts[98]


async def until_ready(session: aiohttp.ClientSession, gateway: str) -> None:
    async with asyncio.timeout(READY_S):
        while True:
            async with session.get(gateway + SGLANG_READY) as answer:
                if answer.ok:
                    return
            await asyncio.sleep(0.1)


def cpu_of(pid: int) -> float:
    """CPU seconds of a process and its children."""
    root = psutil.Process(pid)
    times = [process.cpu_times() for process in (root, *root.children(recursive=True))]
    return sum(each.user + each.system for each in times)


@contextmanager
def service(
    folder: Path, command: str, **settings: Any
) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """A service of ours, and its URL."""
    ready, file = folder / f"{command}.ready", folder / f"{command}.yaml"
    file.write_text(json.dumps({"service": {"port": 0, "ready_file": str(ready)}, **settings}))
    words = [sys.executable, "-m", "headway.launch.cli", command, "--config", str(file)]
    process = subprocess.Popen(words, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        deadline = time.monotonic() + READY_S
        while not ready.is_file():
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{command} did not start")
            time.sleep(0.05)
        yield json.loads(ready.read_text())["url"], process
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(READY_S)


if __name__ == "__main__":
    main()
