"""Whole runs that train adapters: servers get the base once, and adapters from then on."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from headway.contracts.config.launch import LaunchConfig
from headway.contracts.config.model import LoraConfig
from headway.launch.launchers.local import LocalRun
from headway.runtime.inference_client import RemoteInferenceEngine
from tests.integration.driving import kill, resume, steps_of, until_checkpoint, until_steps
from tests.integration.test_transport_runs import check_run, manifests

pytestmark = pytest.mark.extended

STEPS = 6
LORA = LoraConfig(rank=4, alpha=16)


def with_lora(config: LaunchConfig) -> LaunchConfig:
    model = config.trainer.model.model_copy(update={"lora": LORA})
    optimizer = config.trainer.optimizer.model_copy(update={"lr": 1e-2})
    trainer = config.trainer.model_copy(update={"model": model, "optimizer": optimizer})
    return config.model_copy(update={"trainer": trainer})


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_publishes_adapters_also_after_its_trainer_was_killed(
    make_config: Callable[..., LaunchConfig],
    start: Callable[[LaunchConfig], LocalRun],
    connect: Callable[[str], RemoteInferenceEngine],
    ranks: int,
) -> None:
    config = with_lora(make_config(steps=STEPS, num_trainer_ranks=ranks))
    run = start(config)
    run.start_trainer()
    until_steps(config, 3)
    until_checkpoint(config)  # it knows the base
    kill(run, "trainer")
    resume(run, config)
    check_run(config, connect(run.url), steps=STEPS)
    # The servers' logprobs are the trainer's: what they merge is what trains.
    assert max(step["behaviour_kl"] for step in steps_of(config)) < 0.05
    kinds = [json.loads(file.read_text())["kind"] for file in manifests(config)]
    assert kinds[0] == "full"
    assert len(kinds) > 2
    assert set(kinds[1:]) == {"adapter"}
