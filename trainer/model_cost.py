"""Floating-point operations that a model asks for, and those that a device does at best."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from headway.contracts.config.model import TrainedModelConfig
from weight_sync.checkpoint import expert_counts
from weight_sync.model_dir import MAKING_MODELS

PEAK_TFLOPS = {
    "GB200": 2500.0,
    "B200": 2250.0,
    "H200": 989.4,
    "H100 NVL": 835.0,
    "H100 PCIe": 756.0,
    "H100": 989.4,
    "H800": 989.4,
    "H20": 148.0,
    "A100": 312.0,
    "A800": 312.0,
    "L40S": 362.0,
    "L4": 121.0,
}
"""Dense bfloat16 by part of the device's name, from the makers' data sheets; the longest that fits."""


@dataclass(frozen=True, slots=True)
class ModelCost:
    """Operations per token of a dense decoder."""

    parameters: int
    """N: those that tokens are multiplied with: all but the tables that are read only."""
    attention: int
    """L·H·Q: layers · heads · size of a head."""
    is_whole: bool = True
    """True if all parameters get gradients, not adapters alone."""

    def forward_flops(self, lengths: Sequence[int]) -> float:
        """Return the operations of a forward pass: (2·N + 4·L·H·Q·T) per token of a sequence of T
        tokens.
        """
        return 2.0 * self.parameters * sum(lengths) + self._attention_flops(lengths)

    def training_flops(self, lengths: Sequence[int]) -> float:
        """Return the operations of forward and backward pass: (6·N + 12·L·H·Q·T) per token.

        Frozen parameters have no gradient: 4·N. Nothing is counted for activations that are computed
        again, nor taken off for the half of the scores that a causal mask leaves out.

        Source: PaLM (arXiv:2204.02311) appendix B.
        """
        products = 6.0 if self.is_whole else 4.0
        return products * self.parameters * sum(lengths) + 3.0 * self._attention_flops(lengths)

    def _attention_flops(self, lengths: Sequence[int]) -> float:
        return 4.0 * self.attention * sum(length**2 for length in lengths)


def model_cost(config: TrainedModelConfig) -> ModelCost | None:
    """Return the cost according to the directory's config.json; None for mixtures of experts, whose
    tokens use only some of the parameters.
    """
    whole = AutoConfig.from_pretrained(config.path, local_files_only=True)
    text = whole.get_text_config()
    if expert_counts(config.path) is not None:
        return None
    with MAKING_MODELS, torch.device("meta"):
        model = AutoModelForCausalLM.from_config(whole)
    head = model.get_output_embeddings().weight
    tables = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding)} - {
        id(head)
    }
    parameters = sum(p.numel() for p in model.parameters() if id(p) not in tables)
    if config.head == "value":
        parameters -= head.numel()
    heads = text.num_attention_heads
    head_size = getattr(text, "head_dim", None) or text.hidden_size // heads
    attention = text.num_hidden_layers * heads * head_size
    return ModelCost(parameters, attention, is_whole=config.lora is None)


def peak_flops(peak_tflops: float | None, device: torch.device) -> float | None:
    """Operations per second of one device; None if not known.

    Args:
        peak_tflops: as configured; wins over the table.
    """
    if peak_tflops is None and device.type == "cuda":
        peak_tflops = tflops_of(torch.cuda.get_device_name(device))
    return None if peak_tflops is None else peak_tflops * 1e12


def tflops_of(device_name: str) -> float | None:
    """Look the device up in the table."""
    fitting = [part for part in PEAK_TFLOPS if part in device_name]
    return PEAK_TFLOPS[max(fitting, key=len)] if fitting else None
