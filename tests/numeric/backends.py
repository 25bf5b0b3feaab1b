"""Embedded backends on tiny models, requests for them, and waiting on them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headway.contracts.config.model import ModelConfig
from headway.contracts.config.sampling import SamplingConfig
from headway.contracts.config.server import EmbeddedTorchConfig
from headway.contracts.types import LLMRequest
from inference_server.backends.embedded_torch import EmbeddedTorchBackend
from tests.numeric.models import CONTEXT, VOCAB_SIZE, load_reference
from weight_sync.channel import StagedWeights

PATIENCE_S = 30.0


def make_backend(folder: Path, *, attn: str = "sdpa", **config: Any) -> EmbeddedTorchBackend:
    """A backend that was not started."""
    options = EmbeddedTorchConfig(**({"max_sequences": 3, "max_context": CONTEXT} | config))
    return EmbeddedTorchBackend(
        options, ModelConfig(path=str(folder), attn_implementation=attn), version=0
    )


@asynccontextmanager
async def serving(folder: Path, **config: Any) -> AsyncIterator[EmbeddedTorchBackend]:
    """A backend that decodes, closed at the end."""
    backend = make_backend(folder, **config)
    backend.start()
    try:
        yield backend
    finally:
        await asyncio.to_thread(backend.close)


def request(name: str, prompt: list[int], **gconfig: Any) -> LLMRequest:
    """A request that runs past the end of sequence unless told otherwise."""
    options = {"ignore_eos": True, "max_new_tokens": 20} | gconfig
    return LLMRequest(rid=name, input_ids=tuple(prompt), gconfig=SamplingConfig(**options))


def prompt_of(length: int, seed: int) -> list[int]:
    """A random prompt."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, VOCAB_SIZE, (length,), generator=generator).tolist()


async def until(condition: Callable[[], bool]) -> None:
    """Poll a counter of the engine thread, which wakes nobody, until a condition holds."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        await asyncio.sleep(0.001)


def stage(version: int, folder: Path) -> StagedWeights:
    """The weights of a model directory as a proven version."""
    tensors: dict[str, Tensor] = {
        name: p.detach().clone() for name, p in load_reference(folder).named_parameters()
    }
    return StagedWeights(version, "0" * 64, tensors)


def stage_value(version: int, folder: Path, value: float) -> StagedWeights:
    """A version whose every weight is `value`."""
    tensors = stage(version, folder).tensors
    return StagedWeights(
        version, "0" * 64, {name: torch.full_like(t, value) for name, t in tensors.items()}
    )
