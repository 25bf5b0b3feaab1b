"""The scorer: exactly one result or error per answer, whatever the verifier does."""

import asyncio
import os
import signal
import subprocess
import sys
import time

import pytest
import pytest_asyncio

from gateway.components.shared_services import NoOutbound, NoSandbox, SharedServices
from gateway.rewards import scoring
from gateway.rewards.base import Answer, make_reward, register_reward
from gateway.rewards.pool import RewardProcess, WorkerPool
from gateway.rewards.scoring import Scorer
from headway.contracts.config.base import ComponentConfig
from headway.contracts.config.gateway import ExecutorConfig
from headway.contracts.errors import (
    BackendError,
    ConfigError,
    DataError,
    RewardError,
    RewardOutage,
    UnknownName,
)
from headway.runtime.fair_pool import CALLER
from tests.waiting import assert_loop_turns

TIMEOUT_S = 0.5
DEADLINE_S = 20.0

NAMES = {
    "scores": "Scores",
    "settles": "Settles",
    "quick_raises": "QuickRaises",
    "hangs_over": "HangsOver",
    "says_timeout": "SaysTimeout",
    "dies_until": "DiesUntil",
    "out_until": "OutUntil",
    "awaits_forever": "AwaitsForever",
    "good": "good",
    "hangs": "Hangs",
    "hangs_and_ignores_sigterm": "HangsAndIgnoresSigterm",
    "hangs_with_a_child": "HangsWithAChild",
    "fails": "Fails",
}


@pytest.fixture(scope="module", autouse=True)
def registered_samples():
    for name, attribute in NAMES.items():
        register_reward(f"test/{name}", f"tests.unit.gateway.sample_rewards:{attribute}")


@pytest.fixture(autouse=True)
def no_backoff(monkeypatch):
    monkeypatch.setattr(scoring, "BACKOFF_S", 0.0)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def open_scorer():
    """Opens scorers with one worker, started; all are closed at the end."""
    opened = []

    async def opening(outbound=None, **settings) -> Scorer:
        config = ExecutorConfig(**{"reward_timeout_s": TIMEOUT_S, **settings})
        scorer = Scorer(config, SharedServices(NoSandbox(), outbound or NoOutbound()))
        opened.append(scorer)
        await scorer.pool.start()
        return scorer

    yield opening
    for scorer in opened:
        await scorer.aclose()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def scorer(open_scorer):
    return await open_scorer()


pytestmark = pytest.mark.asyncio(loop_scope="module")


async def score(scorer, name, completion="4", **args):
    answer = Answer("2+2=", completion, {"answer": "4"})
    async with asyncio.timeout(DEADLINE_S):
        return await scorer.score(ComponentConfig(name=f"test/{name}", args=args), answer)


async def worker_pid(scorer) -> int:
    return (await score(scorer, "settles", "hard")).details["pid"]


async def until_gone(pid: int) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while process_fields(pid)[0] != "Z":  # noqa: ASYNC110 - a deadline, and nobody to tell
            await asyncio.sleep(0.01)


