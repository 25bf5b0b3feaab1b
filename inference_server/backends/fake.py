"""A backend without a model: tokens are a function of the prompt, position and version.

For tests and load runs. It keeps every promise of a real one that does not need a distribution:
versions per token, the four update policies, pauses, aborts, limits, cancellation, stop tokens. What
shapes a distribution (temperature, penalties, ...) has nothing to act on: every logprob is -1.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from zlib import crc32

from headway.contracts.config.model import ModelConfig
from headway.contracts.config.server import FakeBackendConfig, UpdatePolicy
from headway.contracts.engines import OnDelta
from headway.contracts.errors import BackendError, DataError
from headway.contracts.http.generation import PauseMode
from headway.contracts.types import (
    LLMDelta,
    LLMRequest,
    LLMResponse,
    PolicyVersion,
    StopReason,
    WeightUpdateMeta,
)
from headway.runtime.tasks import Signal
from headway.text.tokenizer import TextTokenizer
from inference_server.backends.base import (
    HeldVersion,
    Limits,
    Load,
    StagedVersion,
    check_request,
    refuse_mask,
)
from weight_sync.channel import WeightReader

LOGPROB = -1.0
VOCAB_SIZE = 1000
"""Vocabulary size of the model that does not exist."""


@dataclass
class _Running:
    rid: str
    tokens: list[int] = field(default_factory=list)
    runs: list[tuple[PolicyVersion, int, int]] = field(default_factory=list)
    is_interrupted: bool = False
    num_recomputes: int = 0


class FakeBackend:
    """Samples `crc32(prompt, position, version) mod vocab_size`."""

    def __init__(
        self,
        config: FakeBackendConfig,
        model: ModelConfig,
        version: PolicyVersion,
        tokenizer: TextTokenizer | None = None,
    ) -> None:
        self._config = config
        known = None if tokenizer is None else tokenizer.model_vocab_size
        self._vocab_size = config.vocab_size or known or VOCAB_SIZE
        self._version = version
        self._running: dict[int, _Running] = {}
        self._tokens = 0
        self._started = time.monotonic()
        self._closed = False
        self._going = asyncio.Event()
        self._going.set()
        self._admitting = asyncio.Event()
        self._admitting.set()
        self._changed = Signal()

    @property
    def limits(self) -> Limits:
        return Limits(self._vocab_size, self._config.max_context)

    @property
    def version(self) -> PolicyVersion:
        return self._version

    @property
    def num_ranks(self) -> int:
        return 1

    @property
    def is_paused(self) -> bool:
        return not self._going.is_set()

    @property
    def failure(self) -> str | None:
        return None

    async def start(self) -> None:
        self._started = time.monotonic()

    async def generate(self, req: LLMRequest, on_delta: OnDelta | None = None) -> LLMResponse:
        check_request(req, self.limits)
        refuse_mask(req, "fake")
        gconfig = req.gconfig
        if gconfig.stop or gconfig.has_grammar or req.logprob_start is not None or req.top_logprobs:
            raise DataError("the fake backend has no text and no distribution; ask for neither")
        arrival = time.monotonic()
        await self._admitting.wait()
        one = _Running(req.rid)
        self._running[id(one)] = one
        try:
            reason, match = await self._decode(req, one, on_delta)
        finally:
            del self._running[id(one)]
        latency_s = time.monotonic() - arrival
        return LLMResponse(
            rid=req.rid,
            output_tokens=one.tokens,
            output_logprobs=[LOGPROB] * len(one.tokens),
            version_runs=one.runs,
            stop_reason=reason,
            stop_match=match,
            latency_s=latency_s,
            ttft_s=latency_s / max(1, len(one.tokens)),
            num_recomputes=one.num_recomputes,
        )

    async def _decode(
        self, req: LLMRequest, one: _Running, on_delta: OnDelta | None
    ) -> tuple[StopReason, int | None]:
        gconfig = req.gconfig
        seed = crc32(repr((req.input_ids, gconfig.seed)).encode())
        for position in range(gconfig.max_new_tokens):
            if self._config.token_latency_s:
                await asyncio.sleep(self._config.token_latency_s)
            while not (self._going.is_set() or one.is_interrupted):
                await self._changed.event().wait()
            if self._closed:
                raise BackendError("the backend was closed")
            if one.is_interrupted:
                return "interrupt", None
            text = f"{seed}:{position}:{self._version}"
            token = crc32(text.encode()) % self._vocab_size
            one.tokens.append(token)
            start = one.runs.pop()[1] if one.runs and one.runs[-1][0] == self._version else position
            one.runs.append((self._version, start, position + 1))
            self._tokens += 1
            if on_delta is not None:
                on_delta(
                    LLMDelta(
                        output_tokens=[token], output_logprobs=[LOGPROB], version=self._version
                    )
                )
            if token in gconfig.stop_token_ids and position + 1 >= gconfig.min_new_tokens:
                return "stop", token
        return "length", None

    async def abort(self, rid: str | None) -> None:
        for one in self._running.values():
            one.is_interrupted |= rid is None or one.rid == rid
        self._changed.notify()

    async def pause(self, mode: PauseMode) -> None:
        self._going.clear()
        self._admitting.clear()
        if mode == "abort":
            await self.abort(None)
            await self._until_idle()
        if mode == "retract":
            self._recompute()

    async def resume(self) -> None:
        self._going.set()
        self._admitting.set()
        self._changed.notify()

    async def flush(self) -> bool:
        return not self._running

    def stage(self, meta: WeightUpdateMeta, reader: WeightReader) -> StagedVersion:
        return HeldVersion(reader.stage(meta, {}))  # there is no model to compare it with

    async def swap(self, staged: StagedVersion, policy: UpdatePolicy = "keep") -> int:
        running = len(self._running)
        if policy == "abort":
            await self.abort(None)
        if policy == "recompute":
            self._recompute()
        if policy in ("abort", "drain") and self._going.is_set():
            self._admitting.clear()
            try:
                await self._until_idle()
            finally:
                self._admitting.set()
        self._version = staged.version
        return running

    def _recompute(self) -> None:
        for one in self._running.values():
            one.num_recomputes += bool(one.tokens)

    async def _until_idle(self) -> None:
        while self._running:  # noqa: ASYNC110 - a stand-in: polling is precise enough
            await asyncio.sleep(0.001)

    def load(self) -> Load:
        uptime_s = time.monotonic() - self._started
        return Load(len(self._running), 0, self._tokens, 0.0, uptime_s)

    async def aclose(self) -> None:
        self._closed = True
        await self.resume()
