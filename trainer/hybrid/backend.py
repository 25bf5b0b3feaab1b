"""Backends that generate with the trainer's parameters, by name: this package knows them by their
protocol alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from headway.contracts.config.hybrid import HybridConfig
from headway.contracts.config.model import Device, ModelConfig
from headway.contracts.registry import Registry
from headway.contracts.types import LLMRequest, LLMResponse, PolicyVersion
from weight_sync.manifest import Adapter
from weight_sync.weight_transfer import Keep, TransferredTensor


class RolloutBackend(Protocol):
    """Generation over weights that it is given for a while; asleep until then.

    Used by one thread. Asynchronous calls come on one event loop, the others between them.
    """

    @property
    def kept(self) -> frozenset[str]:
        """Parameters that it holds from before: they need not be transferred again."""

    @property
    def own_bytes(self) -> int:
        """Memory of weights besides the trainer's."""

    async def start(self) -> None:
        """Make ready; it goes on sleeping."""

    async def generate(self, req: LLMRequest) -> LLMResponse:
        """Generate one sequence; cancelling the call frees what it holds.

        Raises:
            RequestTooLong, DataError: what this model can never serve.
            BackendError: the backend failed or is closed.
        """

    def wake(
        self, version: PolicyVersion, parts: Iterable[TransferredTensor], adapter: Adapter | None
    ) -> None:
        """Take over all weights that are not `kept`, and generate with them as this version. Nothing is
        left of what former weights computed.

        Args:
            parts: each a tensor that is shared, or there until the next one is asked for. Asking is a
                collective of all ranks.
            adapter: of what comes as A and B; None if all is the model's own.
        Raises:
            SyncError: they are not those of the model; it sleeps on.
        """

    def sleep(self, keep: Keep) -> None:
        """End what runs, and let go of keys and values, of what was shared, and of copies but those to
        `keep`; also from the middle of what `wake` did not end."""

    async def aclose(self) -> None:
        """Stop; what is running fails with `BackendError`."""


BACKENDS: Registry[Callable[..., RolloutBackend]] = Registry(
    "hybrid backend",
    {"embedded_torch": "inference_server.backends.embedded.hybrid:HybridTorchBackend"},
)
"""Factories called with (backend config, model config)."""


def make_backend(
    config: HybridConfig, model: ModelConfig, device: Device = "auto"
) -> RolloutBackend:
    """Build the backend that `config.backend.type` names, without weights.

    Args:
        model: the one that is trained.
        device: the kind that it is trained on.
    """
    generating = ModelConfig(path=model.path, dtype=config.dtype or model.dtype)
    backend = config.backend.model_copy(update={"device": device})
    return BACKENDS.get(config.backend.type)(backend, generating)
