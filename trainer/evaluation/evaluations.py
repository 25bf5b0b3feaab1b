"""The evaluations of a run: begun when due, looked at once a step, waited for only at the end.

An evaluation runs on a thread (`Evaluator`). While it is open it has a file
`evaluation.open.STEP.vVERSION.json`, until its metrics are in `evaluation.jsonl` and its rollouts are
settled: a trainer that was killed resumes it. An evaluation without metrics has a line with the reason.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Collection
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from headway.contracts.config.frequency import FrequencyConfig
from headway.contracts.errors import ServiceError
from headway.contracts.types import PolicyVersion
from headway.runtime.journal import MetricsJournal, read_steps
from trainer.checkpoint import RunState
from trainer.evaluation.evaluator import EvaluationTarget, Evaluator
from trainer.timetable import Timetable

log = logging.getLogger(__name__)

JOURNAL_NAME = "evaluation.jsonl"
OPEN_NAME = "evaluation.open.{step}.v{version}.json"


@dataclass(frozen=True, slots=True)
class _Open:
    order: EvaluationTarget
    metrics: Future[dict[str, float]]


class Evaluations:
    """Evaluations of a run, at most one open at a time; a context manager that leaves an open one to
    the next process.
    """

    def __init__(
        self, evaluator: Evaluator | None, run_dir: Path, run_id: str, steps_per_epoch: int = 1
    ) -> None:
        """Args:
        evaluator: None evaluates nothing: a run without evaluation, and ranks other than the first.
        """
        every = FrequencyConfig() if evaluator is None else evaluator.config
        self._timetable = Timetable(every, steps_per_epoch)
        self._evaluator = evaluator
        self._run_dir = run_dir
        self._run_id = run_id
        journal = run_dir / JOURNAL_NAME
        self._journal = MetricsJournal(None if evaluator is None else journal)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="evaluation")
        self._open: _Open | None = None
        self._settling: list[Future[None]] = []
        self._left = [] if evaluator is None else self._read_left()
        """Evaluations that a former process left open."""
        lines = [] if evaluator is None else read_steps(journal)
        self._done = {int(line["step"]): "missed" not in line for line in lines}
        """Step -> whether there are metrics."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._evaluator is not None:
            self._evaluator.stopping.set()
        self._thread.shutdown(cancel_futures=kind is not None)
        if self._evaluator is not None:
            self._evaluator.close()
        self._journal.close()

    def versions(self) -> Collection[PolicyVersion]:
        """Versions that must not be deleted yet."""
        orders = self._left if self._open is None else [*self._left, self._open.order]
        return {order.version for order in orders}

    def begin(self, state: RunState) -> None:
        """Resume the evaluations of a former process, or begin the one that is due at the first step."""
        self._done = {step: kept for step, kept in self._done.items() if step <= state.step}
        left, self._left = self._left, []
        for order in left:
            if order.step > state.step:
                self._miss(order, f"the trainer went back to step {state.step}")
                del self._done[order.step]  # it comes again, with other weights
                self._settle(order, is_kept=False)
            elif order.step in self._done:
                self._settle(order, self._done[order.step])
            else:
                self._start(order)
        if self.is_due(state.step):
            self._start(self._order(state))

    def after_step(self, state: RunState, total_steps: int) -> dict[str, float]:
        """Begin an evaluation if one is due; return the metrics that have come, for this step's line."""
        metrics = self._poll()
        if state.step < total_steps and self.is_due(state.step):
            if self._open is None:
                self._start(self._order(state))
            else:
                self._miss(
                    self._order(state),
                    f"the evaluation of version {self._open.order.version} was open still; raise "
                    "evaluation.every_steps, or evaluation.max_concurrent",
                )
        return {f"evaluation_{name}": value for name, value in metrics.items()}

    def finish(self, state: RunState) -> None:
        """Wait for the open evaluation, as long as `timeout_s` allows, and for the last version's."""
        self._wait()
        if self.is_due(state.step, is_last=True):
            self._start(self._order(state))
            self._wait()

    def is_due(self, step: int, is_last: bool = False) -> bool:
        """True if the version of this step has to be evaluated and has not been."""
        if self._evaluator is None or step in self._done:
            return False
        if self._open is not None and self._open.order.step == step:
            return False
        config = self._evaluator.config
        if is_last and config.at_end:
            return True
        return config.at_start if step == 0 else self._timetable.is_due(step)

    def _order(self, state: RunState) -> EvaluationTarget:
        return EvaluationTarget(self._run_id, state.step, state.version)

    def _start(self, order: EvaluationTarget) -> None:
        assert self._evaluator is not None and self._open is None
        staging = self._run_dir / f".{JOURNAL_NAME}.staging"
        staging.write_text(json.dumps(asdict(order)))
        staging.replace(self._file_of(order))
        log.info("evaluation begins", extra={"step": order.step, "version": order.version})
        self._open = _Open(order, self._thread.submit(self._evaluator.run, order))

    def _poll(self) -> dict[str, float]:
        """Return the metrics of the open evaluation, if it has ended with any."""
        if self._open is None or not self._open.metrics.done():
            return {}
        order, ended = self._open.order, self._open.metrics
        self._open = None
        try:
            metrics = _heading(order) | ended.result()
        except ServiceError as error:
            self._miss(order, str(error))
            self._settle(order, is_kept=False)
            return {}
        self._write(metrics | {"time": time.time()})
        self._settle(order, is_kept=True)
        return metrics

    def _wait(self) -> None:
        if self._open is not None:
            self._open.metrics.exception()  # it ends by itself
            self._poll()
        while self._settling:
            self._settling.pop().result()

    def _miss(self, order: EvaluationTarget, reason: str) -> None:
        log.warning("evaluation missed", extra={"version": order.version, "reason": reason})
        self._write(_heading(order) | {"missed": reason, "time": time.time()})

    def _write(self, line: dict[str, Any]) -> None:
        self._journal.write(line)
        self._done[int(line["step"])] = "missed" not in line

    def _settle(self, order: EvaluationTarget, is_kept: bool) -> None:
        self._settling.append(self._thread.submit(self._settle_now, order, is_kept))

    def _settle_now(self, order: EvaluationTarget, is_kept: bool) -> None:
        assert self._evaluator is not None
        try:
            self._evaluator.settle(order, is_kept)
        except ServiceError as error:
            log.warning("an evaluation's rollouts are left", extra={"reason": str(error)})
        self._file_of(order).unlink(missing_ok=True)

    def _file_of(self, order: EvaluationTarget) -> Path:
        return self._run_dir / OPEN_NAME.format(**_heading(order))

    def _read_left(self) -> list[EvaluationTarget]:
        files = self._run_dir.glob(OPEN_NAME.format(step="*", version="*"))
        orders = [EvaluationTarget(**json.loads(file.read_text())) for file in files]
        mine = [order for order in orders if order.run_id == self._run_id]
        return sorted(mine, key=lambda order: order.step)


def _heading(order: EvaluationTarget) -> dict[str, float]:
    return {"step": order.step, "version": order.version}
