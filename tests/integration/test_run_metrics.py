"""The figures of a real run: in its journal, in its sinks, and on the page that documents them."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest

from headway.contracts.config.launch import LaunchConfig
from headway.contracts.config.metrics import MetricsConfig
from headway.runtime.journal import METRICS_NAME, read_steps
from tests.integration.driving import kill, resume, until_steps
from trainer.tracking.groups import GROUPS

pytestmark = pytest.mark.extended

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"
SINKS = [name for name in ("tensorboard", "wandb") if importlib.util.find_spec(name) is not None]
STEPS, KILLED_AFTER = 6, 3
HYBRID = {name for name in GROUPS["speed"].split() if name.startswith("weight_transfer_")}
ABSENT = {"stopped_fraction", "reference_kl", "kl_coef", "teacher_kl"}.union(
    HYBRID, *(GROUPS[part].split() for part in ("critic", "preference", "evaluation", "float16"))
)
"""What needs parts that this run has not."""


def with_sinks(config: LaunchConfig) -> LaunchConfig:
    metrics = MetricsConfig(sinks=tuple(SINKS), peak_tflops=0.1)
    return config.model_copy(
        update={"trainer": config.trainer.model_copy(update={"metrics": metrics})}
    )


@pytest.fixture
def folder(make_config, start, monkeypatch) -> Path:
    """Of a run whose trainer was killed and resumed."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    config = with_sinks(make_config(steps=STEPS))
    run, folder = start(config), Path(config.trainer.run_dir)
    run.start_trainer()
    until_steps(config, KILLED_AFTER)
    kill(run, "trainer")
    resume(run, config)
    return folder


def test_a_resumed_run_tells_what_the_page_says_and_its_sinks_show_it(folder: Path) -> None:
    steps = read_steps(folder / METRICS_NAME)
    assert [step["step"] for step in steps] == list(range(STEPS))
    rows = re.findall(r"^\| ([^|]*`) \|", PAGE.read_text().split("## All metrics")[1], re.M)
    documented = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert all(step.keys() == documented - ABSENT for step in steps)
    for step in steps:
        assert sum(step["staleness_trajectories"]) == step["trajectories"]
        assert len(step["staleness_trajectories"]) - 1 == step["staleness_max"]
        assert 0.0 < step["mfu"] < 1.0
        assert step["sink_failures"] == 0
    starts = [json.loads(line) for line in (folder / "lineage.jsonl").read_text().splitlines()]
    assert len({start["run_id"] for start in starts}) == 1
    assert 0 == starts[0]["first_step"] < starts[1]["first_step"]
    if "tensorboard" in SINKS:
        assert_curves_are(folder, steps)
    if "wandb" in SINKS:
        names = [path.name for path in (folder / "wandb").glob("offline-run-*")]
        assert len(names) == 2
        assert all(name.endswith(starts[0]["run_id"]) for name in names)


def assert_curves_are(folder: Path, steps: list[dict]) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    everything = {"scalars": 0, "histograms": 0}
    events = EventAccumulator(str(folder / "tensorboard"), everything).Reload()
    rewards = [(event.step, event.value) for event in events.Scalars("rollout/reward")]
    assert rewards == [(step["step"], pytest.approx(step["reward"])) for step in steps]
    shown = [event.histogram_value.num for event in events.Histograms("rollout/staleness_tokens")]
    assert shown == [sum(step["staleness_tokens"]) for step in steps]
