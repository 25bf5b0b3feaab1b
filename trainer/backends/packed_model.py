"""A transformers model as the engine runs it: packed sequences in, a task on its output.

Sequences are packed end to end with their position ids. Where the model allows it, attention runs per
sequence (`packed_attention`); elsewhere transformers builds a block-causal mask from the position
ids, but only when no cache is asked for, hence `use_cache=False` in every forward.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from transformers.modeling_layers import GradientCheckpointingLayer

from headway.contracts.config.model import TrainedModelConfig
from trainer.api import ModelOutput
from trainer.backends.fused_layers import fuse_layers
from trainer.backends.heads import LanguageOutput, LogitsOutput, ValueOutput
from trainer.backends.loading import SCORE
from trainer.backends.packed_attention import (
    NAME,
    UNCOMPILED_NAME,
    PackedLayout,
    can_pack,
    register,
    register_uncompiled,
)
from trainer.backends.router_replay import RouterReplay
from trainer.batching.sequences import SequenceBatch
from trainer.transfer import to_device
from weight_sync.model_size import decoder_layers

log = logging.getLogger(__name__)

T = TypeVar("T")

COMPILER = "inductor"
MAX_VARIANTS = 64
"""Number of times that a block's code may be compiled: with and without gradients, for the hidden size of
each model of the process. At PyTorch's default of 8, a fourth model runs without, and nothing says so."""
MARK = 1000.0
"""Larger than any cap of logits."""
ROUNDINGS = 64
"""Roundings of the largest value by which two equal computations may differ."""


class PackedModel(torch.nn.Module):
    """Body and head of a model."""

    def __init__(self, model: Any, config: TrainedModelConfig, kept_logits_bytes: int = 0) -> None:
        super().__init__()
        self.model = model
        """Model as transformers built it, with its parameter names."""
        self._is_packed = config.attn_implementation == "sdpa" and can_pack(model)
        if self._is_packed:
            register()
            model.set_attn_implementation(NAME)
        self._is_language = config.head == "lm"
        self._kept_logits_bytes = kept_logits_bytes
        # No dropout: proximal and current logprobs must differ by the update only.
        self.eval()
        self._is_plain = True
        self._replay: RouterReplay | None = None
        if config.gradient_checkpointing:
            _recompute_activations(model)

    def forward(self, task: Callable[[ModelOutput], T], batch: SequenceBatch) -> T:
        """Run a task on the output for packed sequences.

        The task is part of the forward so that FSDP holds the head's parameters whole for it, and
        watches what it returns: tensors, or a tuple or dict of them.
        """
        inputs = self._inputs(batch)
        if self._replay is not None:
            self._replay.begin(batch.routed_experts)
        if not self._is_plain:
            return task(LogitsOutput(self.model(**inputs).logits[0], batch))
        hidden = self.model.base_model(**inputs).last_hidden_state[0]
        if self._is_language:
            return task(LanguageOutput(hidden, self._head, batch, self._kept_logits_bytes))
        return task(ValueOutput(hidden, cast(torch.nn.Linear, self._head)))

    @torch.no_grad()
    def try_head(self, device: torch.device) -> None:
        """Learn whether logits are what one matrix makes of the body's output, by trying: some models
        scale or cap them, each in its own words. Collective, once parameters have their values.

        The head is made to give marks, so that no rounding and no small logit can hide or feign a change:
        the marks come out to the bit, and went in as the body's output.
        """
        if not self._is_language:
            return
        head = self._head
        seen: list[tuple[Tensor, Tensor]] = []

        def give_marks(_: torch.nn.Module, inputs: tuple[Tensor, ...], logits: Tensor) -> Tensor:
            marks = torch.linspace(-MARK, MARK, logits.numel(), device=device)
            seen.append((inputs[0], marks.to(logits.dtype).view_as(logits)))
            return seen[0][1]

        size, vocabulary = 4, len(next(head.parameters()))
        probe = SequenceBatch((size,), {"input_ids": torch.arange(size) % vocabulary}).to(device)
        hidden = self(lambda output: cast(LanguageOutput, output).hidden, probe)
        self._is_plain = False
        handle = head.register_forward_hook(give_marks)
        try:
            logits = self(lambda output: output.logits(), probe)
        finally:
            handle.remove()
        self._is_plain = (
            isinstance(head, torch.nn.Linear)
            and len(seen) == 1
            and torch.equal(logits, seen[0][1].view_as(logits).to(logits.dtype))
            and _is_close(seen[0][0].view_as(hidden), hidden)
        )
        if not self._is_plain:
            log.info("this model changes what its head gives; whole logits are computed")

    def replay_experts(self) -> None:
        """Have tokens go to the experts that batches name."""
        self._replay = RouterReplay(self.model)

    def fuse_layers(self) -> None:
        """Have layers compute in fewer passes over memory, where that is known to be the same; before
        they are sharded."""
        if self._is_packed:
            fuse_layers(self.decoder_layers)

    def compile_layers(self) -> None:
        """Compile the repeated blocks, but neither what hooks and wraps them nor their attention."""
        if self._is_packed:
            register_uncompiled()
            self.model.set_attn_implementation(UNCOMPILED_NAME)
        for layer in self.decoder_layers:
            if getattr(layer, "gradient_checkpointing", False):
                # Its `forward` decides on recomputing; what it recomputes is compiled.
                recomputed: Any = layer
                recomputed._gradient_checkpointing_func = _compiling(
                    recomputed._gradient_checkpointing_func
                )
            else:
                layer.forward = _compiled(layer.forward)

    @property
    def decoder_layers(self) -> list[torch.nn.Module]:
        """The repeated blocks, which are the units of sharding."""
        return decoder_layers(self)

    @property
    def _head(self) -> torch.nn.Module:
        if self._is_language:
            return self.model.get_output_embeddings()
        return self.model.get_submodule(SCORE)

    def _inputs(self, batch: SequenceBatch) -> dict[str, Any]:
        device = batch["input_ids"].device
        inputs = {
            "input_ids": batch["input_ids"][None],
            "position_ids": to_device(batch.position_ids, device)[None],
            "use_cache": False,
        }
        if self._is_packed:
            inputs["packed_layout"] = PackedLayout(batch.lengths, device)
        return inputs


def _is_close(one: Tensor, other: Tensor) -> bool:
    """True if the outputs are equal except for the order of sums."""
    bound = ROUNDINGS * torch.finfo(other.dtype).eps * float(other.abs().max())
    return float((one - other).abs().max()) <= bound


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    options: dict[str, Any] = {"dynamic": True, "recompile_limit": MAX_VARIANTS}
    return torch.compile(function, backend=COMPILER, **options)


def _compiling(checkpoint: Callable[..., Any]) -> Callable[..., Any]:
    """A checkpoint of transformers whose block is compiled."""
    known: dict[Callable[..., Any], Callable[..., Any]] = {}

    def run(block: partial[Any], *args: Any) -> Any:
        compiled = known.setdefault(block.func, _compiled(block.func))
        return checkpoint(partial(compiled, *block.args, **block.keywords), *args)

    return run


def _recompute_activations(model: Any) -> None:
    """Checkpoint every decoder layer of a model in evaluation mode."""
    # transformers 5 renamed the method on its way.
    enable = getattr(model, "activation_checkpointing_enable", None)
    (enable or model.gradient_checkpointing_enable)({"use_reentrant": False})
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            # It recomputes only in training mode; the modules in it stay without dropout.
            module.training = True