def process_fields(pid: int) -> tuple[str, int]:
    """State and parent; one that is gone is like a zombie."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            state, parent = file.read().rpartition(")")[2].split()[:2]
    except (FileNotFoundError, ProcessLookupError):
        return "Z", 0
    return state, int(parent)


async def test_a_result_arrives_with_its_details(scorer):
    result = await score(scorer, "good")
    assert result.score == 0.5
    assert result.details == {"seen": ["2+2=", "4", {"answer": "4"}]}


async def test_details_that_cannot_travel_arrive_as_text(scorer):
    result = await score(scorer, "fails", how="explains badly")
    assert result.details == {"error": "one", "seen": {"1": [2, 3]}, "nan": "NaN"}
    assert (await score(scorer, "good")).score == 0.5


@pytest.mark.parametrize(("value", "wanted"), [(1, 1.0), (True, 1.0), (-0.25, -0.25)])
async def test_a_bare_number_is_a_score(scorer, value, wanted):
    result = await score(scorer, "scores", value=value)
    assert (result.score, type(result.score), result.details) == (wanted, float, {})
    assert result.verdict == "scored"


async def test_arguments_make_separate_verifiers(scorer):
    scores = [(await score(scorer, "scores", value=v)).score for v in (1.0, 2.0, 1.0)]
    assert scores == [1.0, 2.0, 1.0]


async def test_easy_cases_are_settled_on_the_event_loop_and_the_rest_in_another_process(scorer):
    easy, hard = await score(scorer, "settles", "easy"), await score(scorer, "settles", "hard")
    assert (easy.score, easy.details["pid"]) == (0.25, os.getpid())
    assert hard.score == 0.75
    assert hard.details["pid"] != os.getpid()


async def test_what_the_quick_way_raises_is_an_error(scorer):
    with pytest.raises(RewardError, match="test/quick_raises' raised KeyError"):
        await score(scorer, "quick_raises")


@pytest.mark.parametrize("name", ["hangs", "hangs_and_ignores_sigterm"])
async def test_a_hanging_verifier_is_killed_and_the_next_one_answered(scorer, name):
    before = await worker_pid(scorer)
    with pytest.raises(RewardError, match=r"ran longer than 0.5 s and was killed") as caught:
        await score(scorer, name)
    assert not isinstance(caught.value, RewardOutage)
    assert (await score(scorer, "good")).score == 0.5
    assert await worker_pid(scorer) != before
    await until_gone(before)


async def test_what_a_hanging_verifier_started_is_killed_too(scorer, tmp_path):
    file = tmp_path / "pid"
    with pytest.raises(RewardError, match="was killed"):
        await score(scorer, "hangs_with_a_child", path=str(file))
    await until_gone(int(file.read_text()))


async def test_an_answer_that_makes_a_sound_verifier_hang_gets_its_verdict(open_scorer):
    scorer = await open_scorer()
    result = await score(scorer, "hangs_over", "bomb")
    assert (result.score, result.verdict) == (0.0, "timeout")
    assert (await score(scorer, "hangs_over", "fine")).score == 1.0


async def test_time_without_a_cpu_is_not_charged(open_scorer, monkeypatch):
    """As on a machine where the verifier waited for its CPU during half of the time."""
    scorer = await open_scorer(reward_attempts=5)
    assert (await score(scorer, "hangs_over", "fine")).score == 1.0
    loop = asyncio.get_running_loop()
    began = loop.time()
    monkeypatch.setattr(RewardProcess, "cpu_wait_s", lambda self: (loop.time() - began) / 2)
    result = await score(scorer, "hangs_over", "bomb")
    assert result.verdict == "timeout"
    assert loop.time() - began >= 2 * TIMEOUT_S - 0.01


async def test_a_process_that_waits_for_a_cpu_tells_how_long():
    """More computing processes than CPUs: some of them wait."""
    cpu = {min(os.sched_getaffinity(0))}
    command = [sys.executable, "-c", "while True: pass"]
    workers = [subprocess.Popen(command) for _ in range(2)]  # noqa: ASYNC220
    try:
        for process in workers:
            os.sched_setaffinity(process.pid, cpu)
        watched = RewardProcess(workers[0].pid, frozenset(), None, None)
        deadline = time.monotonic() + DEADLINE_S
        while watched.cpu_wait_s() < 0.05:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)
    finally:
        for process in workers:
            process.kill()
            process.wait()
    assert watched.cpu_wait_s() == 0.0  # nobody can tell any more


async def test_a_verifier_that_was_given_no_cpu_was_starved_and_judges_again(open_scorer):
    scorer = await open_scorer(reward_attempts=2)
    with pytest.raises(RewardOutage, match="the machine is overloaded"):
        await score(scorer, "hangs_over", "starved")


async def test_a_verifier_that_was_interrupted_leaves_its_process_to_nobody(scorer):
    first = await score(scorer, "says_timeout")
    assert first.verdict == "timeout"
    assert await worker_pid(scorer) != first.details["pid"]


async def test_a_verifier_that_waits_in_line_is_not_charged_for_it(scorer):
    before = asyncio.create_task(score(scorer, "hangs"))
    after = asyncio.create_task(score(scorer, "good"))
    with pytest.raises(RewardError, match="ran longer"):
        await before
    assert (await after).score == 0.5


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("raises", "raised ZeroDivisionError: of no use"),
        ("raises what cannot be sent", "raised NotPicklable: one"),
        ("exits", "raised SystemExit: 0"),
        ("eats memory", "raised MemoryError"),
    ],
)
async def test_a_verifier_that_breaks_is_an_error_and_its_process_goes_on(scorer, how, message):
    before = await worker_pid(scorer)
    with pytest.raises(RewardError, match=f"test/fails.*{message}") as caught:
        await score(scorer, "fails", how=how)
    assert not caught.value.retryable
    assert "sample_rewards.py" in caught.value.message
    assert await worker_pid(scorer) == before


async def test_the_error_has_the_users_frames_and_the_completion(scorer):
    with pytest.raises(RewardError) as caught:
        await score(scorer, "fails", how="raises")
    first, *frames = caught.value.message.splitlines()
    assert first == "reward 'test/fails' raised ZeroDivisionError: of no use"
    assert all("sample_rewards.py" in frame for frame in frames if "File" in frame)
    assert frames[-1].strip() == "raise error"
    (note,) = caught.value.__notes__
    assert note.startswith("the completion, of ")


@pytest.mark.parametrize(
    "how",
    [
        "nan",
        "inf",
        "nan in a result",
        "text in a result",
        "nothing in a result",
        "nothing",
        "text",
        "a list",
        "an unknown verdict",
    ],
)
async def test_what_is_no_judgement_is_an_error(scorer, how):
    with pytest.raises(RewardError, match="'test/fails' returned"):
        await score(scorer, "fails", how=how)


async def test_our_own_errors_keep_their_class(scorer):
    with pytest.raises(DataError, match="row 7 has no answer"):
        await score(scorer, "fails", how="raises a data error")


async def test_a_lost_worker_is_an_outage_and_the_answer_judged_again(scorer, tmp_path):
    assert (await score(scorer, "dies_until", path=str(tmp_path / "here"))).score == 1.0


async def test_a_worker_that_is_lost_every_time_is_an_outage_at_last(scorer, tmp_path):
    with pytest.raises(RewardOutage, match="died"):
        await score(scorer, "dies_until", path=str(tmp_path / "no" / "such" / "folder"))


async def test_a_killed_worker_is_replaced(scorer):
    os.kill(await worker_pid(scorer), signal.SIGKILL)
    assert (await score(scorer, "good")).score == 0.5


async def test_a_killed_template_is_replaced(open_scorer):
    scorer = await open_scorer()
    os.kill(process_fields(await worker_pid(scorer))[1], signal.SIGKILL)
    for _ in range(2):
        with pytest.raises(RewardError, match="was killed"):
            await score(scorer, "hangs")
        assert (await score(scorer, "good")).score == 0.5


async def test_a_cancelled_call_frees_its_worker(scorer):
    before = await worker_pid(scorer)
    call = asyncio.ensure_future(score(scorer, "hangs"))
    await asyncio.sleep(0)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert (await score(scorer, "good")).score == 0.5
    call = asyncio.ensure_future(score(scorer, "hangs"))
    await asyncio.sleep(TIMEOUT_S / 5)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert (await score(scorer, "good")).score == 0.5
    await until_gone(before)


async def test_a_fork_that_is_cancelled_leaves_no_worker(monkeypatch):
    forked: asyncio.Queue[RewardProcess] = asyncio.Queue()

    async def silent(worker: RewardProcess) -> bytes:
        forked.put_nowait(worker)
        return await asyncio.Future()

    monkeypatch.setattr(RewardProcess, "read", silent)
    pool = WorkerPool(1, memory_bytes=0)
    try:
        start = asyncio.ensure_future(pool.start())
        worker = await asyncio.wait_for(forked.get(), DEADLINE_S)
        start.cancel()
        with pytest.raises(asyncio.CancelledError):
            await start
        assert worker.writer.transport.is_closing()
        await until_gone(worker.pid)
    finally:
        await pool.aclose()


async def test_nobody_waits_for_another_s_answers(open_scorer):
    scorer = await open_scorer(reward_workers=1, reward_timeout_s=60.0)

    async def hang() -> None:
        CALLER.set("greedy")
        await score(scorer, "hangs")

    greedy = [asyncio.ensure_future(hang()) for _ in range(3)]
    await asyncio.sleep(0)
    try:
        CALLER.set("modest")
        assert (await asyncio.wait_for(score(scorer, "good"), DEADLINE_S)).score == 0.5
        assert not any(task.done() for task in greedy)
    finally:
        for task in greedy:
            task.cancel()
        await asyncio.gather(*greedy, return_exceptions=True)


async def test_many_callers_share_few_workers(open_scorer):
    scorer = await open_scorer(reward_workers=2)
    parts = [score(scorer, "scores", value=n % 7) for n in range(200)]
    assert [result.score for result in await asyncio.gather(*parts)] == [n % 7 for n in range(200)]


async def test_closing_ends_all_processes(open_scorer):
    scorer = await open_scorer()
    pid = await worker_pid(scorer)
    running = asyncio.create_task(score(scorer, "hangs"))
    await asyncio.sleep(0)
    await scorer.aclose()
    await until_gone(pid)
    with pytest.raises(RewardOutage, match="closed"):
        await running


async def test_an_awaiting_reward_runs_here_with_its_services(scorer):
    result = await score(scorer, "out_until", outages=0)
    assert (result.score, result.details) == (0.5, {"services": "SharedServices"})


async def test_an_outage_of_an_awaiting_reward_is_tried_again(open_scorer):
    scorer = await open_scorer(reward_attempts=3)
    assert (await score(scorer, "out_until", outages=2)).score == 0.5
    with pytest.raises(RewardOutage, match="out of order"):
        await score(scorer, "out_until", outages=3)


async def test_an_awaiting_reward_that_is_wrong_is_not_tried_again(scorer):
    with pytest.raises(RewardError, match="raised ZeroDivisionError") as caught:
        await score(scorer, "out_until", outages=1, error="wrong")
    assert not isinstance(caught.value, RewardOutage)


async def test_an_awaiting_reward_that_nobody_answers_is_an_outage(open_scorer):
    scorer = await open_scorer(reward_wait_s=0.05, reward_attempts=2)
    with pytest.raises(RewardOutage, match=r"took longer than 0.05 s"):
        await score(scorer, "awaits_forever")


class ScriptedOutbound:
    """`Outbound` that answers in turn."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.asked = []

    async def post(self, url, body, timeout_s):
        self.asked.append((url, body, timeout_s))
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


