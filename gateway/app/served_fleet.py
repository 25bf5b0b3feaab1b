"""The fleet as dialects see it: one model under one URL."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path

from gateway.app.fleet import Fleet
from gateway.fleet.resume import generate_whole
from gateway.fleet.stream_progress import interrupted
from headway.contracts.config.base import Config
from headway.contracts.config.gateway import GatewayConfig
from headway.contracts.engines import OnDelta
from headway.contracts.errors import BackendError
from headway.contracts.http.generation import FlushResponse, PauseMode
from headway.contracts.http.paths import GENERATION_FLUSH
from headway.contracts.types import LLMDelta, LLMRequest, LLMResponse, PolicyVersion
from headway.dialects.error_shapes import InvalidField
from headway.dialects.served_model import ServedLoad
from headway.runtime.tasks import cancel_and_wait
from headway.text.tokenizer import TextTokenizer

FLUSH_TIMEOUT_S = 5.0
ABORT_GRACE_S = 5.0
"""Seconds for a server to return the tokens so far of a request that is aborted; then it ends with those
that were streamed.
"""


class ServedFleet:
    """`ServedModel` over a fleet.

    A sequence that a drain or a swap interrupts goes on from its tokens, here or on another server: only
    its client ends it before its end.
    """

    def __init__(self, config: GatewayConfig, fleet: Fleet, tokenizer: TextTokenizer) -> None:
        self.tokenizer = tokenizer
        self.model_name = config.served_model_name or Path(config.tokenizer).absolute().name
        self.model_paths: tuple[str, ...] = (config.tokenizer,)
        self._fleet = fleet
        self._aborts: dict[str, _Abort] = {}
        """By id of the requests that run."""

    @property
    def adapter_versions(self) -> Mapping[str, PolicyVersion]:
        return self._fleet.weights.adapters.versions

    @property
    def max_adapters(self) -> int:
        return self._fleet.weights.adapters.max_adapters

    @property
    def version(self) -> PolicyVersion:
        return self._fleet.version

    @property
    def max_context(self) -> int | None:
        return self._fleet.max_context

    @property
    def is_paused(self) -> bool:
        return self._fleet.pause.is_on

    @property
    def is_ready(self) -> bool:
        statuses = self._fleet.statuses()
        return not self.is_paused and any(one.state == "ready" for one in statuses)

    def load(self) -> ServedLoad:
        here = [one for one in self._fleet.statuses() if one.state != "lost"]
        return ServedLoad(
            running=sum(one.running for one in here),
            queued=sum(one.queued for one in here),
            generated_tokens=self._fleet.generated_tokens,
            busy_s=sum(one.busy_s for one in here),
            kv_usage=sum(one.kv_usage for one in here) / len(here) if here else 0.0,
        )

    async def agenerate(self, req: LLMRequest, on_delta: OnDelta | None = None) -> LLMResponse:
        if req.rid in self._aborts:
            raise InvalidField(f"request id {req.rid!r} is in use; send another one", "rid")
        abort = self._aborts[req.rid] = _Abort(partial(self._fleet.abort, req.rid))
        try:
            ask = partial(self._generate, abort, on_delta)
            is_over = partial(self._is_over, req, abort)
            return await generate_whole(ask, self.tokenizer.decode, req, is_over)
        finally:
            del self._aborts[req.rid]
            await cancel_and_wait([abort.task])

    async def abort(self, rid: str | None) -> None:
        if not self.end(rid):
            await self._fleet.aborts.ask(rid)

    def end(self, rid: str | None) -> bool:
        """End a request of this gateway, or all; false if another one may have it, too."""
        ended = list(self._aborts) if rid is None else [rid]
        for each in ended:
            if each in self._aborts:
                self._aborts[each].begin()
        return rid in self._aborts

    async def pause(self, mode: PauseMode) -> None:
        if mode == "abort":
            await self.abort(None)
        await self._fleet.pause.begin(mode)

    async def resume(self) -> None:
        await self._fleet.pause.end()

    async def flush(self) -> bool:
        members = self._fleet.members
        orders = [
            members.order(member, GENERATION_FLUSH, Config(), FLUSH_TIMEOUT_S)
            for member in members.present()
        ]
        answers = await asyncio.gather(*orders)
        return all(FlushResponse.model_validate_json(answer).flushed for answer in answers)

    def _is_over(self, req: LLMRequest, abort: _Abort) -> bool:
        """True if an interruption is the end: its client's, or that of its adapter."""
        is_gone = req.adapter is not None and req.adapter not in self.adapter_versions
        return abort.task is not None or is_gone

    async def _generate(
        self, abort: _Abort, on_delta: OnDelta | None, req: LLMRequest
    ) -> LLMResponse:
        """Generate until it ends or is aborted."""
        shown: list[LLMDelta] = []

        def show(delta: LLMDelta) -> None:
            shown.append(delta)
            if on_delta is not None:
                on_delta(delta)

        limit = abort.limit = asyncio.timeout(None)
        try:
            async with limit:
                response = await self._fleet.agenerate(req, on_delta and show)
        except TimeoutError:
            if not limit.expired():
                raise
            response = interrupted(req.rid, shown)
        is_cut = response.stop_reason == "interrupt" and not self._is_over(req, abort)
        if on_delta is not None and is_cut and req.gconfig.stop and response.output_tokens:
            raise BackendError(
                f"the stream of request {req.rid!r} was interrupted after "
                f"{len(response.output_tokens)} tokens, and a stop string may stand across the break; "
                "send it again"
            )
        return response


class _Abort:
    """How the client of one request ends it."""

    def __init__(self, at_server: Callable[[], Awaitable[bool]]) -> None:
        """Args:
        at_server: ends it where it runs; false if no server has it.
        """
        self.limit = asyncio.timeout(None)
        """Limit of the generation that runs."""
        self.task: asyncio.Task[None] | None = None
        """Runs once the client wants no more."""
        self._at_server = at_server

    def begin(self) -> None:
        if self.task is None:
            self.task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        grace_s = ABORT_GRACE_S if await self._at_server() else 0.0
        self.limit.reschedule(asyncio.get_running_loop().time() + grace_s)
