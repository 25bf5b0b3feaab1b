"""Embedded backends on tiny models, requests for them, and waiting on them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headway.contracts.config.model import ModelConfig
from headway.contracts.config.sampling import SamplingConfig
from headway.contracts.config.server import EmbeddedTorchConfig
from headway.contracts.types import LLMDelta, LLMRequest, LLMResponse
from headway.text.tokenizer import TextTokenizer
from inference_server.backends.embedded.backend import EmbeddedTorchBackend
from inference_server.backends.embedded.device import Device
from tests.numeric.models import VOCAB_SIZE, load_reference
from weight_sync.channel import StagedWeights
from weight_sync.checkpoint_names import CheckpointNames

DEADLINE_S = 30.0
KV_BYTES = 1 << 24
"""Ample for tiny models: not what happens to be free on the machine."""


def make_backend(
    folder: Path, *, dtype: str = "float32", device: Device | None = None, **config: Any
) -> EmbeddedTorchBackend:
    """A backend that was not started, with the directory's tokenizer if it has one."""
    options = EmbeddedTorchConfig(**({"max_sequences": 3, "kv_cache_bytes": KV_BYTES} | config))
    tokenizer = TextTokenizer(str(folder)) if (folder / "tokenizer.json").is_file() else None
    return EmbeddedTorchBackend(
        options,
        ModelConfig(path=str(folder), dtype=dtype),
        version=0,
        tokenizer=tokenizer,
        device=device,
    )


@asynccontextmanager
async def serving(folder: Path, **config: Any) -> AsyncIterator[EmbeddedTorchBackend]:
    """A backend that decodes, closed at the end."""
    backend = make_backend(folder, **config)
    await backend.start()
    try:
        yield backend
    finally:
        await backend.aclose()


def request(
    name: str,
    prompt: list[int],
    *,
    top_logprobs: int = 0,
    logprob_start: int | None = None,
    **gconfig: Any,
) -> LLMRequest:
    """A request that runs past the end of sequence unless told otherwise."""
    options = {"ignore_eos": True, "max_new_tokens": 20} | gconfig
    return LLMRequest(
        rid=name,
        input_ids=tuple(prompt),
        gconfig=SamplingConfig(**options),
        top_logprobs=top_logprobs,
        logprob_start=logprob_start,
    )


async def generate_all(
    backend: EmbeddedTorchBackend, requests: Iterable[LLMRequest]
) -> list[LLMResponse]:
    """All of them at once."""
    calls = (backend.generate(r) for r in requests)
    return await asyncio.wait_for(asyncio.gather(*calls), DEADLINE_S)


class Heard:
    """The deltas of one request, and an event for every count of tokens."""

    def __init__(self) -> None:
        self.deltas: list[LLMDelta] = []
        self._changed = asyncio.Event()

    def __call__(self, delta: LLMDelta) -> None:
        self.deltas.append(delta)
        self._changed.set()

    @property
    def tokens(self) -> list[int]:
        """All tokens so far."""
        return [token for delta in self.deltas for token in delta.output_tokens]

    async def until(self, count: int) -> None:
        """Wait for this many tokens."""
        async with asyncio.timeout(DEADLINE_S):
            while len(self.tokens) < count:
                self._changed.clear()
                await self._changed.wait()


class Call:
    """A request that was sent: its task and what it has brought so far."""

    def __init__(self, backend: EmbeddedTorchBackend, asked: LLMRequest) -> None:
        self.asked = asked
        self.heard = Heard()
        self.task = asyncio.create_task(backend.generate(asked, self.heard))

    @property
    def prompt(self) -> list[int]:
        """Its tokens."""
        return list(self.asked.input_ids)

    async def response(self) -> LLMResponse:
        """What it ended with."""
        return await asyncio.wait_for(self.task, DEADLINE_S)


def errors(got: Iterable[float], expected: Tensor) -> Tensor:
    """Absolute differences, in float64."""
    return (torch.tensor(list(got), dtype=torch.float64) - expected.double()).abs()


def prompt_of(length: int, seed: int) -> list[int]:
    """A random prompt."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, VOCAB_SIZE, (length,), generator=generator).tolist()


def stage(version: int, folder: Path) -> StagedWeights:
    """The weights of a model directory as a verified version."""
    model = load_reference(folder)
    weights = CheckpointNames(model).split(model.named_parameters())
    tensors = {name: weight.detach().clone() for name, weight in weights}
    return StagedWeights(version, "0" * 64, tensors)


def stage_value(version: int, folder: Path, value: float) -> StagedWeights:
    """A version whose every weight is `value`."""
    tensors = stage(version, folder).tensors
    return StagedWeights(
        version, "0" * 64, {name: torch.full_like(t, value) for name, t in tensors.items()}
    )
