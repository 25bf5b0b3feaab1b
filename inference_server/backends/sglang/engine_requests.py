"""The requests of one SGLang engine: admitted, followed, stamped with versions, ended.

Every call is a stream, so that its first token is known; without `on_delta` two events come. New calls
wait here while requests are held. `_changed` wakes tasks that wait for calls to come or go.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from typing import Any

from headway.contracts.engines import OnDelta
from headway.contracts.errors import BackendError, DataError
from headway.contracts.types import LLMRequest, LLMResponse, PolicyVersion
from headway.runtime.tasks import Signal, cancel_and_wait
from inference_server.backends.base import Limits, check_request, refuse_mask
from inference_server.backends.engine_adapters import EngineAdapter
from inference_server.backends.engine_process import EngineProcess, EngineResponse
from inference_server.backends.sglang import wire
from inference_server.backends.sglang.call import EngineCall
from inference_server.backends.sglang.features import Features
from inference_server.backends.sglang.wire import EngineOutput

log = logging.getLogger(__name__)

ABORT_AGAIN_S = 0.5
"""SGLang forgets an abort that overtakes its request."""
SETTLE_S = 0.2
"""Seconds without an event after which a paused engine has sent everything."""


class EngineRequests:
    """Calls on their way through an engine; used on one event loop."""

    def __init__(self, engine: EngineProcess, version: PolicyVersion) -> None:
        self.version = version
        """Version that samples the next token."""
        self.features = Features(Limits(0, 0))
        self.is_open = True
        """New calls go to the engine."""
        self._engine = engine
        self._lagging: set[PolicyVersion] = set()
        """Versions that were swapped in under one token in flight of every request."""
        self._calls: set[EngineCall] = set()
        self._changed = Signal()
        self._background: set[asyncio.Task[None]] = set()
        self._last_event = 0.0
        self.num_tokens = 0
        """Generated since the start."""
        self.prefill_tokens = 0
        self.num_preemptions = 0
        """Requests that the engine itself retracted, counted when they end."""
        self._busy_s = 0.0
        self._busy_since: float | None = None

    def __len__(self) -> int:
        """Calls, also those that wait."""
        return len(self._calls)

    def in_engine(self) -> list[EngineCall]:
        """Calls that the engine has."""
        return [call for call in self._calls if call.rid]

    @property
    def busy_s(self) -> float:
        """Seconds with calls in the engine."""
        since = self._busy_since
        return self._busy_s + (0.0 if since is None else time.monotonic() - since)

    async def serve(
        self,
        req: LLMRequest,
        on_delta: OnDelta | None,
        find_adapter: Callable[[str], EngineAdapter],
    ) -> LLMResponse:
        """See `GenerationBackend.generate`.

        Args:
            find_adapter: returns what serves under a name.
        """
        check_request(req, self.features.limits)
        if req.adapter is not None:
            find_adapter(req.adapter)
        refuse_mask(req, "sglang")
        self.features.experts.are_wanted(req)
        if req.gconfig.has_grammar and not self.features.has_grammars:
            raise DataError(
                "json_schema and regex need a tokenizer in the SGLang engine; give the model directory "
                "one, or start the engine without --skip-tokenizer-init"
            )
        wire.check_supported(
            req.gconfig, self.features.is_deterministic, self.features.is_pipelined
        )
        call = EngineCall(req, on_delta, time.monotonic(), [(self.version, 0)], find_adapter)
        self._calls.add(call)
        try:
            return await self._engine.guard(self._serve(call))
        finally:
            self._calls.discard(call)

    def interrupt(self, are_meant: Callable[[LLMRequest], bool]) -> asyncio.Task[None]:
        """Answer these calls with the tokens so far; done when they have ended."""
        to_abort = [call for call in self._calls if are_meant(call.req)]
        for call in to_abort:
            call.is_interrupted = True
        self._changed.notify()
        return self.spawn(self.end(to_abort))

    async def until_unused(self, adapter: EngineAdapter) -> None:
        """Wait until no call in the engine uses a version of an adapter."""
        await self.until(lambda: all(call.adapter is not adapter for call in self.in_engine()))

    def note_retract(self) -> None:
        """Whatever is in the engine is about to be retracted by our own order."""
        for call in self.in_engine():
            call.num_retracts += 1

    def hold(self) -> None:
        """Make new calls wait."""
        self.is_open = False

    def admit(self) -> None:
        """Let those that wait go on."""
        self.is_open = True
        self._changed.notify()

    async def end(self, calls: Iterable[EngineCall]) -> None:
        """Abort until they have ended: SGLang forgets an abort that overtakes its request."""
        rids = {call: call.rid for call in calls if call.rid}

        def live() -> list[str]:
            return [rid for call, rid in rids.items() if call.rid == rid]

        while to_abort := live():
            if self._engine.is_managed and len(to_abort) == len(self.in_engine()):
                await self._engine.post("/abort_request", {"abort_all": True})
            else:
                for rid in to_abort:
                    await self._engine.post("/abort_request", {"rid": rid})
            with suppress(TimeoutError):
                async with asyncio.timeout(ABORT_AGAIN_S):
                    await self.until(lambda: not live())

    async def _forget(self, rid: str) -> None:
        """Abort a request that is not waited for any more."""
        for _ in range(2):
            await self._engine.post("/abort_request", {"rid": rid})
            await asyncio.sleep(ABORT_AGAIN_S)

    async def send_back(self) -> None:
        """Take requests without a token out of the engine; they come again after the swap."""
        unstarted = [call for call in self.in_engine() if not call.num_tokens]
        for call in unstarted:
            call.is_sent_back = True
        await self._engine.guard(self.end(unstarted))

    async def cross(self, version: PolicyVersion, lag: int) -> None:
        """Let a new version sample from here on; the one before has `lag` tokens of each call in
        flight.
        """
        await self.settle()
        for call in self.in_engine():
            call.cross(version, lag)
        if lag:
            self._lagging.add(version)
        self.version = version

    async def settle(self) -> None:
        """Let what was sent before the pause arrive, where deltas are stamped by it."""
        while any(call.on_delta for call in self.in_engine()):
            quiet_s = time.monotonic() - self._last_event
            if quiet_s >= SETTLE_S:
                break
            await asyncio.sleep(SETTLE_S - quiet_s)

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await self._changed.event().wait()

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Do it beside; a failure is logged."""
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._reap)
        return task

    def _reap(self, task: asyncio.Task[None]) -> None:
        self._background.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            level = logging.DEBUG if isinstance(error, BackendError) else logging.ERROR
            log.log(level, "a call to SGLang in the background failed", exc_info=error)

    async def aclose(self) -> None:
        """End what runs beside."""
        await cancel_and_wait(self._background)

    # One call.

    async def _serve(self, call: EngineCall) -> LLMResponse:
        while await self._admission(call):
            output = await self._attempt(call)
            if not call.is_discarded(output):
                return self._respond(call, output)
            call.is_sent_back = False
        return self._respond(call, EngineOutput([], {"finish_reason": {"type": "abort"}}))

    async def _admission(self, call: EngineCall) -> bool:
        """Wait until the engine takes requests; false if the call was interrupted before."""
        await self.until(lambda: self.is_open or call.is_interrupted)
        if call.is_interrupted:
            return False
        call.begin(f"{call.req.rid}~{uuid.uuid4().hex[:12]}")
        call.boundaries = [(self.version, 0)]
        if self._busy_since is None:
            self._busy_since = time.monotonic()
        return True

    async def _attempt(self, call: EngineCall) -> EngineOutput:
        """One request to the engine; if it does not end here, it is ended there."""
        rid, is_over = call.rid, False
        try:
            output = await self._exchange_request(call)
            is_over = True
            return output
        finally:
            call.rid = ""
            if self._busy_since is not None and not self.in_engine():
                self._busy_s += time.monotonic() - self._busy_since
                self._busy_since = None
            if not is_over and self._engine.failure is None:
                self.spawn(self._forget(rid))
            self._changed.notify()

    async def _exchange_request(self, call: EngineCall) -> EngineOutput:
        body = wire.generate_body(call.req, call.rid, self.features.limits.vocab_size)
        # Prefixes are shared within a version: after a `keep` swap old ones are still in the cache.
        body["extra_key"] = str(self.version)
        if call.adapter is not None:
            body["lora_path"] = call.adapter.engine_name
        if self.features.experts.are_wanted(call.req):
            body["return_routed_experts"] = True
        if not self.features.can_thin_streams and call.on_delta is None:
            answer = await self._engine.post("/generate", body)
            output = wire.parse_output(answer.content, answer.status)
            self._take(call, output)
            return output
        body["stream"] = True
        if self.features.can_thin_streams:
            body["sampling_params"]["stream_interval"] = call.interval
        output = EngineOutput([], {})
        async with self._engine.stream("/generate", body) as lines:
            if isinstance(lines, EngineResponse):
                return wire.parse_output(lines.content, lines.status)
            async for line in lines:
                event = wire.parse_line(line)
                if event is not None:
                    self._take(call, event)
                    output = event
        if output.finish is None:
            raise BackendError("SGLang ended a stream before its request")
        return output

    def _take(self, call: EngineCall, output: EngineOutput) -> None:
        """Count the new tokens, and pass them on."""
        self._last_event = time.monotonic()
        if call.is_discarded(output):
            return
        seen = call.num_tokens
        self.num_tokens += call.take(output, self._last_event)
        if call.cut is not None and output.finish is None and not call.is_cutting:
            call.is_cutting = True
            self.spawn(self.end([call]))
        call.hand_on(
            output, seen, call.runs() if output.finish is None else self._runs(call, output)
        )

    def _runs(self, call: EngineCall, output: EngineOutput) -> wire.Runs:
        """The versions of a finished call."""
        if call.adapter is not None:
            count = call.num_kept(output)
            return [(call.adapter.version, 0, count)] if count else []
        # Without spans no request crosses a swap: one version sampled it all.
        label = output.meta.get("weight_version")
        default = call.boundaries[0][0] if label is None else wire.parse_label(label)
        return wire.version_runs(output, call.num_kept(output), self._lagging, default)

    def _respond(self, call: EngineCall, output: EngineOutput) -> LLMResponse:
        req, meta = call.req, output.meta
        count = call.num_kept(output)
        reason, match = wire.stop_of(output, call.cut)
        cached = meta.get("cached_tokens", 0)
        self.prefill_tokens += max(0, meta.get("prompt_tokens", 0) - cached)
        self.num_preemptions += max(0, meta.get("num_retractions", 0) - call.num_retracts)
        experts = wire.expert_ids_of(output)
        now = time.monotonic()
        return LLMResponse(
            rid=req.rid,
            output_tokens=output.tokens[:count],
            output_logprobs=wire.logprobs_of(output)[:count],
            version_runs=self._runs(call, output),
            stop_reason=reason,
            stop_match=match,
            latency_s=now - call.arrival,
            ttft_s=(call.first_token or now) - call.arrival,
            top_logprobs=wire.top_logprobs_of(output, count) if req.top_logprobs else None,
            routed_experts=self.features.experts.of_response(experts, len(req.input_ids) + count),
            prompt_logprobs=wire.prompt_logprobs_of(output, req),
            prompt_top_logprobs=wire.prompt_top_logprobs_of(output, req),
            cached_tokens=cached,
            num_recomputes=meta.get("num_retractions", 0),
        )
