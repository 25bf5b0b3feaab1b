"""Tests see no GPU unless `-m gpu` asks for one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import wants_gpus

ROOT = Path(__file__).parents[2]
PROBE = """
import os, subprocess, sys
import pytest

@pytest.mark.gpu
def test_probe():
    code = "import os; print(os.environ['CUDA_VISIBLE_DEVICES'])"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout
    assert child.strip() == os.environ["CUDA_VISIBLE_DEVICES"]
    print(f"seen=<{child.strip()}>")
"""


def test_a_test_and_its_children_see_no_gpu(tmp_path):
    probe = tmp_path / "test_probe.py"
    probe.write_text(PROBE)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu: needs a GPU\n")
    plugins = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_PLUGINS": "tests.conftest"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-s", "-c", str(tmp_path / "pytest.ini"), str(probe)],
        cwd=ROOT,
        env={**os.environ, **plugins, "CUDA_VISIBLE_DEVICES": "2,3", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert "seen=<>" in done.stdout, done.stdout


@pytest.mark.parametrize(
    ("expression", "wanted"),
    [
        ("", False),
        ("not extended", False),
        ("extended and not gpu", False),
        ("gpu", True),
        ("gpu and not extended", True),
    ],
)
def test_the_marker_asks_for_gpus(expression, wanted):
    assert wants_gpus(expression) is wanted
