"""A day on GPUs stops for nothing, and tells everything."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
FIGURE = {"name": "speed", "unit": "tokens/s", "value": 7.0, "spread": [6.0, 8.0], "ranks": 2}
HANG = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
time.sleep(600)
"""


@pytest.fixture
def day(monkeypatch: pytest.MonkeyPatch):
    """The modules of the script, which find one another from its folder."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.chdir(ROOT)
    names = ("gpu_day", "day.runner", "day.steps", "day.page")
    yield {name.rpartition(".")[2]: importlib.import_module(name) for name in names}
    for name in [n for n in sys.modules if n == "gpu_day" or n.partition(".")[0] == "day"]:
        del sys.modules[name]


def python(day: dict[str, Any], name: str, code: str, timeout_s: float = 60.0, **more: Any) -> Any:
    """A step that runs a few lines."""
    return day["steps"].Step(
        name, f"What about {name}?", (sys.executable, "-c", code), timeout_s, **more
    )


def is_running(pid: int) -> bool:
    """Whether there is such a process that is no zombie."""
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def test_a_step_that_fails_or_hangs_does_not_stop_the_others(day, tmp_path: Path) -> None:
    whole = day["runner"].Day(tmp_path / "out", "no NVIDIA GPU", "dry")
    good = f"print('not a figure'); print({json.dumps(FIGURE)!r})"
    whole.run(python(day, "versions", 'print(\'{"name": "torch", "value": "2.13"}\')'))
    whole.run(python(day, "good", good))
    assert whole.exit_status == 0
    whole.run(python(day, "bad", "raise ValueError('no | such kernel')"))
    hung = whole.run(python(day, "hangs", HANG, timeout_s=4.0))
    whole.run(python(day, "left-out", "", skip="wants 8 GPUs, there are 1"))
    whole.run(day["steps"].Step("absent", "Is it there?", ("/nowhere/program",), 5.0))
    whole.run(python(day, "last", "import os; print(os.environ['X'])", env={"X": "said"}))

    assert not is_running(int(hung.said))  # what it had started
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["mode"] == "dry" and report["commit"] and whole.exit_status == 1
    steps = {step["name"]: step for step in report["steps"]}
    assert {name: step["status"] for name, step in steps.items()} == {
        "versions": "ok",
        "good": "ok",
        "bad": "failed",
        "hangs": "timeout",
        "left-out": "skipped",
        "absent": "failed",
        "last": "ok",
    }
    assert steps["good"]["metrics"] == [FIGURE]
    assert steps["bad"]["returncode"] == 1 and "no | such kernel" in steps["bad"]["said"]
    assert steps["last"]["said"] == "said"

    page = (tmp_path / "out" / "report.md").read_text()
    assert "- torch: 2.13" in page and "## Steps: 3 ok, 2 failed, 1 timeout, 1 skipped" in page
    assert "| good | speed | 7.0 | 6.0 to 8.0 | tokens/s | ranks=2 |" in page
    assert "| wants 8 GPUs, there are 1 |" in page and "ValueError: no \\| such kernel |" in page
    assert "## bad: failed, return code 1" in page and "## hangs: timeout" in page


def test_the_report_is_there_after_every_step(day, tmp_path: Path) -> None:
    whole = day["runner"].Day(tmp_path, "", "dry")
    for count in (1, 2):
        whole.run(python(day, f"step-{count}", ""))
        assert len(json.loads((tmp_path / "report.json").read_text())["steps"]) == count


@pytest.mark.parametrize(("num_gpus", "is_dry"), [(0, True), (1, False), (2, False), (8, False)])
def test_steps_start_what_there_is_on_gpus_that_there_are(day, num_gpus: int, is_dry: bool) -> None:
    steps = day["steps"].make_steps(num_gpus, is_dry, "/sglang/bin/python")
    assert len({step.name for step in steps}) == len(steps)
    for step in steps:
        for word in step.argv:
            assert not word.endswith(".py") or (ROOT / word).is_file()
        assert step.skip or is_dry or step.needs <= num_gpus
        visible = step.env.get("CUDA_VISIBLE_DEVICES", "")
        assert visible == "" if is_dry else step.skip or len(visible.split(",")) <= num_gpus
    running = {step.name for step in steps if not step.skip}
    assert {"driver", "versions", "tests", "attention", "decode", "dpo", "grpo-disk"} <= running
    assert ("grpo-nccl" in running) is (is_dry or num_gpus >= 2)
    assert ("sglang-group" in running) is (num_gpus == 8)


def test_steps_are_chosen_by_name(day) -> None:
    steps = day["steps"].make_steps(1, False, None)
    chosen = day["gpu_day"].chosen(steps, "decode, versions")
    assert [step.name for step in chosen] == ["versions", "decode"]
    with pytest.raises(SystemExit, match="no step named decod;"):
        day["gpu_day"].chosen(steps, "decod")


@pytest.mark.extended
def test_a_dry_day_is_green(day, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--dry", "--out", str(tmp_path), "--only", "driver,versions,attention,grpo-kill"]
    assert day["gpu_day"].main(argv) == 0, (tmp_path / "report.md").read_text()
    assert capsys.readouterr().out.endswith(f"{tmp_path / 'report.md'}\n")
