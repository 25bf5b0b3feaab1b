"""Each consumer spends a budget of its own."""

from __future__ import annotations

import pytest

from gateway.execution.error_budgets import MAX_CONSUMERS, ErrorBudgets
from headway.contracts.config.gateway import ExecutorConfig
from headway.contracts.errors import ErrorBudgetExceeded


def exceeded(budgets: ErrorBudgets, consumer: str) -> bool:
    try:
        budgets.check(consumer)
    except ErrorBudgetExceeded:
        return True
    return False


def test_no_consumer_spends_anothers_budget():
    budgets = ErrorBudgets(ExecutorConfig(error_budget=1, error_window=3))
    for _ in range(2):
        budgets.failed("careless", "boom")
    budgets.failed("careful", "once")
    assert [exceeded(budgets, name) for name in ("careless", "careful", "new")] == [
        True,
        False,
        False,
    ]
    assert budgets.last_failures == ["boom", "boom", "once"]
    budgets.reset("careful")
    assert exceeded(budgets, "careless")
    budgets.reset("careless")
    assert not exceeded(budgets, "careless")
    assert budgets.last_failures == []


def test_successes_push_failures_out_of_the_window():
    budgets = ErrorBudgets(ExecutorConfig(error_budget=0, error_window=2))
    budgets.failed("me", "boom")
    budgets.succeeded("me")
    with pytest.raises(ErrorBudgetExceeded, match=r"of 'me' failed, .*latest: boom"):
        budgets.check("me")
    budgets.succeeded("me")
    assert not exceeded(budgets, "me")


def test_memory_is_bounded_whatever_names_there_are():
    budgets = ErrorBudgets(ExecutorConfig(error_budget=0))
    budgets.failed("kept", "boom")
    for number in range(2 * MAX_CONSUMERS):
        budgets.failed(f"name-{number}", "boom")
        budgets.failed("kept", "boom")
    assert len(budgets.last_failures) < 2 * MAX_CONSUMERS
    assert exceeded(budgets, "kept")
