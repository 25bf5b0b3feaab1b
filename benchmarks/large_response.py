"""Measure a generation with much in it (chosen experts), as JSON and as columns.

    python benchmarks/large_response.py --mib 40

One service of ours answers `/v1/generate` with `--mib` MiB of routed experts, by turns as JSON and as
safetensors columns; a client like the gateway's reads it. `value` is the time of JSON over that of
columns. The CPU seconds are those of both processes, per response; a stall is the longest time in which
the client's event loop did nothing else.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import socket
import statistics
import time
from multiprocessing.connection import Connection
from types import SimpleNamespace

import numpy as np
import uvicorn
import uvloop
from fastapi import FastAPI
from gateway_cost import cpu_of
from measure import report

from gateway.service.app import common
from headway.contracts.config.sampling import SamplingConfig
from headway.contracts.routed_experts import RoutedExperts
from headway.contracts.types import LLMRequest, LLMResponse
from headway.runtime.connections import Connections
from headway.runtime.server_calls import generation_headers, post_generate
from headway.runtime.tls import client_context

LAYERS, TOP_K = 48, 8
TOKENS = 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    ours, theirs = multiprocessing.Pipe()
    server = multiprocessing.get_context("spawn").Process(target=serve, args=(options.mib, theirs))
    server.start()
    try:
        uvloop.run(compare(ours.recv(), server.pid or 0, options))
    finally:
        server.terminate()
        server.join()


def prompt_of(mib: int) -> list[int]:
    return [1] * ((mib << 20) // (LAYERS * TOP_K) - TOKENS + 1)


def serve(mib: int, ready: Connection) -> None:
    """A service that has one answer."""
    num_tokens = len(prompt_of(mib)) + TOKENS - 1
    ids = np.random.default_rng(0).integers(0, 128, (num_tokens, LAYERS, TOP_K), np.int16)
    response = LLMResponse(
        rid="r",
        output_tokens=[5] * TOKENS,
        output_logprobs=[-0.5] * TOKENS,
        version_runs=[(0, 0, TOKENS)],
        stop_reason="length",
        latency_s=0.0,
        ttft_s=0.0,
        routed_experts=RoutedExperts(ids),
    )

    async def agenerate(body: LLMRequest) -> LLMResponse:
        return response

    app = FastAPI()
    app.state.service = SimpleNamespace(generator=SimpleNamespace(agenerate=agenerate))
    app.include_router(common)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ready.send(f"http://127.0.0.1:{listener.getsockname()[1]}")
        uvicorn.Server(uvicorn.Config(app, log_level="warning")).run([listener])


async def compare(url: str, server: int, options: argparse.Namespace) -> None:
    request = LLMRequest(
        rid="r",
        input_ids=tuple(prompt_of(options.mib)),
        gconfig=SamplingConfig(max_new_tokens=TOKENS),
        routed_experts=True,
    )
    ways = {"json": {}, "columns": generation_headers(None)}
    clients = {
        name: Connections(client_context(), headers, 4, 10.0, 10.0)
        for name, headers in ways.items()
    }
    figures: dict[str, list[tuple[float, float, float]]] = {name: [] for name in ways}
    for number in range(options.rounds + 1):
        for name, connections in clients.items():
            found = await ask(connections, url, request, server)
            if number:  # the first one warms up
                figures[name].append(found)
    for connections in clients.values():
        await connections.aclose()
    more = {
        f"{name}_{what}": round(statistics.median(each[at] for each in rounds), 3)
        for name, rounds in figures.items()
        for at, what in enumerate(("s", "cpu_s", "stall_s"))
    }
    ratios = [one[0] / two[0] for one, two in zip(*figures.values(), strict=True)]
    report("large_response", "x the time of columns", ratios, mib=options.mib, **more)


async def ask(
    connections: Connections, url: str, request: LLMRequest, server: int
) -> tuple[float, float, float]:
    """Seconds, CPU seconds and the longest stall of one request."""
    stalls = [0.0]

    async def watch() -> None:
        while True:
            before = time.perf_counter()
            await asyncio.sleep(0.001)
            stalls.append(time.perf_counter() - before)

    watching = asyncio.create_task(watch())
    before, start = cpu_of(server) + time.process_time(), time.perf_counter()
    response = await post_generate(connections, url, request)
    seconds = time.perf_counter() - start
    cpu = cpu_of(server) + time.process_time() - before
    watching.cancel()
    assert response.routed_experts is not None
    return seconds, cpu, max(stalls)


if __name__ == "__main__":
    main()
