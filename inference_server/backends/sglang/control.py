"""Pauses and halts of an SGLang engine: what becomes of the requests that it runs.

With overlap scheduling SGLang launches a step before it has read the last one. An in-place pause leaves
that one token of each decoding request in flight: sampled by the old weights, stamped with the new
version (0.5.23). So before a `keep` swap, requests without a token are sent back
(`EngineRequests.send_back`): what then is in flight is one token of every request, and
`wire.version_runs` counts it to the version that sampled it. Where this cannot be arranged (speculative
decoding, a pause by the user), `keep` rebuilds the KV cache as `recompute` does. A request that the
engine itself retracted at that moment has its boundary one token late, so never newer than the truth.

Old servers without version spans know only the version at the end. There a swap under `keep` or
`recompute` runs as `abort`: no request crosses it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass

from headway.contracts.config.server import UpdatePolicy
from headway.contracts.errors import SyncError
from headway.contracts.http.generation import PauseMode
from inference_server.backends.engine_process import EngineProcess
from inference_server.backends.sglang.engine_requests import EngineRequests
from inference_server.backends.sglang.responses import expect_success

log = logging.getLogger(__name__)

IDLE_S = 10.0
IDLE_AGAIN_S = 0.01


@dataclass(frozen=True, slots=True)
class HaltedState:
    """State of a halted engine."""

    flushes: bool
    """Cached keys and values go with the old weights."""
    lag: int = 0
    """Tokens of each running request that the old weights have sampled and not sent yet."""


class EngineControl:
    """Halts one engine and lets it go on; all but `pause` and `resume` is called under `lock`."""

    def __init__(self, engine: EngineProcess, requests: EngineRequests) -> None:
        self._engine = engine
        self._requests = requests
        self.lock = asyncio.Lock()
        """Held while the engine's state changes."""
        self.paused: PauseMode | None = None
        """Mode of the user's pause."""

    async def pause(self, mode: PauseMode) -> None:
        """Stand still until `resume`."""
        async with self.lock:
            self._requests.hold()
            if mode == "abort":
                await self._end_all()
            else:
                await self._pause_engine(mode)
            self.paused = mode

    async def resume(self) -> None:
        """End a pause, if there is one."""
        async with self.lock:
            if self.paused is not None:
                await self.continue_engine()
                self.paused = None
                self._requests.admit()

    async def halt(self, policy: UpdatePolicy) -> HaltedState:
        """Bring the engine between two steps, and running requests to where the policy wants them.

        Raises:
            SyncError: the policy cannot be carried out in a pause, or requests of others do not end.
            BackendError: the engine refused or died.
        """
        if policy in ("keep", "recompute") and not self._requests.features.has_spans:
            log.warning(
                "this SGLang reports no version per token: the swap ends what runs",
                extra={"policy": policy},
            )
            policy = "abort"
        if policy == "drain":
            await self._drain()
        if policy in ("abort", "drain"):
            await self._end_all()
            await self._until_idle()
            return HaltedState(flushes=True)
        return await self._keep_cache() if policy == "keep" else await self.drop_cache()

    async def drop_cache(self) -> HaltedState:
        """Halt it, with running requests back in the queue."""
        await self._pause_engine("retract")
        return HaltedState(flushes=True)

    async def flush(self) -> bool:
        """Drop cached keys and values; false if the engine would not."""
        return (await self._engine.post("/flush_cache", {})).is_ok

    async def continue_engine(self) -> None:
        """Let the engine run on."""
        expect_success(await self._engine.post("/continue_generation", {}), "status")

    async def go_on(self) -> None:
        """Let it run on and take new requests; the latter in any case."""
        try:
            if self._engine.failure is None:
                await self.continue_engine()
        finally:
            self._requests.admit()

    async def _end_all(self) -> None:
        """End what runs, and pause."""
        if self.paused == "abort":
            return
        if self.paused is not None:
            self.paused = "abort"
            await self.continue_engine()  # a frozen request cannot end
        # Not left to SGLang, whose own loop sleeps 1 s.
        await self._engine.guard(self._requests.end(self._requests.in_engine()))
        await self._pause_engine("abort")

    async def _until_idle(self) -> None:
        """Wait for what others asked for, and for calls that were given up, to leave the engine.

        While one runs SGLang changes the weights, keeps the old label and says that it failed (0.5.23).
        """
        deadline = time.monotonic() + IDLE_S
        while not await self.flush():
            if time.monotonic() > deadline:
                raise SyncError(f"SGLang still runs requests of others after {IDLE_S:g} s")
            await asyncio.sleep(IDLE_AGAIN_S)

    async def _drain(self) -> None:
        if self.paused is not None and self._requests.in_engine():
            raise SyncError("a paused engine does not drain; resume it or take another policy")
        await self._engine.guard(self._requests.until(lambda: not self._requests.in_engine()))

    async def _keep_cache(self) -> HaltedState:
        if self.paused in ("abort", "retract"):
            return HaltedState(flushes=False)
        if not self._requests.features.is_pipelined:
            await self._pause_engine("in_place")
            return HaltedState(flushes=False)
        if (
            self.paused is not None
            or self._requests.features.is_speculative
            or not self._requests.features.can_thin_streams
        ):
            log.warning("tokens in flight in SGLang are not known: the swap rebuilds the KV cache")
            return await self.drop_cache()
        await self._requests.send_back()
        await self._pause_engine("in_place")
        return HaltedState(flushes=False, lag=1)

    async def _pause_engine(self, mode: PauseMode) -> None:
        if mode == "retract":
            self._requests.note_retract()
        expect_success(await self._engine.post("/pause_generation", {"mode": mode}), "status")
