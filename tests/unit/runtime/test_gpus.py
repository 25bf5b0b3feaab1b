"""What NVIDIA's driver is asked, on a library that answers as NVML does."""

from __future__ import annotations

import runpy
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from headway.runtime import gpus
from headway.runtime.gpus import Gpu, GpuSurvey, ask_nvml, torch_build, visible_devices

GIB = 1 << 30
TWO = GpuSurvey(
    "580.1",
    (13, 0),
    tuple(Gpu(uuid, "H100", 80 * GIB, (9, 0)) for uuid in ("GPU-1a2b", "GPU-1c")),
)


@dataclass
class Nvml:
    """NVML by the names of its functions; numbers are its error codes."""

    memory: list[int | None]
    init: int = 0
    lost: int = -1
    """Index of a device that cannot be opened."""
    is_open: bool = False

    def nvmlInit_v2(self) -> int:
        self.is_open = self.init == 0
        return self.init

    def nvmlShutdown(self) -> int:
        self.is_open = False
        return 0

    def nvmlSystemGetDriverVersion(self, text: Any, size: Any) -> int:
        text.value = b"580.95.05"[: size.value]
        return 0

    def nvmlSystemGetCudaDriverVersion_v2(self, number: Any) -> int:
        number._obj.value = 13010
        return 0

    def nvmlDeviceGetCount_v2(self, number: Any) -> int:
        number._obj.value = len(self.memory)
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: Any, handle: Any) -> int:
        handle._obj.value = index.value + 1
        return 15 if index.value == self.lost else 0

    def nvmlDeviceGetMemoryInfo(self, handle: Any, memory: Any) -> int:
        given = self.memory[handle.value - 1]
        memory._obj[:] = [given or 0, 0, 0]
        return 3 if given is None else 0

    def nvmlDeviceGetUUID(self, handle: Any, text: Any, size: Any) -> int:
        text.value = b"GPU-%d" % handle.value
        return 0

    def nvmlDeviceGetCudaComputeCapability(self, handle: Any, major: Any, minor: Any) -> int:
        major._obj.value, minor._obj.value = 9, 0
        return 0

    def nvmlDeviceGetName(self, handle: Any, text: Any, size: Any) -> int:
        text.value = b"NVIDIA H100"
        return 0


def test_the_driver_says_what_there_is():
    nvml = Nvml([80 * GIB, None])
    survey = ask_nvml(nvml, num_device_files=2)
    h100s = tuple(
        Gpu(f"GPU-{n}", "NVIDIA H100", memory, (9, 0)) for n, memory in ((1, 80 * GIB), (2, None))
    )
    assert survey == GpuSurvey("580.95.05", (13, 1), h100s, 2)
    assert not nvml.is_open and survey.has_gpus
    assert survey.describe() == "2 NVIDIA GPUs (NVIDIA H100), driver 580.95.05 for CUDA ≤ 13.1"


def test_a_device_that_is_lost_is_none():
    assert [gpu.uuid for gpu in ask_nvml(Nvml([GIB, GIB, GIB], lost=1)).gpus] == ["GPU-1", "GPU-3"]


def test_a_driver_that_does_not_answer_leaves_the_device_files():
    survey = ask_nvml(Nvml([GIB], init=9), num_device_files=4)
    assert survey == GpuSurvey(num_device_files=4) and survey.has_gpus
    assert survey.describe() == "4 NVIDIA GPUs, and no driver library (libnvidia-ml.so.1)"
    assert GpuSurvey().describe() == "no NVIDIA GPU" and not GpuSurvey().has_gpus


@pytest.mark.parametrize(
    ("given", "names"),
    [
        (None, ("0", "1")),
        ("", ()),
        ("-1", ()),
        ("1", ("1",)),
        ("1, 0", ("1", "0")),
        ("0,7,1", ("0",)),  # as in CUDA: nothing counts behind what is not there
        ("GPU-1c,GPU-1a", ("GPU-1c", "GPU-1a")),
        ("GPU-9,0", ()),
        ("MIG-0aa1,MIG-0aa2", ("MIG-0aa1", "MIG-0aa2")),
    ],
)
def test_the_pool_is_what_the_environment_leaves(given, names):
    environ = {} if given is None else {"CUDA_VISIBLE_DEVICES": given}
    assert visible_devices(TWO, environ) == names


V100, H100, B200 = (7, 0), (9, 0), (10, 0)


def machine(cuda: tuple[int, int], *capabilities: tuple[int, int]) -> GpuSurvey:
    gpus = tuple(Gpu(f"GPU-{n}", "GPU", GIB, each) for n, each in enumerate(capabilities))
    return GpuSurvey("1.2", cuda, gpus)


@pytest.mark.parametrize(
    ("cuda", "capabilities", "build"),
    [
        ((13, 0), [H100], "cu130"),
        ((14, 2), [H100, B200], "cu130"),
        ((12, 9), [H100], "cu126"),
        ((12, 0), [V100, H100], "cu126"),
        ((13, 0), [V100], "cu126"),  # CUDA 13 has no code for it
    ],
)
def test_the_build_of_pytorch_is_one_that_driver_and_devices_run(cuda, capabilities, build):
    assert torch_build(machine(cuda, *capabilities)) == build


def test_a_machine_without_gpus_takes_the_build_for_the_cpu():
    assert torch_build(GpuSurvey()) == "cpu"
    assert torch_build(GpuSurvey("580.1", (13, 0))) == "cpu"


@pytest.mark.parametrize(
    ("cuda", "capabilities", "error"),
    [
        (
            (11, 4),
            [H100],
            r"CUDA ≤ 11\.4: the driver is too old; install 580 \(for cu130\) or 525 ",
        ),
        ((12, 8), [B200], r"the driver is too old; install 580 \(for cu130\) or newer, or set"),
        ((13, 0), [V100, B200], r"no build of PyTorch has code for all of them"),
    ],
)
def test_what_no_build_runs_on_is_told(cuda, capabilities, error):
    with pytest.raises(ValueError, match=error):
        torch_build(machine(cuda, *capabilities))


def test_the_installer_runs_the_file_before_there_are_packages(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    file = Path(gpus.__file__)
    stdlib = {name.split(".")[0] for name in sys.stdlib_module_names}
    imported = {
        line.split()[1].split(".")[0]
        for line in file.read_text().splitlines()
        if line.startswith(("import ", "from "))
    }
    assert imported <= stdlib | {"__future__"}
    runpy.run_path(str(file), run_name="__main__")
    assert capsys.readouterr().out.strip() in {"cpu", "cu126", "cu130"}
