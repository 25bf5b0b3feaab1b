"""Sequences beyond what servers can hold: refused at submission and in play, left out by a trainer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from headway.contracts.config.launch import LaunchConfig
from headway.contracts.errors import RequestTooLong, RolloutsFailed
from headway.launch.launchers.local import LocalRun
from headway.launch.quickstart import task
from headway.runtime.inference_client import RemoteInferenceEngine
from tests.integration.builders import rollout
from tests.integration.conftest import run_config
from tests.integration.driving import finish
from tests.processes import local_run
from tests.waiting import eventually

pytestmark = pytest.mark.extended

MakeConfig = Callable[..., LaunchConfig]
Start = Callable[[LaunchConfig], LocalRun]
Connect = Callable[[str], RemoteInferenceEngine]
SMALL, LARGE = 24, 40
PROMPT_TOKENS = 7
"""Of what `rollout` submits, and of the quick start's rows."""


def holding(config: LaunchConfig, max_context: int) -> LaunchConfig:
    """The same with servers that hold so many tokens per sequence."""
    backend = config.server.backend.model_copy(update={"max_context": max_context})
    server = config.server.model_copy(update={"backend": backend})
    return config.model_copy(update={"server": server})


def write_rows(config: LaunchConfig, *lengths: int) -> None:
    """Prompts of so many tokens, over and over."""
    rows = [{"prompt": "1" * (lengths[n % len(lengths)] - 1), "answer": "1"} for n in range(64)]
    task.write_rows(Path(config.trainer.data.path), rows)


def log_of(config: LaunchConfig) -> str:
    """What the trainer wrote."""
    return (Path(config.trainer.run_dir) / "logs" / "trainer.log").read_text()


def test_a_fleet_refuses_what_none_of_its_servers_holds(
    make_config: MakeConfig, connect: Connect, tmp_path: Path, model_dir: Path
) -> None:
    run = local_run(holding(make_config(), SMALL))
    large = local_run(holding(run_config(tmp_path / "large", model_dir), LARGE))
    try:
        run.start_gateway()
        client = connect(run.url)
        # Nobody knows yet what the servers will hold: it is taken, and ends with the reason.
        early = rollout("early", max_new_tokens=LARGE)
        client.submit([early])
        run.start_servers()
        seen = f"{PROMPT_TOKENS} prompt tokens \\+ max_new_tokens={LARGE} exceed the context of {SMALL}"
        with pytest.raises(RolloutsFailed, match=seen):
            client.rollout([early], timeout=60)
        assert client.get("early").summary.attempt == 1

        longest = rollout("small", max_new_tokens=SMALL - PROMPT_TOKENS)
        assert client.rollout([longest], timeout=60).rollout_ids == ["small"]
        above = rollout("above", max_new_tokens=SMALL - PROMPT_TOKENS + 1)
        with pytest.raises(RequestTooLong, match=f"rollout 'above': .* the context of {SMALL};"):
            client.submit([above])
        assert client.status().counts.submitted == 4

        large.url = run.url
        large.start_servers()
        eventually(lambda: len(client.status().servers) == 2, 60, "the second server has joined")
        status = client.status()
        assert (status.smallest_context_tokens, status.largest_context_tokens) == (SMALL, LARGE)
        eventually(
            lambda: all(server.state == "ready" for server in client.status().servers),
            60,
            "both servers are ready",
        )
        many = [
            rollout(f"large-{n}", max_new_tokens=LARGE - PROMPT_TOKENS, group_size=4)
            for n in range(4)
        ]
        assert len(client.rollout(many, timeout=60).rollout_ids) == 4
        with pytest.raises(RequestTooLong, match=f"the context of {LARGE};"):
            client.submit([rollout("beyond", max_new_tokens=LARGE)])
        assert client.status().counts.failed == early.prompt.group_size

        (server,) = [s for s in status.servers if s.max_context_tokens == SMALL]
        alone = connect(server.url)
        with pytest.raises(RequestTooLong, match=f"the context of {SMALL};"):
            alone.submit([above.model_copy(update={"rollout_id": "alone"})])
    finally:
        large.stop()
        run.stop()


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_trainer_leaves_out_prompts_that_no_server_holds(
    make_config: MakeConfig, start: Start, connect: Connect, ranks: int
) -> None:
    config = holding(make_config(steps=3, num_trainer_ranks=ranks), SMALL)
    write_rows(config, PROMPT_TOKENS, SMALL - 12, SMALL - 11)
    run = start(config)
    run.start_trainer()
    finish(run)
    counts = connect(run.url).audit().counts
    assert (counts.consumed, counts.failed) == (3 * 16, 0)
    log = log_of(config)
    assert "prompts are left out" in log
    assert f'"prompt_tokens": {SMALL - 11}, "max_new_tokens": 12, "context": {SMALL}' in log


def test_a_trainer_none_of_whose_prompts_fits_ends_at_the_start(
    make_config: MakeConfig, start: Start, connect: Connect
) -> None:
    config = holding(make_config(), SMALL)
    write_rows(config, SMALL - 11, SMALL - 8)
    run = start(config)
    run.start_trainer()
    assert run.process("trainer").wait(90) == 1
    log = log_of(config)
    assert "none of 64 prompts fit; the shortest, " in log
    assert f"{SMALL - 11} prompt tokens + max_new_tokens=12 exceed the context of {SMALL}" in log
    assert connect(run.url).status().counts.submitted == 0
