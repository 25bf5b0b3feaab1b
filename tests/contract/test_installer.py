"""`make install` installs the versions of the lock, and the PyTorch that this machine's driver runs."""

from __future__ import annotations

import re
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
PYTHON = """#!/bin/bash
# Stands for Python: knows one driver; programs of its virtual environments tell what they were asked.
case "$*" in
*gpus.py) {driver} ;;
*venv*) mkdir -p "$3/bin"; for name in pip uv python; do cp {folder}/program "$3/bin/$name"; done ;;
esac
"""
PROGRAM = """#!/bin/bash
echo "$(basename "$0") $*" | sed "s|$(dirname "$0")/||g; s|/dev/fd/[0-9]*|UV|" >> {folder}/asked
case "$*" in
*+{missing}) [[ "$*" == *--extra-index-url* ]] ;;
esac
"""
INDEX = "https://download.pytorch.org/whl"
UV = "uv pip install --quiet --index-strategy unsafe-best-match --python python"
BEFORE = [
    "pip install -qq --no-compile --requirement UV",
    f"{UV} --no-deps --requirement requirements/dev.txt",
]
AFTER = [f"{UV} --no-build-isolation --editable .[dev]"]
TRIED = 'python -c from weight_sync.device import choose_device; choose_device("cuda")'


def install(
    folder: Path, driver: str, *variables: str, missing: str = "none"
) -> tuple[int, list[str]]:
    """Status of `make install`, and what its Python was asked for."""
    for name, text in (("python", PYTHON), ("program", PROGRAM)):
        file = folder / name
        file.write_text(text.format(folder=folder, driver=driver, missing=missing))
        file.chmod(0o755)
    done = subprocess.run(
        ["make", "install", f"VENV={folder}/venv", f"PYTHON={folder}/python", *variables],
        cwd=ROOT,
        capture_output=True,
        timeout=60,
    )
    asked = folder / "asked"
    return done.returncode, asked.read_text().splitlines() if asked.exists() else []


@pytest.mark.parametrize(
    ("build", "requirement"), [("cu130", "torch===2.13.0"), ("cu126", "torch==2.13.0+cu126")]
)
def test_a_gpu_gets_the_build_that_its_driver_runs_and_it_is_tried(tmp_path, build, requirement):
    status, asked = install(tmp_path, f"echo {build}")
    assert status == 0
    assert asked == [
        *BEFORE,
        f"pip install -qq --no-compile {requirement}",
        *AFTER,
        TRIED,
    ]


def test_a_build_that_the_registry_lacks_comes_from_pytorchs_index(tmp_path):
    status, asked = install(tmp_path, "echo cpu", missing="cpu")
    assert status == 0
    assert asked == [
        *BEFORE,
        "pip install -qq --no-compile torch==2.13.0+cpu",
        f"pip install -qq --no-compile --extra-index-url {INDEX}/cpu torch==2.13.0+cpu",
        *AFTER,
    ]


def test_a_driver_that_is_too_old_ends_the_installation(tmp_path):
    status, asked = install(tmp_path, "echo 'driver 470 is too old' >&2; exit 1")
    assert status != 0 and asked == []


def test_the_build_can_be_named(tmp_path):
    status, asked = install(tmp_path, "exit 1", "TORCH_BUILD=cu126")  # for other machines, maybe
    assert status == 0 and "pip install -qq --no-compile torch==2.13.0+cu126" in asked
    assert TRIED not in asked


def pins(lock: str) -> dict[str, list[str]]:
    """Versions of each package that a lock names."""
    found: dict[str, list[str]] = {}
    for line in (ROOT / "requirements" / lock).read_text().splitlines():
        if match := re.match(r"([a-z0-9-]+)==([^ ]+)", line):
            found.setdefault(match[1], []).append(match[2])
    return found


def requirements(extra: str | None) -> Iterator[Requirement]:
    """What the project wants, with what the extras want that an extra names."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    texts = project["optional-dependencies"][extra] if extra else project["dependencies"]
    for wanted in map(Requirement, texts):
        if wanted.name == project["name"]:
            for inner in wanted.extras:
                yield from requirements(inner)
        else:
            yield wanted


def test_the_lock_names_a_version_for_everything_that_the_project_wants():
    locked = pins("dev.txt")
    wanted = [*requirements(None), *requirements("dev")]
    assert len(wanted) > 40
    for one in wanted:
        if one.name != "torch":
            versions = locked.get(re.sub(r"[-_.]+", "-", one.name).lower(), [])
            assert versions and all(map(one.specifier.contains, versions)), f"make lock: {one}"


@pytest.mark.parametrize("lock", ["dev.txt", "sglang-cpu.txt", "vllm-cpu.txt"])
def test_a_lock_has_hashes_and_nothing_of_pytorch(lock):
    blocks = re.split(r"\n(?=[^ ])", (ROOT / "requirements" / lock).read_text())[1:]
    assert len(blocks) > 100
    assert [block for block in blocks if "--hash=sha256:" not in block] == []
    assert not {"torch", "triton", "nvidia-cublas", "cuda-toolkit"} & pins(lock).keys()
