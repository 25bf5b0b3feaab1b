"""An SGLang server as generation backend: ours to start, or at a URL.

SGLang decodes; versions are ours. The engine's `weight_version` label is our version as text, and the
spans that it reports per request become our runs. Two things need more than a translation:

- *Its pipeline* makes it hard to say which version sampled the last token before a swap: `EngineControl`.
- *What kills it.* Token ids, shapes and counts that crash SGLang are refused before it sees them.

New calls wait in `EngineRequests` while the engine is paused or swapped. `EngineControl.lock` serialises
what changes the engine's state. A scheduler that hangs behind a living front end is SGLang's own
watchdog's to end (`--watchdog-timeout`); we notice its death.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TypeVar

import torch

from headway.contracts.config.model import ModelConfig
from headway.contracts.config.server import SGLangConfig, UpdatePolicy
from headway.contracts.engines import OnDelta
from headway.contracts.errors import BackendError, ConfigError, ServiceError, SyncError
from headway.contracts.http.generation import PauseMode
from headway.contracts.types import (
    GroupRank,
    LLMRequest,
    LLMResponse,
    PolicyVersion,
    WeightUpdateMeta,
)
from headway.runtime.tasks import run_to_end
from headway.text.tokenizer import TextTokenizer
from inference_server.backends.base import Limits, Load, StagedVersion
from inference_server.backends.engine_adapters import EngineAdapters
from inference_server.backends.engine_process import EngineProcess
from inference_server.backends.sglang import updates, wire
from inference_server.backends.sglang.adapters import SGLangAdapters
from inference_server.backends.sglang.call import EngineCall
from inference_server.backends.sglang.control import EngineControl, HaltedState
from inference_server.backends.sglang.engine_requests import ABORT_AGAIN_S, EngineRequests
from inference_server.backends.sglang.features import learn_features, sglang_command
from inference_server.backends.sglang.group import EngineGroup, GroupUpdate, Transfer
from inference_server.backends.sglang.responses import MISSING, body_of, read_label
from inference_server.backends.sglang.updates import FolderUpdate
from weight_sync.channel import WeightObserver, WeightReader, WeightVerifier
from weight_sync.checkpoint import checkpoint_shapes
from weight_sync.transports.nccl import Build, build_of

log = logging.getLogger(__name__)

T = TypeVar("T")

DEFAULT_LABEL = "default"


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
            sglang_command(config, model, version, tokenizer is not None),
            progress=lambda: self._requests.num_tokens,
            live_path=lambda: "/ping",
        )
        self._requests = EngineRequests(self._engine, version)
        self._adapters = EngineAdapters(
            SGLangAdapters(self._engine), config.max_adapters, self._requests.until_unused
        )
        self._control = EngineControl(self._engine, self._requests)
        self._group = EngineGroup(self._engine)
        self._serving: FolderUpdate | None = None
        """Folder from which the served version can be read again, if there is one."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._kv_tokens: int | None = None
        self._started = time.monotonic()

    @property
    def limits(self) -> Limits:
        return self._requests.features.limits

    @property
    def version(self) -> PolicyVersion:
        return self._requests.version

    @property
    def num_ranks(self) -> int:
        return (self._requests.features.num_ranks or 1) if self._config.receive == "group" else 1

    @property
    def is_paused(self) -> bool:
        return self._control.paused is not None

    @property
    def failure(self) -> str | None:
        return self._engine.failure

    async def start(self) -> None:
        """Start as the protocol says; an attached engine labelled with a number serves that version.

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
        self._requests.spawn(self._watch_memory())

    async def generate(self, req: LLMRequest, on_delta: OnDelta | None = None) -> LLMResponse:
        return await self._requests.serve(req, on_delta, self._adapters.find)

    async def abort(self, rid: str | None) -> None:
        ending = self._requests.interrupt(lambda req: rid is None or req.rid == rid)
        if self._control.paused != "in_place":  # else it surfaces once the engine goes on
            await self._engine.guard(asyncio.wait((ending,), timeout=2 * ABORT_AGAIN_S))

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
        await self._requests.interrupt(lambda req: req.adapter == name)
        await self._adapters.unload(name)

    async def pause(self, mode: PauseMode) -> None:
        await self._control.pause(mode)

    async def resume(self) -> None:
        await self._control.resume()

    async def flush(self) -> bool:
        async with self._control.lock:
            return await self._control.flush()

    def stage(self, meta: WeightUpdateMeta, reader: WeightReader) -> StagedVersion:
        """Stage as the protocol says; with `receive: group`, the engine is frozen when this returns."""
        expected = checkpoint_shapes(self._model.path)
        if self._config.receive == "group" and meta.group_rank is not None:
            return self._stage_live(meta, meta.group_rank, reader, expected)
        if isinstance(reader, WeightVerifier):
            verified = reader.verify(meta, expected)
            return FolderUpdate(meta.version, str(verified.folder), verified.digest, verified)
        return FolderUpdate(meta.version, meta.path, reader.stage(meta, expected).digest)

    async def swap(self, staged: StagedVersion, policy: UpdatePolicy = "keep") -> int:
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
        async with self._control.lock:
            self._requests.hold()
            running = len(self._requests.in_engine())
            try:
                halted = await self._control.halt(policy)
                await run_to_end(self._exchange(staged, halted))
            finally:
                if self._control.paused is None:
                    await run_to_end(self._control.go_on())
            return running

    def load(self) -> Load:
        requests = self._requests
        running = sum(call.num_tokens > 0 for call in requests.in_engine())
        capacity = 0 if self._kv_tokens is None else requests.features.kv_capacity
        return Load(
            running=running,
            queued=len(requests) - running,
            generated_tokens=requests.num_tokens,
            busy_s=requests.busy_s,
            uptime_s=time.monotonic() - self._started,
            prefill_tokens=requests.prefill_tokens,
            kv_tokens=self._kv_tokens or 0,
            kv_capacity_tokens=capacity,
            kv_usage=min(1.0, (self._kv_tokens or 0) / capacity) if capacity else 0.0,
            preemptions=requests.num_preemptions,
            max_running=requests.features.max_running,
        )

    async def aclose(self) -> None:
        if self._engine.is_managed:
            self._engine.fail("the backend was closed")  # nothing is put in order in what ends
        elif self._engine.failure is None:
            await self._adapters.aclose()
        await self._requests.aclose()
        await self._engine.aclose()

    # Starting.

    async def _learn(self) -> None:
        """Settle which version the engine serves, and read what it can do."""
        if not self._engine.is_managed:
            await self._control.continue_engine()  # an earlier client may have died in a pause
        label = await read_label(self._engine)
        if label == DEFAULT_LABEL:
            body = {"new_version": str(self._requests.version), "abort_all_requests": False}
            body_of(await self._engine.post("/update_weight_version", body))
        elif label is not None:
            self._requests.version = wire.parse_label(label)
        if self._engine.is_managed or label == DEFAULT_LABEL:
            self._serving = FolderUpdate(self._requests.version, self._model.path)
        self._requests.features = await learn_features(self._engine, self._model.path)
        if self._config.receive == "group" and self._requests.features.num_ranks is None:
            raise ConfigError(
                "an SGLang engine with --pp-size or --dp-size cannot join a trainer's group; set "
                "backend.receive to files"
            )

    # Swapping; under the lock.

    async def _exchange(self, update: FolderUpdate, halted: HaltedState) -> None:
        """Change the weights of a halted engine, and the version with them."""
        await updates.load_folder(self._engine, update, halted.flushes)
        await self._requests.cross(update.version, halted.lag)
        self._serving = update

    # A version that flows into the live weights.

    def _stage_live(
        self,
        meta: WeightUpdateMeta,
        group_rank: GroupRank,
        reader: WeightReader,
        expected: Mapping[str, torch.Size],
    ) -> GroupUpdate:
        if self._loop is None or not isinstance(reader, WeightObserver):
            raise SyncError(
                f"{meta.path} needs a started engine, and a reader that joins for its ranks"
            )
        if meta.path.startswith("ipc:"):
            raise SyncError(
                f"SGLang opens no handles, and {meta.path} comes by them; set backend.receive to files"
            )
        member = reader.follow(meta, self.num_ranks, self._build_for(meta))
        transfer = Transfer(
            self._engine,
            self._group,
            member,
            group_rank,
            reader.deadline,
            expected,
            self._requests.features.dtype,
        )
        return asyncio.run_coroutine_threadsafe(self._begin(transfer), self._loop).result()

    def _build_for(self, meta: WeightUpdateMeta) -> Build | None:
        """The NCCL of an engine that is ours, if that is what a version comes by."""
        if not meta.path.startswith("nccl:") or not self._engine.is_managed:
            return None
        return build_of(self._config.python or sys.executable)

    async def _begin(self, transfer: Transfer) -> GroupUpdate:
        update = GroupUpdate(transfer.version)
        self._requests.spawn(self._carry(transfer, update))
        await update.until_arrived()
        return update

    async def _carry(self, transfer: Transfer, update: GroupUpdate) -> None:
        """Carry out an update from the rendezvous to the commit or the abort, under one lock."""
        try:
            async with self._control.lock:
                update.end(await self._carry_over(transfer, update))
        except (ServiceError, TimeoutError) as error:
            update.fail(error)
        except BaseException:
            update.fail(BackendError("the backend was closed"))
            raise

    async def _carry_over(self, transfer: Transfer, update: GroupUpdate) -> int:
        try:
            first = await transfer.join()
            self._requests.hold()
            running = len(self._requests.in_engine())
            halted = await self._control.halt("keep")
            update.report_received(await transfer.receive(first))
            policy = await transfer.wanted(update.decided)
            to_abort = self._requests.in_engine() if policy in ("abort", "drain") else []
            await run_to_end(self._adopt(transfer, policy, halted, to_abort))
        except BaseException as error:
            failure = await run_to_end(self._take_back(transfer, error))
            if isinstance(error, ServiceError):
                raise failure from error
            raise
        finally:
            if not self._requests.is_open and self._control.paused is None:
                await run_to_end(self._control.go_on())
        if self._control.paused is None:  # else they end once the engine goes on
            await self._engine.guard(self._requests.end(to_abort))
        return running

    async def _adopt(
        self,
        transfer: Transfer,
        policy: UpdatePolicy,
        halted: HaltedState,
        to_abort: Iterable[EngineCall],
    ) -> None:
        """Let frozen requests go on under the new version, as the policy says."""
        if policy == "recompute" and not halted.flushes:
            halted = (
                await self._control.drop_cache()
            )  # reads what is in flight, while it has its old name
        for call in to_abort:  # they end before they sample again
            await self._engine.post("/abort_request", {"rid": call.rid})
        if halted.flushes and not await self._control.flush():
            log.warning("the weights changed, the cache remained")
        await updates.relabel(self._engine, transfer.version)
        transfer.is_torn = False
        await self._requests.cross(transfer.version, halted.lag)
        self._serving = None

    async def _take_back(self, transfer: Transfer, error: BaseException) -> Exception:
        """Go on serving the old version, or give the engine up; returns the reason."""
        failure = await transfer.stop(error)
        if not transfer.is_torn or self._engine.failure is not None:
            return failure
        try:
            if self._serving is None:
                raise SyncError(
                    f"version {self._requests.version} is not stored anywhere to be read again"
                )
            await updates.restore_folder(self._engine, self._serving, flushes=False)
        except (SyncError, BackendError) as lost:
            self._engine.fail(
                f"the weights are torn between versions {self._requests.version} and {transfer.version} "
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
