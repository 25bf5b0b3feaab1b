"""What one generation backend does; chosen by `backend.type`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from headway.contracts.registry import Registry
from headway.contracts.types import LLMRequest, LLMResponse, PolicyVersion

if TYPE_CHECKING:
    import torch

    from weight_sync.channel import StagedWeights


@dataclass(frozen=True, slots=True)
class Load:
    """What a backend is doing."""

    running: int
    """Sequences being decoded."""
    queued: int
    """Sequences that wait for a slot."""
    generated_tokens: int
    """Tokens sampled since the start."""
    busy_s: float
    """Seconds with work since the start."""
    uptime_s: float


class GenerationBackend(Protocol):
    """Continuous batching over one copy of the weights."""

    @property
    def version(self) -> PolicyVersion:
        """Version that samples the next token."""

    @property
    def parameters(self) -> Mapping[str, torch.Size]:
        """Names and shapes that a version must bring."""

    @property
    def is_alive(self) -> bool:
        """False once it failed for good; the server then ends, so that it is started again."""

    def start(self) -> None:
        """Begin to decode."""

    async def generate(self, req: LLMRequest) -> LLMResponse:
        """Generate one sequence; cancelling the call frees its slot.

        Raises:
            RequestTooLong: prompt + max_new_tokens exceed the context.
            DataError: a token id is outside of the vocabulary.
            BackendError: the backend failed or is closed.
        """

    async def swap(self, staged: StagedWeights) -> int:
        """Exchange the weights between two decode steps; the running sequences go on.

        Returns:
            Sequences that were running at that moment.
        """

    def load(self) -> Load:
        """Counters for heartbeats and metrics."""

    def close(self) -> None:
        """Stop; what is running fails with `BackendError`."""


BACKENDS: Registry[Callable[..., GenerationBackend]] = Registry(
    "generation backend",
    {
        "embedded_torch": "inference_server.backends.embedded_torch:EmbeddedTorchBackend",
        "fake": "inference_server.backends.fake:FakeBackend",
    },
    entry_point_group="headway.generation_backends",
)
"""Factories called with (backend config, model config, initial version)."""


def make_backend(config: Any, model: Any, version: PolicyVersion) -> GenerationBackend:
    """Build the backend that `config.type` names."""
    return BACKENDS.get(config.type)(config, model, version)