async def ask_model(open_scorer, *answers):
    outbound = ScriptedOutbound(*answers)
    scorer = await open_scorer(outbound)
    part = ComponentConfig(name="reward_model", args={"url": "http://model/score", "timeout_s": 7})
    result = await scorer.score(part, Answer("p", "c", {"answer": "4"}))
    return result, outbound.asked


async def test_a_reward_model_is_asked_and_asked_again(open_scorer):
    down = BackendError("nobody there")
    result, asked = await ask_model(open_scorer, down, {"score": 0.75, "details": {"why": "so"}})
    assert (result.score, result.details, result.verdict) == (0.75, {"why": "so"}, "scored")
    body = {"prompt": "p", "completion": "c", "data": {"answer": "4"}}
    assert asked == [("http://model/score", body, 7.0)] * 2


async def test_a_reward_model_that_stays_away_is_an_outage(open_scorer):
    with pytest.raises(RewardOutage, match="did not answer: nobody there"):
        await ask_model(open_scorer, *[BackendError("nobody there")] * 3)


@pytest.mark.parametrize(
    "answer",
    [
        {},
        {"score": "high"},
        {"score": float("nan")},
        {"score": 1e39},
        [1.0],
        {"score": 1, "verdict": "splendid"},
        {"score": 1, "details": {"text": "x" * 300_000}},
    ],
    ids=["nothing", "text", "nan", "huge", "list", "verdict", "details"],
)
async def test_a_reward_model_that_answers_nonsense_is_an_error(open_scorer, answer):
    with pytest.raises(RewardError) as caught:
        await ask_model(open_scorer, answer)
    assert not isinstance(caught.value, RewardOutage)


