"""Number of rollouts of a consumer that may fail: each consumer has a budget of its own.

Each gateway keeps them in memory, for the `MAX_CONSUMERS` consumers whose rollouts ended last.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable

from headway.contracts.config.gateway import ExecutorConfig
from headway.contracts.errors import ErrorBudgetExceeded
from headway.contracts.types import DEFAULT_CONSUMER

MAX_CONSUMERS = 1024
SHARED_BUDGET_HINT = "; name a consumer of your own: everyone who names none shares this one"


class ErrorBudgets:
    """Outcomes of the last rollouts of each consumer."""

    def __init__(self, config: ExecutorConfig) -> None:
        self._config = config
        self._outcomes: OrderedDict[str, deque[str | None]] = OrderedDict()
        """Results by consumer, the latest one at the end: a reason for each failure, None for a
        result."""

    @property
    def last_failures(self) -> list[str]:
        """Reasons of the failures that count, by consumer, newest last."""
        return [reason for outcomes in self._outcomes.values() for reason in _failures(outcomes)]

    def succeeded(self, consumer: str) -> None:
        """Count a rollout that ended with a result."""
        self._of(consumer).append(None)

    def failed(self, consumer: str, reason: str) -> None:
        """Count a rollout that failed."""
        self._of(consumer).append(reason)

    def reset(self, consumer: str) -> None:
        """Give a consumer its full budget."""
        self._outcomes.pop(consumer, None)

    def check(self, consumer: str) -> None:
        """Raise once more of its rollouts failed within the window than the budget tolerates.

        Raises:
            ErrorBudgetExceeded: with the last reason.
        """
        outcomes = self._outcomes.get(consumer, ())
        failures = _failures(outcomes)
        if len(failures) > self._config.error_budget:
            raise ErrorBudgetExceeded(
                f"{len(failures)} of the last {len(outcomes)} rollouts of {consumer!r} failed, "
                f"executor.error_budget={self._config.error_budget}; latest: {failures[-1]}. "
                "Mend the cause; then new rollouts that work, or attaching again, restore the budget. "
                "Rollouts that are waited for by id are still given out"
                + (SHARED_BUDGET_HINT if consumer == DEFAULT_CONSUMER else "")
            )

    def _of(self, consumer: str) -> deque[str | None]:
        if consumer not in self._outcomes:
            self._outcomes[consumer] = deque(maxlen=self._config.error_window)
        self._outcomes.move_to_end(consumer)
        if len(self._outcomes) > MAX_CONSUMERS:
            self._outcomes.popitem(last=False)
        return self._outcomes[consumer]


def _failures(outcomes: Iterable[str | None]) -> list[str]:
    return [reason for reason in outcomes if reason is not None]
