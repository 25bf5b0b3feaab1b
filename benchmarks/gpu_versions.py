"""List the versions of PyTorch, CUDA, NCCL, SGLang and vLLM here, and check that those in one process
group fit.

    python benchmarks/gpu_versions.py

HEADWAY_SGLANG_PYTHON and HEADWAY_VLLM_PYTHON name interpreters of other environments. Trainer and engines
with different builds of NCCL cannot form a group: the exit status is then 1.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Mapping

ASK = """
import importlib.metadata as m, json, torch
def version(name):
    try:
        return m.version(name)
    except m.PackageNotFoundError:
        return None
is_cuda = torch.cuda.is_available()
print(json.dumps({
    "torch": torch.__version__, "cuda": torch.version.cuda,
    "gpus": torch.cuda.device_count() if is_cuda else 0,
    "nccl": ".".join(map(str, torch.cuda.nccl.version())) if torch.version.cuda else None,
    "cudnn": torch.backends.cudnn.version() if is_cuda else None,
    **{name: version(name) for name in ("sglang", "vllm", "transformers")},
}))
"""
OTHERS = {"sglang": "HEADWAY_SGLANG_PYTHON", "vllm": "HEADWAY_VLLM_PYTHON"}


def main() -> int:
    """Print a line for each version."""
    ours = ask(sys.executable)
    show("headway", importlib.metadata.version("headway-rl"))
    for name, version in ours.items():
        show(name, version)
    different = []
    for engine, variable in OTHERS.items():
        python = os.environ.get(variable)
        if python is None:
            continue
        theirs = ask(python)
        for name in (engine, "torch", "cuda", "nccl"):
            show(f"{engine}: {name}", theirs[name])
        if theirs["nccl"] != ours["nccl"]:
            different.append(f"{engine} has NCCL {theirs['nccl']}, the trainer {ours['nccl']}")
    print("; ".join(different) or "all members of a process group have one NCCL")
    return int(bool(different))


def ask(python: str) -> Mapping[str, object]:
    """Versions in the environment of an interpreter."""
    done = subprocess.run([python, "-c", ASK], capture_output=True, text=True, check=True)
    found: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return found


def show(name: str, version: object) -> None:
    """Print a value that is text."""
    print(json.dumps({"name": name, "value": version}))


if __name__ == "__main__":
    sys.exit(main())