async def test_a_function_of_trl_judges_chats_in_a_process_of_its_own(scorer):
    from tests.unit.gateway import sample_rewards

    register_reward("test/trl_chat", sample_rewards.trl_chat_reward)
    chat = [{"role": "system", "content": "Add."}, {"role": "user", "content": "2+2="}]
    answer = Answer("Add.2+2=", "4", {"answer": "4"}, messages=chat)
    async with asyncio.timeout(DEADLINE_S):
        result = await scorer.score(ComponentConfig(name="test/trl_chat"), answer)
        assert result.score == 1.0
        with pytest.raises(DataError, match="the row has no answer"):
            await scorer.score(ComponentConfig(name="test/trl_chat"), Answer("", "4", {}))


async def test_unknown_names_and_arguments_are_refused_before_anything_runs(scorer):
    with pytest.raises(UnknownName, match="did you mean 'exact'"):
        await scorer.prepare(ComponentConfig(name="exakt"))
    with pytest.raises(ConfigError, match="reward 'exact': unknown key key"):
        await scorer.prepare(ComponentConfig(name="exact", args={"key": 1}))
    with pytest.raises(ConfigError, match="no JSON"):
        await scorer.prepare(ComponentConfig(name="test/scores", args={"value": {1, 2}}))


async def test_a_reward_that_no_other_process_can_import_is_refused(scorer):
    def local(answer):
        return 1.0

    register_reward("test/local", local)
    with pytest.raises(ConfigError, match="define it at the top of a module"):
        await scorer.prepare(ComponentConfig(name="test/local"))


