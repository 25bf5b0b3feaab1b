"""Each program here was written to do harm; the worker survives it, and the next one is clean."""

import asyncio
import socket
from pathlib import Path

import pytest

from gateway.components.shared_services import ProgramResult
from gateway.sandbox.pool import SandboxPool
from tests.unit.gateway.sandboxes import BACKENDS, open_pool, run

SHORT = {"cpu_s": 1.0}


@pytest.fixture(params=sorted(BACKENDS))
async def pool(request):
    """One worker, which must be the same after the test, and as good."""
    async with open_pool(BACKENDS[request.param]) as opened:
        before = opened.pids
        yield opened
        outcome = await run(opened, "print(6 * 7)")
        assert (outcome.status, outcome.stdout) == ("ok", "42\n")
        assert opened.pids == before, "the worker was lost"


@pytest.fixture
def can_fork(pool: SandboxPool) -> bool:
    return pool.backend.name == "bubblewrap"


def value(outcome: ProgramResult, index: int = 0):
    """What a call returned."""
    assert outcome.status == "ok", outcome.stderr
    return outcome.results[index]["value"]


async def refused(pool: SandboxPool, source: str, call: str = "attack()") -> str:
    """The error that an attack met."""
    outcome = await run(pool, source, call)
    assert outcome.results, outcome
    assert "error" in outcome.results[0], outcome.results
    return outcome.results[0]["error"]


async def test_endless_loop_is_a_timeout(pool):
    outcome = await run(pool, "while True: pass", **SHORT)
    assert outcome.status == "timeout"
    assert outcome.cpu_s >= 1.0


async def test_sleep_is_a_timeout(pool):
    outcome = await run(pool, "import time; time.sleep(1000)", cpu_s=0.03)
    assert outcome.status == "timeout"


async def test_loop_that_ignores_signals_is_a_timeout(pool):
    source = """
        import signal
        for number in range(1, 65):
            try: signal.signal(number, signal.SIG_IGN)
            except (OSError, ValueError): pass
        while True: pass
        """
    assert (await run(pool, source, **SHORT)).status == "timeout"


async def test_memory_hog_is_told_as_memory(pool):
    assert (await run(pool, "x = bytearray(10 ** 10)")).status == "memory"
    assert (await run(pool, "x = []\nwhile True: x.append(bytearray(10 ** 7))")).status == "memory"


async def test_many_processes_share_one_allowance_of_memory(pool, can_fork):
    source = """
        import os, time
        for _ in range(20):
            if os.fork() == 0:
                hoard = bytearray(b"x" * (150 << 20))
                time.sleep(60)
        time.sleep(60)
        """
    outcome = await run(pool, source, memory_bytes=256 << 20)
    # Either the sum was noticed, or the number of processes ran out first.
    assert outcome.status in (("memory", "runtime_error") if can_fork else ("runtime_error",))
    assert outcome.wall_s < 30


async def test_fork_bomb_is_bounded_and_gone(pool, can_fork):
    source = """
        import os
        while True:
            try: os.fork()
            except OSError: pass
        """
    assert (await run(pool, source, cpu_s=0.1)).status == "timeout"
    if can_fork:
        assert await processes(pool) == 2  # the worker, and who counts


async def processes(pool: SandboxPool) -> int:
    count = "sum(name.isdecimal() for name in os.listdir('/proc'))"
    return value(await run(pool, "import os", count))


async def test_thread_bomb_is_bounded(pool):
    source = """
        import threading, time
        def more():
            while True:
                threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
        """
    error = await refused(pool, source, "more()")
    assert "thread" in error


async def test_daemon_does_not_outlive_its_program(pool, can_fork):
    source = """
        import os, time
        def attack():
            if os.fork() == 0:
                os.setsid()
                if os.fork() == 0:
                    while True: time.sleep(1)
                os._exit(0)
            return True
        """
    outcome = await run(pool, source, "attack()")
    if can_fork:
        assert value(outcome) is True
        assert await processes(pool) == 2
    else:
        assert "PermissionError" in outcome.results[0]["error"]


