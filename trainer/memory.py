"""Estimate of one rank's GPU memory, from the model's configuration, before any weight is loaded."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from headway.contracts.config.model import TrainedModelConfig
from headway.contracts.config.trainer import TrainerConfig
from headway.runtime.memory_plan import MemoryPlan
from trainer.algorithms.logprobs import (
    CHUNK_TOKENS,
    GPU_CHUNK_TOKENS,
    GPU_VOCABULARY_TILE,
    VOCABULARY_TILE,
)
from trainer.backends.loading import build_without_parameters
from trainer.backends.sharding import compute_dtype
from trainer.topology import Topology
from weight_sync.model_size import ModelSize, adapter_parameters, model_size

log = logging.getLogger(__name__)

ADVICE = (
    "use more ranks or a larger trainer.shard_size, trainer.cpu_offload, trainer.compute_dtype=bfloat16, "
    "model.lora, or model.gradient_checkpointing and a smaller trainer.max_tokens_per_mb"
)
FLOAT32 = 4
HEAD_TILES = 3
"""Number of float32 tiles of logits, besides those that are kept."""


@dataclass(frozen=True, slots=True)
class Planned:
    """A model that a rank will hold."""

    model: TrainedModelConfig
    is_trained: bool


def check_memory(
    planned: Mapping[str, Planned], trainer: TrainerConfig, topology: Topology
) -> None:
    """Log what this rank's GPU will hold; nothing on the CPU, which swaps, or of other backends.

    Raises:
        ConfigError: it cannot hold it.
    """
    if topology.device.type != "cuda" or trainer.backend != "fsdp2":
        return
    plan = plan_rank(planned, trainer, topology.world_size, topology.device)
    free, _ = torch.cuda.mem_get_info(topology.device)
    log.info(plan.check(f"rank {topology.rank}, {topology.device}", free, ADVICE))


def plan_rank(
    planned: Mapping[str, Planned], trainer: TrainerConfig, world_size: int, device: torch.device
) -> MemoryPlan:
    """Add up the models of one rank.

    Between passes each holds its shard: weights, and if it is trained gradients and two moments of Adam.
    One at a time is in a pass: its tables and two layers whole, and activations of a micro-batch.

    Args:
        planned: by their names.
        device: what the rank computes on.
    """
    shards = trainer.shard_size or world_size
    needed: dict[str, int] = {}
    gathered, activations = 0, 0
    for name, each in planned.items():
        bare = build_without_parameters(each.model)
        size = model_size(bare)
        held_dtype: torch.dtype = getattr(torch, each.model.dtype)
        cast = compute_dtype(trainer.compute_dtype, held_dtype, device)
        held, computed = held_dtype.itemsize, (cast or held_dtype).itemsize
        trained = _trained_parameters(each, bare, size)
        shard, trained_shard = -(-size.parameters // shards), -(-trained // shards)
        adapters = trained_shard if each.model.lora is not None else 0
        needed[f"{name} weights"] = 0 if trainer.cpu_offload else (shard + adapters) * held
        if each.is_trained and not trainer.cpu_offload:
            needed[f"{name} gradients"] = trained_shard * held
            needed[f"{name} optimizer"] = 2 * trained_shard * held
        if world_size > 1 or cast is not None or trainer.cpu_offload:
            gathered = max(gathered, gathered_bytes(size, computed, trained > 0))
        if each.is_trained:
            activations = max(
                activations,
                activation_bytes(
                    size,
                    computed,
                    trainer.max_tokens_per_mb,
                    each.model.gradient_checkpointing,
                ),
            )
    needed["gathered layers"] = gathered
    tiles = HEAD_TILES * tile_bytes(trainer.max_tokens_per_mb, device)
    wanted = {"activations": activations, "logits": trainer.kept_logits_bytes + tiles}
    return MemoryPlan(needed, wanted if activations else {})


def tile_bytes(num_tokens: int, device: torch.device) -> int:
    """Return the bytes of one tile of logits in float32, for a micro-batch of at most `num_tokens`."""
    is_cuda = device.type == "cuda"
    rows = GPU_CHUNK_TOKENS if is_cuda else CHUNK_TOKENS
    columns = GPU_VOCABULARY_TILE if is_cuda else VOCABULARY_TILE
    return min(rows, num_tokens) * columns * FLOAT32


def gathered_bytes(size: ModelSize, itemsize: int, is_trained: bool) -> int:
    """Return the bytes that FSDP holds unsharded within a pass: everything outside the layers, the
    layer that computes and the next one; in training also the gradients of one layer, and their
    float32 copy that is being reduced.
    """
    whole = (size.around + 2 * size.largest_layer) * itemsize
    sent = max(size.largest_layer, size.around) * (itemsize + FLOAT32)
    return whole + (sent if is_trained else 0)


def activation_bytes(size: ModelSize, itemsize: int, tokens: int, recomputes: bool) -> int:
    """A bound on what autograd keeps of a micro-batch, in layers of the kind of Llama and Qwen3.

    Of a token: two norms (in float32, normalised, and their results), queries, keys and values before
    and behind their norms and places, attention's output twice, and four of the feed-forward part.
    """
    norms = 2 * size.hidden * (2 * FLOAT32 + itemsize)
    heads = (4 * size.queries + 5 * size.keys) * itemsize + 3 * (size.queries + size.keys) * FLOAT32
    of_layer = norms + heads + 4 * size.intermediate * itemsize
    if not recomputes:
        return tokens * size.layers * of_layer
    return tokens * (size.layers * size.hidden * itemsize + of_layer)


def _trained_parameters(each: Planned, bare: torch.nn.Module, size: ModelSize) -> int:
    lora = each.model.lora
    if not each.is_trained:
        return 0
    return (
        size.parameters
        if lora is None
        else adapter_parameters(bare, lora.rank, lora.target_modules)
    )
