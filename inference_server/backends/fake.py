"""A backend without a model: tokens are a function of the prompt, position and version.

For tests and load runs. It keeps every promise of a real one: versions per token, swaps between
tokens while sequences run, limits, cancellation.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING
from zlib import crc32

from headway.contracts.config.model import ModelConfig
from headway.contracts.config.server import FakeBackendConfig
from headway.contracts.errors import BackendError, DataError, RequestTooLong
from headway.contracts.types import LLMRequest, LLMResponse, PolicyVersion
from inference_server.backends.base import Load

if TYPE_CHECKING:
    import torch

    from weight_sync.channel import StagedWeights

LOGPROB = -1.0


class FakeBackend:
    """Samples `crc32(prompt, position, version) mod vocab_size`, always `max_new_tokens` of them."""

    def __init__(
        self, config: FakeBackendConfig, model: ModelConfig, version: PolicyVersion
    ) -> None:
        self._config = config
        self._version = version
        self._running = 0
        self._tokens = 0
        self._started = time.monotonic()
        self._closed = False

    @property
    def version(self) -> PolicyVersion:
        return self._version

    @property
    def parameters(self) -> Mapping[str, torch.Size]:
        return {}

    @property
    def is_alive(self) -> bool:
        return True

    def start(self) -> None:
        self._started = time.monotonic()

    async def generate(self, req: LLMRequest) -> LLMResponse:
        wanted = req.gconfig.max_new_tokens
        if len(req.input_ids) + wanted > self._config.max_context:
            raise RequestTooLong(
                f"{len(req.input_ids)} prompt + {wanted} new tokens exceed {self._config.max_context}"
            )
        if max(req.input_ids) >= self._config.vocab_size:
            raise DataError(f"token id {max(req.input_ids)} is outside of the vocabulary")
        arrival = time.monotonic()
        seed = crc32(repr((req.input_ids, req.gconfig.seed)).encode())
        tokens: list[int] = []
        runs: list[tuple[PolicyVersion, int, int]] = []
        self._running += 1
        try:
            for position in range(wanted):
                if self._config.token_latency_s:
                    await asyncio.sleep(self._config.token_latency_s)
                if self._closed:
                    raise BackendError("the backend was closed")
                text = f"{seed}:{position}:{self._version}"
                tokens.append(crc32(text.encode()) % self._config.vocab_size)
                start = runs.pop()[1] if runs and runs[-1][0] == self._version else position
                runs.append((self._version, start, position + 1))
                self._tokens += 1
        finally:
            self._running -= 1
        latency_s = time.monotonic() - arrival
        return LLMResponse(
            rid=req.rid,
            output_tokens=tokens,
            output_logprobs=[LOGPROB] * wanted,
            version_runs=runs,
            stop_reason="length",
            latency_s=latency_s,
            ttft_s=latency_s / wanted,
        )

    async def swap(self, staged: StagedWeights) -> int:
        self._version = staged.version
        return self._running

    def load(self) -> Load:
        uptime_s = time.monotonic() - self._started
        return Load(self._running, 0, self._tokens, 0.0, uptime_s)

    def close(self) -> None:
        self._closed = True
