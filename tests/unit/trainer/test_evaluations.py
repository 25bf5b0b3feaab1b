"""When evaluations begin, what is written of them, and what a trainer that comes back goes on with."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from headway.contracts.config.evaluation import EvaluationConfig
from headway.contracts.config.sampling import SamplingConfig
from headway.contracts.errors import BackendError
from headway.runtime.config import validate_config
from trainer.checkpoint import RunState
from trainer.evaluation.evaluations import Evaluations
from trainer.evaluation.evaluator import EvaluationTarget, Stopped

STATE = RunState("run", step=0, version=10)
TOTAL = 100


class ScriptedEvaluator:
    """Ends an evaluation when `go` is set, with the result that the test sets."""

    def __init__(self, **config: Any) -> None:
        tree = {"data": {"path": "unused"}, "every_steps": 2, "at_end": False, **config}
        self.config = validate_config(EvaluationConfig, tree)
        self.stopping = Event()
        self.go = Event()
        self.outcome: dict[str, float] | Exception = {"score": 0.5}
        self.played: list[EvaluationTarget] = []
        self.settled: list[tuple[int, bool]] = []

    def run(self, order: EvaluationTarget) -> dict[str, float]:
        self.played.append(order)
        while not self.go.wait(0.01):
            if self.stopping.is_set():
                raise Stopped
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome

    def close(self) -> None:
        pass

    def settle(self, order: EvaluationTarget, is_kept: bool) -> None:
        self.settled.append((order.step, is_kept))


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as one:
        yield one


def at(step: int) -> RunState:
    return replace(STATE, step=step, version=STATE.version + step)


def lines(folder: Path) -> list[tuple[int, int, float | str]]:
    written = (folder / "evaluation.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in written]
    return [(one["step"], one["version"], one.get("score", one.get("missed"))) for one in found]


def open_files(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.glob("evaluation.open*"))


def end_open(evaluator: ScriptedEvaluator, evaluations: Evaluations) -> None:
    """Let what is open end, and wait for that."""
    evaluator.go.set()
    evaluations.finish(at(1))


def test_training_goes_on_while_a_version_is_evaluated(tmp_path: Path, stack: ExitStack) -> None:
    evaluator = ScriptedEvaluator()
    evaluations = stack.enter_context(Evaluations(evaluator, tmp_path, "run"))
    evaluations.begin(at(0))
    assert evaluations.after_step(at(1), TOTAL) == {}
    for step in (2, 3):
        assert evaluations.after_step(at(step), TOTAL) == {}
        assert set(evaluations.versions()) == {12}
    evaluator.go.set()
    evaluations._open.metrics.result(10)
    told = evaluations.after_step(at(5), TOTAL)
    assert told == {"evaluation_step": 2, "evaluation_version": 12, "evaluation_score": 0.5}
    assert set(evaluations.versions()) == set()
    evaluations.finish(at(5))
    assert lines(tmp_path) == [(2, 12, 0.5)]
    assert evaluator.settled == [(2, True)]
    assert open_files(tmp_path) == []


def test_versions_are_due_by_epochs_too(tmp_path: Path, stack: ExitStack) -> None:
    evaluator = ScriptedEvaluator(every_steps=None, every_epochs=1)
    evaluator.go.set()
    evaluations = stack.enter_context(Evaluations(evaluator, tmp_path, "run", steps_per_epoch=3))
    for step in range(1, 8):
        assert evaluations.is_due(step) == (step in (3, 6))
        evaluations.after_step(at(step), TOTAL)
        evaluations._wait()
    assert [order.step for order in evaluator.played] == [3, 6]


def test_what_is_due_while_another_is_open_is_missed(tmp_path: Path, stack: ExitStack) -> None:
    evaluator = ScriptedEvaluator()
    evaluations = stack.enter_context(Evaluations(evaluator, tmp_path, "run"))
    evaluations.after_step(at(2), TOTAL)
    evaluations.after_step(at(4), TOTAL)
    end_open(evaluator, evaluations)
    (first, second) = lines(tmp_path)
    assert first[:2] == (4, 14)
    assert "version 12 was open still" in first[2]
    assert second == (2, 12, 0.5)


def test_a_failure_is_a_reason_and_no_number(tmp_path: Path, stack: ExitStack) -> None:
    evaluator = ScriptedEvaluator()
    evaluator.outcome = BackendError("version 12 is gone")
    evaluations = stack.enter_context(Evaluations(evaluator, tmp_path, "run"))
    evaluations.after_step(at(2), TOTAL)
    end_open(evaluator, evaluations)
    assert lines(tmp_path) == [(2, 12, "version 12 is gone")]
    assert evaluator.settled == [(2, False)]


def test_the_first_and_the_last_version_are_evaluated_once(
    tmp_path: Path, stack: ExitStack
) -> None:
    evaluator = ScriptedEvaluator(at_start=True, at_end=True)
    evaluator.go.set()
    evaluations = stack.enter_context(Evaluations(evaluator, tmp_path, "run"))
    evaluations.begin(at(0))
    evaluations._open.metrics.result(10)
    evaluations.after_step(at(3), 3)
    evaluations.finish(at(3))
    evaluations.finish(at(3))
    assert [order.step for order in evaluator.played] == [0, 3]


def test_a_trainer_that_comes_back_goes_on_with_what_was_open(
    tmp_path: Path, stack: ExitStack
) -> None:
    before = ScriptedEvaluator()
    with Evaluations(before, tmp_path, "run") as evaluations:
        evaluations.after_step(at(2), TOTAL)
    assert open_files(tmp_path) == ["evaluation.open.2.v12.json"]
    evaluator = ScriptedEvaluator()
    evaluations = stack.enter_context(Evaluations(evaluator, tmp_path, "run"))
    assert set(evaluations.versions()) == {12}  # before the first version is published again
    evaluations.begin(replace(at(2), version=15))
    end_open(evaluator, evaluations)
    assert evaluator.played == before.played
    assert lines(tmp_path) == [(2, 12, 0.5)]


def test_a_trainer_that_went_back_evaluates_the_step_anew(tmp_path: Path, stack: ExitStack) -> None:
    with Evaluations(ScriptedEvaluator(), tmp_path, "run") as evaluations:
        evaluations.after_step(at(2), TOTAL)
    evaluator = ScriptedEvaluator()
    evaluations = stack.enter_context(Evaluations(evaluator, tmp_path, "run"))
    evaluations.begin(at(1))
    evaluations.after_step(replace(at(2), version=17), TOTAL)
    end_open(evaluator, evaluations)
    assert lines(tmp_path) == [(2, 12, "the trainer went back to step 1"), (2, 17, 0.5)]
    assert evaluator.settled == [(2, False), (2, True)]


def test_figures_that_were_written_before_a_crash_are_settled_and_not_written_again(
    tmp_path: Path, stack: ExitStack
) -> None:
    (tmp_path / "evaluation.jsonl").write_text('{"step": 2, "version": 12, "score": 0.5}\n')
    (tmp_path / "evaluation.open.2.v12.json").write_text(
        '{"run_id": "run", "step": 2, "version": 12}'
    )
    evaluator = ScriptedEvaluator()
    evaluations = stack.enter_context(Evaluations(evaluator, tmp_path, "run"))
    evaluations.begin(at(2))
    evaluations.finish(at(2))
    assert evaluator.played == []
    assert evaluator.settled == [(2, True)]
    assert lines(tmp_path) == [(2, 12, 0.5)]
    assert open_files(tmp_path) == []


def test_what_was_due_at_the_checkpoint_and_never_begun_is_begun(
    tmp_path: Path, stack: ExitStack
) -> None:
    evaluator = ScriptedEvaluator()
    evaluations = stack.enter_context(Evaluations(evaluator, tmp_path, "run"))
    evaluations.begin(at(4))
    assert set(evaluations.versions()) == {14}
    end_open(evaluator, evaluations)


def test_a_run_without_evaluation_writes_nothing(tmp_path: Path) -> None:
    with Evaluations(None, tmp_path, "run") as evaluations:
        evaluations.begin(at(0))
        assert evaluations.after_step(at(2), TOTAL) == {}
        evaluations.finish(at(2))
    assert list(tmp_path.iterdir()) == []


def test_equal_samples_are_refused() -> None:
    config = validate_config(EvaluationConfig, {"data": {"path": "x"}, "num_samples": 2})
    with pytest.raises(ValueError, match=r"evaluation\.num_samples=2 at temperature 0"):
        config.sampling_over(SamplingConfig(max_new_tokens=5))
    merged = validate_config(EvaluationConfig, {"data": {"path": "x"}}).sampling_over(
        SamplingConfig(max_new_tokens=5)
    )
    assert (merged.max_new_tokens, merged.temperature) == (5, 0.0)
