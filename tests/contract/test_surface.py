"""The names that other projects import from `headway` and, to publish weights, from `weight_sync`: there,
light until they are used, typed, and in the documentation."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

import headway
import weight_sync

ROOT = Path(__file__).parents[2]
PACKAGES = ("headway", "gateway", "weight_sync", "inference_server", "trainer")
NAMES = sorted({*headway.__all__, *weight_sync.__all__} - {"__version__"})
PAGE = (ROOT / "docs" / "python.md").read_text()
PARTS = (ROOT / "docs" / "extending.md").read_text()
REGISTER = """
from headway import register_filter, register_reward, register_tool, register_workflow
register_filter("unanimous", Unanimous)
register_reward("length", Length)
register_tool("clock", Clock)
register_workflow("brief", Brief)
register_workflow("persistent", Persistent)
"""

USE = """
import sys
before = set(sys.modules)
import headway
loaded = {name.partition(".")[0] for name in set(sys.modules) - before}
assert loaded == {"headway"}, loaded
assert [name for name in sys.modules if name.startswith("headway.")] == []
for name in headway.__all__:
    assert name in dir(headway), name
    value = getattr(headway, name)
    assert getattr(value, "__name__", name) == name, value
import weight_sync
heavy = {"torch", "transformers", "sglang", "vllm", "ray"} & set(sys.modules)
assert not heavy, heavy
for name in weight_sync.__all__:
    assert name in dir(weight_sync), name
    assert getattr(weight_sync, name).__name__ == name, name
"""

MISTAKES = """
from headway import Answer, Prompt, RewardResult, SamplingConfig, make_reward, register_reward
from headway import Promt  # type: ignore[attr-defined]

def brevity(answer: Answer, words: int = 20) -> RewardResult:
    text: int = answer.completion  # type: ignore[assignment]
    return RewardResult(float(len(answer.completion.split()) <= words))

register_reward(1, brevity)  # type: ignore[arg-type]
SamplingConfig(max_new_tokens="many")  # type: ignore[arg-type]
Prompt(text="2 + 2 =")  # type: ignore[call-arg]
"""


def test_each_name_is_there_and_light():
    done = subprocess.run([sys.executable, "-c", USE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("package", [headway, weight_sync], ids=lambda package: package.__name__)
def test_an_unknown_name_is_an_attribute_error(package: ModuleType):
    message = f"module '{package.__name__}' has no attribute 'Promt'"
    with pytest.raises(AttributeError, match=message):
        _ = package.Promt


@pytest.mark.parametrize("package", [headway, weight_sync], ids=lambda package: package.__name__)
def test_type_checkers_are_shown_the_same_names(package: ModuleType):
    tree = ast.parse((ROOT / package.__name__ / "__init__.pyi").read_text())
    shown = {
        name.asname: f"{node.module}.{name.name}"
        for node in tree.body
        if isinstance(node, ast.ImportFrom)
        for name in node.names
    }
    assert shown == {name: f"{module}.{name}" for name, module in package._MODULES.items()}


def test_every_name_is_in_the_table_of_the_page():
    cells = [line.split("|")[1] for line in PAGE.splitlines() if line.startswith("| `")]
    assert sorted(re.findall(r"`(\w+)`", " ".join(cells))) == NAMES


def script_of(page: str) -> str:
    return "\n".join(re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL))


@pytest.mark.extended
def test_a_strict_type_checker_sees_them_without_a_plugin(tmp_path: Path):
    (tmp_path / "mistakes.py").write_text(MISTAKES)
    (tmp_path / "page.py").write_text(script_of(PAGE))
    (tmp_path / "parts.py").write_text(script_of(PARTS) + REGISTER)
    (tmp_path / "mypy.ini").write_text("[mypy]\nstrict = true\n")
    examples = [ROOT / "examples" / name for name in ("rewards", "workflows")]
    files = [tmp_path, examples[0] / "my_rewards.py", examples[1] / "second_thought.py"]
    cache = ROOT / ".mypy_cache" / "plain"  # kept: what Headway imports takes seconds to read
    command = ["mypy", "--config-file", tmp_path / "mypy.ini", "--cache-dir", cache]
    command += ["--follow-imports", "silent", *files]  # as of an installed package
    done = subprocess.run(
        [sys.executable, "-m", *map(str, command)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_say_that_they_are_typed(package: str):
    assert (ROOT / package / "py.typed").is_file()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "py.typed" in project["tool"]["setuptools"]["package-data"][package]


def test_our_own_modules_import_only_the_version_from_here():
    """Otherwise the walls between the packages would not see who imports whom."""
    for package in PACKAGES:
        for file in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.ImportFrom) and node.module in ("headway", "weight_sync"):
                    taken = {name.name for name in node.names}
                    assert taken == {"__version__"}, f"{file} imports {taken}"
