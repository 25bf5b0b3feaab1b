"""An SGLang server as generation backend: ours to start, or at a URL.

SGLang decodes; versions are ours. The engine's `weight_version` label is our version as text, and the
spans that it reports per request become our runs. Three things need more than a translation:

- *Its pipeline.* With overlap scheduling SGLang launches a step before it has read the last one. An
  in-place pause leaves that one token of each decoding request in flight: sampled by the old weights,
  stamped with the new version (0.5.23). So before a `keep` swap, requests without a token are sent
  back (`Traffic.send_back`): what then is in flight is one token of every request, and
  `wire.version_runs` counts it to the version that sampled it. Where this cannot be arranged
  (speculative decoding, a pause by the user), `keep` rebuilds the KV cache as `recompute` does. A
  request that the engine itself retracted at that moment has its boundary one token late, so never
  newer than the truth.
- *Old servers* without spans know only the version at the end. There a swap under `keep` or
  `recompute` runs as `abort`: no request crosses it.
- *What kills it.* Token ids, shapes and counts that crash SGLang are refused before it sees them.

New calls wait in `Traffic` while the engine is paused or swapped. `_turn` serialises what changes the
engine's state. A scheduler that hangs behind a living front end is SGLang's own watchdog's to end
(`--watchdog-timeout`); we notice its death.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch

from headway.contracts.config.model import ModelConfig
from headway.contracts.config.server import SGLangConfig, UpdatePolicy
from headway.contracts.errors import BackendError, ConfigError, ServiceError, SyncError
from headway.contracts.http.generation import PauseMode
from headway.contracts.types import (
    GroupSeat,
    LLMRequest,
    LLMResponse,
    PolicyVersion,
    WeightUpdateMeta,
)
from headway.rollout.tokenizer import TextTokenizer
from inference_server.backends.base import Limits, Load, OnDelta, Staged
from inference_server.backends.engine_process import EngineProcess
from inference_server.backends.sglang import updates, wire
from inference_server.backends.sglang.answers import MISSING, body_of, expect_success, read_label
from inference_server.backends.sglang.call import Call
from inference_server.backends.sglang.features import learn_features, sglang_command
from inference_server.backends.sglang.group import EngineGroup, GroupUpdate, Transfer
from inference_server.backends.sglang.traffic import ABORT_AGAIN_S, Traffic
from inference_server.backends.sglang.updates import FolderUpdate
from weight_sync.channel import WeightObserver, WeightReader, WeightVerifier
from weight_sync.checkpoint import checkpoint_shapes

log = logging.getLogger(__name__)

T = TypeVar("T")

DEFAULT_LABEL = "default"


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
        self._engine = EngineProcess(
            config,
            sglang_command(model, version, tokenizer is not None),
            progress=lambda: self._traffic.num_tokens,
            live_path=lambda: "/ping",
        )
        self._traffic = Traffic(self._engine, version)
        self._group = EngineGroup(self._engine)
        self._serving: FolderUpdate | None = None
        """Where the version that serves can be read again, if anywhere."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._paused: PauseMode | None = None
        self._turn = asyncio.Lock()
        self._kv_tokens: int | None = None
        self._started = time.monotonic()

    @property
    def limits(self) -> Limits:
        return self._traffic.features.limits

    @property
    def version(self) -> PolicyVersion:
        return self._traffic.version

    @property
    def num_ranks(self) -> int:
        return (self._traffic.features.num_ranks or 1) if self._config.receive == "group" else 1

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
        self._traffic.spawn(self._watch_memory())

    async def generate(self, req: LLMRequest, on_delta: OnDelta | None = None) -> LLMResponse:
        return await self._traffic.serve(req, on_delta)

    async def abort(self, rid: str | None) -> None:
        ending = self._traffic.interrupt(rid)
        if self._paused != "in_place":  # else it surfaces once the engine goes on
            await self._engine.guard(asyncio.wait((ending,), timeout=2 * ABORT_AGAIN_S))

    async def pause(self, mode: PauseMode) -> None:
        async with self._turn:
            self._traffic.hold()
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
                self._traffic.admit()

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
            self._traffic.hold()
            running = len(self._traffic.in_engine())
            try:
                quiet = await self._quiesce(policy)
                await _whole(self._exchange(staged, quiet))
            finally:
                if self._paused is None:
                    await _whole(self._go_on())
            return running

    def load(self) -> Load:
        traffic = self._traffic
        running = sum(call.num_tokens > 0 for call in traffic.in_engine())
        capacity = 0 if self._kv_tokens is None else traffic.features.kv_capacity
        return Load(
            running=running,
            queued=len(traffic) - running,
            generated_tokens=traffic.num_tokens,
            busy_s=traffic.busy_s,
            uptime_s=time.monotonic() - self._started,
            prefill_tokens=traffic.prefill_tokens,
            kv_tokens=self._kv_tokens or 0,
            kv_capacity_tokens=capacity,
            kv_usage=min(1.0, (self._kv_tokens or 0) / capacity) if capacity else 0.0,
            preemptions=traffic.num_preemptions,
            max_running=traffic.features.max_running,
        )

    async def aclose(self) -> None:
        if self._engine.is_managed:
            self._engine.fail("the backend was closed")  # nothing is put in order in what ends
        await self._traffic.aclose()
        await self._engine.aclose()

    # Starting.

    async def _learn(self) -> None:
        """Settle which version the engine serves, and read what it can do."""
        if not self._engine.is_managed:
            await self._continue()  # whoever was here before may have died in a pause
        label = await read_label(self._engine)
        if label == DEFAULT_LABEL:
            body = {"new_version": str(self._traffic.version), "abort_all_requests": False}
            body_of(await self._engine.post("/update_weight_version", body))
        elif label is not None:
            self._traffic.version = wire.parse_label(label)
        if self._engine.is_managed or label == DEFAULT_LABEL:
            self._serving = FolderUpdate(self._traffic.version, self._model.path)
        self._traffic.features = await learn_features(self._engine, self._model.path)
        if self._config.receive == "group" and self._traffic.features.num_ranks is None:
            raise ConfigError(
                "an SGLang engine with --pp-size or --dp-size cannot join a trainer's group; set "
                "backend.receive to files"
            )

    # Halting and swapping; under `_turn`.

    async def _quiesce(self, policy: UpdatePolicy) -> _Quiet:
        if policy in ("keep", "recompute") and not self._traffic.features.has_spans:
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
        await self._engine.guard(
            self._traffic.end(self._traffic.in_engine())
        )  # SGLang's own loop sleeps 1 s
        await self._pause_engine("abort")

    async def _drain(self) -> None:
        if self._paused is not None and self._traffic.in_engine():
            raise SyncError("a paused engine does not drain; resume it or take another policy")
        await self._engine.guard(self._traffic.until(lambda: not self._traffic.in_engine()))

    async def _drop_cache(self) -> _Quiet:
        await self._pause_engine("retract")
        return _Quiet(flushes=True)

    async def _keep_cache(self) -> _Quiet:
        if self._paused in ("abort", "retract"):
            return _Quiet(flushes=False)
        if not self._traffic.features.is_pipelined:
            await self._pause_engine("in_place")
            return _Quiet(flushes=False)
        if (
            self._paused is not None
            or self._traffic.features.is_speculative
            or not self._traffic.features.can_thin_streams
        ):
            log.warning("what is in flight in SGLang is not known: the swap rebuilds the KV cache")
            return await self._drop_cache()
        await self._traffic.send_back()
        await self._pause_engine("in_place")
        return _Quiet(flushes=False, lag=1)

    async def _exchange(self, update: FolderUpdate, quiet: _Quiet) -> None:
        """Change the weights of a halted engine, and the version with them."""
        await updates.load_folder(self._engine, update, quiet.flushes)
        await self._traffic.cross(update.version, quiet.lag)
        self._serving = update

    async def _pause_engine(self, mode: PauseMode) -> None:
        if mode == "retract":
            self._traffic.note_retract()
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
            self._traffic.admit()

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
            self._traffic.features.dtype,
        )
        return asyncio.run_coroutine_threadsafe(self._begin(transfer), self._loop).result()

    async def _begin(self, transfer: Transfer) -> GroupUpdate:
        update = GroupUpdate(transfer.version)
        self._traffic.spawn(self._carry(transfer, update))
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
            self._traffic.hold()
            running = len(self._traffic.in_engine())
            quiet = await self._quiesce("keep")
            update.arrive(await transfer.receive(first))
            policy = await transfer.wanted(update.decided)
            doomed = self._traffic.in_engine() if policy in ("abort", "drain") else []
            await _whole(self._adopt(transfer, policy, quiet, doomed))
        except BaseException as error:
            failure = await _whole(self._take_back(transfer, error))
            if isinstance(error, ServiceError):
                raise failure from error
            raise
        finally:
            if not self._traffic.is_open and self._paused is None:
                await _whole(self._go_on())
        if self._paused is None:  # else they end once the engine goes on
            await self._engine.guard(self._traffic.end(doomed))
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
        await self._traffic.cross(transfer.version, quiet.lag)
        self._serving = None

    async def _take_back(self, transfer: Transfer, error: BaseException) -> Exception:
        """Let the old version serve on, or give the engine up; returns why it came to that."""
        failure = await transfer.stop(error)
        if not transfer.is_torn or self._engine.failure is not None:
            return failure
        try:
            if self._serving is None:
                raise SyncError(f"version {self._traffic.version} lies nowhere to be read again")
            await updates.restore_folder(self._engine, self._serving, flushes=False)
        except (SyncError, BackendError) as lost:
            self._engine.fail(
                f"the weights are torn between versions {self._traffic.version} and {transfer.version} "
                f"({failure}), and the old one is lost: {lost.message}"
            )
        return failure

    # Waiting and watching.

    async def _watch_memory(self) -> None:
        """Keep at hand what only the engine knows: the tokens in its cache."""
        while (answer := await self._engine.get("/v1/loads")).status not in MISSING:
            loads = body_of(answer).get("loads", [])
            self._kv_tokens = sum(int(load.get("num_used_tokens", 0)) for load in loads)
            await asyncio.sleep(self._config.health_interval_s)


async def _whole(work: Awaitable[T]) -> T:
    """Await to the end, also when cancelled; the cancellation comes after it."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        raise
