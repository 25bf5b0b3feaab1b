"""What is checked of rollouts before they are stored: nothing that could never run is queued.

Requests may be large. So the event loop is given back between them, and what takes long is done off it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from gateway.execution.rollout_runner import RolloutRunner
from gateway.ledger.base import LedgerReader
from gateway.rewards.scoring import Scorer
from gateway.workflows.base import prompt_size
from headway.contracts.config.base import ComponentConfig
from headway.contracts.config.gateway import ExecutorConfig
from headway.contracts.context import ContextLimits
from headway.contracts.engines import Generator
from headway.contracts.errors import ConfigError, RequestTooLong, ServiceError
from headway.contracts.types import Prompt, RolloutRequest
from headway.runtime.offload import SMALL, offload, size_of

MAX_REWARDS = 16
"""Maximum number of rewards that one request may name."""
MAX_ARGS = 1 << 17
"""Characters and values in the arguments of one part."""
MAX_CHECKED = 16
"""Rollouts of a request that are looked at in one turn of the event loop."""


class SubmissionChecker:
    """Refuses rollouts that could never run."""

    def __init__(
        self,
        generator: Generator,
        ledger: LedgerReader,
        runner: RolloutRunner,
        scorer: Scorer,
        config: ExecutorConfig,
    ) -> None:
        self._generator = generator
        self._ledger = ledger
        self._runner = runner
        self._scorer = scorer
        self._max_row_size = config.max_row_size

    async def check(self, requests: Sequence[RolloutRequest]) -> None:
        """Check all of them.

        Raises:
            UnknownName, ConfigError: workflow, reward or filter do not exist, or cannot be made.
            DataError: a prompt without tokens, with unknown ones, or that its workflow cannot begin with.
            RequestTooLong: a prompt + max_new_tokens exceed what any server can hold.
        """
        rewards: set[tuple[str, str]] = set()
        for request in requests:
            if _check_args(request) > SMALL:
                await asyncio.sleep(0)  # a request may hold thousands
            rewards.add(_key_of(request.reward))
            if len(rewards) > MAX_REWARDS:
                raise ConfigError(
                    f"the rollouts name more than {MAX_REWARDS} rewards with different arguments; what "
                    "differs by row belongs into the row's data"
                )
        limit = ContextLimits.of(self._generator.statuses()).largest
        doubtful = []
        for place, request in enumerate(requests):
            await self._check(request)
            if self._runner.is_doubtful(request, limit):
                doubtful.append(request)
            if place % MAX_CHECKED == MAX_CHECKED - 1:
                await asyncio.sleep(0)
        await self._check_prompts(doubtful, limit)

    async def _check(self, request: RolloutRequest) -> None:
        try:
            if (size := size_of(request.prompt.data)) > SMALL:
                await self._check_size(size, request.prompt)
            self._runner.check(request)
            await self._scorer.prepare(request.reward)
        except ServiceError as error:
            raise _of_rollout(request.rollout_id, error) from error

    async def _check_size(self, size: int, prompt: Prompt) -> None:
        limit = self._max_row_size
        if await offload(size, size_of, prompt.data, limit + 1) > limit:
            raise RequestTooLong(
                f"the prompt's data has more than executor.max_row_size={limit} characters and values; "
                "leave some out, or raise the setting"
            )

    async def _check_prompts(self, doubtful: Sequence[RolloutRequest], limit: int | None) -> None:
        size = sum(prompt_size(each.prompt) for each in doubtful)
        found = await offload(size, self._runner.unplayable, doubtful, limit)
        for rollout_id, error in found.items():
            if await self._ledger.get(rollout_id, with_payload=False) is None:
                raise _of_rollout(rollout_id, error) from error
                # else it is sent again, and was taken when servers held more


def _check_args(request: RolloutRequest) -> int:
    """Return the size of the largest arguments."""
    largest = 0
    for part in (request.workflow, request.reward, request.filter):
        if part is None or not part.args:
            continue
        size = size_of(part.args, MAX_ARGS + 1)
        largest = max(largest, size)
        if size > MAX_ARGS:
            raise ConfigError(
                f"rollout {request.rollout_id!r}: the arguments of {part.name!r} have more than "
                f"{MAX_ARGS} characters and values; what differs by row belongs into the row's data"
            )
    return largest


def _key_of(reward: ComponentConfig) -> tuple[str, str]:
    return reward.name, repr(reward.args)


def _of_rollout(rollout_id: str, error: ServiceError) -> ServiceError:
    return type(error)(f"rollout {rollout_id!r}: {error.message}")
