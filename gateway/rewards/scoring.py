"""`Scorer`: scores an answer by the reward that a request names.

Each reward is made once. What `quick` settles costs microseconds here; an `AsyncReward` runs on the event
loop under a time limit; everything else runs in `pool.WorkerPool`. Three ends that are no score:

- the verifier raised, hung or returned no number: `RewardError`. A verifier that declares a
  `hang_verdict` says that only the answer can make it hang: then that verdict, with score 0, if it
  really computed all that time;
- a worker was lost, or a service that is awaited failed: scored again, `reward_attempts` times, then
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
from dataclasses import dataclass, replace
from typing import Any

from gateway.components.shared_services import SharedServices
from gateway.rewards.base import (
    Answer,
    AsyncReward,
    Reward,
    as_result,
    reward_factory,
    reward_raised,
)
from gateway.rewards.functions import build_reward
from gateway.rewards.pool import RewardJob, WorkerPool, WorkerTaskPool, WorkerTimeout
from headway.contracts.config.base import ComponentConfig
from headway.contracts.config.gateway import ExecutorConfig
from headway.contracts.errors import ConfigError, RewardError, RewardOutage, ServiceError
from headway.contracts.types import RewardResult, Verdict
from headway.runtime.fair_pool import time_limit

log = logging.getLogger(__name__)
MAX_MADE = 256
CHECK_S = 1.0
"""Seconds to check the arguments of one reward, in a process."""
BACKOFF_S = 0.1
SHOWN_CHARS = 500
"""Characters kept of the beginning and of the end of a completion that could not be scored."""
BUSY_SHARE = 0.5
"""A verifier that had less of the CPU while its time ran was starved, not hung by an answer."""


@dataclass(frozen=True, slots=True)
class Made:
    """A reward with what the ways of calling it need."""

    name: str
    quick: Callable[[Answer], float | RewardResult | None] | None
    hang_verdict: Verdict | None
    has_check: bool
    awaiting: AsyncReward | None
    job: RewardJob | None
    """Reward for a process; None for one that awaits others."""


class Scorer:
    """Judges answers, each to exactly one result or error."""

    def __init__(self, config: ExecutorConfig, services: SharedServices) -> None:
        self._config = config
        self.pool = WorkerPool(config.reward_workers, config.reward_memory_bytes)
        """Workers that run verifiers; the first answer waits for them unless they were started."""
        self._clerk = WorkerPool(1, config.reward_memory_bytes)
        """Workers that check and read rows, apart from those that score: rows hold up no answers."""
        self._services = replace(services, task_pool=WorkerTaskPool(self._clerk))
        self._checked: OrderedDict[bytes, None] = OrderedDict()
        self._made: OrderedDict[tuple[str, str], Made] = OrderedDict()

    async def aclose(self) -> None:
        """End them at once."""
        await self.pool.aclose()
        await self._clerk.aclose()

    async def prepare(self, reward: ComponentConfig) -> None:
        """Make a reward, so that a request that names it wrongly is refused before anything runs.

        Raises:
            UnknownName: nobody registered the name.
            ConfigError: the arguments do not fit, or it cannot run in another process.
        """
        made = self._make(reward)
        if made.has_check and made.job is not None and made.job.reward not in self._checked:
            await self._check(made.name, made.job)
            self._checked[made.job.reward] = None
            if len(self._checked) > MAX_MADE:
                self._checked.popitem(last=False)

    async def _check(self, name: str, job: RewardJob) -> None:
        try:
            await self._clerk.make(job, CHECK_S)
        except WorkerTimeout as error:
            raise ConfigError(
                f"the arguments of reward {name!r} took longer than {CHECK_S:g} s to check; send simpler "
                "ones"
            ) from error

    async def score(self, reward: ComponentConfig, answer: Answer) -> RewardResult:
        """Return the score of one answer.

        Raises:
            RewardError: the verifier raised, hung, or returned no finite number; a note has the
                completion.
            RewardOutage: it could not be scored, after `reward_attempts` attempts.
            ServiceError: the verifier raised one of our own errors, for example on a bad row.
        """
        try:
            return await self._score(self._make(reward), answer)
        except RewardError as error:
            text = answer.completion
            error.add_note(f"the completion, of {len(text)} characters:\n{_ends(text)}")
            raise

    async def _score(self, made: Made, answer: Answer) -> RewardResult:
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

    async def _judge_in_process(self, made: Made, job: RewardJob, answer: Answer) -> RewardResult:
        timeout_s = self._config.reward_timeout_s
        try:
            reply = await self.pool.score(job, answer, timeout_s)
        except WorkerTimeout as error:
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
            async with time_limit(wait_s):
                returned = await reward.score(answer, self._services)
        except TimeoutError as error:
            raise RewardOutage(f"reward {name!r} took longer than {wait_s:g} s") from error
        except ServiceError as error:
            if error.retryable and not isinstance(error, RewardOutage):
                raise RewardOutage(f"reward {name!r} was let down: {error.message}") from error
            raise
        except Exception as error:
            raise reward_raised(name, error) from error
        return as_result(name, returned)

    def _make(self, part: ComponentConfig) -> Made:
        try:
            arguments = json.dumps(part.args, sort_keys=True) if part.args else "{}"
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


def _made(part: ComponentConfig, arguments: str) -> Made:
    factory = reward_factory(part.name)
    reward = build_reward(factory, part.name, part.args)
    awaiting = reward if isinstance(reward, AsyncReward) else None
    return Made(
        name=part.name,
        quick=getattr(reward, "quick", None),
        hang_verdict=getattr(reward, "hang_verdict", None),
        has_check=getattr(reward, "check", None) is not None,
        awaiting=awaiting,
        job=None if awaiting is not None else _job(factory, part.name, arguments, reward),
    )


def _job(factory: Callable[..., Reward], name: str, arguments: str, reward: Reward) -> RewardJob:
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
    return RewardJob(name, bytes_, frozenset(getattr(reward, "preload", ())))


def _own_errors(name: str, call: Callable[[Answer], Any], answer: Answer) -> Any:
    """Call a verifier here; what it raises is a `RewardError`, or one of our own."""
    try:
        return call(answer)
    except ServiceError:
        raise
    except Exception as error:
        raise reward_raised(name, error) from error


def _ends(text: str) -> str:
    """A text, or its beginning and its end."""
    if len(text) <= 2 * SHOWN_CHARS:
        return text
    return f"{text[:SHOWN_CHARS]}\n[...]\n{text[-SHOWN_CHARS:]}"
