"""`ppo-code` and `ppo-math` as whole runs: answers scored over HTTP beside the models' inferences."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from headway.contracts.config.launch import LaunchConfig
from headway.launch.launchers.local import LocalRun
from headway.runtime.inference_client import RemoteInferenceEngine
from tests.integration.driving import finish, steps_of
from tests.waiting import eventually

SHORT_RUN = ("test_a_trainer_that_dies_within_a_call_goes_on_with_the_batch[once]",)

MakeConfig = Callable[..., LaunchConfig]
Start = Callable[[LaunchConfig], LocalRun]
Connect = Callable[[str], RemoteInferenceEngine]
CALLS = ("actor_gen", "rew_inf", "ref_inf", "critic_inf", "critic_train", "actor_train")
DOUBLE = {
    "prompt": "Write `double`.",
    "language": "python",
    "input_output": json.dumps({"fn_name": "double", "inputs": [[2]], "outputs": [4]}),
}
MATH_REWARD = {"name": "exact", "args": {"pattern": "[0-9]"}}


@pytest.fixture
def code_rows(tmp_path: Path) -> Path:
    """MBPP where the data sets are at hand."""
    path = tmp_path / "code.jsonl"
    given = os.environ.get("HEADWAY_DATA_DIR")
    rows = [json.dumps(DOUBLE | {"query_id": str(n)}) for n in range(16)]
    if given is not None:
        lines = (Path(given) / "mbpp" / "mbpp_io.jsonl").read_text().splitlines()
        rows = [line for line in lines if len(json.loads(line)["prompt"]) < 200][:16]
    path.write_text("\n".join(rows) + "\n")
    return path


def code_sections(rows: Path, **options: Any) -> dict[str, Any]:
    """Two prompts of two trajectories per step."""
    return {
        "type": "ppo-code",
        "data": {"path": str(rows), "batch_size": 2},
        "ppo": {"group_size": 2, "ppo_n_minibatches": 1, **options},
        "rollout": {"wait_timeout_s": 90},
    }


def spans_of(config: LaunchConfig) -> dict[int, dict[str, tuple[float, float]]]:
    """Step -> call -> begin and end, in microseconds."""
    trace = json.loads((Path(config.trainer.run_dir) / "trace.json").read_text())
    spans: dict[int, dict[str, tuple[float, float]]] = {}
    for event in trace["traceEvents"]:
        of_step = spans.setdefault(event["args"]["step"], {})
        of_step[event["name"]] = (event["ts"], event["ts"] + event["dur"])
    return spans


@pytest.mark.parametrize("disable_value", [False, True])
def test_code_is_generated_run_and_learned_from(
    make_config: MakeConfig,
    start: Start,
    connect: Connect,
    code_rows: Path,
    disable_value: bool,
) -> None:
    config = make_config(steps=3, **code_sections(code_rows, disable_value=disable_value))
    run = start(config)
    run.start_trainer()
    finish(run)
    client = connect(run.url)
    audit = client.audit()
    assert (audit.lost, audit.duplicated) == (0, 0)
    assert audit.counts.consumed == 3 * 4
    wanted = [name for name in CALLS if not (disable_value and name.startswith("critic"))]
    spans = spans_of(config)
    assert set(spans) == {0, 1, 2}
    overlapped = 0
    for step in spans.values():
        assert set(step) - {"advantages"} == set(wanted)
        asked = [step[name] for name in wanted if name.endswith("_inf")]
        overlapped += max(begin for begin, _ in asked) < min(end for _, end in asked)
    assert overlapped, "reward, reference and critic are asked side by side"
    steps = steps_of(config)
    assert [step["step"] for step in steps] == [0, 1, 2]
    assert all(step["grad_norm"] >= 0.0 for step in steps)
    # A random model writes no program: what the verifier said, not what came with the rollouts.
    assert all(step["reward"] == -1.0 for step in steps)
    assert ("value_loss" in steps[0]) != disable_value
    assert steps[0]["reference_kl"] == pytest.approx(0.0, abs=1e-6)


ALLOCATIONS = {
    "ref_inf": {"ranks": [0]},
    "actor_train": {"ranks": [0], "mb_spec": {"n_mbs": 2}},
    "critic_inf": {"ranks": [1], "mb_spec": {"max_tokens_per_mb": 512}},
    "critic_train": {"ranks": [1], "mb_spec": {"n_mbs": 2}},
}
"""The policy and its reference on one rank, the critic on the other; answers are generated and verified
by other processes."""


@pytest.mark.timeout(500)
@pytest.mark.parametrize(
    ("num_ranks", "calls"), [(1, ["actor_train"]), (2, CALLS)], ids=["once", "in each call"]
)
def test_a_trainer_that_dies_within_a_call_goes_on_with_the_batch(
    make_config: MakeConfig,
    start: Start,
    connect: Connect,
    code_rows: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    num_ranks: int,
    calls: Sequence[str],
) -> None:
    """The launcher starts it again, from its newest checkpoint; it dies in step after step, each time in
    the next call. Two ranks have models of their own: rank 0 dies also while it waits for what the other
    computes."""
    marks = tmp_path / "marks"
    marks.mkdir()
    traps = [f"{call}@{step}" for step, call in enumerate(calls, start=1)]
    monkeypatch.setenv("HEADWAY_CALL_TRAPS", ",".join(traps))
    monkeypatch.setenv("HEADWAY_CALL_MARKS", str(marks))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]), prepend=os.pathsep)
    num_steps = len(calls) + 2
    recovery = {"mode": "fault", "retries": len(calls), "retry_after_s": 0.0, "every_steps": 1}
    sections = code_sections(code_rows) | {
        "recovery": recovery,
        "trainer": {
            "modules": ["tests.integration.call_traps"],
            "total_steps": num_steps,
            "num_threads": 1,
        },
        "dataflow": {"allocations": {} if num_ranks == 1 else ALLOCATIONS},
    }
    config = make_config(steps=num_steps, num_trainer_ranks=num_ranks, **sections)
    run = start(config)
    run.start_trainer()
    first = run.process("trainer")
    eventually(lambda: run.watch() is not None, 400, "the trainer has ended")
    assert run.watch() == 0, run.process("trainer").log_tail()
    assert sorted(mark.name for mark in marks.iterdir()) == sorted(traps)
    assert first.exit_code() == (-signal.SIGKILL if num_ranks == 1 else 1)
    audit = connect(run.url).audit()
    assert (audit.lost, audit.duplicated) == (0, 0)
    assert audit.counts.consumed == num_steps * 4
    assert [step["step"] for step in steps_of(config)] == [*range(num_steps)]


def test_six_calls_on_two_allocations_overlap(
    make_config: MakeConfig, start: Start, connect: Connect, code_rows: Path
) -> None:
    sections = code_sections(code_rows) | {"dataflow": {"allocations": ALLOCATIONS}}
    config = make_config(steps=3, num_trainer_ranks=2, **sections)
    run = start(config)
    run.start_trainer()
    finish(run)
    audit = connect(run.url).audit()
    assert (audit.lost, audit.duplicated, audit.counts.consumed) == (0, 0, 3 * 4)
    overlapped = {"inferences": 0, "updates": 0}
    for step in spans_of(config).values():
        assert set(step) - {"advantages"} == set(CALLS)
        pairs = {
            "inferences": ("ref_inf", "critic_inf"),
            "updates": ("actor_train", "critic_train"),
        }
        for what, (one, other) in pairs.items():
            (begin, end), (later, until) = step[one], step[other]
            overlapped[what] += max(begin, later) < min(end, until)
    assert all(overlapped.values()), overlapped
    for name in ("model", "critic"):
        assert (Path(config.trainer.run_dir) / name / "config.json").is_file()


def test_the_best_of_more_samples_are_learned_from(
    make_config: MakeConfig, start: Start, connect: Connect
) -> None:
    config = make_config(
        steps=3,
        type="ppo-math",
        ppo={"group_size": 2, "generation_size": 6, "ppo_n_minibatches": 1},
        rollout={"reward": MATH_REWARD, "wait_timeout_s": 90},
    )
    run = start(config)
    run.start_trainer()
    finish(run)
    audit = connect(run.url).audit()
    assert audit.counts.consumed == 3 * 4 * 6
    for step in steps_of(config):
        assert step["trajectories"] == 4 * 2


def test_a_verifier_that_finds_everything_wrong_ends_the_run_with_the_reason(
    make_config: MakeConfig, start: Start
) -> None:
    config = make_config(
        steps=3,
        type="ppo-math",
        ppo={"group_size": 2, "ppo_n_minibatches": 1, "check_verifier_status": True},
        rollout={"reward": {"name": "exact", "args": {"pattern": "never"}}, "wait_timeout_s": 90},
    )
    run = start(config)
    run.start_trainer()
    eventually(lambda: run.watch() is not None, 120, "the trainer has ended")
    assert run.watch() == 1
    assert "ppo.check_verifier_status" in run.process("trainer").log_tail()
