import asyncio
import os
import select
import signal
import subprocess
import sys
import textwrap

import psutil
import pytest

from gateway.components.shared_services import NoOutbound, Program
from gateway.sandbox import worker_handle
from gateway.sandbox.backends import (
    BUBBLEWRAP,
    LANDLOCK,
    UNSAFE,
    Backend,
    SandboxCommand,
    Unavailable,
)
from gateway.sandbox.choice import BackgroundSandbox, make_sandbox
from gateway.sandbox.pool import SandboxPool
from gateway.sandbox.probe import probe
from gateway.sandbox.values import Opaque, read_value, write_source
from headway.contracts.config.gateway import SandboxConfig
from headway.contracts.errors import ConfigError, RewardOutage
from tests.unit.gateway.sandboxes import BACKENDS, open_pool, run


@pytest.fixture(params=sorted(BACKENDS))
async def pool(request):
    async with open_pool(BACKENDS[request.param]) as opened:
        yield opened


async def test_program_reads_and_prints(pool):
    outcome = await run(pool, "print(int(input()) * 2)\nprint('ü')", stdin="21\n")
    assert (outcome.status, outcome.stdout, outcome.results) == ("ok", "42\nü\n", ())
    assert 0 < outcome.cpu_s < outcome.wall_s + 1
    assert outcome.max_rss_bytes > 1 << 20


async def test_calls_are_evaluated_each_in_its_own_right(pool):
    source = """
        def f(x): return [x, {"a": 1.5, "b": None}]
        if __name__ == "__main__": raise SystemExit("must not run")
        """
    outcome = await run(pool, source, "f(2)", "f()", "f(True)", "undefined")
    assert outcome.status == "ok"
    assert outcome.results[0] == {"value": [2, {"a": 1.5, "b": None}]}
    assert outcome.results[1]["error"].startswith("TypeError: f() missing 1")
    assert outcome.results[2] == {"value": [True, {"a": 1.5, "b": None}]}
    assert outcome.results[3] == {"error": "NameError: name 'undefined' is not defined"}


