"""Bounds on what a step of the engine costs a GPU: launches, copies, waits, and shapes of attention."""

from __future__ import annotations

import pytest

from tests.numeric.models import save_model
from tests.processes import FORKS
from tests.unit.inference_server.device_metrics import Figures, report

DEADLINE_S = 120.0
LAYERS = 2
LAUNCHES = 36 * LAYERS + 66
"""Of a plain decode step: norms, rotary embedding and products of transformers' layers; sampling."""
SAMPLING = 50
"""Launches of cuts, penalties and bans besides, and those that a replayed step is left with."""


@pytest.fixture(scope="module")
def metrics(tmp_path_factory):
    folder = save_model(
        tmp_path_factory.mktemp("metrics"), "llama", num_layers=LAYERS, context=1024
    )
    answers, theirs = FORKS.Pipe()
    child = FORKS.Process(target=report, args=(str(folder), theirs), daemon=True)
    child.start()
    theirs.close()
    assert answers.poll(DEADLINE_S), "the figures did not come"
    told = answers.recv()
    child.join(DEADLINE_S)
    if isinstance(told, Exception):
        raise told
    return {name: Figures(**each) for name, each in told.items()}


def test_nothing_mixes_the_devices_and_no_step_waits_more_than_once(metrics):
    for name, each in metrics.items():
        assert each.mixed == [], name
        assert each.reads <= 1, name


def test_a_decode_step_is_one_copy_to_the_device_and_two_when_the_rows_change(metrics):
    for name in ("one length", "eight lengths", "all wishes", "graph", "graph ahead"):
        assert metrics[f"decode, {name}"].copies == 1, name
    for name, each in metrics.items():
        assert each.copies <= 2 or "slabs" in name, name


def test_attention_has_one_shape_however_long_the_sequences_are(metrics):
    for name, each in metrics.items():
        assert each.shapes <= 1 or "slabs" in name, name


def test_launches_grow_neither_with_lengths_nor_with_scores(metrics):
    plain = metrics["decode, one length"].launches
    assert plain == metrics["decode, eight lengths"].launches
    assert plain <= LAUNCHES, f"{plain} launches, at most {LAUNCHES} are allowed: {metrics}"
    for name in ("all wishes", "other rows"):
        assert metrics[f"decode, {name}"].launches <= LAUNCHES + SAMPLING
    for name in ("prefill, eight lengths", "prefill after it", "scores, top 0", "scores, top 3"):
        assert metrics[name].launches <= plain + 10
    assert metrics["decode, graph"].launches <= SAMPLING
    assert metrics["decode, graph ahead"].launches <= SAMPLING + 1


def test_a_swap_copies_all_weights_in_one_launch(metrics):
    assert metrics["swap"].launches == 1
    assert metrics["swap"].copies == 0
