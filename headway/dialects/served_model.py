"""What a dialect asks of the model behind it: that of one server, or of a gateway's whole fleet."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from fastapi import Request

from headway.contracts.engines import OnDelta
from headway.contracts.errors import BackendError
from headway.contracts.http.generation import PauseMode
from headway.contracts.types import LLMDelta, LLMRequest, LLMResponse, PolicyVersion
from headway.runtime.tasks import cancel_and_wait
from headway.text.tokenizer import TextTokenizer

Part = LLMDelta | LLMResponse
ROUTING_KEY_HEADER = "x-smg-routing-key"
"""SGLang's router's."""
MAX_KEY = 256


@dataclass(frozen=True, slots=True)
class ServedLoad:
    """Current load, summed over the servers."""

    running: int
    """Sequences being decoded."""
    queued: int
    """Sequences that wait."""
    generated_tokens: int
    """Tokens sampled since the start."""
    busy_s: float
    """Seconds with work since the start."""
    kv_tokens: int = 0
    """Tokens whose keys and values are held."""
    kv_capacity_tokens: int = 0
    """Tokens whose keys and values fit; 0 if not known."""
    kv_usage: float = 0.0
    """Share of the key-value cache that running sequences hold; 0 if not known."""


class ServedModel(Protocol):
    """One model under one URL."""

    @property
    def tokenizer(self) -> TextTokenizer | None:
        """None: only token ids are understood."""

    @property
    def model_name(self) -> str:
        """Name by which clients of several models address this one."""

    @property
    def model_paths(self) -> tuple[str, ...]:
        """Directories by which they may address it too."""

    @property
    def adapter_versions(self) -> Mapping[str, PolicyVersion]:
        """Version of each loaded adapter, by name."""

    @property
    def max_adapters(self) -> int:
        """Maximum number of adapters that can be loaded; 0 if none can."""

    @property
    def version(self) -> PolicyVersion:
        """Version that samples the next token."""

    @property
    def max_context(self) -> int | None:
        """Tokens per sequence, prompt included; None while that is not known."""

    @property
    def is_paused(self) -> bool: ...

    @property
    def is_ready(self) -> bool:
        """True if requests are served."""

    def load(self) -> ServedLoad: ...

    async def agenerate(self, req: LLMRequest, on_delta: OnDelta | None = None) -> LLMResponse:
        """Generate one sequence; cancelling the call frees what it holds."""

    async def abort(self, rid: str | None) -> None:
        """End the request of this id, or all, with the tokens so far; an unknown id is no error."""

    async def pause(self, mode: PauseMode) -> None:
        """Stop decoding; new requests wait."""

    async def resume(self) -> None:
        """Go on; no effect if it is not paused."""

    async def flush(self) -> bool:
        """Drop shared prefixes; false if sequences were running, and nothing was dropped."""


def served_model(request: Request) -> ServedModel:
    """The model behind an app (`app.state.served_model`)."""
    model: ServedModel = request.app.state.served_model
    return model


def routing_key(request: Request) -> str | None:
    """Return the key that routers send: requests of one key are best served by one server."""
    key = request.headers.get(ROUTING_KEY_HEADER)
    return key[:MAX_KEY] if key else None


def room_after(model: ServedModel, num_tokens: int) -> int:
    """Return the tokens that the context has left behind a prompt.

    Raises:
        BackendError: no server has said how much it holds.
    """
    if model.max_context is None:
        raise BackendError(
            "no generation server has reported its context yet; send the maximum number of new tokens"
        )
    return max(0, model.max_context - num_tokens)


async def all_of(model: ServedModel, requests: Sequence[LLMRequest]) -> list[LLMResponse]:
    """The responses of requests that run together; if one fails, the others end too."""
    if len(requests) == 1:
        return [await model.agenerate(requests[0])]
    tasks = [asyncio.create_task(model.agenerate(each)) for each in requests]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await cancel_and_wait(tasks)


async def stream_of(model: ServedModel, req: LLMRequest) -> AsyncGenerator[Part]:
    """The deltas of a request as they come, then its response; leaving early cancels it."""
    parts: asyncio.Queue[LLMDelta | None] = asyncio.Queue()
    work = asyncio.ensure_future(model.agenerate(req, parts.put_nowait))
    work.add_done_callback(lambda _: parts.put_nowait(None))
    try:
        while (part := await parts.get()) is not None:
            yield part
        yield await work
    finally:
        work.cancel()


async def merged(
    model: ServedModel, requests: Sequence[LLMRequest]
) -> AsyncGenerator[tuple[int, Part]]:
    """The deltas and responses of requests that run together, as they come, with their places."""
    queue: asyncio.Queue[tuple[int, LLMDelta | None]] = asyncio.Queue()

    def came(index: int, delta: LLMDelta) -> None:
        queue.put_nowait((index, delta))

    def ended(index: int, _: asyncio.Task[LLMResponse]) -> None:
        queue.put_nowait((index, None))

    tasks = [
        asyncio.create_task(model.agenerate(request, partial(came, index)))
        for index, request in enumerate(requests)
    ]
    for index, task in enumerate(tasks):
        task.add_done_callback(partial(ended, index))
    left = len(tasks)
    try:
        while left:
            index, part = await queue.get()
            if part is None:
                left -= 1
                yield index, await tasks[index]
            else:
                yield index, part
    finally:
        await cancel_and_wait(tasks)
