"""What the settings of `ppo-hybrid` refuse, and where roles go."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from headway.contracts.config.ppo_hybrid import PPOHybridExperiment


def experiment(**changes: Any) -> PPOHybridExperiment:
    tree: dict[str, Any] = {
        "model": {"path": "model"},
        "data": {"path": "rows.jsonl", "batch_size": 4},
        "reward": {"rule": {"name": "exact"}},
    }
    return PPOHybridExperiment(**(tree | changes))


def test_a_mini_batch_holds_whole_groups():
    for count, rows in ((1, 32), (2, 16), (3, 16), (4, 8)):
        assert experiment(algorithm={"num_minibatches": count}).mini_batch_rows == rows


def test_roles_that_are_not_named_run_in_the_first_pool():
    workers = {"pools": {"main": {"num_workers": 2}, "other": {}}, "placement": {"reward": "other"}}
    placed = experiment(workers=workers).workers
    assert placed.pool_of("critic") == placed.pool_of("actor_rollout") == "main"
    assert placed.pool_of("reward") == "other"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"reward": {}}, "nothing scores responses"),
        ({"reward": {"rule": {"name": "exact"}, "model": {"path": "m"}}}, "both score"),
        ({"reward": {"rule": {"name": "exact"}, "input_tokenizer": "m"}}, "read for reward.model"),
        ({"algorithm": {"advantage": {"type": "gae"}}}, "wants a critic"),
        ({"critic": {}}, "reads no values of a critic"),
        ({"sampling": {"temperature": 0.0}}, "equal siblings"),
        ({"algorithm": {"num_minibatches": 5}}, "exceeds data.batch_size=4"),
        ({"algorithm": {"distillation_coef": 1.0}}, "wants a teacher"),
        ({"workers": {"placement": {"critic": "none"}}}, "no pool; known: global_pool"),
        ({"workers": {"pools": {"a": {"devices": ["0"], "num_workers": 2}}}}, "one for each"),
        ({"evaluation": {"data": {"path": "x", "rows": 1}}}, "rows"),
        ({"trainer": {"cpu_offload": True}, "offload": {"optimizer": True}}, "leave out offload"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, Any], message: str):
    with pytest.raises(ValidationError, match=message):
        experiment(**changes)
