"""From a leased request to its group: workflow, reward, version bounds and filter."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

from headway.contracts.context import (
    begins_with_prompt,
    check_context,
    first_new_tokens,
    most_tokens,
)
from headway.contracts.engines import Generator
from headway.contracts.errors import (
    ConfigError,
    DataError,
    RequestTooLong,
    StaleVersion,
    VersionMoved,
    WorkflowError,
)
from headway.contracts.types import (
    LLMRequest,
    LLMResponse,
    PolicyVersion,
    Prompt,
    RolloutRequest,
    Trajectory,
    TrajectoryGroup,
    VersionBounds,
)
from headway.rollout.executor import Played
from headway.rollout.filters.base import make_filter
from headway.rollout.resume import generate_whole
from headway.rollout.signal import Signal
from headway.rollout.tokenizer import TextTokenizer
from headway.rollout.workflows.base import Sample, Stage, make_workflow

T = TypeVar("T")


class Player:
    """Plays requests on a stage."""

    def __init__(
        self,
        generator: Generator,
        tokenizer: TextTokenizer | None,
        set_stage: Callable[[RolloutRequest], Stage],
        changed: Signal,
        max_group_size: int,
    ) -> None:
        """Args:
        generator: samples; its `version` is what the bounds are about.
        tokenizer: None plays nothing, and says so.
        set_stage: score and facilities for one request; `generate` is replaced.
        changed: raised when a version is committed.
        max_group_size: trajectories that may ever be in play.
        """
        self._generator = generator
        self._tokenizer = tokenizer
        self._set_stage = set_stage
        self._changed = changed
        self._max_group_size = max_group_size

    def check(self, request: RolloutRequest) -> None:
        """Refuse what could never be played.

        Raises:
            UnknownName, ConfigError: workflow or filter do not exist, or do not take these arguments.
            WorkflowError: this service has no tokenizer.
        """
        make_workflow(request.workflow, self._need_tokenizer(), request.gconfig)
        if request.filter is not None:
            make_filter(request.filter.name, request.filter.args)
        if request.prompt.group_size > self._max_group_size:
            raise ConfigError(
                f"group_size={request.prompt.group_size} of rollout {request.rollout_id!r} exceeds "
                f"executor.max_concurrent={self._max_group_size}: it could never start"
            )

    def may_be_too_long(self, request: RolloutRequest, limit: int) -> bool:
        """Whether its prompt has to be encoded to know; see `too_long`."""
        most = _most_tokens(request.prompt) + request.gconfig.max_new_tokens
        return most > limit and begins_with_prompt(request.workflow)

    def too_long(self, requests: Sequence[RolloutRequest], limit: int) -> dict[str, RequestTooLong]:
        """Of those that may be too long, the rollouts that no server could hold.

        It encodes their prompts, which takes a while: for a thread.

        Args:
            limit: tokens per sequence, prompt included.
        """
        found: dict[str, RequestTooLong] = {}
        for request in requests:
            try:
                length = len(self._need_tokenizer().encode_prompt(request.prompt))
                new = first_new_tokens(request.workflow, length, request.gconfig.max_new_tokens)
                check_context(length, new, limit, f"rollout {request.rollout_id!r}: ")
            except RequestTooLong as error:
                found[request.rollout_id] = error
            except DataError:
                pass  # told when it is played, as of short ones
        return found

    async def play(self, request: RolloutRequest) -> Played:
        """Play the whole group; the first sample that fails ends the others."""
        tokenizer = self._need_tokenizer()
        workflow = make_workflow(request.workflow, tokenizer, request.gconfig)
        await self._until(request.versions)
        generate = partial(generate_whole, self._generator.agenerate, tokenizer.decode)
        if request.versions != VersionBounds():
            generate = partial(_generate_within, generate, self._generator, request.versions)
        stage = replace(self._set_stage(request), generate=generate)
        rows = await _all(
            [
                workflow.run(Sample(request.rollout_id, request.prompt, index), stage)
                for index in range(request.prompt.group_size)
            ]
        )
        group = TrajectoryGroup(
            request.rollout_id, request.prompt.group_id, tuple(row for each in rows for row in each)
        )
        _check_group(group, request)
        if request.filter is None:
            return Played(group)
        return Played(group, make_filter(request.filter.name, request.filter.args).keep(group))

    async def _until(self, bounds: VersionBounds) -> None:
        changed = self._changed.event()
        while bounds.min_version is not None and self._generator.version < bounds.min_version:
            if self._generator.has(bounds.min_version):
                break  # some servers are newer than the others
            await changed.wait()
            changed = self._changed.event()
        _check_generator(self._generator, bounds)

    def _need_tokenizer(self) -> TextTokenizer:
        if self._tokenizer is None:
            raise WorkflowError("this server has no tokenizer.json, so it plays no workflows")
        return self._tokenizer


def _most_tokens(prompt: Prompt) -> int:
    if prompt.input_ids is not None:
        return len(prompt.input_ids)
    return most_tokens([prompt.text or "", *(m.content for m in prompt.messages or ())])


async def _all(plays: Sequence[Awaitable[T]]) -> list[T]:
    if len(plays) == 1:
        return [await plays[0]]

    async def run(play: Awaitable[T]) -> T:
        return await play

    try:
        async with asyncio.TaskGroup() as siblings:
            tasks = [siblings.create_task(run(play)) for play in plays]
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from group
    return [task.result() for task in tasks]


async def _generate_within(
    generate: Callable[[LLMRequest], Awaitable[LLMResponse]],
    generator: Generator,
    bounds: VersionBounds,
    req: LLMRequest,
) -> LLMResponse:
    """Sample, and refuse tokens of versions beyond the bounds."""
    _check_generator(generator, bounds)
    response = await generate(req.model_copy(update={"version": bounds.exact}))
    for version, _, _ in response.version_runs:
        if bounds.exact is not None and version != bounds.exact:
            raise VersionMoved(f"a server sampled with version {version}, not {bounds.exact}")
        _check_version(version, bounds)
    return response


def _check_generator(generator: Generator, bounds: VersionBounds) -> None:
    """One that is asked for by its number may be kept by some servers while another one serves."""
    if bounds.exact is None or not generator.has(bounds.exact):
        _check_version(generator.version, bounds)


def _check_version(version: PolicyVersion, bounds: VersionBounds) -> None:
    if bounds.max_version is not None and version > bounds.max_version:
        raise StaleVersion(
            f"version {version} serves, versions.max_version={bounds.max_version} was asked for"
        )
    if bounds.min_version is not None and version < bounds.min_version:
        raise VersionMoved(
            f"a server sampled with version {version}, versions.min_version={bounds.min_version} "
            "was asked for"
        )


def _check_group(group: TrajectoryGroup, request: RolloutRequest) -> None:
    rows = group.trajectories
    names = [row.trajectory_id for row in rows]
    samples = {row.sample_index for row in rows}
    if len(set(names)) < len(names) or samples != set(range(request.prompt.group_size)):
        raise DataError(
            f"workflow {request.workflow.name!r} returned the trajectories {names[:8]} for a group of "
            f"{request.prompt.group_size}; one or more branches of every sample are wanted"
        )
    if request.versions.pin and len(versions := _versions(rows)) > 1:
        raise VersionMoved(f"a swap fell into the rollout: its tokens have versions {versions}")


def _versions(rows: Sequence[Trajectory]) -> list[PolicyVersion]:
    return sorted({int(v) for row in rows for v in row.versions[row.loss_mask]})
