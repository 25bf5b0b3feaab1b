"""Against a server that speaks SandboxFusion's API and runs what it gets in a plain process."""

import asyncio
import subprocess
import sys
import time

import pytest
import uvicorn
from fastapi import FastAPI

from gateway.components.shared_services import NoOutbound, Program
from gateway.sandbox.choice import make_sandbox
from headway.contracts.config.gateway import SandboxConfig
from headway.contracts.errors import Forbidden, RewardOutage
from tests.unit.gateway.sandboxes import HttpOutbound


def make_app(seen: list[dict]) -> FastAPI:
    app = FastAPI()

    @app.post("/run_code")
    def run_code(body: dict) -> dict:
        seen.append(body)
        if "broken" in body["stdin"]:
            return {"status": "SandboxError", "message": "no room", "run_result": None}
        started = time.monotonic()
        try:
            done = subprocess.run(
                [sys.executable, "-I", "-c", body["code"]],
                input=body["stdin"],
                capture_output=True,
                text=True,
                timeout=body["run_timeout"],
                check=False,
            )
        except subprocess.TimeoutExpired:
            return {"status": "Failed", "run_result": {"status": "TimeLimitExceeded"}}
        result = {
            "status": "Finished",
            "execution_time": time.monotonic() - started,
            "return_code": done.returncode,
            "stdout": done.stdout,
            "stderr": done.stderr,
        }
        return {"status": "Failed" if done.returncode else "Success", "run_result": result}

    return app


@pytest.fixture
async def seen():
    return []


@pytest.fixture
async def sandbox(seen):
    config = uvicorn.Config(make_app(seen), port=0, log_level="warning", lifespan="off")
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve())
    async with asyncio.timeout(10):
        while not server.started:  # noqa: ASYNC110 - uvicorn tells nobody
            await asyncio.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    settings = SandboxConfig(type="remote", url=f"http://127.0.0.1:{port}/", wall_factor=1.0)
    remote = make_sandbox(settings, HttpOutbound())
    await remote.start()
    yield remote
    await remote.aclose()
    server.should_exit = True
    await serving


async def test_program_reads_and_prints(sandbox, seen):
    outcome = await sandbox.run(Program("print(int(input()) * 2)", stdin="21\n"))
    assert (outcome.status, outcome.stdout) == ("ok", "42\n")
    assert seen[0]["language"] == "python"
    assert seen[0]["memory_limit_MB"] == 512


async def test_results_of_calls_come_back_beside_what_is_printed(sandbox):
    source = "print('hello', end='')\ndef f(x):\n    print('in f')\n    return (x, 'ü')"
    outcome = await sandbox.run(Program(source, calls=("f(1)", "f()", "f(2)")))
    assert outcome.status == "ok"
    assert outcome.results[0]["exact"] == ["tuple", [1, "ü"]]
    assert "error" in outcome.results[1]
    assert outcome.results[2]["value"] == [2, "ü"]
    assert outcome.stdout == "helloin f\nin f\n"


@pytest.mark.parametrize(
    ("source", "status", "cpu_s"),
    [
        ("def", "compile_error", 20.0),
        ("1 / 0", "runtime_error", 20.0),
        ("raise MemoryError", "memory", 20.0),
        ("import os; os._exit(7)", "runtime_error", 20.0),
        ("while True: pass", "timeout", 0.5),
        ("print('x' * 100_000)", "output_limit", 20.0),
    ],
)
async def test_status_tells_how_a_program_ended(sandbox, source, status, cpu_s):
    assert (await sandbox.run(Program(source, cpu_s=cpu_s))).status == status


async def test_sandbox_that_fails_is_an_outage(sandbox):
    with pytest.raises(RewardOutage, match="no room"):
        await sandbox.run(Program("print(1)", stdin="broken"))


async def test_sandbox_that_is_away_is_an_outage():
    settings = SandboxConfig(type="remote", url="http://127.0.0.1:9")
    with pytest.raises(RewardOutage, match="failed"):
        await make_sandbox(settings, HttpOutbound()).run(Program("print(1)"))


async def test_url_that_the_config_does_not_allow_is_forbidden():
    settings = SandboxConfig(type="remote", url="http://127.0.0.1:9")
    with pytest.raises(Forbidden):
        await make_sandbox(settings, NoOutbound()).run(Program("print(1)"))
