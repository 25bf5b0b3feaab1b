"""The drawing of `ppo-hybrid` has the calls that its settings ask for."""

from __future__ import annotations

from typing import Any

import pytest

from headway.contracts.config.ppo_hybrid import PPOHybridExperiment
from trainer.dataflow.hybrid import hybrid_flow

GRPO = {
    "generate_sequences",
    "compute_rm_score",
    "compute_log_prob",
    "row_advantages",
    "update_actor",
}


def flow_of(**changes: Any):
    tree: dict[str, Any] = {
        "model": {"path": "model"},
        "data": {"path": "rows.jsonl"},
        "reward": {"rule": {"name": "exact"}},
    }
    return hybrid_flow(PPOHybridExperiment(**(tree | changes)))


@pytest.mark.parametrize(
    ("changes", "more"),
    [
        ({}, set()),
        ({"algorithm": {"kl_coef": 0.1}}, {"compute_ref_log_prob"}),
        (
            {"critic": {}, "algorithm": {"advantage": {"type": "gae"}}},
            {"compute_values", "update_critic"},
        ),
        ({"reward": {"model": {"path": "rm"}, "input_tokenizer": "model"}}, set()),
    ],
)
def test_calls_follow_from_the_settings(changes: dict[str, Any], more: set[str]):
    assert {call.name for call in flow_of(**changes).calls} == GRPO | more


@pytest.mark.parametrize(
    ("kl_in", "reader"), [("loss", "update_actor"), ("reward", "row_advantages")]
)
def test_the_reference_is_read_where_the_penalty_is(kl_in: str, reader: str):
    flow = flow_of(algorithm={"kl_coef": 0.1, "kl_in": kl_in})
    readers = {to for (source, to), _ in flow.edges.items() if source == "compute_ref_log_prob"}
    assert readers == {reader}
