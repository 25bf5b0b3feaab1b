"""Every process gets its own GPUs: by the environment that it is started with."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from headway.contracts.config.launch import LaunchConfig
from headway.contracts.errors import ConfigError
from headway.launch.launchers import local
from headway.launch.launchers.local import LocalRun
from headway.launch.launchers.placement import place
from headway.runtime.config import validate_config
from headway.runtime.gpus import Gpu, GpuSurvey
from headway.runtime.process import ProcessSpec

H100 = 80 << 30


def machine(num_gpus: int) -> GpuSurvey:
    gpus = tuple(Gpu(f"GPU-{n}f", "NVIDIA H100", H100, (9, 0)) for n in range(num_gpus))
    return GpuSurvey("580.95.05", (13, 0), gpus, num_gpus)


def configure(
    servers: int = 1,
    ranks: int = 1,
    backend: dict[str, Any] | None = None,
    device: str = "auto",
    run_dir: str = "run",
    **settings: Any,
) -> LaunchConfig:
    trainer = {
        "run_dir": run_dir,
        "data": {"path": "rows.jsonl", "batch_size": 1},
        "rollout": {"reward": {"name": "exact"}},
        "trainer": {"device": device},
    }
    tree = {
        "model": "model",
        "gateway": {},
        "server": {"backend": backend or {}},
        "trainer": trainer,
        "num_servers": servers,
        "num_trainer_ranks": ranks,
        **settings,
    }
    return validate_config(LaunchConfig, tree)


def devices(config: LaunchConfig, num_gpus: int, visible: str | None = None) -> dict[str, str]:
    """CUDA_VISIBLE_DEVICES of each process."""
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    placement = place(config, machine(num_gpus), environ)
    return {name: ",".join(names) for name, names in placement.devices.items()}


class Recorder:
    """Stands for a process that was started."""

    specs: list[ProcessSpec] = []

    def __init__(self, spec: ProcessSpec, template: object) -> None:
        self.spec = spec
        self.specs.append(spec)

    def wait_ready(self, timeout_s: float) -> str:
        return "http://127.0.0.1:8000"

    def exit_code(self) -> int | None:
        return 1 if self.spec.name == "server-1" else None

    def log_tail(self) -> str:
        return ""

    def stop(self, grace_s: float) -> None: ...


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[ProcessSpec]:
    monkeypatch.setattr(local, "Process", Recorder)
    monkeypatch.setattr(Recorder, "specs", [])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return Recorder.specs


def start_all(run: LocalRun) -> None:
    run.start_gateway()
    run.start_servers()
    run.start_trainer()


def test_each_process_is_started_with_devices_of_its_own(
    started: list[ProcessSpec], tmp_path: Path
):
    config = configure(servers=3, ranks=4, run_dir=str(tmp_path))
    with LocalRun(config, survey=machine(8)) as run:
        start_all(run)
        run.watch()  # server-1 died
    seen = [(spec.name, spec.env["CUDA_VISIBLE_DEVICES"]) for spec in started]
    assert seen == [
        ("gateway", "7"),
        ("server-0", "4"),
        ("server-1", "5"),
        ("server-2", "6"),
        ("trainer", "0,1,2,3"),
        ("server-1", "5"),  # started again, on the same
    ]
    # As nvidia-smi counts, unless somebody said how to.
    assert {spec.env["CUDA_DEVICE_ORDER"] for spec in started} == {"PCI_BUS_ID"}


def test_without_a_gpu_nothing_changes(started: list[ProcessSpec], tmp_path: Path):
    with LocalRun(configure(run_dir=str(tmp_path)), survey=GpuSurvey()) as run:
        start_all(run)
    assert len(started) == 3
    assert not any(name.startswith("CUDA") for spec in started for name in spec.env)


def test_a_child_sees_what_it_was_given(tmp_path: Path):
    placement = place(configure(servers=2), machine(4), {})
    code = "import os; print(os.environ['CUDA_VISIBLE_DEVICES'])"
    log = tmp_path / "child.log"
    env = placement.environment("server-1")
    child = local.Process(ProcessSpec("server-1", [sys.executable, "-c", code], log, env))
    assert child.wait(60.0) == 0
    assert log.read_text() == "2\n"


def test_an_outer_list_is_the_pool_and_keeps_its_names():
    config = configure(servers=2)
    assert devices(config, 8, "6,2,5") == {
        "trainer": "6",
        "server-0": "2",
        "server-1": "5",
        "gateway": "",
    }
    uuids = "GPU-3f,GPU-1f,GPU-0f,GPU-7f"
    assert devices(config, 8, uuids)["server-1"] == "GPU-0f"
    outer = {"CUDA_VISIBLE_DEVICES": "6,2,5"}  # indices in the order that the user's shell has
    assert set(place(config, machine(8), outer).environment("trainer")) == {"CUDA_VISIBLE_DEVICES"}


def test_an_empty_outer_list_is_the_cpu():
    assert devices(configure(servers=2), 8, "") == {}


@pytest.mark.parametrize(
    ("backend", "each"),
    [
        ({"type": "sglang", "args": {"--tp-size": 2}}, 2),
        ({"type": "sglang", "args": {"--tp": "2", "--dp-size": 2}}, 4),
        ({"type": "sglang", "args": {"--tp": 4, "--dp": 4, "--enable-dp-attention": True}}, 4),
        ({"type": "vllm", "args": {"--tensor-parallel-size": 2, "-pp": 2}}, 4),
        ({"type": "sglang", "args": {"--tp-size": 4, "--nnodes": 2}}, 2),
        ({"type": "sglang"}, 1),
        ({"type": "sglang", "args": {"--device": "cpu"}}, 0),
        ({"type": "sglang", "url": "http://engine:30000"}, 0),
        ({"type": "fake"}, 0),
        ({"device": "cpu"}, 0),
        ({"device": "cuda"}, 1),
    ],
)
def test_an_engine_gets_as_many_as_it_asks_for(backend, each):
    given = devices(configure(servers=2, ranks=2, backend=backend), 10)
    names = [str(number) for number in range(2 + 2 * each)]
    assert given["trainer"].split(",") == names[:2]
    first, second = (given[name].split(",") if each else [] for name in ("server-0", "server-1"))
    assert first + second == names[2:] and len(first) == each


def test_devices_that_an_engine_names_itself_are_nobody_elses():
    backend = {"type": "sglang", "env": {"CUDA_VISIBLE_DEVICES": "0,1"}}
    assert devices(configure(backend=backend), 4) == {
        "trainer": "2",
        "server-0": "",
        "gateway": "3",
    }


def test_who_trains_on_the_cpu_takes_none():
    assert devices(configure(device="cpu"), 1) == {"trainer": "", "server-0": "0", "gateway": ""}


def test_too_few_are_refused_with_the_count_of_each_role():
    backend = {"type": "sglang", "args": {"--tp-size": 2}}
    config = configure(servers=2, ranks=4, backend=backend)
    with pytest.raises(ConfigError) as error:
        devices(config, 8, "0,1,2,3,4")
    assert error.value.message == (
        "the processes of this run want 8 GPUs (4 trainer ranks with 1 each, 2 servers (sglang) with 2 "
        "each), and CUDA_VISIBLE_DEVICES=0,1,2,3,4 leaves 5 (0, 1, 2, 3, 4); lower num_trainer_ranks or "
        "num_servers, set trainer.trainer.device or server.backend.device to cpu, or set "
        "share_gpus=true to let servers run on GPUs that others have"
    )


def test_servers_may_share_and_ranks_may_not():
    config = configure(servers=3, ranks=2, share_gpus=True)
    assert devices(config, 2) == {
        "trainer": "0,1",
        "server-0": "0",
        "server-1": "1",
        "server-2": "0",
        "gateway": "",
    }
    assert devices(config, 8)["server-0"] == "2"  # enough: nobody shares
    with pytest.raises(ConfigError, match="want 5 GPUs"):
        devices(config, 1)


def test_cuda_without_a_gpu_is_refused_before_anything_starts():
    for config in (configure(device="cuda"), configure(backend={"device": "cuda"})):
        with pytest.raises(
            ConfigError, match=r"device is cuda; this machine has no NVIDIA GPU; run"
        ):
            place(config, GpuSurvey(), {})
    with pytest.raises(ConfigError, match="and CUDA_VISIBLE_DEVICES=;"):
        devices(configure(device="cuda"), 2, "")


def test_a_gpu_that_is_named_twice_is_refused():
    with pytest.raises(ConfigError, match="CUDA_VISIBLE_DEVICES=0,0 names a GPU twice"):
        devices(configure(), 2, "0,0")


def test_flags_that_are_no_numbers_are_refused():
    backend = {"type": "sglang", "args": {"--tp-size": "all"}}
    with pytest.raises(ConfigError, match=r"--tp-size is 'all'; give the number of GPUs"):
        devices(configure(backend=backend), 8)
