"""Generators for tests of the rollout service: what they answer is decided by the test."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Self

import numpy as np

from headway.contracts.config.server import UpdatePolicy
from headway.contracts.errors import BackendError
from headway.contracts.http.servers import ServerStatus
from headway.contracts.sampling_mask import SamplingMask
from headway.contracts.types import LLMRequest, LLMResponse, PolicyVersion, WeightUpdateMeta
from tests.unit.gateway.rollout_builders import make_response

Answer = Callable[[LLMRequest, int], Awaitable[list[int]]]
"""(request, attempt of this request) -> tokens."""


async def at_once(req: LLMRequest, attempt: int) -> list[int]:
    return [7]


async def never(req: LLMRequest, attempt: int) -> list[int]:
    await asyncio.Event().wait()
    raise AssertionError


def fails(times: int, error: Callable[[str], Exception] = BackendError) -> Answer:
    """Each request fails so many times before it is answered."""

    async def answer(req: LLMRequest, attempt: int) -> list[int]:
        if attempt <= times:
            raise error(f"attempt {attempt} failed")
        return [7]

    return answer


class ScriptedGenerator:
    """`Generator` that samples what its script says, at the version that was last committed."""

    def __init__(self, answer: Answer = at_once, version: PolicyVersion = 0) -> None:
        self.answer = answer
        self.version = version
        self.swapping_from: PolicyVersion | None = None
        self.kept: PolicyVersion | None = None
        """Sampled by those who ask for it, whatever serves."""
        self.publishing: asyncio.Event | None = None
        """Publications wait for it."""
        self.begun: list[PolicyVersion] = []
        self.given_up: list[PolicyVersion] = []
        self.servers: list[ServerStatus] = []
        self.updates_in_flight = 0
        self.generated_tokens = 0
        self.attempts: Counter[str] = Counter()
        self.playing: set[str] = set()
        self.most_playing = 0
        self.stamps_late = False
        """Tokens carry the version that serves when they are sampled, not when they were asked for."""
        self.reports_masks = True
        """A request for a sampling mask is told that no other token could be drawn."""

    @property
    def weights(self) -> Self:
        return self

    @property
    def sampled_version(self) -> PolicyVersion:
        return self.version if self.swapping_from is None else self.swapping_from

    @property
    def head(self) -> PolicyVersion:
        return self.version

    def has(self, version: PolicyVersion) -> bool:
        return version in (self.version, self.kept)

    def statuses(self) -> list[ServerStatus]:
        return self.servers

    async def agenerate(self, req: LLMRequest) -> LLMResponse:
        self.attempts[req.rid] += 1
        self.playing.add(req.rid)
        self.most_playing = max(self.most_playing, len(self.playing))
        version = self.version if req.version is None else req.version
        try:
            tokens = await self.answer(req, self.attempts[req.rid])
            response = make_response(req, tokens, self.version if self.stamps_late else version)
            if not (req.sampling_mask and self.reports_masks):
                return response
            mask = SamplingMask.of([np.array([token], np.int32) for token in tokens])
            return response.model_copy(update={"sampling_mask": mask})
        finally:
            self.playing.discard(req.rid)

    async def update_weights(
        self, meta: WeightUpdateMeta, policy: UpdatePolicy | None = None
    ) -> PolicyVersion:
        self.begun.append(meta.version)
        try:
            if self.publishing is not None:
                await self.publishing.wait()
        except asyncio.CancelledError:
            self.given_up.append(meta.version)
            raise
        self.version = meta.version
        return meta.version

    async def cancel_update(self, version: PolicyVersion) -> None:
        pass

    async def aclose(self) -> None:
        pass