@pytest.mark.parametrize(
    ("source", "status"),
    [
        ("import sys; sys.exit(0)", "ok"),
        ("import sys; sys.exit(3)", "runtime_error"),
        ("import os; os._exit(0)", "ok"),
        ("import os; os._exit(3)", "runtime_error"),
        ("raise ValueError('no')", "runtime_error"),
        ("def", "compile_error"),
        ("\0", "compile_error"),
        ("raise MemoryError", "memory"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", "runtime_error"),
    ],
)
async def test_status_tells_how_a_program_ended(pool, source, status):
    assert (await run(pool, source)).status == status


async def test_traceback_names_the_line_and_nothing_of_ours(pool):
    outcome = await run(pool, "x = 1\nraise ValueError('no')")
    assert "line 2" in outcome.stderr
    assert "ValueError: no" in outcome.stderr
    assert "play" not in outcome.stderr


async def test_results_come_as_far_as_they_came(pool):
    source = "def f(x):\n    while x: pass\n    return x"
    outcome = await run(pool, source, "f(0)", "f(1)", cpu_s=1.0)
    assert (outcome.status, outcome.results) == ("timeout", ({"value": 0},)), outcome


async def test_threads_and_exit_handlers_are_waited_for(pool):
    source = """
        import atexit, threading, time
        atexit.register(print, "last")
        threading.Thread(target=lambda: (time.sleep(0.05), print("thread"))).start()
        print("main")
        """
    assert (await run(pool, source)).stdout == "main\nthread\nlast\n"


async def test_standard_input_can_be_opened_by_path_and_by_number(pool):
    outcome = await run(pool, "print(open(0).read())", stdin="one")
    assert outcome.stdout == "one\n"
    if pool.backend is BUBBLEWRAP:
        outcome = await run(pool, "print(open('/dev/stdin').read())", stdin="one")
        assert outcome.stdout == "one\n", outcome


async def test_common_modules_are_there(pool):
    names = ["numpy_is_not", "collections", "decimal", "heapq", "typing", "dataclasses", "sqlite3"]
    outcome = await run(
        pool, "import importlib", *(f"importlib.import_module({n!r}) and 1" for n in names)
    )
    assert ["value" in result for result in outcome.results] == [False, *[True] * 6]


@pytest.mark.parametrize(
    "expression",
    [
        "(1, [2, (3,)])", "{1: 'a', (2, 3): None}", "{1, 2}", "frozenset({1})", "1e999", "-1e999", "2j",
        "b'\\xff'", "[True, 1, 1.0, 'x', None]", "{'a': (1,)}", "2 ** 20000", "()", "{}", "set()",
    ],
)  # fmt: skip
async def test_value_survives_the_way_out_and_into_source(pool, expression):
    outcome = await run(pool, "", expression)
    value = read_value(outcome.results[0])
    wanted = eval(expression)
    assert value == wanted
    assert type(value) is type(wanted)
    assert eval(write_source(value)) == wanted


async def test_subclasses_come_out_as_what_they_are_made_of(pool):
    source = """
        from collections import Counter, namedtuple
        from enum import IntEnum
        Point = namedtuple("Point", "x y")
        class Colour(IntEnum): RED = 1
        """
    outcome = await run(
        pool, source, "Counter('aab')", "Point(1, 2)", "Colour.RED", "map(str, [1])", "object()"
    )
    values = [read_value(result) for result in outcome.results]
    assert values[:3] == [{"a": 2, "b": 1}, (1, 2), 1]
    assert isinstance(values[3], Opaque)
    assert values[3].items == ["1"]
    assert isinstance(values[4], Opaque)


@pytest.mark.parametrize(
    "exact",
    [["rubbish", 1], ["set", [["list", [1]]]], [1, 2, 3], ["bytes", 7], [[], []], ["int", "x"]],
)
def test_value_that_nobody_wrote_is_refused(exact):
    with pytest.raises(ValueError, match=r"value|int|unpack|not enough|invalid"):
        read_value({"value": None, "exact": exact})


async def test_programs_run_in_parallel(pool):
    async with open_pool(pool.backend, num_workers=4) as many:
        outcomes = await asyncio.gather(*(run(many, f"print({n})") for n in range(200)))
    assert [outcome.stdout for outcome in outcomes] == [f"{n}\n" for n in range(200)]


async def test_killed_worker_is_replaced_and_the_program_run_again(pool):
    running = asyncio.create_task(run(pool, "import time; time.sleep(0.5); print(1)"))
    await asyncio.sleep(0)  # the job is on its way
    (before,) = pool.pids
    worker = psutil.Process(before).children()[0].pid if pool.backend is BUBBLEWRAP else before
    os.kill(worker, signal.SIGKILL)
    assert (await running).stdout == "1\n"
    assert pool.pids != [before]


async def test_cancelled_program_ends_at_once(pool):
    (before,) = pool.pids
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await run(pool, "import time; time.sleep(60)", cpu_s=60.0)
    with pytest.raises(ProcessLookupError):
        os.kill(before, 0)
    assert (await run(pool, "print(1)")).stdout == "1\n"


async def test_program_that_hardly_ran_is_run_once_more(pool):
    outcome = await run(pool, "import time; time.sleep(60)", cpu_s=0.02)
    assert outcome.status == "timeout"
    assert outcome.wall_s < 10


def until_gone(pids: list[int], timeout_s: float = 20.0) -> None:
    """Block until these processes have ended."""
    for pid in pids:
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        assert select.select([descriptor], [], [], timeout_s)[0], f"{pid} still runs"
        os.close(descriptor)


GATEWAY = """
import asyncio, sys
from gateway.components.shared_services import Program
from gateway.sandbox import backends
from gateway.sandbox.pool import SandboxPool

async def main():
    pool = SandboxPool(getattr(backends, sys.argv[1]), 1, 4.0)
    await pool.start()
    running = asyncio.create_task(pool.run(Program("while True: pass", cpu_s=1000.0)))
    await asyncio.sleep(0.1)
    print(*pool.pids, flush=True)
    await running

asyncio.run(main())
"""


@pytest.mark.parametrize("name", ["BUBBLEWRAP", "LANDLOCK"])
async def test_workers_die_with_a_gateway_that_was_killed(name):
    async with open_pool({"BUBBLEWRAP": BUBBLEWRAP, "LANDLOCK": LANDLOCK}[name]):
        pass  # skipped where there is none
    gateway = subprocess.Popen(  # noqa: ASYNC220
        [sys.executable, "-c", GATEWAY, name], stdout=subprocess.PIPE, text=True
    )
    with gateway:
        (worker,) = map(int, gateway.stdout.readline().split())
        family = [worker, *(child.pid for child in psutil.Process(worker).children(recursive=True))]
        assert len(family) > 1
        gateway.kill()
    until_gone(family)


IMPOSTOR = """
import json, socket, struct, sys, time
control = socket.socket(fileno=0)
def send(data): control.sendall(struct.pack(">I", len(data)) + data)
send(b'{"ready": true}')
control.recv(1 << 16)
KIND = sys.argv[1]
if KIND == "rubbish": send(b"[1, 2]")
if KIND == "torn": send(b'{"stopped": nul')
if KIND == "empty": send(b"{}")
if KIND == "huge": control.sendall(b"\\xff\\xff\\xff\\xff")
if KIND == "silent": time.sleep(60)
"""


@pytest.mark.parametrize("kind", ["rubbish", "torn", "empty", "huge", "silent", "gone"])
async def test_worker_that_fails_twice_is_an_outage_and_no_verdict(kind, monkeypatch):
    monkeypatch.setattr(worker_handle, "GRACE_S", 0.3)
    argv = [sys.executable, "-I", "-S", "-c", IMPOSTOR, kind]
    pool = SandboxPool(Backend("impostor", "", "", lambda: SandboxCommand(argv)), 1, 1.0)
    await pool.start()
    with pytest.raises(RewardOutage, match="twice"):
        await pool.run(Program("print(1)", cpu_s=0.1))
    await pool.aclose()
    assert pool.pids == []


async def test_backend_that_cannot_start_says_why():
    argv = [sys.executable, "-c", "import sys; sys.exit('no such luck')"]
    pool = SandboxPool(Backend("broken", "", "", lambda: SandboxCommand(argv)), 2, 1.0)
    with pytest.raises(Unavailable, match="no such luck"):
        await pool.start()
    assert pool.pids == []


async def test_probe_finds_what_an_unsafe_backend_lets_through():
    pool = SandboxPool(UNSAFE, 1, 4.0)
    await pool.start()
    with pytest.raises(Unavailable, match=r"read a file.*wrote to a file.*reached a port"):
        await probe(pool)
    await pool.aclose()


async def test_auto_says_what_it_chose_and_what_it_covers(caplog):
    caplog.set_level("INFO")
    sandbox = make_sandbox(SandboxConfig(), NoOutbound())
    await sandbox.start()
    try:
        (line,) = [record.message for record in caplog.records if "sandbox:" in record.message]
    finally:
        await sandbox.aclose()
    assert "covers" in line or "programs are refused" in line


async def test_auto_falls_back_and_then_refuses_with_reasons(monkeypatch, caplog):
    monkeypatch.setenv("PATH", "/nowhere")
    caplog.set_level("INFO")
    sandbox = make_sandbox(SandboxConfig(), NoOutbound())
    await sandbox.start()
    await sandbox.aclose()
    assert "bwrap is not installed" in caplog.text

    monkeypatch.setattr(sys, "base_prefix", "/nowhere")
    sandbox = make_sandbox(SandboxConfig(), NoOutbound())
    await sandbox.start()
    with pytest.raises(ConfigError, match=r"bwrap is not installed.*landlock: .*nowhere"):
        await sandbox.run(Program("print(1)"))


async def test_backend_asked_for_by_name_must_hold(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    sandbox = make_sandbox(SandboxConfig(type="bubblewrap"), NoOutbound())
    with pytest.raises(ConfigError, match="bwrap is not installed"):
        await sandbox.start()


async def test_unsafe_must_be_allowed_and_still_limits_resources():
    with pytest.raises(ValueError, match="allow_unsafe"):
        SandboxConfig(type="unsafe")
    sandbox = make_sandbox(SandboxConfig(type="unsafe", allow_unsafe=True), NoOutbound())
    await sandbox.start()
    try:
        assert (await sandbox.run(Program("x = bytearray(10 ** 10)"))).status == "memory"
        assert (await sandbox.run(Program("while True: pass", cpu_s=1.0))).status == "timeout"
        daemon = textwrap.dedent(
            """
            import os, time
            if os.fork() == 0:
                os.setsid()
                time.sleep(60)
            """
        )
        assert (await sandbox.run(Program(daemon))).status == "ok"
    finally:
        await sandbox.aclose()


async def test_programs_wait_for_a_sandbox_that_starts_beside_its_service():
    unsafe = SandboxConfig(type="unsafe", allow_unsafe=True)
    sandbox = BackgroundSandbox(make_sandbox(unsafe, NoOutbound()))
    await sandbox.start()
    try:
        assert (await sandbox.run(Program("print(1)"))).stdout == "1\n"
    finally:
        await sandbox.aclose()


async def test_a_sandbox_that_is_closed_while_it_starts_leaves_nothing():
    unsafe = SandboxConfig(type="unsafe", allow_unsafe=True)
    before = psutil.Process().children(recursive=True)
    sandbox = BackgroundSandbox(make_sandbox(unsafe, NoOutbound()))
    await sandbox.start()
    async with asyncio.timeout(10.0):
        while psutil.Process().children(recursive=True) == before:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    await sandbox.aclose()
    new = set(psutil.Process().children(recursive=True)) - set(before)
    _, alive = psutil.wait_procs(new, timeout=5.0)
    assert not alive


async def test_no_sandbox_refuses_and_says_so():
    sandbox = make_sandbox(SandboxConfig(type="none"), NoOutbound())
    await sandbox.start()
    with pytest.raises(ConfigError, match=r"sandbox\.type"):
        await sandbox.run(Program("print(1)"))
    await sandbox.aclose()
