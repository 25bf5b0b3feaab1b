"""Verifiers run in worker processes that are killed when they hang.

The clock starts when a worker takes the call, not while it starts up; a killed worker is replaced.
Covered: endless loops, crashes of the interpreter, leaks across calls into the gateway. Not covered:
hostile code (a verifier is trusted code; untrusted programs need a sandbox).
"""

from __future__ import annotations

import asyncio
import json
import math
import multiprocessing
from collections.abc import Callable
from functools import lru_cache
from numbers import Real
from typing import Any

from pebble import ProcessExpired, ProcessPool

from headway.contracts.config.base import PartConfig
from headway.contracts.errors import RewardError, ServiceError
from headway.contracts.types import RewardResult, Verdict
from headway.rollout.rewards.base import REWARDS, Answer, AsyncReward, Reward, build_reward

Factory = Callable[..., Reward]


class RewardPool:
    """Scores completions in `num_workers` processes."""

    def __init__(self, num_workers: int, timeout_s: float) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        self._pool = ProcessPool(max_workers=num_workers, context=context)
        self._timeout_s = timeout_s

    async def score(self, reward: PartConfig, answer: Answer) -> RewardResult:
        """The judgement of one answer.

        Raises:
            RewardError: the verifier raised, hung, died, or returned no finite number.
            ServiceError: the verifier raised one of our own errors, for example on a bad row.
        """
        arguments = json.dumps(reward.args, sort_keys=True)
        future = self._pool.schedule(
            _score,
            # The factory itself: what was registered here is unknown to the registry over there.
            args=[REWARDS.get(reward.name), reward.name, arguments, answer],
            timeout=self._timeout_s,
        )
        try:
            score, details, verdict = await asyncio.wrap_future(future)
        except ServiceError:
            raise
        except TimeoutError as error:
            raise RewardError(
                f"reward {reward.name!r} ran longer than {self._timeout_s:g} s and was killed"
            ) from error
        except ProcessExpired as error:
            raise RewardError(f"reward {reward.name!r} ended its process: {error}") from error
        except Exception as error:
            raise RewardError(
                f"reward {reward.name!r} raised {type(error).__name__}: {error}"
            ) from error
        if not math.isfinite(score):
            raise RewardError(f"reward {reward.name!r} returned {score}; a finite number is wanted")
        return RewardResult(score, details, verdict)

    def close(self) -> None:
        """End the workers at once."""
        self._pool.stop()
        self._pool.join()


@lru_cache(maxsize=64)
def _reward_of(factory: Factory, name: str, arguments: str) -> Reward:
    return build_reward(factory, name, json.loads(arguments))


def _score(
    factory: Factory, name: str, arguments: str, answer: Answer
) -> tuple[float, dict[str, Any], Verdict]:
    """Runs in the worker.

    What goes back is ours: an exception or detail that cannot be unpickled would end the pool.
    """
    try:
        reward = _reward_of(factory, name, arguments)
        if isinstance(reward, AsyncReward):
            raise TypeError("is asynchronous, and runs on the event loop only")
        verdict = reward(answer)
        result = verdict if isinstance(verdict, RewardResult) else RewardResult(verdict)
        if not isinstance(result.score, Real):
            raise TypeError(
                f"returned {type(result.score).__name__}, wanted a number or RewardResult"
            )
        details = json.loads(json.dumps(result.details, default=str))
        return float(result.score), details, result.verdict
    except ServiceError as error:
        raise ServiceError.from_body(error.to_body()) from None
    except BaseException as error:  # noqa: BLE001 - sys.exit() here must not end the gateway
        raise RewardError(f"reward {name!r} raised {type(error).__name__}: {error}") from None
