"""The metrics of a run: always into the journal, and into sinks, even if these fail."""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import subprocess
from pathlib import Path

import pytest
import torch

from headway.contracts.config.experiment import SFTExperiment
from headway.contracts.errors import ConfigError, UnknownName
from headway.runtime.config import dump_yaml
from headway.runtime.journal import METRICS_NAME, MetricsJournal, read_steps
from tests.unit.trainer.run_descriptions import run_description, step
from trainer.topology import Topology
from trainer.tracking.base import register_sink
from trainer.tracking.groups import curve_name, histograms, scalars
from trainer.tracking.lineage import LINEAGE_NAME, git_commit, is_dirty
from trainer.tracking.tracker import Tracker, open_tracker

ROOT = Path(__file__).parents[3]


class FullDisk:
    """Takes the first step, and then no more."""

    def __init__(self, description) -> None:
        self._room = 1

    def write(self, metrics) -> None:
        self._room -= 1
        if self._room < 0:
            raise OSError(errno.ENOSPC, "No space left on device")

    def close(self) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")


class Unreachable:
    """A service that is not there."""

    def __init__(self, description) -> None:
        raise ConnectionError("no route to host")


@pytest.fixture(scope="module", autouse=True)
def sinks_of_this_file() -> None:
    register_sink("test_full_disk", FullDisk)
    register_sink("test_unreachable", Unreachable)


def test_a_sink_that_fails_is_logged_once_and_counted(tmp_path, caplog):
    description = run_description(tmp_path, sinks=("test_full_disk", "test_unreachable"))
    file = tmp_path / METRICS_NAME
    with caplog.at_level(logging.WARNING):
        tracker = Tracker(MetricsJournal(file), description)
        for number in range(4):
            tracker.write(step(number, loss=1.0))
        tracker.close()
    rows = read_steps(file)
    assert [row["loss"] for row in rows] == [1.0] * 4
    assert [row["sink_failures"] for row in rows] == [1, 1, 2, 3]
    assert [record.sink for record in caplog.records] == ["test_unreachable", "test_full_disk"]


def test_a_journal_that_cannot_be_written_ends_the_run():
    tracker = Tracker(MetricsJournal(Path("/dev/full")))
    with pytest.raises(OSError, match="No space left"):
        tracker.write(step(0, loss=1.0))
    with pytest.raises(OSError, match="No space left"):
        tracker.close()


def test_a_sink_without_its_package_is_refused_with_what_to_install(tmp_path, monkeypatch):
    (tmp_path / "sink_of_a_package.py").write_text("import no_such_package_anywhere\n")
    monkeypatch.syspath_prepend(tmp_path)
    register_sink("test_not_installed", "sink_of_a_package:Sink")
    with pytest.raises(ConfigError, match=r"no_such_package_anywhere.*the extra 'tracking'"):
        Tracker(MetricsJournal(None), run_description(tmp_path, sinks=("test_not_installed",)))


def test_an_unknown_sink_is_refused_with_the_known_ones(tmp_path):
    with pytest.raises(UnknownName, match="did you mean 'tensorboard'"):
        Tracker(MetricsJournal(None), run_description(tmp_path, sinks=("tensorbord",)))


def sft_config(folder: Path, **metrics) -> SFTExperiment:
    return SFTExperiment.model_validate(
        {
            "run_dir": str(folder / "my-run"),
            "output_dir": str(folder / "model"),
            "model": {"path": "m"},
            "data": {"path": "rows.jsonl"},
            "metrics": metrics,
        }
    )


def test_every_start_leaves_a_line_of_where_it_comes_from(tmp_path):
    config = sft_config(tmp_path)
    topology = Topology(0, 1, torch.device("cpu"))
    for first_step in (0, 7):
        open_tracker(config, topology, "0123abcd", first_step).close()
    lines = (tmp_path / "my-run" / LINEAGE_NAME).read_text().splitlines()
    first, second = map(json.loads, lines)
    assert (first["first_step"], second["first_step"]) == (0, 7)
    digest = hashlib.sha256(dump_yaml(config).encode()).hexdigest()
    assert first["config_sha256"] == second["config_sha256"] == digest
    assert first["packages"]["torch"] == torch.__version__
    assert first["git_commit"] == git_commit(ROOT)


def test_other_ranks_write_nothing(tmp_path):
    tracker = open_tracker(sft_config(tmp_path), Topology(1, 2, torch.device("cpu")), "")
    tracker.write(step(0, loss=1.0))
    tracker.close()
    assert not list(tmp_path.iterdir())


def git(folder: Path, *arguments: str) -> str:
    who = ["-c", "user.name=t", "-c", "user.email=t@t"]
    done = subprocess.run(
        ["git", "-C", str(folder), *who, *arguments], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def test_the_commit_is_of_the_checkout_that_holds_the_package(tmp_path):
    assert git_commit(tmp_path) is None
    git(tmp_path, "init", "-q")
    file = tmp_path / "headway" / "__init__.py"
    file.parent.mkdir()
    file.write_text("")
    assert git_commit(tmp_path) is None, "installed into somebody else's checkout"
    assert is_dirty(tmp_path) is None
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "one")
    assert git_commit(tmp_path) == git(tmp_path, "rev-parse", "HEAD")
    assert is_dirty(tmp_path) is False
    file.write_text("x = 1")
    assert is_dirty(tmp_path) is True


def test_figures_are_shown_in_groups():
    metrics = step(3, loss=0.5) | {"my_own": 2, "staleness_trajectories": [0]}
    assert dict(scalars(metrics)) == {"policy/loss": 0.5, "other/my_own": 2.0}
    assert dict(histograms(metrics)) == {"rollout/staleness_tokens": [5, 0, 3]}
    assert curve_name("mfu") == "speed/mfu"
    assert curve_name("evaluation_pass@4") == "evaluation/evaluation_pass@4"
    assert curve_name("eval_loss") == "evaluation/eval_loss"
