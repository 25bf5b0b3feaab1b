"""An agent that is killed in the middle of a run, and comes back, fails no rollout."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path

import pytest

from headway.contracts.config.gateway import OutboundConfig
from headway.runtime.outbound import HttpOutbound
from tests.integration.agent_bench import Bench, open_bench

NUM_ROLLOUTS = 200
AWAY_S = 3.0
DEADLINE_S = 60.0
AGENT = """
import json, sys, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.request import Request, urlopen

class Agent(BaseHTTPRequestHandler):
    def do_POST(self):
        call = json.loads(self.rfile.read(int(self.headers["content-length"])))
        place = call["session"]
        time.sleep(0.02)
        turn = {"model": "policy", "messages": [{"role": "user", "content": call["text"]}]}
        headers = {"authorization": "Bearer " + place["api_key"], "content-type": "application/json"}
        url = place["openai_url"] + "/chat/completions"
        urlopen(Request(url, json.dumps(turn).encode(), headers)).read()
        answer = b'{"reward": 1.0}'
        self.send_response(200)
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *what):
        pass

server = ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Agent)
print(server.server_port, flush=True)
server.serve_forever()
"""


@contextmanager
def agent(port: int = 0) -> Iterator[int]:
    """An agent in a process of its own, which is killed at the end; its port."""
    command = [sys.executable, "-c", AGENT, str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        try:
            yield int(process.stdout.readline())
        finally:
            process.kill()


async def until_ready(bench: Bench, count: int) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while (await bench.service.ledger.counts()).ready < count:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


@asynccontextmanager
async def running(folder: Path, url: str) -> AsyncIterator[Bench]:
    """A gateway that runs rollouts on this agent."""
    outbound = HttpOutbound(OutboundConfig(allow=(url,), allow_private=True))
    rollout = {
        "workflow": {"name": "session", "args": {"agent_url": url}},
        "reward": {"name": "given"},
    }
    prompts = [{"group_id": f"g{number}", "text": "2+2"} for number in range(NUM_ROLLOUTS)]
    rollouts = [rollout | {"rollout_id": each["group_id"], "prompt": each} for each in prompts]
    limits = {"max_concurrent": 16, "error_budget": 0}
    async with open_bench(folder, lambda text: "4", outbound, limits) as bench:
        assert (await bench.post("/v1/rollouts", {"rollouts": rollouts}))[0] == 200
        yield bench
    await outbound.aclose()


@pytest.mark.extended
async def test_an_agent_that_is_killed_and_comes_back_fails_no_rollout(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.INFO, "headway.runtime.outages")
    async with AsyncExitStack() as stack:
        with agent() as port:
            url = f"http://127.0.0.1:{port}/play"
            bench = await stack.enter_async_context(running(tmp_path, url))
            await until_ready(bench, NUM_ROLLOUTS // 4)
        await asyncio.sleep(AWAY_S)
        status = await bench.service.status()
        assert [(one.url, one.waiting) for one in status.services_away] == [(url, 16)]
        assert status.last_failures == []
        stack.enter_context(agent(port))
        await until_ready(bench, NUM_ROLLOUTS)
        counts = await bench.service.ledger.counts()
        assert (counts.ready, counts.failed) == (NUM_ROLLOUTS, 0)
        assert (await bench.service.status()).services_away == []
        requeues = (await bench.service.ledger.audit()).requeues
    assert requeues <= 16  # those that the agent had begun
    messages = [each.message for each in caplog.records if each.name == "headway.runtime.outages"]
    assert messages == ["a service is away; calls wait for it", "a service is back"]
