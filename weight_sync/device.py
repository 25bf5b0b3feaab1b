"""Choice of the device that a process computes on, for the trainer and the embedded generation
backend.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch

from headway.contracts.config.model import Device
from headway.contracts.errors import ConfigError
from headway.runtime.gpus import TORCH_BUILDS, VISIBLE, GpuSurvey, has_code, survey_gpus

INDEX = "https://download.pytorch.org/whl"


def choose_device(setting: Device = "auto") -> torch.device:
    """Return this process's device, always with an index, and make it the calling thread's.

    Among several processes (LOCAL_RANK, as torchrun sets it) each takes its own of the GPUs that it
    sees; one that sees a single GPU takes that. CUDA's current device belongs to a thread: every other
    thread that computes starts with `use_device`, or its work goes to the first GPU.

    Raises:
        ConfigError: a GPU is wanted, or there, and PyTorch can use none; or LOCAL_RANK has none.
    """
    if setting == "cpu":
        return torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", local_index(os.environ, torch.cuda.device_count()))
        use_device(device)
        return device
    survey = survey_gpus()
    if setting == "auto" and (not survey.has_gpus or hides_gpus(os.environ)):
        return torch.device("cpu")
    reason = why_no_cuda(survey, os.environ, torch.__version__, torch.version.cuda)
    hint = "set device=cuda where there is one" if setting == "cuda" else "mend that"
    raise ConfigError(
        f"device={setting}, and PyTorch can use no GPU here: {reason}; {hint}, or set device=cpu to "
        "compute on the CPU"
    )


def use_device(device: torch.device) -> None:
    """Make a device the current one of the calling thread; the CPU is always."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def local_index(environ: Mapping[str, str], num_visible: int) -> int:
    """Return which of the visible GPUs belongs to this process.

    Raises:
        ConfigError: its LOCAL_RANK has none.
    """
    local_rank = int(environ.get("LOCAL_RANK", "0"))
    if num_visible == 1:  # a scheduler, or the launcher, shows each process its own alone
        return 0
    if local_rank >= num_visible:
        raise ConfigError(
            f"LOCAL_RANK={local_rank} of this process wants GPU {local_rank}, and it sees {num_visible} "
            f"({VISIBLE}={environ.get(VISIBLE, '(unset)')}); start at most {num_visible} processes on "
            "this machine, or show them more GPUs"
        )
    return local_rank


def hides_gpus(environ: Mapping[str, str]) -> bool:
    """True if the environment says that no GPU is to be used."""
    return environ.get(VISIBLE, "unset").strip() in ("", "-1")


def why_no_cuda(
    survey: GpuSurvey, environ: Mapping[str, str], version: str, built_for: str | None
) -> str:
    """Say why `torch.cuda.is_available()` is false, and what to do.

    Args:
        version: of PyTorch.
        built_for: the CUDA that PyTorch is built for; None for a build without.
    """
    seen = survey.describe()
    if not survey.has_gpus:
        return f"this machine has {seen}"
    if hides_gpus(environ):
        return f"{VISIBLE}={environ[VISIBLE]!r} hides them ({seen})"
    if not survey.driver:
        return f"{seen}; in a container, start it with --gpus or a GPU reservation"
    if not survey.gpus:
        return f"{seen}; ask the scheduler for GPUs (Slurm: --gres=gpu:1)"
    runs = [b.name for b in TORCH_BUILDS if survey.cuda[0] >= b.cuda and has_code(b, survey)]
    if built_for is None:
        what = _install(version, runs[0]) if runs else "install a newer driver, then another build"
        return f"PyTorch {version} is the build for the CPU ({seen}); {what}"
    major = int(built_for.split(".")[0])
    if survey.cuda[0] < major:
        first = next((str(b.driver) for b in TORCH_BUILDS if b.cuda == major), f"of CUDA {major}")
        other = f", or {_install(version, runs[0])}" if runs else ""
        return (
            f"PyTorch {version} is built for CUDA {built_for}, and the driver is too old ({seen}); "
            f"install driver {first} or newer{other}"
        )
    if VISIBLE in environ:
        return f"{VISIBLE}={environ[VISIBLE]} names none of its devices ({seen})"
    return f"CUDA does not start ({seen}); python -c 'import torch; torch.cuda.init()' says why"


def _install(version: str, build: str) -> str:
    plain = version.partition("+")[0]
    return f"pip install torch=={plain}+{build} --extra-index-url {INDEX}/{build}"
