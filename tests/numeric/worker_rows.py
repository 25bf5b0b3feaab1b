"""Batches for workers, what workers make of them, and workers for tests of groups."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from headway.contracts.config.critic import CriticConfig, ValueModelConfig
from headway.contracts.config.model import TrainedModelConfig
from headway.contracts.config.trainer import TrainerConfig
from headway.contracts.config.workers import GenerationConfig, WorkerRewardConfig, WorkersConfig
from tests.numeric.engines import OPTIMIZER, TOTAL_STEPS, WIDE
from tests.numeric.models import VOCAB_SIZE
from trainer.workers.data_proto import DataProto
from trainer.workers.padding import sequence_columns

PROMPT, RESPONSE = 6, 9
TEMPERATURE = 0.8


def workers_config(
    folder: Path, *, shard_size: int | None = None, **sections: Any
) -> WorkersConfig:
    """Of a tiny model, with micro-batches of a few rows."""
    options = {"total_steps": TOTAL_STEPS, "max_tokens_per_mb": 31, "num_threads": 1}
    defaults: dict[str, Any] = {
        "model": TrainedModelConfig(path=str(folder)),
        "optimizer": OPTIMIZER,
        "trainer": TrainerConfig(**options, shard_size=shard_size),
        "algorithm": WIDE,
        "critic": CriticConfig(optimizer=OPTIMIZER, normalization="exponential"),
        "reward": WorkerRewardConfig(model=ValueModelConfig(path=str(folder), seed=3)),
        "generation": GenerationConfig(engine="forward"),
    }
    return WorkersConfig(**(defaults | sections))


def random_rows(size: int, seed: int = 0, temperature: float = TEMPERATURE) -> DataProto:
    """Prompts of 1 to 6 and responses of 0 to 9 tokens, some of them out of the loss."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> Tensor:
        return torch.randint(low, high + 1, (size, 1), generator=generator)

    def noise() -> Tensor:
        return torch.randn(size, RESPONSE, generator=generator)

    prompts = torch.randint(VOCAB_SIZE, (size, PROMPT), generator=generator)
    responses = torch.randint(VOCAB_SIZE, (size, RESPONSE), generator=generator)
    prompt_mask = torch.arange(PROMPT) >= PROMPT - draw(1, PROMPT)
    sampled = torch.arange(RESPONSE) < draw(0, RESPONSE)
    columns = sequence_columns(prompts, prompt_mask, responses, sampled)
    columns["response_mask"] &= torch.rand(size, RESPONSE, generator=generator) < 0.8
    behaviour = -4 * torch.rand(size, RESPONSE, generator=generator)
    columns |= {
        "rollout_log_probs": behaviour,
        "old_log_probs": behaviour + 0.3 * noise(),
        "advantages": noise(),
        "returns": 2 * noise() + 1,
    }
    return DataProto.of(
        {"temperature": temperature}, **columns, uid=[f"row-{n}" for n in range(size)]
    )


def content_of(batch: DataProto) -> list[tuple[Any, ...]]:
    """Every byte of a batch."""
    columns = [
        (name, str(t.dtype), tuple(t.shape), t.contiguous().numpy().tobytes())
        for name, t in batch.tensors.items()
    ]
    objects = [(name, tuple(column.tolist())) for name, column in batch.objects.items()]
    return [*columns, *objects, tuple(batch.meta.items()), batch.num_padding]


def stored_weights(folder: Path) -> dict[str, Tensor]:
    """Of a directory that was exported."""
    weights: dict[str, Tensor] = {}
    for file in folder.glob("*.safetensors"):
        weights |= load_file(file)
    return weights
