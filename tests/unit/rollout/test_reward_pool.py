import asyncio
import time

import pytest

from headway.contracts.config.base import PartConfig
from headway.contracts.errors import ConfigError, DataError, RewardError, UnknownName
from headway.rollout.rewards.base import REWARDS, make_reward, register_reward
from headway.rollout.rewards.pool import RewardPool

TIMEOUT_S = 0.5
STARTUP_S = 8.0  # a worker process imports before its first call

NAMES = {
    "scores": "Scores",
    **{
        name: name
        for name in (
            "good",
            "hangs",
            "hangs_and_ignores_sigterm",
            "raises",
            "raises_a_data_error",
            "raises_what_cannot_be_sent",
            "explains_itself_badly",
            "dies",
            "exits",
            "returns",
        )
    },
}


@pytest.fixture(scope="module", autouse=True)
def registered_samples():
    for name, attribute in NAMES.items():
        if f"test/{name}" not in REWARDS.names():
            register_reward(f"test/{name}", f"sample_rewards:{attribute}")


@pytest.fixture(scope="module")
def pool():
    made = RewardPool(num_workers=1, timeout_s=TIMEOUT_S)
    yield made
    made.close()


async def score(pool, name, **args):
    part = PartConfig(name=f"test/{name}", args=args)
    return await pool.score(part, "2+2=", "4", {"answer": "4"})


async def test_a_result_arrives_with_its_details(pool):
    verdict = await score(pool, "good")
    assert verdict.score == 0.5
    assert verdict.details == {"seen": ["2+2=", "4", {"answer": "4"}]}


async def test_details_that_cannot_travel_arrive_as_text(pool):
    verdict = await score(pool, "explains_itself_badly")
    assert verdict.details == {"error": "one", "seen": {"1": [2, 3]}}
    assert (await score(pool, "good")).score == 0.5


@pytest.mark.parametrize(("value", "wanted"), [(1, 1.0), (True, 1.0), (-0.25, -0.25)])
async def test_a_bare_number_is_a_score(pool, value, wanted):
    verdict = await score(pool, "scores", value=value)
    assert (verdict.score, type(verdict.score), verdict.details) == (wanted, float, {})


async def test_arguments_make_separate_verifiers(pool):
    scores = [(await score(pool, "scores", value=v)).score for v in (1.0, 2.0, 1.0)]
    assert scores == [1.0, 2.0, 1.0]


@pytest.mark.parametrize("name", ["hangs", "hangs_and_ignores_sigterm"])
async def test_a_hanging_verifier_is_killed_and_the_next_one_answered(pool, name):
    await score(pool, "good")  # the worker is up: what follows measures the limit alone
    start = time.monotonic()
    with pytest.raises(RewardError, match=r"ran longer than 0.5 s and was killed"):
        await score(pool, name)
    assert TIMEOUT_S <= time.monotonic() - start < TIMEOUT_S + 4.0
    async with asyncio.timeout(STARTUP_S):
        assert (await score(pool, "good")).score == 0.5


async def test_a_verifier_that_waits_in_line_is_not_charged_for_it(pool):
    with pytest.raises(ExceptionGroup) as caught:
        async with asyncio.TaskGroup() as group:
            after = group.create_task(wait_in_line(pool))
            group.create_task(score(pool, "hangs"))
    assert caught.group_contains(RewardError, match="ran longer")
    assert after.result() == 0.5


async def wait_in_line(pool) -> float:
    """Asks while the hanging one is in play, and outlives the cancellation that its end brings."""
    asking = asyncio.ensure_future(score(pool, "good"))
    try:
        return (await asyncio.shield(asking)).score
    except asyncio.CancelledError:
        return (await asking).score


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("raises", "raised ZeroDivisionError: of no use"),
        ("raises_what_cannot_be_sent", "raised NotPicklable: one"),
        ("dies", "ended its process"),
        ("exits", "raised SystemExit: 0"),
    ],
)
async def test_a_verifier_that_breaks_is_an_error(pool, name, message):
    with pytest.raises(RewardError, match=f"test/{name}.*{message}"):
        await score(pool, name)
    assert (await score(pool, "good")).score == 0.5


@pytest.mark.parametrize(
    "kind",
    [
        "nan",
        "inf",
        "nan in a result",
        "text in a result",
        "nothing in a result",
        "nothing",
        "text",
        "a list",
    ],
)
async def test_what_is_no_finite_number_is_an_error(pool, kind):
    with pytest.raises(RewardError, match="test/returns"):
        await score(pool, "returns", kind=kind)


async def test_our_own_errors_keep_their_class(pool):
    with pytest.raises(DataError, match="row 7 has no answer"):
        await score(pool, "raises_a_data_error")


async def test_a_cancelled_call_frees_its_worker(pool):
    await score(pool, "good")
    call = asyncio.ensure_future(score(pool, "hangs"))
    await asyncio.sleep(0)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    async with asyncio.timeout(STARTUP_S):
        assert (await score(pool, "good")).score == 0.5


def test_a_factory_in_this_process_is_a_verifier_too():
    assert make_reward("test/scores", {"value": 0.5})("p", "c", {}) == 0.5


def test_unknown_names_and_arguments_are_refused_before_anything_runs():
    with pytest.raises(UnknownName, match="did you mean 'exact'"):
        make_reward("exakt", {})
    with pytest.raises(ConfigError, match=r"'exact' does not take \{'key': 1\}"):
        make_reward("exact", {"key": 1})
