"""When something is due: by steps, by epochs and by seconds; and what follows: exports, total steps."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from headway.contracts.config.experiment import PPOExperiment, SFTExperiment
from headway.contracts.config.frequency import ExportConfig, FrequencyConfig
from headway.contracts.config.recovery import RecoveryConfig
from headway.contracts.errors import ConfigError
from trainer.checkpoint import CheckpointContents, Checkpoints
from trainer.exports import Exports
from trainer.steps import steps_per_epoch, with_total_steps
from trainer.timetable import Timetable
from trainer.topology import Topology

ALONE = Topology(0, 1, torch.device("cpu"))


def due(steps: range, steps_per_epoch: int = 4, **every: float) -> list[int]:
    """One step a second."""
    now = [0.0]
    timetable = Timetable(
        FrequencyConfig.model_validate(every), steps_per_epoch, ALONE, lambda: now[0]
    )
    found = []
    for step in steps:
        now[0] += 1.0
        if timetable.is_due(step):
            found.append(step)
        assert timetable.is_due(step) == (step in found), "a step is decided once"
    return found


@pytest.mark.parametrize(
    ("every", "wanted"),
    [
        ({}, []),
        ({"every_steps": 5}, [5, 10]),
        ({"every_epochs": 1}, [4, 8, 12]),
        ({"every_epochs": 2}, [8]),
        ({"every_s": 3.0}, [3, 6, 9, 12]),
        ({"every_s": 0.5}, list(range(1, 13))),
        ({"every_steps": 5, "every_epochs": 1, "every_s": 6.0}, [4, 5, 6, 8, 10, 12]),
    ],
    ids=str,
)
def test_steps_epochs_and_seconds_count_each_by_itself(every, wanted):
    assert due(range(1, 13), **every) == wanted


def test_checkpoints_and_evaluations_are_due_by_seconds_and_epochs_too(tmp_path):
    config = RecoveryConfig(every_steps=None, every_epochs=1)
    checkpoints = Checkpoints(tmp_path, config, ALONE, steps_per_epoch=3)
    assert [step for step in range(1, 8) if checkpoints.is_due(step, 7)] == [3, 6, 7]


class Written:
    """A model that is a file."""

    def save(self, meta):
        assert meta.weight_format == "hf"
        folder = Path(meta.path)
        folder.mkdir(parents=True)
        (folder / "model").touch()

        class Done:
            def result(self):
                return None

        return Done()


def test_the_newest_exports_are_kept(tmp_path):
    exports = Exports(tmp_path, ExportConfig(every_steps=2, keep=2), ALONE, 4)
    for step in range(1, 8):
        exports.after_step(step, {"model": Written(), "critic": Written()})
    folders = sorted(f.name for f in (tmp_path / "exports").iterdir())
    assert folders == ["step-00000004", "step-00000006"]
    assert (tmp_path / "exports" / "step-00000006" / "critic" / "model").is_file()
    again = Exports(tmp_path, ExportConfig(every_steps=2), ALONE, 4)
    again.after_step(6, {"model": Written()})  # a run that went back
    assert not (tmp_path / "exports" / "step-00000006" / "critic").exists()


def supervised(**trainer: object) -> SFTExperiment:
    tree = {"model": {"path": "m"}, "data": {"path": "d", "batch_size": 4}, "output_dir": "o"}
    return SFTExperiment.model_validate(tree | {"trainer": trainer})


def test_epochs_are_whole_batches():
    config = supervised(total_epochs=3)
    assert steps_per_epoch(range(11), config) == 2
    assert with_total_steps(config, range(11)).trainer.total_steps == 6
    assert with_total_steps(config, range(3)).trainer.total_steps == 3
    assert with_total_steps(supervised(total_steps=9), range(11)).trainer.total_steps == 9
    assert (config.trainer.planned_steps, supervised().trainer.planned_steps) == (None, 100)


def test_a_run_may_stop_before_its_schedules_end():
    config = with_total_steps(supervised(total_epochs=3, stop_after_steps=2), range(11))
    assert (config.trainer.last_step, config.trainer.total_steps) == (2, 6)
    assert with_total_steps(supervised(stop_after_steps=200), range(1)).trainer.last_step == 100


def test_what_epochs_leave_to_the_policy_is_checked_once_they_are_known():
    tree = {
        "model": {"path": "m"},
        "data": {"path": "d", "batch_size": 4},
        "rollout": {"reward": {"name": "exact"}},
        "weight_sync": {"root": "w"},
        "critic": {"warmup_steps": 2},
        "trainer": {"total_epochs": 1},
    }
    config = PPOExperiment.model_validate(tree)
    assert with_total_steps(config, range(12)).trainer.total_steps == 3
    with pytest.raises(ConfigError, match="leaves no step"):
        with_total_steps(config, range(8))


def test_a_resume_wants_a_checkpoint_and_auto_does_without(tmp_path):
    wanted = Checkpoints(tmp_path, RecoveryConfig(mode="resume"), ALONE)
    with pytest.raises(ConfigError, match=r"holds no checkpoint.*recovery\.mode=auto"):
        wanted.resume(CheckpointContents({}))
    assert (
        Checkpoints(tmp_path, RecoveryConfig(mode="auto"), ALONE).resume(CheckpointContents({}))
        is None
    )
