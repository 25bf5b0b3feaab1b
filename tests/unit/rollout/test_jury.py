"""The jury: a whole batch judged beside rollouts, and ended with whoever asked."""

import asyncio

import pytest
from prometheus_client import CollectorRegistry

from headway.contracts.config.base import PartConfig
from headway.contracts.config.gateway import ExecutorConfig
from headway.contracts.errors import ConfigError, RewardError, RewardOutage
from headway.contracts.http.rewards import AnswerToScore
from headway.rollout.facilities import Facilities, NoOutbound, NoSandbox
from headway.rollout.rewards import scoring
from headway.rollout.rewards.base import Answer, register_reward
from headway.rollout.rewards.jury import Jury
from headway.rollout.rewards.scoring import Scorer
from tests.waiting import until

DEADLINE_S = 30.0
NAMES = ("Scores", "Fails", "OutUntil", "AwaitsForever", "good")


@pytest.fixture(scope="module", autouse=True)
def registered_samples():
    for name in NAMES:
        register_reward(f"jury/{name}", f"tests.unit.rollout.sample_rewards:{name}")


class Court:
    """A jury, the scorer that it shares, and its figures."""

    def __init__(self, tokenizer=None, **settings):
        config = ExecutorConfig(**settings)
        self.metrics = CollectorRegistry()
        self.scorer = Scorer(config, Facilities(NoSandbox(), NoOutbound()))
        self.jury = Jury(self.scorer, tokenizer, config, self.metrics)

    async def judge(self, name, count=1, **args):
        answers = [AnswerToScore(completion=str(number)) for number in range(count)]
        return await self.jury.judge(PartConfig(name=f"jury/{name}", args=args), answers)

    def figure(self, name, **labels):
        return self.metrics.get_sample_value(f"headway_reward_{name}", labels)


@pytest.fixture
async def court():
    court = Court(max_scored=2, reward_attempts=2)
    yield court
    await court.scorer.aclose()


async def test_answers_of_rollouts_do_not_wait_behind_a_batch(court):
    """Two of five are under way and never end; the others wait for them, and nobody else does."""
    batch = asyncio.create_task(court.judge("AwaitsForever", 5))
    await until(lambda: court.jury._turns.locked())
    assert court.figure("pending_answers") == 5
    result = await court.scorer.score(PartConfig(name="jury/good"), Answer("", "1", {}))
    assert result.score == 0.5
    assert not batch.done()
    batch.cancel()
    with pytest.raises(asyncio.CancelledError):
        await batch
    assert court.figure("pending_answers") == 0
    assert not court.jury._turns.locked()
    assert [r.score for r in await court.judge("Scores", 5, value=2.0)] == [2.0] * 5


async def test_an_outage_ends_the_call_and_the_others_with_it(court, monkeypatch):
    monkeypatch.setattr(scoring, "BACKOFF_S", 0.0)
    with pytest.raises(RewardOutage, match="out of order"):
        await court.judge("OutUntil", 5, outages=100)
    assert court.figure("pending_answers") == 0
    assert court.figure("scored_answers_total", reward="jury/OutUntil", outcome="reward_outage")
    assert [r.score for r in await court.judge("OutUntil", 2, outages=1)] == [0.5] * 2


async def test_errors_stand_in_their_places_and_are_counted(court):
    (raised,) = await court.judge("Fails", how="raises")
    (data,) = await court.judge("Fails", how="raises a data error")
    assert isinstance(raised, RewardError)
    assert data.code == "data"
    for outcome in ("reward", "data"):
        counted = court.figure("scored_answers_total", reward="jury/Fails", outcome=outcome)
        assert counted == 1.0


async def test_what_says_nothing_of_the_answer_is_no_result(court):
    program = "```python\ndef add(a, b):\n    return a + b\n```"
    code = [AnswerToScore(completion=program, data={"test_list": ["assert add(1, 2) == 3"]})]
    with pytest.raises(ConfigError, match="no sandbox"):
        await court.jury.judge(PartConfig(name="code"), code)
    with pytest.raises(ConfigError, match=r"no tokenizer.json.*send the text"):
        await court.jury.judge(PartConfig(name="exact"), [AnswerToScore(completion_ids=(1, 2))])
