"""An engine as a child or at a URL: flags, readiness, death, hanging, and the end of its group."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from headway.contracts.config.server import EngineProcessConfig
from headway.contracts.errors import BackendError, ConfigError
from inference_server.backends import engine_command_line
from inference_server.backends.engine_command_line import EngineCommand, command_flags
from inference_server.backends.engine_process import EngineProcess, EngineResponse

DEADLINE_S = 30.0
CHILD = {"PYTHONPATH": str(Path(__file__).parent)}


def engine_of(config: dict, progress=lambda: 0, args=None) -> EngineProcess:
    command = EngineCommand(
        name="the stand-in",
        module="engine_child",
        args=args or {},
        ready_path="/health",
        env=CHILD,
        owned_flags={"--model": "model.path"},
    )
    config = {"health_interval_s": 0.05, "health_timeout_s": 20.0} | config
    return EngineProcess(EngineProcessConfig(**config), command, progress, lambda: "/health")


@asynccontextmanager
async def running(config: dict, **options):
    engine = engine_of(config, **options)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.aclose()


def file_of(folder: Path, text: str) -> Path:
    file = folder / "range"
    file.write_text(text)
    return file


async def until_failed(engine: EngineProcess) -> str:
    async def never() -> None:
        await asyncio.Event().wait()

    with pytest.raises(BackendError) as caught:
        await asyncio.wait_for(engine.guard(never()), DEADLINE_S)
    assert engine.failure == str(caught.value)
    return engine.failure


async def until_gone(pid: int) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while _is_running(pid):  # noqa: ASYNC110 - not our child: nobody tells us
            await asyncio.sleep(0.01)


def _is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"  # nobody collects an orphan in some containers


def test_flags_keep_their_names_and_shapes():
    line = command_flags(
        {"--tp-size": 2, "--quick": True, "--slow": False, "--none": None, "--rate": 0.5}
        | {"--names": ["a", 1], "--config": {"k": [1]}, "-x": "two words"}
    )
    assert line == [
        *("--tp-size", "2", "--quick", "--rate", "0.5", "--names", "a", "1"),
        *("--config", '{"k": [1]}', "-x", "two words"),
    ]


@pytest.mark.parametrize("flag", ["tp-size", "--tp-size=2", "--tp size"])
def test_what_is_no_flag_is_refused(flag):
    with pytest.raises(ConfigError, match="not a flag"):
        command_flags({flag: 2})


async def test_nobody_is_given_the_port_of_an_engine_while_it_loads():
    lowest = int(engine_command_line.GIVEN_PORTS.read_text().split()[0])
    async with running({}) as engine:
        assert engine_command_line.FIRST_PORT <= int(engine.url.rpartition(":")[2]) < lowest


async def test_where_any_port_may_be_given_it_takes_one_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(engine_command_line, "GIVEN_PORTS", file_of(tmp_path, "1024\t65000\n"))
    async with running({}) as engine:
        assert int(engine.url.rpartition(":")[2]) > 0


async def test_without_a_free_port_it_says_which_ones_it_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with socket.create_server((engine_command_line.LOOPBACK, 0)) as listener:
        port = listener.getsockname()[1]
        monkeypatch.setattr(engine_command_line, "FIRST_PORT", port)
        monkeypatch.setattr(
            engine_command_line, "GIVEN_PORTS", file_of(tmp_path, f"{port + 1} 60999")
        )
        with pytest.raises(BackendError, match=f"no port from {port} to {port} is free"):
            await engine_of({}).start()


@pytest.mark.parametrize("is_ours", [True, False], ids=["chosen", "set"])
async def test_an_engine_whose_port_was_taken_meanwhile_gets_another(
    is_ours: bool, monkeypatch: pytest.MonkeyPatch
):
    with socket.create_server((engine_command_line.LOOPBACK, 0)) as other:
        taken = other.getsockname()[1]
        choose, chosen = engine_command_line._free_port, iter([taken])
        monkeypatch.setattr(engine_command_line, "_free_port", lambda: next(chosen, choose()))
        if is_ours:
            async with running({}) as engine:
                assert not engine.url.endswith(f":{taken}")
                assert (await engine.get("/facts")).is_ok
        else:
            with pytest.raises(BackendError, match="ended with status 1"):
                await engine_of({"args": {"--port": taken}}).start()


async def test_child_gets_flags_and_environment_and_its_group_ends_with_it(tmp_path):
    log = tmp_path / "engine.log"
    config = {"args": {"--mine": [1, 2], "--shared": "user"}, "env": {"ADDED": "yes"}}
    config["log_file"] = str(log)
    async with running(config, args={"--shared": "ours", "--ours": True}) as engine:
        facts = (await engine.get("/facts")).json()
        assert facts["added"] == "yes"
        assert facts["argv"][4:] == ["--shared", "user", "--ours", "--mine", "1", "2"]
        pids = (engine.pid, facts["grandchild"])
        assert all(map(_is_running, pids))
        missing = await engine.get("/missing")
        assert (missing.status, missing.is_ok) == (404, False)
    for pid in pids:
        await until_gone(pid)
    with pytest.raises(BackendError, match="closed"):
        await engine.get("/health")


async def test_flag_that_a_setting_owns_is_refused():
    with pytest.raises(ConfigError, match=r"--model; set model\.path instead"):
        await engine_of({"args": {"--model": "x"}}).start()


async def test_child_that_dies_while_starting_is_told_with_its_last_lines(tmp_path):
    engine = engine_of({"args": {"--die": True}, "log_file": str(tmp_path / "engine.log")})
    with pytest.raises(BackendError, match=r"ended with status 7:\n(.*\n)*no such model"):
        await asyncio.wait_for(engine.start(), DEADLINE_S)


async def test_interpreter_that_is_missing_is_told():
    with pytest.raises(ConfigError, match=r"set backend\.python"):
        await engine_of({"python": "/nowhere/python"}).start()


async def test_engine_that_never_answers_is_given_up():
    with pytest.raises(BackendError, match=r"start_timeout_s=0\.3"):
        await engine_of({"url": "http://127.0.0.1:9", "start_timeout_s": 0.3}).start()


async def test_death_is_noticed_at_once_and_ends_calls_in_flight(tmp_path):
    config = {"log_file": str(tmp_path / "engine.log"), "health_interval_s": 600.0}
    async with running(config) as engine:
        grandchild = (await engine.get("/facts")).json()["grandchild"]
        slow = asyncio.create_task(engine.post("/slow", {}))
        os.kill(engine.pid, signal.SIGKILL)
        failure = await until_failed(engine)
        assert "ended with status -9" in failure
        with pytest.raises(BackendError):
            await slow
        await until_gone(grandchild)


async def test_exit_code_and_last_lines_are_in_the_failure(tmp_path):
    async with running({"log_file": str(tmp_path / "engine.log")}) as engine:
        with pytest.raises(BackendError):
            await engine.post("/exit", {})
        failure = await until_failed(engine)
        assert "ended with status 3" in failure
        assert "the engine says goodbye" in failure


async def test_engine_without_answer_and_progress_is_ended(tmp_path):
    config = {"log_file": str(tmp_path / "engine.log"), "health_timeout_s": 0.3}
    async with running(config) as engine:
        pid = engine.pid
        await engine.post("/hang", {})
        assert "is hung" in await until_failed(engine)
        await until_gone(pid)


async def test_engine_without_answer_but_with_progress_lives():
    tokens = iter(range(10**6))
    stalled = asyncio.Event()
    asked = []

    def progress() -> int:
        asked.append(None)
        if len(asked) == 40:
            stalled.set()
        return next(tokens)

    config = {"health_timeout_s": 0.2, "health_interval_s": 0.02}
    async with running(config, progress=progress) as engine:
        await engine.post("/hang", {})
        await asyncio.wait_for(stalled.wait(), DEADLINE_S)
        assert engine.failure is None


async def test_attached_engine_outlives_us_and_its_loss_is_noticed(tmp_path):
    async with running({"log_file": str(tmp_path / "engine.log")}) as owner:
        async with running({"url": owner.url}) as guest:
            assert guest.pid is None
            assert (await guest.get("/health")).is_ok
        assert (await owner.get("/health")).is_ok
        async with running({"url": owner.url, "health_timeout_s": 0.3}) as guest:
            os.kill(owner.pid, signal.SIGKILL)
            assert "is hung" in await until_failed(guest)


async def test_a_call_may_have_a_deadline():
    async with running({}) as engine:
        with pytest.raises(BackendError, match="gave no answer"):
            await engine.post("/slow", {}, timeout_s=0.1)


async def test_long_lines_stream_whole():
    async with running({}) as engine:

        async def read() -> list[bytes]:
            async with engine.stream("/long", {}) as lines:
                assert not isinstance(lines, EngineResponse)
                return [line async for line in lines]

        assert [len(line) for line in await engine.guard(read())] == [2_000_002]


@asynccontextmanager
async def closing_engine():
    """An engine that keeps a connection after its response, and closes it as the next request comes."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: keep-alive\r\n\r\n{}")
        await reader.read(1)
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        yield f"http://{host}:{port}"


async def test_no_request_is_lost_on_a_connection_that_the_engine_closes():
    async with closing_engine() as url, running({"url": url}) as engine:
        for _ in range(3):
            assert (await engine.post("/generate", {})).is_ok
