"""What `headway engine check` runs: the suite of all backends on an engine that runs already."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from transformers import AutoModelForCausalLM

from headway.contracts.config.model import ModelConfig
from headway.contracts.config.server import SGLangConfig, VLLMConfig
from headway.contracts.errors import ServiceError
from headway.contracts.types import LLMRequest, LLMResponse
from inference_server.backends.base import GenerationBackend
from inference_server.backends.sglang.backend import SGLangBackend
from inference_server.backends.vllm.backend import VLLMBackend
from inference_server.testing import GenerationBackendContract
from weight_sync.model_dir import MAKING_MODELS

FACTOR = 0.9
"""Factor on the weights of a version that samples differently."""
NUM_REQUESTS = 8
NUM_TOKENS = 32


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine that runs."""

    kind: str
    """sglang or vllm"""
    url: str
    model: Path
    tolerance: float | None
    """Mean error of the logprobs; None goes by the weights' type."""


class TestEngine(GenerationBackendContract):
    engine: ClassVar[Engine]
    timeout_s = 600.0

    def save_model(self, folder: Path) -> None:
        """Take the engine's own."""
        folder.symlink_to(self.engine.model)

    def make_backend(self, model: ModelConfig, version: int) -> GenerationBackend:
        """Attach."""
        if self.engine.kind == "sglang":
            return SGLangBackend(SGLangConfig(url=self.engine.url), model, version)
        return VLLMBackend(VLLMConfig(url=self.engine.url), model, version)

    @classmethod
    def teardown_class(cls) -> None:
        """Give the engine its first weights again."""
        with suppress(ServiceError):  # it is gone; a test has said so
            cls().swap_in(1.0)
        super().teardown_class()

    def swap_in(self, factor: float) -> None:
        """Let the engine serve its first weights times a factor, as the next version."""

        async def work() -> None:
            staged = await self.served.stage(self.served.publish(factor))
            await self.served.backend.swap(staged, "abort")

        self.served.run(work())

    @pytest.mark.parametrize("factor", [1.0, FACTOR], ids=["first", "next"])
    def test_logprobs_are_those_of_the_version(
        self, factor: float, record_property: Callable[[str, object], None]
    ) -> None:
        self.swap_in(factor)
        vocabulary = min(self.served.backend.limits.vocab_size, 1000)
        prompts = [
            tuple((7 * i + 11 * j) % (vocabulary - 2) + 2 for j in range(6 + i))
            for i in range(NUM_REQUESTS)
        ]
        asked = [self.served.request(NUM_TOKENS, prompt) for prompt in prompts]
        responses = [self.served.run(self.served.backend.generate(one)) for one in asked]
        model, dtype = load_scaled(self.engine.model, factor)
        errors = torch.cat(
            [errors_of(model, one, made) for one, made in zip(asked, responses, strict=True)]
        )
        mean, largest = errors.mean().item(), errors.max().item()
        figures = f"{len(errors)} logprobs, error {mean:.1e}, at most {largest:.1e}"
        record_property("remark", figures)
        tolerance = self.engine.tolerance or (1e-3 if dtype == torch.float32 else 0.03)
        assert mean <= tolerance, f"{figures}; wanted {tolerance:g} in the mean"


def load_scaled(folder: Path, factor: float) -> tuple[torch.nn.Module, torch.dtype]:
    """Return a model's weights times a factor, in float32, and the type that they are stored in."""
    with MAKING_MODELS:
        model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, dtype="auto")
    stored: torch.dtype = model.dtype
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(factor)
    return model.float().eval(), stored


@torch.no_grad()
def errors_of(model: torch.nn.Module, asked: LLMRequest, response: LLMResponse) -> torch.Tensor:
    """Differences between an engine's logprobs and transformers'. Shape: (tokens,)."""
    tokens = torch.tensor([[*asked.input_ids, *response.output_tokens]])
    logits = model(input_ids=tokens).logits[0, len(asked.input_ids) - 1 : -1].double()
    sampled = torch.tensor(response.output_tokens)[:, None]
    expected = torch.log_softmax(logits, dim=-1).gather(1, sampled)[:, 0]
    return (torch.tensor(response.output_logprobs, dtype=torch.float64) - expected).abs()