async def test_a_reward_that_was_registered_as_text_or_as_an_object_is_the_same(scorer):
    from tests.unit.gateway import sample_rewards

    register_reward("test/object", sample_rewards.plain_reward)
    assert (await score(scorer, "object", bonus=0.5)).score == 1.5
    assert make_reward("test/object", {})(Answer("", "3", {"answer": "4"})) == 0.0


SLOW_PATTERN = "(?i)" + "[\0-\U0010ffff]" * 60


async def test_a_pattern_that_takes_long_to_compile_is_refused_and_the_loop_goes_on(
    scorer, monkeypatch
):
    monkeypatch.setattr(scoring, "CHECK_S", 0.1)
    async with assert_loop_turns(10):
        with pytest.raises(ConfigError, match=r"took longer than 0\.1 s to check"):
            await scorer.prepare(ComponentConfig(name="exact", args={"pattern": SLOW_PATTERN}))
        with pytest.raises(ConfigError, match="is not a regular expression"):
            inner = {"name": "exact", "args": {"pattern": "("}}
            await scorer.prepare(ComponentConfig(name="format", args={"inner": inner}))


async def test_a_pattern_that_tries_every_way_to_match_is_cut_off(scorer):
    reward = ComponentConfig(name="exact", args={"pattern": "(x+)+$"})
    with pytest.raises(RewardError, match=r"took longer than|was killed"):
        await scorer.score(reward, Answer("", "x" * 60 + "y", {"answer": "4"}))
