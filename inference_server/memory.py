"""Estimate of a generation server's GPU memory, from the model's configuration, before it is loaded."""

from __future__ import annotations

import logging

import torch

from headway.contracts.config.server import EmbeddedTorchConfig, ServerConfig
from headway.runtime.memory_plan import MemoryPlan
from inference_server.default_dtype import settled_model
from weight_sync.device import choose_device
from weight_sync.model_dir import model_without_weights
from weight_sync.model_size import ModelSize, model_size

log = logging.getLogger(__name__)

ADVICE = (
    "use model.dtype=bfloat16, a smaller backend.kv_cache_bytes, backend.max_context or "
    "backend.max_prefill_tokens, or an engine that spreads a model over GPUs (backend.type: sglang)"
)
FLOAT32 = 4
SAMPLING_COPIES = 3
"""Number of float32 copies of the logits: scaled, sorted or masked, and as probabilities."""


def check_memory(config: ServerConfig) -> None:
    """Log what the server's GPU will hold; nothing on the CPU, and for engines, which plan themselves.

    Raises:
        ConfigError: it cannot hold it; or there is no device as configured.
    """
    backend = config.backend
    if not isinstance(backend, EmbeddedTorchConfig):
        return
    device = choose_device(backend.device)
    if device.type != "cuda":
        return
    itemsize = getattr(torch, settled_model(config).dtype).itemsize
    plan = plan_server(model_size(model_without_weights(config.model)), itemsize, backend)
    free, _ = torch.cuda.mem_get_info(device)
    log.info(plan.check(str(device), free, ADVICE))


def plan_server(size: ModelSize, itemsize: int, backend: EmbeddedTorchConfig) -> MemoryPlan:
    """Add up weights, keys and values, and what a step and a swap take.

    Without `kv_cache_bytes` the cache takes a share of what is free, at least one sequence. A second copy
    of the weights exists from the staging of a version until it serves; if it does not fit, a swap copies
    through the host's memory.

    Args:
        itemsize: bytes of a weight.
    """
    weights = size.parameters * itemsize
    context = min(backend.max_context or size.max_context, size.max_context)
    one_sequence = context * size.kv_width * itemsize
    cache = backend.kv_cache_bytes or one_sequence
    logits = backend.max_sequences * size.vocabulary * (itemsize + SAMPLING_COPIES * FLOAT32)
    of_token = 4 * size.hidden + 3 * size.queries + 4 * size.keys + 3 * size.intermediate
    step = logits + (backend.max_prefill_tokens + backend.max_sequences) * of_token * itemsize
    return MemoryPlan(
        {"weights": weights, "KV cache": cache, "step": step},
        {"second copy for a swap": weights},
    )
