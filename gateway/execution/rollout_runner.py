"""Running of a leased request, up to its group: workflow, reward, version bounds and filter."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from functools import partial
from typing import TypeVar

from gateway.execution.executor import RolloutOutcome
from gateway.filters.base import make_filter
from gateway.fleet.resume import Generate, generate_whole
from gateway.trajectories.sample import Sample
from gateway.workflows.base import RolloutContext, Workflow, make_workflow
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
    ServiceError,
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
from headway.runtime.fair_pool import CALLER
from headway.runtime.tasks import Signal
from headway.text.tokenizer import TextTokenizer

T = TypeVar("T")


class RolloutRunner:
    """Runs requests, each in a rollout context."""

    def __init__(
        self,
        generator: Generator,
        tokenizer: TextTokenizer | None,
        make_context: Callable[[RolloutRequest, Generate], RolloutContext],
        changed: Signal,
        max_group_size: int,
    ) -> None:
        """Args:
        generator: samples; its `version` is what the bounds are about.
        tokenizer: None runs nothing, and says so.
        make_context: score and services for one request, which samples by the second argument.
        changed: raised when a version is committed.
        max_group_size: maximum number of trajectories that may ever run at once.
        """
        self._generator = generator
        self._tokenizer = tokenizer
        self._make_context = make_context
        self._changed = changed
        self._max_group_size = max_group_size

    def check(self, request: RolloutRequest) -> None:
        """Refuse what could never be run, as far as that is known at once.

        Raises:
            UnknownName, ConfigError: workflow or filter do not exist, or do not take these arguments.
            DataError: token ids that no model here knows, or that the workflow cannot use.
            RequestTooLong: the prompt's text is too long to be encoded.
            WorkflowError: this service has no tokenizer.
        """
        prompt, tokenizer = request.prompt, self._need_tokenizer()
        workflow = make_workflow(request.workflow, tokenizer, request.gconfig)
        if request.filter is not None:
            make_filter(request.filter.name, request.filter.args)
        if prompt.group_size > self._max_group_size:
            raise ConfigError(
                f"group_size={prompt.group_size} of group {prompt.group_id!r} exceeds "
                f"executor.max_concurrent={self._max_group_size}: it could never start"
            )
        if request.gconfig.logit_bias:
            _check_ids("gconfig.logit_bias", request.gconfig.logit_bias, tokenizer.vocab_size)
        if prompt.input_ids is not None:
            _check_ids("the prompt", prompt.input_ids, tokenizer.vocab_size)
            if (opening := _opening_of(workflow)) is not None:
                opening(prompt)
        tokenizer.check_length(*_texts(prompt))

    def is_doubtful(self, request: RolloutRequest, limit: int | None) -> bool:
        """True if its prompt has to be read to know; see `unplayable`."""
        prompt = request.prompt
        if limit is not None and _most_tokens(prompt) + request.gconfig.max_new_tokens > limit:
            return True
        if prompt.text is not None:
            return not self._need_tokenizer().least_tokens(prompt.text)
        return prompt.messages is not None

    def unplayable(
        self, requests: Sequence[RolloutRequest], limit: int | None
    ) -> dict[str, ServiceError]:
        """Return those of the doubtful rollouts that could never be run.

        It encodes their prompts, which takes a while: for `offload`.

        Args:
            limit: tokens per sequence, prompt included; None is not known.
        """
        found: dict[str, ServiceError] = {}
        for request in requests:
            try:
                self._read(request, limit)
            except ServiceError as error:
                found[request.rollout_id] = error
        return found

    def _read(self, request: RolloutRequest, limit: int | None) -> None:
        tokenizer, prompt = self._need_tokenizer(), request.prompt
        workflow = make_workflow(request.workflow, tokenizer, request.gconfig)
        if (opening := _opening_of(workflow)) is None:
            return
        if least := tokenizer.least_tokens(prompt.text or ""):
            _check_context(request, least, limit, "at least ")
        _check_context(request, len(opening(prompt)), limit)

    async def run(self, request: RolloutRequest) -> RolloutOutcome:
        """Run the whole group; the first sample that fails ends the others."""
        CALLER.set(request.consumer)
        tokenizer = self._need_tokenizer()
        workflow = make_workflow(request.workflow, tokenizer, request.gconfig)
        await self._until(request.versions)
        ask = self._generator.agenerate
        if request.sampling_mask:
            ask = partial(_generate_with_mask, ask)
        if request.routed_experts:
            ask = partial(_generate_with_experts, ask)
        generate = partial(generate_whole, ask, tokenizer.decode)
        if request.versions != VersionBounds():
            generate = partial(_generate_within, generate, self._generator, request.versions)
        context = self._make_context(request, generate)
        rows = await _all(
            [
                partial(workflow.run, Sample(request.rollout_id, request.prompt, index), context)
                for index in range(request.prompt.group_size)
            ]
        )
        group = TrajectoryGroup(
            request.rollout_id, request.prompt.group_id, tuple(row for each in rows for row in each)
        )
        _check_group(group, request)
        if request.filter is None:
            return RolloutOutcome(group)
        return RolloutOutcome(
            group, make_filter(request.filter.name, request.filter.args).keep(group)
        )

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
            raise WorkflowError("this server has no tokenizer.json, so it runs no workflows")
        return self._tokenizer


def _opening_of(workflow: Workflow) -> Callable[[Prompt], list[int]] | None:
    """See `HasOpening`: looked up, for to ask whether it is one takes as long as the rest."""
    return getattr(workflow, "opening", None)


def _check_ids(where: str, ids: Collection[int], vocab_size: int) -> None:
    highest = max(ids, default=0)
    if highest >= vocab_size:
        raise DataError(
            f"{where} holds the token id {highest}; the model's vocabulary has {vocab_size}, so ids are "
            "below that"
        )


def _check_context(
    request: RolloutRequest, length: int, limit: int | None, where: str = ""
) -> None:
    if begins_with_prompt(request.workflow):
        new = first_new_tokens(request.workflow, length, request.gconfig.max_new_tokens)
        check_context(length, new, limit, where)


def _texts(prompt: Prompt) -> list[str]:
    return [prompt.text or "", *(message.content for message in prompt.messages or ())]


def _most_tokens(prompt: Prompt) -> int:
    return most_tokens(_texts(prompt)) if prompt.input_ids is None else len(prompt.input_ids)


async def _all(samples: Sequence[Callable[[], Awaitable[T]]]) -> list[T]:
    if len(samples) == 1:
        return [await samples[0]()]

    async def run(sample: Callable[[], Awaitable[T]]) -> T:
        return await sample()

    tasks = []
    try:
        async with asyncio.TaskGroup() as siblings:
            for sample in samples:
                tasks.append(siblings.create_task(run(sample)))
                await asyncio.sleep(0)  # what they do first, they do not all do at once
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from group
    return [task.result() for task in tasks]


async def _generate_with_mask(
    generate: Callable[[LLMRequest], Awaitable[LLMResponse]], req: LLMRequest
) -> LLMResponse:
    """Sample, and ask for the sampling mask where the request cuts the distribution."""
    if not req.gconfig.cuts_distribution:
        return await generate(req)
    response = await generate(req.model_copy(update={"sampling_mask": True}))
    if response.sampling_mask is None and response.output_tokens:
        raise ConfigError(
            f"request {req.rid!r} cuts the distribution (top_k, top_p or min_p), and its server reported "
            "no sampling mask; set algorithm.sampling_mask=ignore to train without, or cut nothing"
        )
    return response


async def _generate_with_experts(
    generate: Callable[[LLMRequest], Awaitable[LLMResponse]], req: LLMRequest
) -> LLMResponse:
    """Sample, and ask for the routed experts."""
    response = await generate(req.model_copy(update={"routed_experts": True}))
    if response.routed_experts is None and response.stop_reason != "interrupt":
        raise ConfigError(
            f"request {req.rid!r} asks for its routed experts, and its server reported none; serve the "
            "trainer's mixture of experts, or set algorithm.routed_experts=ignore"
        )
    return response


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
