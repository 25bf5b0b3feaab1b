"""Groups of cgroup v2, in a folder that stands in for the kernel's: what is written, read and heeded."""

import asyncio
from pathlib import Path

import pytest

from gateway.components.shared_services import Program
from gateway.sandbox.backends import BUBBLEWRAP
from gateway.sandbox.cgroup import Cgroup, find_parent
from gateway.sandbox.worker_handle import SandboxWorkerLost, WorkerHandle
from headway.contracts.errors import ConfigError
from tests.unit.gateway.sandboxes import open_pool
from tests.waiting import until

FILES = {
    "cgroup.procs": "",
    "cgroup.kill": "",
    "cpu.stat": "usage_usec 5000000\nuser_usec 1\n",
    "memory.events": "low 0\noom 0\noom_kill 0\noom_group_kill 0\n",
    "memory.max": "",
    "memory.oom.group": "",
    "pids.max": "",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.fixture
async def worker(folder):
    async with open_pool(BUBBLEWRAP):
        pass  # skipped where there is none
    handle = WorkerHandle(BUBBLEWRAP, Cgroup(folder))
    await handle.start()
    yield handle
    handle.kill()


async def test_program_joins_its_group_and_is_bounded_by_it(worker, folder):
    frame = await worker.run(Program("print(1)", memory_bytes=64 << 20), 20.0)
    assert (frame["stopped"], frame["stdout"]) == (None, "1\n")
    written = {name: (folder / name).read_text() for name in ("cgroup.procs", "memory.max")}
    assert written == {"cgroup.procs": "0", "memory.max": str(64 << 20)}
    assert (folder / "memory.oom.group").read_text() == "1"


async def test_program_that_the_kernel_ended_for_its_memory_is_told_as_memory(
    worker, folder, monkeypatch
):
    def send(*args):
        own(*args)  # the group is bounded, and the program has not ended
        text = FILES["memory.events"].replace("oom_kill 0", "oom_kill 3")
        (folder / "memory.events").write_text(text)

    own = worker._send
    with monkeypatch.context() as patch:
        patch.setattr(worker, "_send", send)
        frame = await worker.run(Program("print(1)"), 20.0)
    assert frame["stopped"] == "memory"
    await worker.start()
    assert (await worker.run(Program("print(1)"), 20.0))["stopped"] is None


async def test_cpu_time_is_that_of_the_group(worker, folder):
    sleeper = Program("import time\ntime.sleep(60)", cpu_s=2.0)
    running = asyncio.create_task(worker.run(sleeper, 60.0))
    await until(lambda: (folder / "cgroup.procs").read_text())
    (folder / "cpu.stat").write_text("usage_usec 7100000\n")
    assert (await running)["stopped"] == "cpu"


async def test_group_that_cannot_be_bounded_is_no_verdict(worker, folder):
    (folder / "memory.max").unlink()
    with pytest.raises(SandboxWorkerLost, match=r"memory\.max"):
        await worker.run(Program("print(1)"), 20.0)


def test_controllers_are_enabled_where_they_are_not(tmp_path):
    control = tmp_path / "cgroup.subtree_control"
    control.write_text("cpu")
    assert find_parent(str(tmp_path)) == tmp_path
    assert control.read_text() == "+memory +pids"
    control.write_text("cpu memory pids")
    assert find_parent(str(tmp_path)) == tmp_path
    assert control.read_text() == "cpu memory pids"


def test_folder_that_is_named_must_be_one(tmp_path):
    with pytest.raises(ConfigError, match=r"sandbox\.cgroup.*delegate one"):
        find_parent(str(tmp_path))
