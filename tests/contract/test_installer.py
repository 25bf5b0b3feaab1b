"""`make install` installs the build of PyTorch that this machine's driver runs."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYTHON = """#!/bin/bash
# Stands for Python: knows one driver; programs of its virtual environments tell what they were asked.
case "$*" in
*gpus.py) {driver} ;;
*venv*) mkdir -p "$3/bin"; cp {folder}/program "$3/bin/pip"; cp {folder}/program "$3/bin/python" ;;
esac
"""
PROGRAM = """#!/bin/bash
echo "$(basename "$0") $*" >> {folder}/asked
case "$*" in
*+{missing}) [[ "$*" == *--extra-index-url* ]] ;;
esac
"""
INDEX = "https://download.pytorch.org/whl"
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
        f"pip install --quiet {requirement}",
        "pip install --quiet --constraint constraints.txt --editable .[dev]",
        TRIED,
    ]


def test_a_build_that_the_registry_lacks_comes_from_pytorchs_index(tmp_path):
    status, asked = install(tmp_path, "echo cpu", missing="cpu")
    assert status == 0
    assert asked[:2] == [
        "pip install --quiet torch==2.13.0+cpu",
        f"pip install --quiet --extra-index-url {INDEX}/cpu torch==2.13.0+cpu",
    ]
    assert TRIED not in asked


def test_a_driver_that_is_too_old_ends_the_installation(tmp_path):
    status, asked = install(tmp_path, "echo 'driver 470 is too old' >&2; exit 1")
    assert status != 0 and asked == []


def test_the_build_can_be_named(tmp_path):
    status, asked = install(tmp_path, "exit 1", "TORCH_BUILD=cu126")  # for other machines, maybe
    assert status == 0 and asked[0] == "pip install --quiet torch==2.13.0+cu126"
    assert TRIED not in asked
