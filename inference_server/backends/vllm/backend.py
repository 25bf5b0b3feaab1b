"""vLLM behind our contract, on its own verbs: token ids in and out, pauses, weight updates, labels.

The engine's weights are labelled with our version numbers, and vLLM says at the end of each answer
which label sampled which tokens: that is where versions come from. Every request carries the version
as `cache_salt`, so that what a new request finds in the prefix cache was computed by its own weights.

| policy | running requests |
| --- | --- |
| keep | frozen (`/pause?mode=keep`), then on with their keys and values |
| recompute | frozen, sent back to the queue without them (`/reset_prefix_cache`), prefilled again |
| abort | answered with the tokens so far |
| drain | end first; what waits in vLLM's own queue starts after the swap |

New requests wait in this process while the engine is paused (vLLM would refuse them). Pauses, resumes
and swaps exclude one another (`_lock`). A swap that fails before weights are touched changes nothing; one
that fails in between leaves weights of no version, so the backend has failed for good. The engine is
resumed in any case.

Every version reaches vLLM as files: its own weight transfer broadcasts tensor by tensor in a group of its
own making, over NCCL only.

Not covered: several `--api-server-count` processes (`/abort_requests` reaches one of them), and an
engine whose weights another client updates, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from headway.contracts.config.model import ModelConfig
from headway.contracts.config.server import UpdatePolicy, VLLMConfig
from headway.contracts.engines import OnDelta
from headway.contracts.errors import BackendError, ConfigError, RequestTooLong, SyncError
from headway.contracts.http.generation import PauseMode
from headway.contracts.types import (
    LLMRequest,
    LLMResponse,
    PolicyVersion,
    WeightUpdateMeta,
)
from headway.runtime.tasks import Signal, cancel_and_wait, run_to_end
from headway.text.tokenizer import TextTokenizer
from inference_server.backends.base import (
    Limits,
    Load,
    StagedVersion,
    check_request,
    refuse_mask,
)
from inference_server.backends.engine_adapters import EngineAdapter, EngineAdapters
from inference_server.backends.vllm.call import VLLMCall
from inference_server.backends.vllm.engine import (
    CONTROL_TIMEOUT_S,
    BrokenUpdateError,
    PausedError,
    VLLMEngine,
)
from inference_server.backends.vllm.load import Gauges, Stopwatch
from inference_server.backends.vllm.wire import OutputChunk, check_sampling
from weight_sync.channel import VerifiedVersion, WeightReader, WeightVerifier
from weight_sync.checkpoint import checkpoint_shapes, read_model_config

log = logging.getLogger(__name__)

REFUSED_AGAIN_S = 0.1
ABORT_AGAIN_S = 0.25
SETTLE_S = 0.05
"""Streams are silent this long before the version changes under them."""


@dataclass(frozen=True, slots=True)
class DirectoryUpdate:
    """A verified version in a directory that the engine can read."""

    version: PolicyVersion
    path: str
    digest: str = ""
    held: VerifiedVersion | None = None


class VLLMBackend:
    """`GenerationBackend` on a vLLM server.

    `on_delta` is served from vLLM's own stream. A stream says only at its end which weights sampled
    what, so a delta carries the version that was serving when it arrived; before a swap, streams are
    left to fall silent. The response carries vLLM's versions; a difference is logged. With
    `logprob_start` the deltas come at the end, one per version. Without `on_delta` nothing is
    streamed, and `ttft_s` is the latency. `num_recomputes` counts our own pauses and swaps, also for
    a request that had not begun; vLLM does not tell of its preemptions.
    """

    def __init__(
        self,
        config: VLLMConfig,
        model: ModelConfig,
        version: PolicyVersion,
        tokenizer: TextTokenizer | None = None,
    ) -> None:
        if model.init_from_scratch:
            raise ConfigError(
                "vLLM cannot draw the trainer's random weights; save them to a directory, set "
                "model.path to it and model.init_from_scratch to false"
            )
        self._config = config
        self._model = Path(model.path)
        self._version = version
        self._engine = VLLMEngine(config, model)
        self._limits = Limits(int(read_model_config(str(self._model))["vocab_size"]), 0)
        self._calls: set[VLLMCall] = set()
        self._admits = False
        self._opened = Signal()
        self._answered = Signal()
        self._adapters = EngineAdapters(self._engine, config.max_adapters, self._until_unused)
        self._lock = asyncio.Lock()
        self._is_paused = False
        self._failure: str | None = None
        self._started = time.monotonic()
        self._busy = Stopwatch()
        self._gauges = Gauges()
        self._gauge_reader: asyncio.Task[None] | None = None

    @property
    def limits(self) -> Limits:
        return self._limits

    @property
    def version(self) -> PolicyVersion:
        return self._version

    @property
    def num_ranks(self) -> int:
        return 1

    @property
    def is_paused(self) -> bool:
        return self._is_paused

    @property
    def failure(self) -> str | None:
        return self._failure or self._engine.process.failure

    async def start(self) -> None:
        self._started = time.monotonic()
        self._version = await self._engine.start(self._version)
        self._limits = Limits(self._limits.vocab_size, self._engine.max_context)
        self._gauge_reader = asyncio.create_task(self._read_gauges(), name="vllm metrics")
        self._open(True)

    async def generate(self, req: LLMRequest, on_delta: OnDelta | None = None) -> LLMResponse:
        self._check(req)
        if req.top_logprobs > self._limits.vocab_size:  # vLLM's core would die of it
            req = req.model_copy(update={"top_logprobs": self._limits.vocab_size})
        call = VLLMCall(req, on_delta)
        self._calls.add(call)
        try:
            chunk = await self._until_answered(call)
            self._check_alive()
            return call.response(chunk, self._engine.experts)
        except BackendError as error:
            if self.failure is None:
                raise
            raise BackendError(self.failure) from error
        finally:
            self._calls.discard(call)

    async def abort(self, rid: str | None) -> None:
        await self._interrupt([one for one in self._calls if rid is None or one.req.rid == rid])

    @property
    def adapters(self) -> Mapping[str, PolicyVersion]:
        """Version of each loaded adapter, by name."""
        return self._adapters.versions

    @property
    def max_adapters(self) -> int:
        """See `AdapterBackend`."""
        return self._config.max_adapters

    async def load_adapter(self, name: str, folder: Path, version: PolicyVersion) -> None:
        """See `AdapterBackend`; requests that run end with the version that they began with."""
        await self._adapters.load(name, folder, version)

    async def unload_adapter(self, name: str) -> None:
        """See `AdapterBackend`."""
        self._adapters.find(name)
        await self._interrupt([one for one in self._calls if one.req.adapter == name])
        await self._adapters.unload(name)

    async def pause(self, mode: PauseMode) -> None:
        async with self._lock:
            self._open(False)
            self._is_paused = True
            try:
                await self._engine.pause("abort" if mode == "abort" else "keep")
                if mode == "retract":
                    await self._recompute()
            except BaseException:
                await self._go_on()
                raise
            if mode == "abort":
                await self._until_idle()

    async def resume(self) -> None:
        async with self._lock:
            if self._is_paused:
                await self._go_on()

    async def flush(self) -> bool:
        return not self._in_flight and await self._engine.drop_prefixes()

    def stage(self, meta: WeightUpdateMeta, reader: WeightReader) -> StagedVersion:
        if not self._engine.takes_versions:
            raise SyncError(
                "vLLM on a CPU packs the weights of experts once, and would go on with the first ones; "
                "serve this mixture with sglang or embedded_torch, or on a GPU"
            )
        # The proof counts: vLLM reads by itself.
        expected = checkpoint_shapes(str(self._model))
        if isinstance(reader, WeightVerifier):
            verified = reader.verify(meta, expected)
            return DirectoryUpdate(meta.version, str(verified.folder), verified.digest, verified)
        digest = reader.stage(meta, expected).digest
        if not Path(meta.path).is_dir():
            raise SyncError(f"vLLM loads a version from a directory; {meta.path} is none")
        return DirectoryUpdate(meta.version, str(Path(meta.path).resolve()), digest)

    async def swap(self, staged: StagedVersion, policy: UpdatePolicy = "keep") -> int:
        """Exchange the weights between two decode steps.

        Returns:
            Number of requests that the engine had when it was halted.

        Raises:
            SyncError: not staged here, or not loaded; see `failure` whether the engine survived.
            BackendError: the engine failed, or did not pause; then nothing was changed.
        """
        if not isinstance(staged, DirectoryUpdate):
            raise SyncError(f"{type(staged).__name__} was not staged by this backend")
        async with self._lock:
            self._open(False)
            running = len(self._in_flight)
            try:
                await self._halt(policy)
                await run_to_end(self._exchange(staged))
            finally:
                if not self._is_paused:
                    await run_to_end(self._go_on())
            return running

    def load(self) -> Load:
        return self._gauges.load(
            asked=len(self._in_flight),
            held_back=len(self._calls) - len(self._in_flight),
            num_tokens=self._engine.num_tokens,
            busy_s=self._busy.seconds(),
            uptime_s=time.monotonic() - self._started,
            max_running=self._engine.max_running,
        )

    async def aclose(self) -> None:
        await cancel_and_wait([self._gauge_reader])
        process = self._engine.process
        if not process.is_managed and process.failure is None:
            await self._adapters.aclose()
        if self._is_paused and not process.is_managed and process.failure is None:
            await self._go_on()  # so that the next client finds it running
        await process.aclose()
        self._opened.notify()

    # Generating.

    @property
    def _in_flight(self) -> list[VLLMCall]:
        """Calls that the engine has."""
        return [call for call in self._calls if call.engine_id is not None]

    def _check(self, req: LLMRequest) -> None:
        self._check_alive()
        check_request(req, self._limits)
        if req.adapter is not None:
            self._adapters.find(req.adapter)
        refuse_mask(req, "vllm")
        self._engine.experts.are_wanted(req)
        if len(req.input_ids) >= self._limits.max_context:
            raise RequestTooLong(
                f"{len(req.input_ids)} prompt tokens fill the context of "
                f"{self._limits.max_context}; vLLM scores a prompt only if one more token "
                "fits: shorten it"
            )
        check_sampling(req.gconfig, self._engine.logprobs_mode)

    def _check_alive(self) -> None:
        if self.failure is not None:
            raise BackendError(self.failure)

    async def _until_answered(self, call: VLLMCall) -> OutputChunk:
        while True:
            while not self._admits and not call.is_interrupted:
                await self._engine.process.guard(self._opened.event().wait())
                self._check_alive()
            if call.is_interrupted:
                return OutputChunk(reason="interrupt", runs=[])
            try:
                return await self._ask(call)
            except PausedError:
                await asyncio.sleep(REFUSED_AGAIN_S)  # paused since, or by another client

    async def _ask(self, call: VLLMCall) -> OutputChunk:
        """One attempt at the engine."""
        request_id, req = uuid.uuid4().hex, call.req  # our own id may be in use twice at a time
        call.adapter = None if req.adapter is None else self._adapters.find(req.adapter)
        call.engine_id = self._engine.engine_id(request_id)
        self._busy.run(True)
        try:
            if call.is_streamed:
                return await self._engine.process.guard(self._follow(call, request_id))
            return await self._engine.ask(request_id, req, str(self._version), call.engine_adapter)
        finally:
            call.engine_id = None
            self._busy.run(bool(self._in_flight))
            self._answered.notify()

    async def _follow(self, call: VLLMCall, request_id: str) -> OutputChunk:
        """A streamed answer, handed over as it grows; all of it in the end."""
        whole = OutputChunk()
        salt = str(self._version)
        parts = self._engine.stream(request_id, call.req, salt, call.engine_adapter)
        async with contextlib.aclosing(parts):
            async for part in parts:
                self._check_alive()
                call.stamp(part, self._version)
                whole.extend(part)
        if whole.reason is None:
            raise BackendError(f"vLLM broke off the stream of {call.req.rid}; its log has more")
        return whole

    async def _interrupt(self, calls: list[VLLMCall]) -> None:
        """End calls with the tokens so far."""
        for call in calls:
            call.is_interrupted = True
        self._opened.notify()
        await self._end(calls)

    async def _until_unused(self, adapter: EngineAdapter) -> None:
        while any(call.adapter is adapter for call in self._in_flight):
            await self._answered.event().wait()

    async def _end(self, calls: list[VLLMCall]) -> None:
        """Abort calls at the engine; again until they end, for one may still be on its way there."""
        while ids := [call.engine_id for call in calls if call.engine_id is not None]:
            await self._engine.abort(ids)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ABORT_AGAIN_S):
                    while any(call.engine_id in ids for call in calls):
                        await self._answered.event().wait()

    # Pausing and updating; callers hold `_lock`.

    async def _halt(self, policy: UpdatePolicy) -> None:
        """Bring the engine between two steps, and running requests to where the policy wants them."""
        if policy == "abort":
            await self._engine.pause("abort")
            await self._until_idle()
        elif not self._is_paused:
            await self._engine.pause("wait" if policy == "drain" else "keep")
        if policy == "recompute":
            await self._recompute()
        await self._until_silent()

    async def _recompute(self) -> None:
        self._gauges.read(await self._engine.metrics())
        self._gauges.send_back(max(0, len(self._in_flight) - self._gauges.waiting))
        await self._engine.drop_caches()
        for call in self._in_flight:
            call.num_recomputes += 1

    async def _exchange(self, update: DirectoryUpdate) -> None:
        try:
            await self._engine.load_directory(update.path, update.version)
        except BrokenUpdateError as error:
            reason = f"version {update.version} was not loaded whole: {error}"
            self._mark_failed(reason)
            with contextlib.suppress(BackendError, TimeoutError):
                async with asyncio.timeout(CONTROL_TIMEOUT_S):
                    await self._end(self._in_flight)
            raise SyncError(f"{reason}; the engine must be started again") from error
        self._version = update.version

    async def _go_on(self) -> None:
        """Resume; an engine that cannot be resumed has failed."""
        self._is_paused = False
        try:
            await self._engine.resume()
        except BackendError as error:
            self._mark_failed(f"vLLM could not be resumed: {error.message}")
        self._open(True)

    def _mark_failed(self, reason: str) -> None:
        if self.failure is None:
            self._failure = reason
            log.error("the engine cannot go on", extra={"reason": reason})

    async def _until_idle(self) -> None:
        """Wait until the requests that were ended at the engine have ended here, too."""
        while self._in_flight:
            await self._answered.event().wait()

    async def _until_silent(self) -> None:
        """Wait until all sampled tokens have arrived in the streams, so that they get the right
        version.
        """
        halted = time.monotonic()
        while streams := [call for call in self._in_flight if call.is_streamed]:
            last_event = max(halted, *(call.last_event for call in streams))
            silent_s = time.monotonic() - last_event
            if silent_s >= SETTLE_S:
                return
            await asyncio.sleep(SETTLE_S - silent_s)

    def _open(self, admits: bool) -> None:
        self._admits = admits
        self._opened.notify()

    async def _read_gauges(self) -> None:
        while True:
            with contextlib.suppress(BackendError):
                self._gauges.read(await self._engine.metrics())
            await asyncio.sleep(self._config.health_interval_s)
