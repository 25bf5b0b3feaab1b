"""NVIDIA GPUs of this machine, as their driver reports them: without torch, and without a CUDA context.

The driver is asked through NVML, its own library. Nothing here but the standard library: the installer
runs this file before there is any package. `python headway/runtime/gpus.py` prints which build of PyTorch
suits this machine. Devices of other makers are not looked for.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VISIBLE = "CUDA_VISIBLE_DEVICES"
ORDER = "CUDA_DEVICE_ORDER"
NVML = "libnvidia-ml.so.1"
TEXT_BYTES = 96
"""Longest text that NVML gives."""


@dataclass(frozen=True, slots=True)
class TorchBuild:
    """One of PyTorch's builds."""

    name: str
    """Name of the build, as in the address of its index."""
    cuda: int
    """Major version of CUDA that the driver has to run."""
    driver: int
    """The first driver that does."""
    oldest: tuple[int, int]
    newest: tuple[int, int]
    """Compute capabilities of the devices that it has code for."""


TORCH_BUILDS = (
    TorchBuild("cu130", 13, 580, (7, 5), (12, 9)),
    TorchBuild("cu126", 12, 525, (5, 0), (9, 0)),
)
"""Those of PyTorch 2.13, the best first."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """One device."""

    uuid: str
    name: str
    memory_bytes: int | None
    """All of its memory; None where it is the host's."""
    capability: tuple[int, int]
    """Compute capability: what code it runs."""


@dataclass(frozen=True, slots=True)
class GpuSurvey:
    """GPUs of this machine, as NVIDIA's driver reports them."""

    driver: str = ""
    """Version of the driver; empty where there is none that can be asked."""
    cuda: tuple[int, int] = (0, 0)
    """Newest CUDA that the driver runs."""
    gpus: tuple[Gpu, ...] = ()
    """GPUs in the order of the bus, as in nvidia-smi; those that this process may open."""
    num_device_files: int = 0
    """Files /dev/nvidia0 and so on; more than `gpus` where a scheduler withholds some."""

    @property
    def has_gpus(self) -> bool:
        """True if the machine has GPUs, usable or not."""
        return bool(self.gpus) or self.num_device_files > 0

    def describe(self) -> str:
        """One line for messages."""
        if not self.has_gpus:
            return "no NVIDIA GPU"
        if not self.driver:
            return f"{self.num_device_files} NVIDIA GPUs, and no driver library ({NVML})"
        names = ", ".join(sorted({gpu.name for gpu in self.gpus})) or "none open to this process"
        version = ".".join(map(str, self.cuda))
        return f"{len(self.gpus)} NVIDIA GPUs ({names}), driver {self.driver} for CUDA ≤ {version}"


def survey_gpus() -> GpuSurvey:
    """Ask the driver; a machine without one has no GPUs."""
    num_files = len(list(Path("/dev").glob("nvidia[0-9]*")))
    try:
        library = ctypes.CDLL(NVML)
    except OSError:
        return GpuSurvey(num_device_files=num_files)
    return ask_nvml(library, num_files)


def ask_nvml(library: Any, num_device_files: int = 0) -> GpuSurvey:
    """Ask a loaded NVML; a driver that does not answer counts as none.

    Args:
        library: its functions by their names in C.
    """
    if library.nvmlInit_v2() != 0:
        return GpuSurvey(num_device_files=num_device_files)
    try:
        cuda, count = ctypes.c_int(0), ctypes.c_uint(0)
        library.nvmlSystemGetCudaDriverVersion_v2(ctypes.byref(cuda))
        library.nvmlDeviceGetCount_v2(ctypes.byref(count))
        found = (_ask_device(library, index) for index in range(count.value))
        return GpuSurvey(
            _text(library.nvmlSystemGetDriverVersion),
            (cuda.value // 1000, cuda.value % 1000 // 10),
            tuple(gpu for gpu in found if gpu is not None),
            num_device_files,
        )
    finally:
        library.nvmlShutdown()


def visible_devices(survey: GpuSurvey, environ: Mapping[str, str]) -> tuple[str, ...]:
    """Names of the devices that a process with this environment may use, as CUDA_VISIBLE_DEVICES takes
    them: indices, or (beginnings of) UUIDs. As in CUDA, nothing counts behind the first one that is not
    there."""
    given = environ.get(VISIBLE)
    if given is None:
        return tuple(str(index) for index in range(len(survey.gpus)))
    names: list[str] = []
    for name in (part.strip() for part in given.split(",")):
        if not _is_there(name, survey):
            break
        names.append(name)
    return tuple(names)


def torch_build(survey: GpuSurvey) -> str:
    """PyTorch's build for this machine: `cpu`, `cu130` or `cu126`.

    Raises:
        ValueError: no build runs on this driver and has code for these devices.
    """
    if not survey.gpus:
        return "cpu"
    fitting = [build for build in TORCH_BUILDS if has_code(build, survey)]
    for build in fitting:
        if survey.cuda[0] >= build.cuda:
            return build.name
    if not fitting:
        raise ValueError(
            f"{survey.describe()}: no build of PyTorch has code for all of them; name some in {VISIBLE} "
            "when you run, and set TORCH_BUILD"
        )
    wanted = " or ".join(f"{build.driver} (for {build.name})" for build in fitting)
    raise ValueError(
        f"{survey.describe()}: the driver is too old; install {wanted} or newer, or set TORCH_BUILD=cpu"
    )


def has_code(build: TorchBuild, survey: GpuSurvey) -> bool:
    """True if a build runs on all devices, with a driver that is new enough."""
    return all(build.oldest <= gpu.capability <= build.newest for gpu in survey.gpus)


def _is_there(name: str, survey: GpuSurvey) -> bool:
    if name.isdecimal():
        return int(name) < len(survey.gpus)
    if name.startswith("MIG-"):
        return True
    return name.startswith("GPU-") and any(gpu.uuid.startswith(name) for gpu in survey.gpus)


def _ask_device(library: Any, index: int) -> Gpu | None:
    """None where it is not ours to open, or lost."""
    handle = ctypes.c_void_p()
    if library.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(handle)) != 0:
        return None
    memory = (ctypes.c_ulonglong * 3)()  # total, free, used
    has_memory = library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)) == 0
    uuid, name = (
        _text(function, handle)
        for function in (library.nvmlDeviceGetUUID, library.nvmlDeviceGetName)
    )
    major, minor = ctypes.c_int(0), ctypes.c_int(0)
    library.nvmlDeviceGetCudaComputeCapability(handle, ctypes.byref(major), ctypes.byref(minor))
    capability = (major.value, minor.value)
    return Gpu(uuid, name, int(memory[0]) if has_memory else None, capability)


def _text(function: Any, *arguments: Any) -> str:
    buffer = ctypes.create_string_buffer(TEXT_BYTES)
    function(*arguments, buffer, ctypes.c_uint(TEXT_BYTES))
    return buffer.value.decode(errors="replace")


def main() -> None:
    """Print the build of PyTorch that suits this machine."""
    survey = survey_gpus()
    try:
        build = torch_build(survey)
    except ValueError as error:
        sys.exit(str(error))
    sys.stderr.write(f"{survey.describe()}: PyTorch's build {build}\n")
    sys.stdout.write(f"{build}\n")


if __name__ == "__main__":
    main()
