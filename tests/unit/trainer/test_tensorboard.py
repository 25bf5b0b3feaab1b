"""Event files, read back with TensorBoard's own reader."""

from __future__ import annotations

import pytest

from headway.runtime.journal import METRICS_NAME, MetricsJournal, read_steps
from tests.unit.trainer.run_descriptions import HISTOGRAM, run_description, step
from trainer.tracking.tracker import Tracker

pytest.importorskip("tensorboard")

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.util.tensor_util import make_ndarray

from trainer.tracking.tensorboard import FOLDER, TensorBoardSink


def events_of(folder) -> EventAccumulator:
    events = EventAccumulator(str(folder / FOLDER), size_guidance={"scalars": 0, "histograms": 0})
    return events.Reload()


def write_steps(folder, first_step: int, losses: list[float]) -> None:
    sink = TensorBoardSink(run_description(folder, first_step))
    for number, loss in enumerate(losses, first_step):
        sink.write(step(number, loss))
    sink.close()


def test_curves_and_histograms_are_read_back(tmp_path):
    write_steps(tmp_path, 0, [3.0, 2.0, 1.0])
    events = events_of(tmp_path)
    assert events.Tags()["scalars"] == ["policy/loss"]
    assert [(e.step, e.value) for e in events.Scalars("policy/loss")] == [(0, 3), (1, 2), (2, 1)]
    histogram = events.Histograms("rollout/staleness_tokens")[2].histogram_value
    assert (histogram.min, histogram.max, histogram.num, histogram.sum) == (0, 2, 8, 6)
    assert histogram.bucket == HISTOGRAM
    assert histogram.bucket_limit == [0.5, 1.5, 2.5]


def test_config_and_lineage_are_shown(tmp_path):
    write_steps(tmp_path, 0, [])
    events = events_of(tmp_path)
    texts = {
        tag: make_ndarray(events.Tensors(tag)[0].tensor_proto).item().decode()
        for tag in events.Tags()["tensors"]
    }
    assert "lr: 0.5" in texts["config/text_summary"]
    assert "c0ffee" in texts["lineage/text_summary"]


def test_a_resumed_run_goes_on_with_the_same_curve(tmp_path):
    write_steps(
        tmp_path, 0, [3.0, 2.0, 9.0, 9.0]
    )  # killed after step 3; the checkpoint holds 2 steps
    write_steps(tmp_path, 2, [1.5, 1.0])
    curve = [(e.step, e.value) for e in events_of(tmp_path).Scalars("policy/loss")]
    assert curve == [(0, 3.0), (1, 2.0), (2, 1.5), (3, 1.0)]


def test_a_folder_that_cannot_be_made_leaves_the_journal(tmp_path):
    (tmp_path / FOLDER).write_text("a file stands in the way")
    file = tmp_path / METRICS_NAME
    tracker = Tracker(MetricsJournal(file), run_description(tmp_path, sinks=("tensorboard",)))
    tracker.write(step(0, loss=1.0))
    tracker.close()
    assert read_steps(file)[0]["sink_failures"] == 1
