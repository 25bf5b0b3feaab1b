"""Weights & Biases without a network: what stands in the folder of an offline run."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from headway.runtime.journal import METRICS_NAME, MetricsJournal, read_steps
from tests.unit.trainer.run_descriptions import HISTOGRAM, run_description, step
from trainer.tracking.tracker import Tracker

pytest.importorskip("wandb")

import wandb
from wandb.proto.wandb_internal_pb2 import Record

from trainer.tracking.weights_and_biases import WandbSink

BLOCK, FILE_HEADER, HEADER = 2**15, 7, 7
FULL, LAST = 1, 4


@pytest.fixture(autouse=True)
def offline(monkeypatch, tmp_path):
    monkeypatch.setenv("WANDB_MODE", "offline")
    for name in ("WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    wandb.teardown()  # it reads the environment once
    yield
    wandb.teardown()


def records_of(file: Path) -> Iterator[Record]:
    """A file of wandb: LevelDB's log format, whose blocks begin after a header of the file's own."""
    data, at, parts = file.read_bytes(), FILE_HEADER, []
    assert data.startswith(b":W&B")
    while at + HEADER <= len(data):
        left = BLOCK - at % BLOCK
        if left < HEADER:
            at += left
            continue
        _, size, kind = struct.unpack("<IHB", data[at : at + HEADER])
        parts.append(data[at + HEADER : at + HEADER + size])
        at += HEADER + size
        if kind in (FULL, LAST):
            record = Record()
            record.ParseFromString(b"".join(parts))
            parts = []
            yield record


def starts_of(folder: Path) -> list[list[Record]]:
    """The records of each start, in order."""
    files = sorted(folder.glob("wandb/offline-run-*/*.wandb"), key=lambda f: f.stat().st_mtime_ns)
    return [list(records_of(file)) for file in files]


def history_of(records: list[Record]) -> list[dict]:
    return [
        {
            item.key or "/".join(item.nested_key): json.loads(item.value_json)
            for item in record.history.item
        }
        for record in records
        if record.HasField("history")
    ]


def write_steps(folder: Path, first_step: int, losses: list[float]) -> None:
    folder.mkdir(exist_ok=True)
    sink = WandbSink(run_description(folder, first_step))
    for number, loss in enumerate(losses, first_step):
        sink.write(step(number, loss))
    sink.close()
    wandb.teardown()  # the process that writes the file ends


def test_curves_histograms_and_config_are_read_back(tmp_path):
    write_steps(tmp_path / "run", 0, [3.0, 2.0])
    (records,) = starts_of(tmp_path / "run")
    run = next(record.run for record in records if record.HasField("run"))
    assert (run.run_id, run.project, run.display_name) == ("0123abcd", "tests", "a run")
    assert list(run.tags) == ["small"]
    config = {update.key: json.loads(update.value_json) for update in run.config.update}
    assert config["optimizer"] == {"lr": 0.5}
    assert config["lineage"] == {"git_commit": "c0ffee"}
    rows = history_of(records)
    assert [(row["step"], row["policy/loss"]) for row in rows] == [(0, 3.0), (1, 2.0)]
    curve = "rollout/staleness_tokens"
    assert rows[0][f"{curve}/_type"] == "histogram"
    assert rows[0][f"{curve}/values"] == HISTOGRAM
    assert rows[0][f"{curve}/bins"] == [-0.5, 0.5, 1.5, 2.5]
    axes = {r.metric.glob_name: r.metric.step_metric for r in records if r.HasField("metric")}
    assert axes["*"] == "step"


def test_a_resumed_run_is_the_same_run_and_keeps_its_step_numbers(tmp_path):
    write_steps(tmp_path / "run", 0, [3.0, 2.0, 9.0])
    write_steps(tmp_path / "run", 2, [1.5])
    starts = starts_of(tmp_path / "run")
    runs = [next(record.run for record in records if record.HasField("run")) for records in starts]
    assert [run.run_id for run in runs] == ["0123abcd", "0123abcd"]
    assert [row["step"] for row in history_of(starts[1])] == [2]


def test_a_service_that_is_not_there_leaves_the_journal(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
    monkeypatch.setenv("WANDB_INIT_TIMEOUT", "2")
    file = tmp_path / METRICS_NAME
    tracker = Tracker(MetricsJournal(file), run_description(tmp_path, sinks=("wandb",)))
    tracker.write(step(0, loss=1.0))
    tracker.close()
    assert read_steps(file)[0]["sink_failures"] == 1
