"""`Learner`: which calls are updates of the policy."""

from __future__ import annotations

import numpy as np
import torch

from headway.contracts.config.dataflow import DataflowConfig
from headway.contracts.types import Trajectory
from trainer.dataflow.call import Call
from trainer.dataflow.graph import Dataflow
from trainer.dataflow.policy import CRITIC, GENERATED, POLICY
from trainer.learner import Learner

ROLLOUT = Call("play", "generate", "rollout", (), (*GENERATED, "scores"), POLICY)
CALLS = (
    ROLLOUT,
    Call("learn_values", "train_step", "any", ("input_ids",), (), CRITIC),
    Call("learn_first", "train_step", "any", ("input_ids",), (), POLICY),
    Call("learn_second", "train_step", "any", ("input_ids",), (), POLICY),
)


class Update:
    """An interface that notes when it is called."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name = name
        self.log = log

    def train_step(self, batch: object) -> dict[str, float]:
        self.log.append(self.name)
        return {}


class Following:
    def __init__(self, log: list[str]) -> None:
        self.log = log

    def follow(self) -> None:
        self.log.append("follow")


def trajectory() -> Trajectory:
    mask = np.array([False, True, True])
    return Trajectory(
        rollout_id="run.0",
        group_id="a",
        sample_index=0,
        input_ids=np.array([1, 2, 3], dtype=np.int32),
        loss_mask=mask,
        logprobs=np.where(mask, -1.0, 0.0).astype(np.float32),
        versions=np.where(mask, 0, -1).astype(np.int32),
        reward=1.0,
        stop_reason="stop",
    )


def calls_of_a_step(step: int) -> list[str]:
    log: list[str] = []
    updates = {call.name: Update(call.name, log) for call in CALLS if call is not ROLLOUT}
    config = DataflowConfig(trace_steps=0)
    follower = Following(log)
    learner = Learner(Dataflow(CALLS), updates, config, torch.device("cpu"), follower, 1)
    learner.train_step([trajectory()], version=0, step=step)
    return log


def test_every_update_of_the_policy_waits_for_the_critic_to_be_warm():
    assert calls_of_a_step(0) == ["learn_values"]


def test_the_reference_follows_once_after_the_last_update_of_the_policy():
    log = calls_of_a_step(1)
    assert log.count("learn_values") == 1
    assert [name for name in log if name != "learn_values"] == [
        "learn_first",
        "learn_second",
        "follow",
    ]