async def test_host_file_is_neither_read_nor_written_nor_deleted(pool, tmp_path: Path):
    secret = tmp_path / "secret"
    secret.write_text("the treasure")
    for folder in (secret, *list(secret.parents)[:4]):
        folder.chmod(0o777 if folder != Path("/tmp") else 0o1777)
    for attack in (
        "open({!r}).read()",
        "open({!r}, 'a')",
        "os.unlink({!r})",
        "os.truncate({!r}, 0)",
    ):
        error = await refused(pool, "import os", attack.format(str(secret)))
        assert "FileNotFoundError" in error or "PermissionError" in error
    assert secret.read_text() == "the treasure"


@pytest.mark.parametrize("path", ["/root", "/work", "/home", "/etc/passwd", "/etc/shadow"])
async def test_host_folders_cannot_be_read(pool, path):
    attack = f"os.listdir({path!r}) if os.path.isdir({path!r}) else open({path!r}).read()"
    await refused(pool, "import os", attack)


async def test_attributes_of_host_files_stay(pool, tmp_path: Path):
    target = tmp_path / "file"
    target.touch()
    before = target.stat()
    attacks = [f"os.chmod({str(target)!r}, 0)", f"os.utime({str(target)!r}, (0, 0))"]
    outcome = await run(pool, "import os", *attacks)
    assert all("error" in result for result in outcome.results)
    assert (target.stat().st_mode, target.stat().st_mtime) == (before.st_mode, before.st_mtime)


async def test_environment_holds_no_secrets(pool, monkeypatch):
    monkeypatch.setenv("HEADWAY_TEST_TOKEN", "the treasure")
    async with open_pool(pool.backend) as fresh:
        told = value(await run(fresh, "import os", "sorted(os.environ)"))
    assert "HEADWAY_TEST_TOKEN" not in told


async def test_host_loopback_cannot_be_reached(pool):
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0)
        port = server.getsockname()[1]
        attack = f"socket.create_connection(('127.0.0.1', {port}), 1)"
        await refused(pool, "import socket", attack)
        with pytest.raises(BlockingIOError):
            server.accept()


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
async def test_endless_output_is_cut(pool, stream):
    outcome = await run(pool, f"import sys\nwhile True: sys.{stream}.write('x' * 10000)")
    assert outcome.status == "output_limit"
    assert len(outcome.stdout) + len(outcome.stderr) <= 65_536


async def test_huge_result_is_cut(pool):
    outcome = await run(pool, "", "'x' * 10 ** 7")
    assert outcome.status == "output_limit"


async def test_huge_file_is_refused(pool):
    source = """
        def attack():
            with open("big", "wb") as file:
                for _ in range(3000): file.write(bytes(1 << 20))
        """
    outcome = await run(pool, source, "attack()")
    assert outcome.status == "runtime_error" or "error" in outcome.results[0]


async def test_many_files_fill_no_more_than_the_scratch_folder(pool, can_fork):
    if not can_fork:
        pytest.skip("landlock counts no disk space; its notes say so")
    source = """
        def attack():
            for number in range(100):
                with open(f"file{number}", "wb") as file: file.write(bytes(7 << 20))
        """
    assert "No space left" in await refused(pool, source)


async def test_files_do_not_outlive_their_program(pool):
    source = """
        import os
        os.makedirs("a/b/c", exist_ok=True)
        open("a/b/left", "w").write("a message")
        os.symlink("/usr", "link")
        os.mkdir("closed", 0o500)
        """
    assert (await run(pool, source)).status == "ok"
    assert value(await run(pool, "import os", "os.listdir('.')")) == []


async def test_kernel_objects_do_not_outlive_their_program(pool):
    source = """
        import ctypes
        libc = ctypes.CDLL(None)
        """
    calls = (
        "libc.shmget(1234, 4096, 0o1666)",
        "libc.msgget(1234, 0o1666)",
        "libc.semget(9, 1, 0o1666)",
    )
    outcome = await run(pool, source, *calls)
    assert [value(outcome, index) for index in range(3)] == [-1, -1, -1]


