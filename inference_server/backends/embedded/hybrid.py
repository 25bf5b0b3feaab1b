"""The embedded torch backend in a trainer's process: between `wake` and `sleep` it generates with the
trainer's weights, and otherwise holds nothing."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from headway.contracts.config.model import ModelConfig
from headway.contracts.config.server import EmbeddedTorchConfig
from headway.contracts.types import LLMRequest, LLMResponse, PolicyVersion
from headway.text.tokenizer import TextTokenizer
from inference_server.backends.base import Load
from inference_server.backends.embedded.backend import EmbeddedTorchBackend
from weight_sync.manifest import Adapter
from weight_sync.weight_transfer import GeneratorWeights, Keep, TransferredTensor


class HybridTorchBackend:
    """`RolloutBackend` of a trainer, on this machine's CPU or one GPU."""

    def __init__(self, config: EmbeddedTorchConfig, model: ModelConfig) -> None:
        has_tokenizer = (Path(model.path) / "tokenizer.json").is_file()
        tokenizer = TextTokenizer(model.path) if has_tokenizer else None
        self._engine = EmbeddedTorchBackend(config, model, 0, tokenizer, without_weights=True)
        self._weights = GeneratorWeights(self._engine.expected, self._engine.device)

    @property
    def kept(self) -> frozenset[str]:
        return self._weights.kept

    @property
    def own_bytes(self) -> int:
        return self._weights.own_bytes

    async def start(self) -> None:
        await self._engine.start()

    async def generate(self, req: LLMRequest) -> LLMResponse:
        return await self._engine.generate(req)

    def wake(
        self, version: PolicyVersion, parts: Iterable[TransferredTensor], adapter: Adapter | None
    ) -> None:
        self._engine.wake(version, self._weights.take(parts, adapter), adapter)

    def sleep(self, keep: Keep) -> None:
        self._engine.sleep()
        self._weights.release(keep)

    def load(self) -> Load:
        """Counters, also of keys and values that are held."""
        return self._engine.load()

    async def aclose(self) -> None:
        await self._engine.aclose()
        self._weights.release("nothing")
