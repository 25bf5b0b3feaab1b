"""Every claimed rollout ends exactly once: as a result, a recorded failure, or back in the queue."""

import asyncio
import time

import pytest

from gateway.rewards.base import register_reward
from headway.contracts.config.base import ComponentConfig
from headway.contracts.errors import (
    ConfigError,
    DataError,
    ErrorBudgetExceeded,
    QueueFull,
    RequestTooLong,
    RolloutsFailed,
    UnknownName,
)
from headway.contracts.types import Prompt
from tests.unit.gateway import sample_rewards
from tests.unit.gateway.generators import fails, never

EXACT_X = ComponentConfig(name="exact")


async def test_rollouts_are_played_scored_and_delivered(open_service):
    bench = await open_service()
    await bench.submit("a", "b", size=3)
    first, second = await bench.wait(2)
    assert (first.rollout_id, second.rollout_id) == ("a", "b")
    assert [row.sample_index for row in first.trajectories] == [0, 1, 2]
    assert {row.reward for row in first.trajectories} == {0.0}  # token 7 is "world", not "x"
    await bench.submit("right", prompt=Prompt(group_id="g", text="hello", data={"answer": "world"}))
    (group,) = await bench.wait(1, "d2")
    assert group.trajectories[0].reward == 1.0


async def test_an_always_raising_workflow_spends_the_budget_and_never_becomes_a_reward(
    open_service,
):
    bench = await open_service(fails(99, ZeroDivisionError), error_budget=3)
    await bench.submit(*(f"r{index}" for index in range(8)))
    with pytest.raises(ErrorBudgetExceeded) as caught:
        await bench.wait(1)
    assert "executor.error_budget=3" in str(caught.value)
    assert "workflow raised ZeroDivisionError: attempt 1 failed" in str(caught.value)
    await bench.until_counts(failed=8, ready=0, delivered=0)
    status = await bench.service.status()
    assert len(status.last_failures) == 5
    assert status.running == 0


async def bad_ones_fail(req, attempt):
    if req.rid.startswith("bad"):
        raise DataError("no good")
    return [7]


async def test_nobody_waits_for_anothers_failures(open_service):
    bench = await open_service(bad_ones_fail, error_budget=0)
    await bench.submit("bad1", "good1", consumer="default")
    await bench.submit("good2", consumer="careful")
    await bench.until_counts(failed=1, ready=2)
    assert len(await bench.wait(1, "d1", consumer="careful")) == 1
    told = "'bad1' of group 'g-bad1': DataError: no good.*name a consumer of your own"
    with pytest.raises(ErrorBudgetExceeded, match=told):
        await bench.wait(1, "d2", consumer="default")
    (group,) = await bench.wait(1, "d3", consumer="default", rollout_ids=("good1",))
    assert group.rollout_id == "good1"


async def test_a_failed_rollout_keeps_the_traceback_and_the_completion(open_service, caplog):
    register_reward("executor/raises", sample_rewards.raises_over_a_completion)
    bench = await open_service(error_budget=0)
    prompt = Prompt(group_id="g", text="hello", data={"answer": "secret"})
    await bench.submit("a", prompt=prompt, reward=ComponentConfig(name="executor/raises"))
    with pytest.raises(RolloutsFailed) as caught:
        await bench.wait(1, rollout_ids=("a",))
    reason = (await bench.ledger.get("a")).reason
    (line,) = [record for record in caplog.records if record.message == "rollout failed"]
    assert (line.rollout_id, line.group_id, line.reason) == ("a", "g", reason)
    assert reason in caught.value.message
    first, frame = "'executor/raises' raised AssertionError: neither\nof ?\n", "sample_rewards.py"
    for text in (first, frame, "the completion, of 5 characters:\nworld"):
        assert text in reason
    assert "gateway/rewards" not in reason and "secret" not in reason
    (brief,) = (await bench.service.status()).last_failures
    assert brief.startswith("rollout 'a' of group 'g': RewardError")
    assert "world" not in brief and "\n" not in brief


async def test_failures_within_the_budget_are_recorded_and_the_rest_goes_on(open_service):
    bench = await open_service(bad_ones_fail, error_budget=2, error_window=4)
    await bench.submit("bad1", "good1", "bad2", "good2", "good3", "good4")
    assert len(await bench.wait(4)) == 4
    with pytest.raises(RolloutsFailed, match="'bad1' is failed: DataError: no good"):
        await bench.wait(1, "d2", rollout_ids=("bad1",))


async def test_old_failures_leave_the_window(open_service):
    bench = await open_service(bad_ones_fail, error_budget=1, error_window=3)
    await bench.submit("bad1", "bad2")
    with pytest.raises(ErrorBudgetExceeded):
        await bench.wait(1, "d1")
    await bench.until_counts(failed=2)
    await bench.submit("a", "b", "c")
    await bench.until_counts(ready=3)
    assert len(await bench.wait(3, "d2")) == 3


async def test_a_hanging_workflow_times_out(open_service):
    bench = await open_service(never, rollout_timeout_s=0.1, error_budget=0)
    start = time.monotonic()
    await bench.submit("a", size=2)
    with pytest.raises(ErrorBudgetExceeded, match=r"still running after 0\.1 s"):
        await bench.wait(1)
    assert time.monotonic() - start < 5
    assert not bench.generator.playing
    counts = await bench.ledger.counts()
    assert (counts.failed, counts.leased) == (2, 0)