async def test_worker_cannot_be_killed_or_stopped(pool, can_fork):
    everybody = "os.kill(-1, 9)" if can_fork else "os.kill(-1, 0)"
    attacks = [f"os.kill(os.getppid(), signal.{name})" for name in ("SIGSTOP", "SIGINT", "SIGKILL")]
    for attack in (*attacks, everybody):  # the fixture finds the worker alive
        outcome = await run(pool, "import os, signal", attack)
        assert can_fork or "PermissionError" in outcome.results[0]["error"]


@pytest.mark.parametrize(
    "attack",
    [
        "resource.prlimit(os.getppid(), resource.RLIMIT_CPU, (0, 0))",
        "os.setpriority(os.PRIO_PROCESS, os.getppid(), 19)",
        "os.sched_setaffinity(os.getppid(), {0})",
        "os.pidfd_open(os.getppid())",
        "open(f'/proc/{os.getppid()}/mem', 'r+b')",
        "open(f'/proc/{os.getppid()}/environ').read()",
        "resource.setrlimit(resource.RLIMIT_AS, (-1, -1))",
        "os.setuid(0) or open('/proc/1/mem', 'rb')",
        "os.mkfifo('/usr/here')",
    ],
)
async def test_worker_and_limits_cannot_be_tampered_with(pool, attack):
    error = await refused(pool, "import os, resource", attack)
    assert any(
        word in error for word in ("Permission", "not permitted", "not allowed", "Read-only")
    )


async def test_worker_cannot_be_traced(pool):
    source = """
        import ctypes, os
        libc = ctypes.CDLL(None)
        """
    attach, namespace = "libc.ptrace(16, os.getppid(), 0, 0)", "libc.unshare(0x10000000)"
    outcome = await run(pool, source, attach, namespace)
    assert [value(outcome, 0), value(outcome, 1)] == [-1, -1]


async def test_segfault_is_a_runtime_error(pool):
    outcome = await run(pool, "import ctypes; ctypes.string_at(0)")
    assert outcome.status == "runtime_error"


async def test_deep_recursion_is_a_runtime_error(pool):
    source = """
        import sys
        sys.setrecursionlimit(10 ** 9)
        def f(): return f()
        f()
        """
    assert (await run(pool, source, memory_bytes=128 << 20)).status in ("runtime_error", "memory")


@pytest.mark.parametrize("source", ["(" * 5000, "-" * 200_000 + "1", "[" * 200 + "]" * 200])
async def test_source_that_breaks_compilers_is_its_own_fault(pool, source):
    outcome = await run(pool, source)
    assert outcome.status in ("compile_error", "runtime_error", "memory", "ok")


async def test_deeply_nested_result_is_its_own_fault(pool):
    source = """
        deep = []
        for _ in range(100_000): deep = [deep]
        """
    assert "RecursionError" in await refused(pool, source, "deep")


async def test_forged_reports_are_not_believed_beyond_their_form(pool):
    source = """
        import os
        os.write(3, b'rubbish\\n{"result": 1}\\n[[[[\\n{"ended": "accepted"}\\n')
        os.write(3, b'[' * 50_000 + b'\\n')
        os._exit(0)
        """
    outcome = await run(pool, source, "1")
    assert outcome.status == "ok"
    assert all("value" not in result for result in outcome.results)


async def test_good_programs_are_right_beside_bombs():
    bombs = ["import os\nwhile True: os.fork()", "x = []\nwhile True: x.append('x' * 10 ** 7)"]
    async with open_pool(BACKENDS["bubblewrap"], num_workers=4, wall_factor=20.0) as pool:
        hostile = [run(pool, bomb, cpu_s=1.0) for bomb in bombs * 2]
        good = [run(pool, f"def f(x): return x + {n}", "f(1)") for n in range(100)]
        outcomes = (await asyncio.gather(*hostile, *good))[len(hostile) :]
    assert [value(outcome) for outcome in outcomes] == [n + 1 for n in range(100)]
