"""The embedded torch backend in a trainer's process: between `wake` and `sleep` it generates with the
trainer's weights, and otherwise holds nothing."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from headway.contracts.config.model import ModelConfig
from headway.contracts.config.server import EmbeddedTorchConfig
from headway.contracts.types import PolicyVersion
from headway.text.tokenizer import TextTokenizer
from inference_server.backends.embedded.backend import EmbeddedTorchBackend
from weight_sync.manifest import Adapter
from weight_sync.weight_transfer import GeneratorWeights, Keep, TransferredTensor


class HybridTorchBackend(EmbeddedTorchBackend):
    """`RolloutBackend` of a trainer, on this machine's CPU or one GPU."""

    def __init__(self, config: EmbeddedTorchConfig, model: ModelConfig) -> None:
        has_tokenizer = (Path(model.path) / "tokenizer.json").is_file()
        tokenizer = TextTokenizer(model.path) if has_tokenizer else None
        super().__init__(config, model, 0, tokenizer, without_weights=True)
        self._weights = GeneratorWeights(self.expected, self.device)

    @property
    def kept(self) -> frozenset[str]:
        return self._weights.kept

    @property
    def own_bytes(self) -> int:
        return self._weights.own_bytes

    def wake(
        self, version: PolicyVersion, parts: Iterable[TransferredTensor], adapter: Adapter | None
    ) -> None:
        self.take_weights(version, self._weights.take(parts, adapter), adapter)

    def sleep(self, keep: Keep) -> None:
        self.drop_weights()
        self._weights.release(keep)

    async def aclose(self) -> None:
        await super().aclose()
        self._weights.release("nothing")
