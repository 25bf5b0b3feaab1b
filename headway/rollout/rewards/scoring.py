"""`Scorer`: the judgement of an answer by the reward that a request names.

Each reward is made once. What `quick` settles costs microseconds here; an `AsyncReward` runs on the event
loop under a time limit; everything else runs in `pool.WorkerPool`. Three ends that are no score:

- the verifier raised, hung or returned no number: `RewardError`. A verifier that declares a
  `hang_verdict` says that only the answer can make it hang: then that verdict, with score 0, if it
  really computed all that time;
- a worker was lost, somebody who is awaited failed: judged again, `reward_attempts` times, then
  `RewardOutage`;
- one of our own errors, for example a `DataError` about the row: raised as it is.
"""

from __future__ import annotations

import asyncio
import json
import logging
import pickle
import random
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from headway.contracts.config.base import PartConfig
from headway.contracts.config.gateway import ExecutorConfig
from headway.contracts.errors import ConfigError, RewardError, RewardOutage, ServiceError
from headway.contracts.types import RewardResult, Verdict
from headway.rollout.facilities import Facilities
from headway.rollout.rewards.base import Answer, AsyncReward, Reward, as_result, reward_factory
from headway.rollout.rewards.functions import build_reward
from headway.rollout.rewards.pool import Hung, Job, WorkerPool

log = logging.getLogger(__name__)
MAX_MADE = 256
BACKOFF_S = 0.1
BUSY_SHARE = 0.5
"""A verifier that had less of the CPU while its time ran was starved, not hung by an answer."""


@dataclass(frozen=True, slots=True)
class Made:
    """A reward with what the ways of calling it need."""

    name: str
    quick: Callable[[Answer], float | RewardResult | None] | None
    hang_verdict: Verdict | None
    awaiting: AsyncReward | None
    job: Job | None
    """For a process; None for one that awaits others."""


class Scorer:
    """Judges answers, each to exactly one result or error."""

    def __init__(self, config: ExecutorConfig, facilities: Facilities) -> None:
        self._config = config
        self._facilities = facilities
        self._pool = WorkerPool(config.reward_workers, config.reward_memory_bytes)
        self._made: OrderedDict[tuple[str, str], Made] = OrderedDict()

    async def start(self) -> None:
        """Start the processes that run verifiers."""
        await self._pool.start()

    async def aclose(self) -> None:
        """End them at once."""
        await self._pool.aclose()

    def prepare(self, reward: PartConfig) -> None:
        """Make a reward, so that a request that names it wrongly is refused before anything runs.

        Raises:
            UnknownName: nobody registered the name.
            ConfigError: the arguments do not fit, or it cannot run in another process.
        """
        self._make(reward)

    async def score(self, reward: PartConfig, answer: Answer) -> RewardResult:
        """The judgement of one answer.

        Raises:
            RewardError: the verifier raised, hung, or returned no finite number.
            RewardOutage: it could not be judged, after `reward_attempts` attempts.
            ServiceError: the verifier raised one of our own errors, for example on a bad row.
        """
        made = self._make(reward)
        if made.quick is not None:
            settled = _own_errors(made.name, made.quick, answer)
            if settled is not None:
                return as_result(made.name, settled)
        for attempt in range(1, self._config.reward_attempts):
            try:
                return await self._judge(made, answer)
            except RewardOutage as error:
                log.warning("attempt %d at reward %r failed: %s", attempt, made.name, error.message)
            await asyncio.sleep(BACKOFF_S * 2**attempt * random.uniform(0.5, 1.5))
        return await self._judge(made, answer)

    async def _judge(self, made: Made, answer: Answer) -> RewardResult:
        if made.job is not None:
            return await self._judge_in_process(made, made.job, answer)
        assert made.awaiting is not None
        return await self._judge_here(made.name, made.awaiting, answer)

    async def _judge_in_process(self, made: Made, job: Job, answer: Answer) -> RewardResult:
        timeout_s = self._config.reward_timeout_s
        try:
            reply = await self._pool.judge(job, answer, timeout_s)
        except Hung as error:
            if made.hang_verdict is not None:
                if error.busy_s < BUSY_SHARE * timeout_s:
                    raise RewardOutage(
                        f"reward {made.name!r} had {error.busy_s:.1f} s of CPU in {timeout_s:g} s; "
                        "the machine is overloaded"
                    ) from error
                return RewardResult(0.0, verdict=made.hang_verdict)
            raise RewardError(
                f"reward {made.name!r} ran longer than {timeout_s:g} s and was killed"
            ) from error
        return RewardResult(reply["score"], reply["details"], reply["verdict"])

    async def _judge_here(self, name: str, reward: AsyncReward, answer: Answer) -> RewardResult:
        wait_s = self._config.reward_wait_s
        try:
            async with asyncio.timeout(wait_s):
                returned = await reward.judge(answer, self._facilities)
        except TimeoutError as error:
            raise RewardOutage(f"reward {name!r} took longer than {wait_s:g} s") from error
        except ServiceError as error:
            if error.retryable and not isinstance(error, RewardOutage):
                raise RewardOutage(f"reward {name!r} was let down: {error.message}") from error
            raise
        except Exception as error:
            raise _raised(name, error) from error
        return as_result(name, returned)

    def _make(self, part: PartConfig) -> Made:
        try:
            arguments = json.dumps(part.args, sort_keys=True)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"arguments of reward {part.name!r} are no JSON: {error}") from error
        key = (part.name, arguments)
        made = self._made.get(key)
        if made is None:
            made = self._made[key] = _made(part, arguments)
            if len(self._made) > MAX_MADE:
                self._made.popitem(last=False)
        else:
            self._made.move_to_end(key)
        return made


def _made(part: PartConfig, arguments: str) -> Made:
    factory = reward_factory(part.name)
    reward = build_reward(factory, part.name, part.args)
    awaiting = reward if isinstance(reward, AsyncReward) else None
    return Made(
        name=part.name,
        quick=getattr(reward, "quick", None),
        hang_verdict=getattr(reward, "hang_verdict", None),
        awaiting=awaiting,
        job=None if awaiting is not None else _job(factory, part.name, arguments, reward),
    )


def _job(factory: Callable[..., Reward], name: str, arguments: str, reward: Reward) -> Job:
    """The factory itself goes along: what was registered here is unknown to the registry over there."""
    try:
        where = pickle.dumps(factory)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"reward {name!r} cannot be imported by another process: {error}; "
            "define it at the top of a module"
        ) from error
    if b"__main__" in where:
        raise ConfigError(
            f"reward {name!r} is defined in the script that runs; put it into a module of its own, "
            "which another process can import"
        )
    bytes_ = pickle.dumps((factory, name, arguments))
    return Job(name, bytes_, frozenset(getattr(reward, "preload", ())))


def _own_errors(name: str, call: Callable[[Answer], Any], answer: Answer) -> Any:
    """Call a verifier here; what it raises is a `RewardError`, or one of our own."""
    try:
        return call(answer)
    except ServiceError:
        raise
    except Exception as error:
        raise _raised(name, error) from error


def _raised(name: str, error: BaseException) -> RewardError:
    return RewardError(f"reward {name!r} raised {type(error).__name__}: {error}")
