"""An SGLang server as generation backend: ours to start, or at a URL.

SGLang decodes; versions are ours. The engine's `weight_version` label is our version as text, and the
spans that it reports per request become our runs. Three things need more than a translation:

- *Its pipeline.* With overlap scheduling SGLang launches a step before it has read the last one. An
  in-place pause leaves that one token of each decoding request in flight: sampled by the old weights,
  stamped with the new version (0.5.23). So before a `keep` swap, requests without a token are sent
  back (`_send_back`): what then is in flight is one token of every request, and `wire.version_runs`
  counts it to the version that sampled it. Where this cannot be arranged (speculative decoding, a
  pause by the user), `keep` rebuilds the KV cache as `recompute` does. A request that the engine
  itself retracted at that moment has its boundary one token late, so never newer than the truth.
- *Old servers* without spans know only the version at the end. There a swap under `keep` or
  `recompute` runs as `abort`: no request crosses it.
- *What kills it.* Token ids, shapes and counts that crash SGLang are refused before it sees them.

Every call is a stream, so that its first token is known; without `on_delta` two events come. New calls
wait here (`_open`) while the engine is paused or swapped. `_turn` serialises what changes the engine's
state; `_changed` wakes whoever waits for calls to come or go. A scheduler that hangs behind a living
front end is SGLang's own watchdog's to end (`--watchdog-timeout`); we notice its death.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from headway.contracts.config.model import ModelConfig
from headway.contracts.config.server import SGLangConfig, UpdatePolicy
from headway.contracts.errors import BackendError, ConfigError, ServiceError, SyncError
from headway.contracts.http import PauseMode
from headway.contracts.types import (
    GroupSeat,
    LLMRequest,
    LLMResponse,
    PolicyVersion,
    WeightUpdateMeta,
)
from headway.rollout.tokenizer import TextTokenizer
from inference_server.backends.base import Limits, Load, OnDelta, Staged, check_request
from inference_server.backends.engine_process import Answer, EngineProcess
from inference_server.backends.sglang import updates, wire
from inference_server.backends.sglang.answers import MISSING, body_of, expect_success, read_label
from inference_server.backends.sglang.call import Call
from inference_server.backends.sglang.features import Features, learn_features, sglang_command
from inference_server.backends.sglang.group import EngineGroup, GroupUpdate, Transfer
from inference_server.backends.sglang.updates import FolderUpdate
from inference_server.backends.sglang.wire import Output
from weight_sync.channel import WeightObserver, WeightReader, WeightVerifier
from weight_sync.checkpoint import checkpoint_shapes

log = logging.getLogger(__name__)

T = TypeVar("T")

DEFAULT_LABEL = "default"
ABORT_AGAIN_S = 0.5
"""SGLang forgets an abort that overtakes its request."""
SETTLE_S = 0.05
"""Without an event for this long, a paused engine has said all."""


@dataclass(frozen=True, slots=True)
class _Quiet:
    """How the engine was brought to a halt."""

    flushes: bool
    """Cached keys and values go with the old weights."""
    lag: int = 0
    """Tokens of each running request that the old weights have sampled and nobody has seen yet."""


class SGLangBackend:
    """`GenerationBackend` over one SGLang engine."""

    def __init__(
        self,
        config: SGLangConfig,
        model: ModelConfig,
        version: PolicyVersion,
        tokenizer: TextTokenizer | None = None,
    ) -> None:
        self._config = config
        self._model = model
        self._version = version
        self._engine = EngineProcess(
            config,
            sglang_command(model, version, tokenizer is not None),
            progress=lambda: self._num_tokens,
            live_path=lambda: "/ping",
        )
        self._features = Features(Limits(0, 0))
        self._group = EngineGroup(self._engine)
        self._serving: FolderUpdate | None = None
        """Where the version that serves can be read again, if anywhere."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lagging: set[PolicyVersion] = set()
        """Versions that were swapped in under one token in flight of every request."""
        self._calls: set[Call] = set()
        self._open = True
        self._paused: PauseMode | None = None
        self._turn = asyncio.Lock()
        self._changed = asyncio.Event()
        self._background: set[asyncio.Task[None]] = set()
        self._last_event = 0.0
        self._num_tokens = 0
        self._prefill_tokens = 0
        self._kv_tokens: int | None = None
        self._busy_s = 0.0
        self._busy_since: float | None = None
        self._started = time.monotonic()

    @property
    def limits(self) -> Limits:
        return self._features.limits

    @property
    def version(self) -> PolicyVersion:
        return self._version

    @property
    def num_ranks(self) -> int:
        return (self._features.num_ranks or 1) if self._config.receive == "group" else 1

    @property
    def is_paused(self) -> bool:
        return self._paused is not None

    @property
    def failure(self) -> str | None:
        return self._engine.failure

    async def start(self) -> None:
        """As the protocol says; an attached engine labelled with a number serves that version.

        Raises:
            ConfigError: the engine streams parts only, cannot join a group as configured, or the
                model directory is damaged.
            BackendError: it did not come up, or serves weights of an unknown version.
        """
        self._loop = asyncio.get_running_loop()
        await self._engine.start()
        try:
            async with asyncio.timeout(self._config.start_timeout_s):
                await self._learn()
        except TimeoutError:
            await self._engine.aclose()
            raise BackendError(
                f"SGLang at {self._engine.url} generated nothing within "
                f"start_timeout_s={self._config.start_timeout_s:g}"
            ) from None
        except BaseException:
            await self._engine.aclose()
            raise
        self._started = time.monotonic()
        self._spawn(self._watch_memory())

    async def generate(self, req: LLMRequest, on_delta: OnDelta | None = None) -> LLMResponse:
        check_request(req, self.limits)
        wire.check_supported(
            req.gconfig, self._features.is_deterministic, self._features.is_pipelined
        )
        call = Call(req, on_delta, time.monotonic(), [(self._version, 0)])
        self._calls.add(call)
        try:
            return await self._engine.guard(self._serve(call))
        finally:
            self._calls.discard(call)

    async def abort(self, rid: str | None) -> None:
        doomed = [call for call in self._calls if rid is None or call.req.rid == rid]
        for call in doomed:
            call.is_interrupted = True
        self._notify()
        ending = self._spawn(self._end(doomed))
        if self._paused != "in_place":  # else it surfaces once the engine goes on
            await self._engine.guard(asyncio.wait((ending,), timeout=2 * ABORT_AGAIN_S))

    async def pause(self, mode: PauseMode) -> None:
        async with self._turn:
            self._open = False
            if mode == "abort":
                await self._end_all()
            else:
                await self._pause_engine(mode)
            self._paused = mode

    async def resume(self) -> None:
        async with self._turn:
            if self._paused is not None:
                await self._continue()
                self._paused = None
                self._admit()

    async def flush(self) -> bool:
        async with self._turn:
            return await self._flushes()

    def stage(self, meta: WeightUpdateMeta, reader: WeightReader) -> Staged:
        """As the protocol says; under `receive: group`, the engine is frozen when this returns."""
        expected = checkpoint_shapes(self._model.path)
        if self._config.receive == "group" and meta.seat is not None:
            return self._stage_live(meta, meta.seat, reader, expected)
        if isinstance(reader, WeightVerifier):
            proven = reader.verify(meta, expected)
            return FolderUpdate(meta.version, str(proven.folder), proven.digest, proven)
        return FolderUpdate(meta.version, meta.path, reader.stage(meta, expected).digest)

    async def swap(self, staged: Staged, policy: UpdatePolicy = "keep") -> int:
        """Exchange the weights between two decode steps.

        A version in the live weights cannot `drain`: what runs is ended as by `abort`.

        Raises:
            SyncError: the engine refused; the old version serves on, or `failure` is set.
            BackendError: the engine died.
        """
        if isinstance(staged, GroupUpdate):
            return await staged.commit(policy)
        if not isinstance(staged, FolderUpdate):
            raise SyncError(f"{type(staged).__name__} was not staged by this backend")
        async with self._turn:
            self._open = False
            running = len(self._in_engine())
            try:
                quiet = await self._quiesce(policy)
                await _whole(self._exchange(staged, quiet))
            finally:
                if self._paused is None:
                    await _whole(self._go_on())
            return running

    def load(self) -> Load:
        now = time.monotonic()
        running = sum(call.num_tokens > 0 for call in self._in_engine())
        busy_s = self._busy_s + (now - self._busy_since if self._busy_since is not None else 0.0)
        return Load(
            running=running,
            queued=len(self._calls) - running,
            generated_tokens=self._num_tokens,
            busy_s=busy_s,
            uptime_s=now - self._started,
            prefill_tokens=self._prefill_tokens,
            kv_tokens=self._kv_tokens or 0,
            kv_capacity_tokens=0 if self._kv_tokens is None else self._features.kv_capacity,
        )

    async def aclose(self) -> None:
        if self._engine.is_managed:
            self._engine.fail("the backend was closed")  # nothing is put in order in what ends
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        await self._engine.aclose()

    # Starting.

    async def _learn(self) -> None:
        """Settle which version the engine serves, and read what it can do."""
        if not self._engine.is_managed:
            await self._continue()  # whoever was here before may have died in a pause
        label = await read_label(self._engine)
        if label == DEFAULT_LABEL:
            body = {"new_version": str(self._version), "abort_all_requests": False}
            body_of(await self._engine.post("/update_weight_version", body))
        elif label is not None:
            self._version = wire.parse_label(label)
        if self._engine.is_managed or label == DEFAULT_LABEL:
            self._serving = FolderUpdate(self._version, self._model.path)
        self._features = await learn_features(self._engine, self._model.path)
        if self._config.receive == "group" and self._features.num_ranks is None:
            raise ConfigError(
                "an SGLang engine with --pp-size or --dp-size cannot join a trainer's group; set "
                "backend.receive to files"
            )

    # One call.

    async def _serve(self, call: Call) -> LLMResponse:
        while await self._admission(call):
            output = await self._attempt(call)
            if not call.is_discarded(output):
                return self._respond(call, output)
            call.is_sent_back = False
        return self._respond(call, Output([], {"finish_reason": {"type": "abort"}}))

    async def _admission(self, call: Call) -> bool:
        """Wait until the engine takes requests; false if the call was interrupted before."""
        await self._until(lambda: self._open or call.is_interrupted)
        if call.is_interrupted:
            return False
        call.rid = f"{call.req.rid}~{uuid.uuid4().hex[:12]}"
        call.boundaries = [(self._version, 0)]
        if self._busy_since is None:
            self._busy_since = time.monotonic()
        return True

    async def _attempt(self, call: Call) -> Output:
        """One request to the engine; if it does not end here, it is ended there."""
        rid, is_over = call.rid, False
        try:
            output = await self._exchange_request(call)
            is_over = True
            return output
        finally:
            call.rid = ""
            if self._busy_since is not None and not self._in_engine():
                self._busy_s += time.monotonic() - self._busy_since
                self._busy_since = None
            if not is_over and self._engine.failure is None:
                self._spawn(self._forget(rid))
            self._notify()

    async def _exchange_request(self, call: Call) -> Output:
        body = wire.generate_body(call.req, call.rid, self.limits.vocab_size)
        # Prefixes are shared within a version: after a `keep` swap old ones lie in the cache still.
        body["extra_key"] = str(self._version)
        if not self._features.can_thin_streams and call.on_delta is None:
            answer = await self._engine.post("/generate", body)
            output = wire.parse_output(answer.content, answer.status)
            self._take(call, output)
            return output
        body["stream"] = True
        if self._features.can_thin_streams:
            body["sampling_params"]["stream_interval"] = call.interval
        output = Output([], {})
        async with self._engine.stream("/generate", body) as lines:
            if isinstance(lines, Answer):
                return wire.parse_output(lines.content, lines.status)
            async for line in lines:  # to the end, so that the connection serves again
                event = wire.parse_line(line)
                if event is not None:
                    self._take(call, event)
                    output = event
        if output.finish is None:
            raise BackendError("SGLang ended a stream before its request")
        return output

    def _take(self, call: Call, output: Output) -> None:
        """Count what is new, and hand it on."""
        self._last_event = time.monotonic()
        if call.is_discarded(output):
            return
        seen = call.num_tokens
        self._num_tokens += call.take(output, self._last_event)
        if call.cut is not None and output.finish is None and not call.is_cutting:
            call.is_cutting = True
            self._spawn(self._end([call]))
        call.hand_on(
            output, seen, call.runs() if output.finish is None else self._runs(call, output)
        )

    def _runs(self, call: Call, output: Output) -> wire.Runs:
        """The versions of a finished call."""
        # Without spans no request crosses a swap: one version sampled it all.
        label = output.meta.get("weight_version")
        default = call.boundaries[0][0] if label is None else wire.parse_label(label)
        return wire.version_runs(output, call.num_kept(output), self._lagging, default)

    def _respond(self, call: Call, output: Output) -> LLMResponse:
        req, meta = call.req, output.meta
        count = call.num_kept(output)
        reason, match = wire.stop_of(output, call.cut)
        cached = meta.get("cached_tokens", 0)
        self._prefill_tokens += max(0, meta.get("prompt_tokens", 0) - cached)
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
            prompt_logprobs=wire.prompt_logprobs_of(output, req),
            prompt_top_logprobs=wire.prompt_top_logprobs_of(output, req),
            cached_tokens=cached,
            num_recomputes=meta.get("num_retractions", 0),
        )

    # Ending calls.

    async def _end(self, calls: Iterable[Call]) -> None:
        """Abort until they have ended: SGLang forgets an abort that overtakes its request."""
        rids = {call: call.rid for call in calls if call.rid}

        def live() -> list[str]:
            return [rid for call, rid in rids.items() if call.rid == rid]

        while doomed := live():
            if self._engine.is_managed and len(doomed) == len(self._in_engine()):
                await self._engine.post("/abort_request", {"abort_all": True})
            else:
                for rid in doomed:
                    await self._engine.post("/abort_request", {"rid": rid})
            with suppress(TimeoutError):
                async with asyncio.timeout(ABORT_AGAIN_S):
                    await self._until(lambda: not live())

    async def _forget(self, rid: str) -> None:
        """Abort a request that nobody waits for."""
        for _ in range(2):
            await self._engine.post("/abort_request", {"rid": rid})
            await asyncio.sleep(ABORT_AGAIN_S)

    # Halting and swapping; under `_turn`.

    async def _quiesce(self, policy: UpdatePolicy) -> _Quiet:
        if policy in ("keep", "recompute") and not self._features.has_spans:
            log.warning(
                "this SGLang reports no version per token: the swap ends what runs",
                extra={"policy": policy},
            )
            policy = "abort"
        if policy == "drain":
            await self._drain()
            return _Quiet(flushes=True)
        if policy == "abort":
            await self._end_all()
            return _Quiet(flushes=True)
        return await self._keep_cache() if policy == "keep" else await self._drop_cache()

    async def _end_all(self) -> None:
        """End what runs, and pause."""
        if self._paused == "abort":
            return
        if self._paused is not None:
            self._paused = "abort"
            await self._continue()  # a frozen request cannot end
        await self._engine.guard(self._end(self._in_engine()))  # SGLang's own loop sleeps 1 s
        await self._pause_engine("abort")

    async def _drain(self) -> None:
        if self._paused is not None and self._in_engine():
            raise SyncError("a paused engine does not drain; resume it or take another policy")
        await self._engine.guard(self._until(lambda: not self._in_engine()))

    async def _drop_cache(self) -> _Quiet:
        await self._pause_engine("retract")
        return _Quiet(flushes=True)

    async def _keep_cache(self) -> _Quiet:
        if self._paused in ("abort", "retract"):
            return _Quiet(flushes=False)
        if not self._features.is_pipelined:
            await self._pause_engine("in_place")
            return _Quiet(flushes=False)
        if (
            self._paused is not None
            or self._features.is_speculative
            or not self._features.can_thin_streams
        ):
            log.warning("what is in flight in SGLang is not known: the swap rebuilds the KV cache")
            return await self._drop_cache()
        await self._send_back()
        await self._pause_engine("in_place")
        return _Quiet(flushes=False, lag=1)

    async def _send_back(self) -> None:
        """Take requests without a token out of the engine; they come again after the swap."""
        unstarted = [call for call in self._in_engine() if not call.num_tokens]
        for call in unstarted:
            call.is_sent_back = True
        await self._engine.guard(self._end(unstarted))

    async def _exchange(self, update: FolderUpdate, quiet: _Quiet) -> None:
        """Change the weights of a halted engine, and the version with them."""
        await updates.load_folder(self._engine, update, quiet.flushes)
        await self._cross(update.version, quiet)
        self._serving = update

    async def _cross(self, version: PolicyVersion, quiet: _Quiet) -> None:
        """From here on this version samples."""
        await self._settle()
        for call in self._in_engine():
            call.cross(version, quiet.lag)
        if quiet.lag:
            self._lagging.add(version)
        self._version = version

    async def _settle(self) -> None:
        """Let what was sent before the pause arrive, where deltas are stamped by it."""
        while any(call.on_delta for call in self._in_engine()):
            quiet_s = time.monotonic() - self._last_event
            if quiet_s >= SETTLE_S:
                break
            await asyncio.sleep(SETTLE_S - quiet_s)

    async def _pause_engine(self, mode: PauseMode) -> None:
        expect_success(await self._engine.post("/pause_generation", {"mode": mode}), "status")

    async def _flushes(self) -> bool:
        return (await self._engine.post("/flush_cache", {})).is_ok

    async def _continue(self) -> None:
        expect_success(await self._engine.post("/continue_generation", {}), "status")

    async def _go_on(self) -> None:
        try:
            if self._engine.failure is None:
                await self._continue()
        finally:
            self._admit()

    def _admit(self) -> None:
        self._open = True
        self._notify()

    # A version that flows into the live weights.

    def _stage_live(
        self,
        meta: WeightUpdateMeta,
        seat: GroupSeat,
        reader: WeightReader,
        expected: Mapping[str, torch.Size],
    ) -> GroupUpdate:
        if self._loop is None or not isinstance(reader, WeightObserver):
            raise SyncError(
                f"{meta.path} needs a started engine, and a reader that takes its seats"
            )
        member = reader.follow(meta, self.num_ranks)
        transfer = Transfer(
            self._engine,
            self._group,
            member,
            seat,
            reader.patience,
            expected,
            self._features.dtype,
        )
        return asyncio.run_coroutine_threadsafe(self._begin(transfer), self._loop).result()

    async def _begin(self, transfer: Transfer) -> GroupUpdate:
        update = GroupUpdate(transfer.version)
        self._spawn(self._carry(transfer, update))
        await update.until_arrived()
        return update

    async def _carry(self, transfer: Transfer, update: GroupUpdate) -> None:
        """From the rendezvous to the commit or to the abort, in one turn."""
        try:
            async with self._turn:
                update.end(await self._carry_over(transfer, update))
        except (ServiceError, TimeoutError) as error:
            update.fail(error)
        except BaseException:
            update.fail(BackendError("the backend was closed"))
            raise

    async def _carry_over(self, transfer: Transfer, update: GroupUpdate) -> int:
        try:
            first = await transfer.meet()
            self._open = False
            running = len(self._in_engine())
            quiet = await self._quiesce("keep")
            update.arrive(await transfer.receive(first))
            policy = await transfer.wanted(update.decided)
            doomed = self._in_engine() if policy in ("abort", "drain") else []
            await _whole(self._adopt(transfer, policy, quiet, doomed))
        except BaseException as error:
            failure = await _whole(self._take_back(transfer, error))
            if isinstance(error, ServiceError):
                raise failure from error
            raise
        finally:
            if not self._open and self._paused is None:
                await _whole(self._go_on())
        if self._paused is None:  # else they end once the engine goes on
            await self._engine.guard(self._end(doomed))
        return running

    async def _adopt(
        self, transfer: Transfer, policy: UpdatePolicy, quiet: _Quiet, doomed: Iterable[Call]
    ) -> None:
        """Let what is frozen go on as the policy says, under the new version."""
        if policy == "recompute" and not quiet.flushes:
            quiet = await self._drop_cache()  # reads what is in flight, while it has its old name
        for call in doomed:  # they end before they sample again
            await self._engine.post("/abort_request", {"rid": call.rid})
        if quiet.flushes and not await self._flushes():
            log.warning("the weights changed, the cache remained")
        await updates.relabel(self._engine, transfer.version)
        transfer.is_torn = False
        await self._cross(transfer.version, quiet)
        self._serving = None

    async def _take_back(self, transfer: Transfer, error: BaseException) -> Exception:
        """Let the old version serve on, or give the engine up; returns why it came to that."""
        failure = await transfer.stop(error)
        if not transfer.is_torn or self._engine.failure is not None:
            return failure
        try:
            if self._serving is None:
                raise SyncError(f"version {self._version} lies nowhere to be read again")
            await updates.restore_folder(self._engine, self._serving, flushes=False)
        except (SyncError, BackendError) as lost:
            self._engine.fail(
                f"the weights are torn between versions {self._version} and {transfer.version} "
                f"({failure}), and the old one is lost: {lost.message}"
            )
        return failure

    # Waiting and watching.

    def _in_engine(self) -> list[Call]:
        return [call for call in self._calls if call.rid]

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await self._changed.wait()

    async def _watch_memory(self) -> None:
        """Keep at hand what only the engine knows: the tokens in its cache."""
        while (answer := await self._engine.get("/v1/loads")).status not in MISSING:
            loads = body_of(answer).get("loads", [])
            self._kv_tokens = sum(int(load.get("num_used_tokens", 0)) for load in loads)
            await asyncio.sleep(self._config.health_interval_s)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._reap)
        return task

    def _reap(self, task: asyncio.Task[None]) -> None:
        self._background.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            level = logging.DEBUG if isinstance(error, BackendError) else logging.ERROR
            log.log(level, "a call to SGLang in the background failed", exc_info=error)


async def _whole(work: Awaitable[T]) -> T:
    """Await to the end, also when cancelled; the cancellation comes after it."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        raise