async def test_the_next_play_begins_while_the_ledger_is_told_of_the_last(open_service, monkeypatch):
    second_began, answers = asyncio.Event(), asyncio.Event()

    async def generate(req, attempt):
        if req.rid.startswith("second"):
            second_began.set()
        return [7]

    bench = await open_service(generate, max_concurrent=1)
    complete = bench.ledger.complete

    async def complete_late(lease, group):
        await answers.wait()
        await complete(lease, group)

    monkeypatch.setattr(bench.ledger, "complete", complete_late)
    await bench.submit("first", "second")
    await asyncio.wait_for(second_began.wait(), 10)
    answers.set()
    assert [group.rollout_id for group in await bench.wait(2)] == ["first", "second"]
    assert (await bench.service.status()).running == 0


async def test_a_lost_server_is_no_failure(open_service):
    bench = await open_service(fails(2), max_attempts=3, error_budget=0)
    await bench.submit("a", "b")
    assert len(await bench.wait(2)) == 2
    assert (await bench.service.ledger.audit()).requeues == 4
    assert (await bench.service.status()).last_failures == []


async def test_a_rollout_that_loses_every_server_fails_with_the_last_reason(open_service):
    bench = await open_service(fails(99), max_attempts=2, error_budget=0)
    await bench.submit("a")
    with pytest.raises(ErrorBudgetExceeded, match="2 attempts; last: attempt 2 failed"):
        await bench.wait(1)


async def test_one_failing_sibling_ends_the_group(open_service):
    async def one_fails(req, attempt):
        if req.rid.endswith(".1"):
            raise RequestTooLong("too long")
        return await never(req, attempt)

    bench = await open_service(one_fails, error_budget=0)
    await bench.submit("a", size=3)
    with pytest.raises(ErrorBudgetExceeded, match="RequestTooLong: too long"):
        await bench.wait(1)
    assert not bench.generator.playing


async def test_a_failing_verifier_is_a_failure_not_a_score(open_service):
    bench = await open_service(error_budget=0)
    reward = ComponentConfig(name="exact", args={"answer_key": "missing"})
    await bench.submit("a", reward=reward)
    with pytest.raises(ErrorBudgetExceeded, match="no field 'missing'"):
        await bench.wait(1)


async def test_concurrency_is_bounded_in_trajectories(open_service):
    gate = asyncio.Event()

    async def gated(req, attempt):
        await gate.wait()
        return [7]

    bench = await open_service(gated, max_concurrent=5)
    await bench.submit("a", "b", "c", size=2)
    await bench.until(lambda: len(bench.generator.playing) == 4)
    status = await bench.service.status()
    assert (status.running, status.counts.queued) == (4, 2)
    gate.set()
    assert len(await bench.wait(3)) == 3
    assert bench.generator.most_playing <= 5


async def test_shutdown_puts_rollouts_back(open_service):
    bench = await open_service(never)
    await bench.submit("a", "b", size=2)
    await bench.until(lambda: len(bench.generator.playing) == 4)
    await bench.service.aclose()
    counts = await bench.ledger.counts()
    assert (counts.queued, counts.leased) == (4, 0)
    assert not bench.generator.playing
    audit = await bench.ledger.audit()
    assert (audit.lost, audit.duplicated, audit.requeues) == (0, 0, 4)
    again = await open_service(ledger=bench.ledger)
    assert [group.rollout_id for group in await again.wait(2)] == ["a", "b"]


async def test_wait_answers_none_when_the_time_is_over(open_service):
    bench = await open_service(never)
    await bench.submit("a")
    assert await bench.wait(1, timeout_s=0.05) is None
    assert await bench.wait(1, timeout_s=0) is None


async def test_names_and_arguments_are_checked_before_anything_is_stored(open_service):
    bench = await open_service(max_concurrent=4, max_queued=8)
    with pytest.raises(UnknownName):
        await bench.submit("a", "b", reward=ComponentConfig(name="exakt"))
    with pytest.raises(ConfigError):
        await bench.submit("a", reward=ComponentConfig(name="exact", args={"key": 1}))
    with pytest.raises(ConfigError, match=r"group_size=5 .* exceeds executor\.max_concurrent=4"):
        await bench.submit("a", size=5)
    with pytest.raises(QueueFull):
        await bench.submit("a", "b", "c", size=3)
    assert (await bench.ledger.counts()).submitted == 0


async def test_failures_of_one_consumer_do_not_end_another_ones_wait(open_service):
    async def bad_ones_fail(req, attempt):
        if req.rid.startswith("bad"):
            raise DataError("no good")
        return [7]

    bench = await open_service(bad_ones_fail, error_budget=0)
    await bench.submit("bad", consumer="one")
    with pytest.raises(ErrorBudgetExceeded, match="rollouts of 'one' failed"):
        await bench.wait(1, consumer="one")
    await bench.submit("good", consumer="two")
    assert len(await bench.wait(1, consumer="two")) == 1
