"""The graphs of experiments on rows, and the interfaces that they name."""

from __future__ import annotations

import pytest

from trainer.data_supervised import Example, pack_examples
from trainer.dataflow.supervised import COLUMNS, ROWS
from trainer.experiments.base import EXPERIMENTS
from trainer.interfaces.base import INTERFACES
from trainer.interfaces.dpo import make as make_dpo
from trainer.interfaces.reward_modeling import make as make_rw
from trainer.interfaces.sft import make as make_sft

MAKERS = {"sft": make_sft, "rw": make_rw, "dpo": make_dpo}


def flow_of(kind: str, **changes):
    """The graph of an experiment with so much of its configuration."""
    model = {"path": "none", "head": "value" if kind == "rw" else "lm"}
    tree = {"output_dir": "none", "model": model, "data": {"path": "none"}}
    experiment = EXPERIMENTS.get(kind)
    assert experiment.flow is not None
    return experiment.flow(experiment.config.model_validate(tree | changes))


@pytest.mark.parametrize("kind", MAKERS)
def test_calls_are_on_the_interface_of_the_experiments_name(kind):
    assert INTERFACES.get(kind) is MAKERS[kind]
    flow = flow_of(kind)
    assert {call.interface for call in flow.model_calls} == {kind}
    assert flow.calls[0].name == ROWS and flow.calls[-1].name == f"{kind}_train"


def test_a_batch_has_the_columns_that_rows_are_said_to_bring():
    batch = pack_examples([Example([1], ([2], [3]), margin=0.5)])
    assert set(batch.columns) == {*COLUMNS, "margin"}
    flow = flow_of("rw", data={"path": "none", "margin_key": "margin"})
    assert set(flow.calls[0].output_keys) == set(batch.columns)
    assert "margin" not in flow_of("rw").producers


@pytest.mark.parametrize(
    ("model", "reference", "asked"),
    [
        ({}, None, "reference"),
        ({}, {"path": "other"}, "reference"),
        ({"lora": {"rank": 2}}, None, "model"),
        ({"lora": {"rank": 2}}, {"path": "other"}, "reference"),
    ],
)
def test_an_update_by_preference_waits_for_the_reference(model, reference, asked):
    flow = flow_of("dpo", model={"path": "none", **model}, reference=reference)
    assert [(call.name, call.model) for call in flow.model_calls] == [
        ("ref_inf", asked),
        ("dpo_train", "model"),
    ]
    assert flow.edges["ref_inf", "dpo_train"] == ("reference_logprobs",)
