"""Rewards that misbehave, and plain functions, importable by name in the processes that run verifiers."""

import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

from headway.contracts.errors import DataError, RewardOutage
from headway.contracts.types import RewardResult


class Scores:
    """Returns what it was made with."""

    def __init__(self, value: float = 1.0):
        self.value = value

    def __call__(self, answer):
        return self.value


class Settles:
    """Settles on the event loop what it can, and tells where it ran."""

    def quick(self, answer):
        return RewardResult(0.25, {"pid": os.getpid()}) if answer.completion == "easy" else None

    def __call__(self, answer):
        return RewardResult(0.75, {"pid": os.getpid()})


class QuickRaises:
    def quick(self, answer):
        raise KeyError("of no use")

    def __call__(self, answer):
        return 1.0


class HangsOver:
    """Over one answer only, which then gets a verdict; over another, it waits without computing."""

    hang_verdict = "timeout"

    def __call__(self, answer):
        while answer.completion == "bomb":
            pass
        while answer.completion == "starved":
            time.sleep(0.01)
        return 1.0


class SaysTimeout:
    """Interrupted itself: what it leaves behind is not trusted."""

    def __call__(self, answer):
        return RewardResult(0.0, {"pid": os.getpid()}, "timeout")


class NotPicklable(Exception):
    def __init__(self, first, second):
        super().__init__(first)


class DiesUntil:
    """Ends its process as long as the file is missing."""

    def __init__(self, path: str):
        self.path = Path(path)

    def __call__(self, answer):
        if not self.path.exists():
            with suppress(FileNotFoundError):
                self.path.touch()
            os._exit(3)
        return 1.0


class OutUntil:
    """`AsyncReward`: an outage on the first calls."""

    def __init__(self, outages: int, error: str = "outage"):
        self.outages = outages
        self.error = error

    async def score(self, answer, services):
        if self.outages > 0:
            self.outages -= 1
            raise {"outage": RewardOutage, "wrong": ZeroDivisionError}[self.error]("out of order")
        return RewardResult(0.5, {"services": type(services).__name__})


class AwaitsForever:
    async def score(self, answer, services):
        import asyncio

        await asyncio.Event().wait()


def good():
    return tells


def tells(answer):
    return RewardResult(0.5, {"seen": [answer.prompt, answer.completion, dict(answer.data)]})


class Hangs:
    def __call__(self, answer):
        while True:
            time.sleep(0.01)


class HangsAndIgnoresSigterm:
    def __call__(self, answer):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True:
            pass


class HangsWithAChild:
    """Leaves the process id of its child in a file."""

    def __init__(self, path: str):
        self.path = path

    def __call__(self, answer):
        child = os.fork()
        if child == 0:
            time.sleep(600)
        Path(self.path).write_text(str(child))
        os.waitpid(child, 0)


class Fails:
    """Raises or returns what its name says; JSON arguments cannot carry it."""

    def __init__(self, how: str):
        self.how = how

    def __call__(self, answer):
        return _FAILURES[self.how]()


async def raises_over_a_completion(answer, services):
    raise AssertionError("neither\nof \udce9")


def _raise(error):
    raise error


_FAILURES = {
    "raises": lambda: _raise(ZeroDivisionError("of no use")),
    "raises a data error": lambda: _raise(DataError("row 7 has no answer")),
    "raises what cannot be sent": lambda: _raise(NotPicklable("one", "two")),
    "exits": lambda: sys.exit(0),
    "eats memory": lambda: len(bytearray(1 << 40)),
    "explains badly": lambda: RewardResult(
        0.5, {"error": NotPicklable("one", "two"), "seen": {1: (2, 3)}, "nan": float("nan")}
    ),
    "nan": lambda: float("nan"),
    "inf": lambda: float("inf"),
    "nan in a result": lambda: RewardResult(float("nan")),
    "text in a result": lambda: RewardResult("high"),
    "nothing in a result": lambda: RewardResult(None),
    "nothing": lambda: None,
    "text": lambda: "1.0",
    "a list": lambda: [1.0],
    "an unknown verdict": lambda: RewardResult(1.0, verdict="splendid"),
}


def plain_reward(answer, bonus: float = 0.0):
    """Ours."""
    return float(answer.completion == answer.data["answer"]) + bonus


async def plain_async_reward(answer, services):
    return RewardResult(0.5, {"sandbox": type(services.sandbox).__name__})


def areal_reward(prompt, completions, prompt_ids, completion_ids, answer, **kwargs):
    """AReaL's."""
    assert isinstance(prompt_ids, list)
    return float(completions == answer) + len(completion_ids) + len(kwargs)


def narrow_areal_reward(prompt, completions, prompt_ids, completion_ids, answer):
    return completions == answer


def compute_score(data_source, solution_str, ground_truth, extra_info=None, method: str = "strict"):
    """verl's."""
    score = float(solution_str == ground_truth)
    return {"score": score, "source": data_source, "split": extra_info.get("split"), "how": method}


async def compute_score_later(data_source, solution_str, ground_truth, extra_info):
    return solution_str == ground_truth


def trl_reward(prompts, completions, level, **kwargs):
    """TRL's."""
    assert sorted(kwargs) == ["answer", "completion_ids"]
    lists = zip(prompts, completions, level, kwargs["completion_ids"], strict=True)
    return [len(p) * 1000 + len(c) * 100 + n * 10 + len(ids) for p, c, n, ids in lists]


def trl_chat_reward(completions, answer, **kwargs):
    assert [message["role"] for message in kwargs["prompts"][0]] == ["system", "user"]
    contents = [completion[0]["content"] for completion in completions]
    return [float(text == wanted) for text, wanted in zip(contents, answer, strict=True)]


async def trl_reward_later(completions, **kwargs):
    assert "services" not in kwargs
    return [0.25 for _ in completions]


def trl_returns(completions, returned, log_metric=None):
    assert log_metric is None
    return returned[0]


def positional_reward(answer, bonus=0.0, /, *rest, **more):
    assert not rest
    return float(answer.completion == "4") + bonus + len(more)
