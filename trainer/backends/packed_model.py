"""A transformers model as the engine runs it: packed sequences in, a task on its output.

Sequences are packed end to end with their position ids. Where the model allows it, attention runs per
sequence (`packed_attention`); elsewhere transformers builds a block-causal mask from the position
ids, but only when no cache is asked for, hence `use_cache=False` in every forward.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from transformers.modeling_layers import GradientCheckpointingLayer

from headway.contracts.config.model import TrainedModelConfig
from trainer.api import ModelOutput
from trainer.backends.heads import LanguageOutput, LogitsOutput, ValueOutput
from trainer.backends.loading import SCORE
from trainer.backends.packed_attention import NAME, PackedLayout, can_pack, register
from trainer.batching.sequences import SequenceBatch

log = logging.getLogger(__name__)

T = TypeVar("T")


class PackedModel(torch.nn.Module):
    """Body and head of a model."""

    def __init__(self, model: Any, config: TrainedModelConfig, kept_logits_bytes: int = 0) -> None:
        super().__init__()
        self.model = model
        """What transformers made, with its names of the parameters."""
        self._is_packed = config.attn_implementation == "sdpa" and can_pack(model)
        if self._is_packed:
            register()
            model.set_attn_implementation(NAME)
        self._is_language = config.head == "lm"
        self._kept_logits_bytes = kept_logits_bytes
        # No dropout: proximal and current logprobs must differ by the update only.
        self.eval()
        self._is_plain = True
        if config.gradient_checkpointing:
            _recompute_activations(model)

    def forward(self, task: Callable[[ModelOutput], T], batch: SequenceBatch) -> T:
        """Run a task on the output for packed sequences.

        The task is part of the forward so that FSDP holds the head's parameters whole for it, and
        watches what it returns: tensors, or a tuple or dict of them.
        """
        inputs = self._inputs(batch)
        if not self._is_plain:
            return task(LogitsOutput(self.model(**inputs).logits[0]))
        hidden = self.model.base_model(**inputs).last_hidden_state[0]
        if self._is_language:
            return task(LanguageOutput(hidden, self._head, self._kept_logits_bytes))
        return task(ValueOutput(hidden, self._head))

    @torch.no_grad()
    def try_head(self, device: torch.device) -> None:
        """Learn whether logits are what the head makes of the body's output, by trying: some models
        scale or cap them, each in its own words. Collective, once parameters have their values."""
        if not self._is_language:
            return
        size, vocabulary = 4, len(next(self._head.parameters()))
        probe = SequenceBatch((size,), {"input_ids": torch.arange(size) % vocabulary}).to(device)
        plain = self(lambda output: output.logits(), probe)
        self._is_plain = False
        self._is_plain = torch.equal(plain, self(lambda output: output.logits(), probe))
        if not self._is_plain:
            log.info("this model changes what its head gives; whole logits are computed")

    @property
    def decoder_layers(self) -> list[torch.nn.Module]:
        """The repeated blocks, which are the units of sharding."""
        stacks = [list(m) for m in self.modules() if isinstance(m, torch.nn.ModuleList)]
        return max(stacks, key=len, default=[])

    @property
    def _head(self) -> torch.nn.Module:
        if self._is_language:
            return self.model.get_output_embeddings()
        return self.model.get_submodule(SCORE)

    def _inputs(self, batch: SequenceBatch) -> dict[str, Any]:
        device = batch["input_ids"].device
        inputs = {
            "input_ids": batch["input_ids"][None],
            "position_ids": batch.position_ids[None].to(device),
            "use_cache": False,
        }
        if self._is_packed:
            inputs["packed_layout"] = PackedLayout.of(batch.lengths, device)
        return inputs


def _recompute_activations(model: Any) -> None:
    """Checkpoint every decoder layer of a model in evaluation mode."""
    # transformers 5 renamed the method on its way.
    enable = getattr(model, "activation_checkpointing_enable", None)
    (enable or model.gradient_checkpointing_enable)({"use_reentrant": False})
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            # It recomputes only in training mode; the modules in it stay without dropout.
            module.training = True
