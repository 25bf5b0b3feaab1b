"""Who may import whom, and what the light rooms never load."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("headway", "weight_sync", "inference_server", "trainer")
HEAVY = ("torch", "transformers", "sglang", "vllm", "ray", "megatron")


def modules_below(folder: str) -> list[str]:
    """Dotted names of all modules of a room, read from the tree, not imported."""
    return [
        ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for file in sorted((ROOT / folder).rglob("*.py"))
    ]


LIGHT = [
    *modules_below("headway/contracts"),
    *modules_below("headway/runtime"),
    *modules_below("headway/rollout"),
    "headway.launch.cli",
]

REPORT_HEAVY_IMPORTS = f"""
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
    loaded = [heavy for heavy in {HEAVY!r} if heavy in sys.modules]
    if loaded:
        sys.exit(f"importing {{name}} loads {{loaded}}")
"""


def test_imports_run_one_way():
    command = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run(
        [command, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert ", 0 broken" in done.stdout


def test_the_light_rooms_never_load_torch():
    assert len(LIGHT) > 30
    done = subprocess.run(
        [sys.executable, "-c", REPORT_HEAVY_IMPORTS, *LIGHT],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "module", ["headway.rollout.gateway", "headway.launch.cli", "headway.runtime.inference_client"]
)
def test_each_light_process_starts_without_torch(module):
    done = subprocess.run(
        [sys.executable, "-c", REPORT_HEAVY_IMPORTS, module],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", PACKAGES)
def test_a_generic_name_is_our_package(name):
    """Other distributions install packages of these names; ours must be the one that is imported."""
    file = Path(importlib.import_module(name).__file__)
    assert file == ROOT / name / "__init__.py"


@pytest.mark.parametrize("file", [*(ROOT / "headway").rglob("__init__.py")], ids=str)
def test_no_facade_loads_the_world(file):
    lines = [
        line for line in file.read_text().splitlines() if line.startswith(("import ", "from "))
    ]
    assert not lines, f"{file} imports eagerly: {lines}"
