"""A process computes on its own GPU, and never on the CPU of a machine with GPUs without a word."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch

from headway.contracts.config.hybrid import HybridConfig
from headway.contracts.errors import ConfigError
from headway.runtime.gpus import Gpu, GpuSurvey
from weight_sync import device as module
from weight_sync.device import choose_device, use_device, why_no_cuda

H100S = tuple(Gpu(f"GPU-{n}", "NVIDIA H100", 80 << 30, (9, 0)) for n in range(4))
MACHINE = GpuSurvey("570.86.10", (12, 8), H100S, 4)
CPU = torch.device("cpu")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch):
    """Set what the driver says, and how many GPUs PyTorch can use; the devices that were made current."""
    current: dict[str, torch.device] = {}
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("LOCAL_RANK", raising=False)

    def set_machine(survey: GpuSurvey, usable: int = 0) -> dict[str, torch.device]:
        def set_device(chosen: torch.device) -> None:
            current[threading.current_thread().name] = chosen

        monkeypatch.setattr(module, "survey_gpus", lambda: survey)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: usable > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: usable)
        monkeypatch.setattr(torch.cuda, "set_device", set_device)
        return current

    return set_machine


def test_a_machine_without_gpus_computes_on_the_cpu(machine):
    machine(GpuSurvey())
    assert choose_device("auto") == CPU
    with pytest.raises(ConfigError, match=r"device=cuda.* this machine has no NVIDIA GPU"):
        choose_device("cuda")


@pytest.mark.parametrize("setting", ["auto", "cuda"])
def test_every_thread_is_put_on_the_devices_index(machine, monkeypatch, setting):
    current = machine(MACHINE, usable=4)
    monkeypatch.setenv("LOCAL_RANK", "2")
    chosen = choose_device(setting)
    assert chosen == torch.device("cuda", 2)
    thread = threading.Thread(target=use_device, args=(chosen,), name="decode")
    thread.start()
    thread.join()
    assert current == {threading.current_thread().name: chosen, "decode": chosen}
    use_device(CPU)


def test_the_only_visible_gpu_is_a_processes_own_whatever_its_local_rank(machine, monkeypatch):
    machine(MACHINE, usable=1)
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert choose_device() == torch.device("cuda", 0)


def test_a_local_rank_without_a_gpu_is_refused(machine, monkeypatch):
    machine(MACHINE, usable=2)
    monkeypatch.setenv("LOCAL_RANK", "2")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    with pytest.raises(
        ConfigError, match=r"LOCAL_RANK=2 .* sees 2 \(CUDA_VISIBLE_DEVICES=4,5\); start at most 2"
    ):
        choose_device()


def test_cpu_asks_nobody(machine):
    assert machine(MACHINE, usable=4) == {} and choose_device("cpu") == CPU


def test_auto_never_trains_silently_on_the_cpu_beside_gpus(machine, monkeypatch):
    machine(MACHINE)
    with pytest.raises(ConfigError, match=r"device=auto.*set device=cpu to compute on the CPU"):
        choose_device("auto")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # said in so many words
    assert choose_device("auto") == CPU
    with pytest.raises(ConfigError, match="CUDA_VISIBLE_DEVICES='' hides them"):
        choose_device("cuda")


@pytest.mark.parametrize(
    ("survey", "visible", "built_for", "reason"),
    [
        (
            MACHINE,
            None,
            "13.0",
            "PyTorch 2.13.0+cu130 is built for CUDA 13.0, and the driver is too old (4 NVIDIA GPUs "
            "(NVIDIA H100), driver 570.86.10 for CUDA ≤ 12.8); install driver 580 or newer, or pip "
            "install torch==2.13.0+cu126 --extra-index-url https://download.pytorch.org/whl/cu126",
        ),
        (
            replace(MACHINE, driver="580.95.05", cuda=(13, 0)),
            None,
            None,
            "PyTorch 2.13.0+cu130 is the build for the CPU (4 NVIDIA GPUs (NVIDIA H100), driver "
            "580.95.05 for CUDA ≤ 13.0); pip install torch==2.13.0+cu130 --extra-index-url "
            "https://download.pytorch.org/whl/cu130",
        ),
        (
            replace(MACHINE, cuda=(11, 4)),
            None,
            "12.6",
            "PyTorch 2.13.0+cu130 is built for CUDA 12.6, and the driver is too old (4 NVIDIA GPUs "
            "(NVIDIA H100), driver 570.86.10 for CUDA ≤ 11.4); install driver 525 or newer",
        ),
        (
            replace(MACHINE, gpus=()),
            None,
            "12.6",
            "0 NVIDIA GPUs (none open to this process), driver 570.86.10 for CUDA ≤ 12.8; ask the "
            "scheduler for GPUs (Slurm: --gres=gpu:1)",
        ),
        (
            GpuSurvey(num_device_files=4),
            None,
            "12.6",
            "4 NVIDIA GPUs, and no driver library (libnvidia-ml.so.1); in a container, start it with "
            "--gpus or a GPU reservation",
        ),
        (
            MACHINE,
            "9",
            "12.6",
            "CUDA_VISIBLE_DEVICES=9 names none of its devices (4 NVIDIA GPUs (NVIDIA H100), driver "
            "570.86.10 for CUDA ≤ 12.8)",
        ),
        (
            MACHINE,
            None,
            "12.6",
            "CUDA does not start (4 NVIDIA GPUs (NVIDIA H100), driver 570.86.10 for CUDA ≤ 12.8); python "
            "-c 'import torch; torch.cuda.init()' says why",
        ),
    ],
    ids=["old_driver", "cpu_build", "ancient_driver", "withheld", "no_library", "absent", "other"],
)
def test_the_reason_says_what_to_do(survey, visible, built_for, reason):
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert why_no_cuda(survey, environ, "2.13.0+cu130", built_for) == reason


def test_generation_in_the_trainer_has_no_device_of_its_own():
    with pytest.raises(ValueError, match=r"generation runs where the trainer does"):
        HybridConfig.model_validate({"backend": {"device": "cpu"}})
