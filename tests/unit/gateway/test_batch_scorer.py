"""A whole batch scored beside rollouts, and ended with the request."""

import asyncio

import pytest
from prometheus_client import CollectorRegistry

from gateway.components.shared_services import NoOutbound, NoSandbox, SharedServices
from gateway.rewards import scoring
from gateway.rewards.base import Answer, register_reward
from gateway.rewards.batch_scorer import BatchScorer
from gateway.rewards.scoring import Scorer
from headway.contracts.config.base import ComponentConfig
from headway.contracts.config.gateway import ExecutorConfig
from headway.contracts.errors import ConfigError, RewardError, RewardOutage
from headway.contracts.http.rewards import AnswerToScore
from tests.waiting import until

DEADLINE_S = 30.0
NAMES = ("Scores", "Fails", "OutUntil", "AwaitsForever", "good")


@pytest.fixture(scope="module", autouse=True)
def registered_samples():
    for name in NAMES:
        register_reward(f"batch/{name}", f"tests.unit.gateway.sample_rewards:{name}")


class ScorerBench:
    """A batch scorer, the scorer that it shares, and its metrics."""

    def __init__(self, tokenizer=None, **settings):
        config = ExecutorConfig(**settings)
        self.metrics = CollectorRegistry()
        self.scorer = Scorer(config, SharedServices(NoSandbox(), NoOutbound()))
        self.batch_scorer = BatchScorer(self.scorer, tokenizer, config, self.metrics)

    async def score(self, name, count=1, **args):
        answers = [AnswerToScore(completion=str(number)) for number in range(count)]
        return await self.batch_scorer.score(
            ComponentConfig(name=f"batch/{name}", args=args), answers
        )

    def figure(self, name, **labels):
        return self.metrics.get_sample_value(f"headway_reward_{name}", labels)


@pytest.fixture
async def bench():
    bench = ScorerBench(max_concurrent_scores=2, reward_attempts=2)
    yield bench
    await bench.scorer.aclose()


async def test_answers_of_rollouts_do_not_wait_behind_a_batch(bench):
    """Two of five are under way and never end; the others wait for them, and nobody else does."""
    batch = asyncio.create_task(bench.score("AwaitsForever", 5))
    await until(lambda: bench.batch_scorer._turns.locked())
    assert bench.figure("pending_answers") == 5
    result = await bench.scorer.score(ComponentConfig(name="batch/good"), Answer("", "1", {}))
    assert result.score == 0.5
    assert not batch.done()
    batch.cancel()
    with pytest.raises(asyncio.CancelledError):
        await batch
    assert bench.figure("pending_answers") == 0
    assert not bench.batch_scorer._turns.locked()
    assert [r.score for r in await bench.score("Scores", 5, value=2.0)] == [2.0] * 5


async def test_an_outage_ends_the_call_and_the_others_with_it(bench, monkeypatch):
    monkeypatch.setattr(scoring, "BACKOFF_S", 0.0)
    with pytest.raises(RewardOutage, match="out of order"):
        await bench.score("OutUntil", 5, outages=100)
    assert bench.figure("pending_answers") == 0
    assert bench.figure("scored_answers_total", reward="batch/OutUntil", outcome="reward_outage")
    assert [r.score for r in await bench.score("OutUntil", 2, outages=1)] == [0.5] * 2


async def test_errors_stand_in_their_places_and_are_counted(bench):
    (raised,) = await bench.score("Fails", how="raises")
    (data,) = await bench.score("Fails", how="raises a data error")
    assert isinstance(raised, RewardError)
    assert data.code == "data"
    for outcome in ("reward", "data"):
        counted = bench.figure("scored_answers_total", reward="batch/Fails", outcome=outcome)
        assert counted == 1.0


async def test_what_says_nothing_of_the_answer_is_no_result(bench):
    program = "```python\ndef add(a, b):\n    return a + b\n```"
    code = [AnswerToScore(completion=program, data={"test_list": ["assert add(1, 2) == 3"]})]
    with pytest.raises(ConfigError, match="no sandbox"):
        await bench.batch_scorer.score(ComponentConfig(name="code"), code)
    with pytest.raises(ConfigError, match=r"no tokenizer.json.*send the text"):
        await bench.batch_scorer.score(
            ComponentConfig(name="exact"), [AnswerToScore(completion_ids=(1, 2))]
        )
