"""The forward of one step over a cache: from the scheduler's lists to logits on the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from inference_server.backends.embedded.adapter_bank import AdapterBank
from inference_server.backends.embedded.attention import Step, StepTokens
from inference_server.backends.embedded.decode_graphs import DecodeGraphs
from inference_server.backends.embedded.device import Device, VarlenAttention
from inference_server.backends.embedded.paged_attention import (
    PagedInputs,
    PagedStep,
    paged_inputs,
)
from inference_server.backends.embedded.paged_cache import PagedCache
from inference_server.backends.embedded.slab_attention import SlabStep
from inference_server.backends.embedded.slab_decode import SlabDecodeStep, decode_order

Forward = Callable[[Tensor, Tensor, Tensor, Step], Tensor]
"""Ids [T], positions [T], places [w] whose logits are wanted, step -> logits [w, V]."""


class StepRunner(Protocol):
    """Computes steps."""

    places: list[int] | None
    """Where each token of the last step was in its forward; None where they were in their order."""

    def run(self, tokens: StepTokens, drawn: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """One forward.

        Args:
            drawn: [T] in place of the ids where only the device knows them yet.
        Returns:
            Logits [w, V], uniforms and targets, on the device; valid until the next step.
        """

    def forget(self) -> None:
        """Weights, or keys and values, get other memory."""


class SlabRunner:
    """Steps over slabs."""

    def __init__(
        self, forward: Forward, num_kv_heads: int, device: Device, adapters: AdapterBank
    ) -> None:
        self._forward = forward
        self._adapters = adapters
        self._num_kv_heads = num_kv_heads
        self._where = device.where
        self._is_host = device.is_host
        self.places: list[int] | None = None

    def run(self, tokens: StepTokens, drawn: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """As in `StepRunner`."""
        where = self._where
        order = decode_order(tokens.spans) if self._is_host and drawn is None else None
        step: Step
        if order is None:
            self.places = None
            self._adapters.begin(tokens.spans)
            step = SlabStep(tokens.spans, self._num_kv_heads, where)
        else:
            self.places = places = sorted(range(len(order)), key=order.__getitem__)
            tokens = replace(
                tokens,
                ids=[tokens.ids[at] for at in order],
                positions=[tokens.positions[at] for at in order],
                wanted=[places[at] for at in tokens.wanted],
                spans=[tokens.spans[at] for at in order],
            )
            self._adapters.begin(tokens.spans)
            step = SlabDecodeStep(tokens.spans)
        logits = self._forward(
            torch.tensor(tokens.ids, device=where) if drawn is None else drawn,
            torch.tensor(tokens.positions, device=where),
            torch.tensor(tokens.wanted, dtype=torch.long, device=where),
            step,
        )
        return (
            logits,
            torch.tensor(tokens.uniforms, dtype=torch.float32, device=where),
            torch.tensor(tokens.targets, dtype=torch.long, device=where),
        )

    def forget(self) -> None:
        """Nothing is remembered."""


class PagedRunner:
    """Steps over a pool of blocks: one copy to the device, and a graph for steps that only decode."""

    def __init__(
        self,
        forward: Forward,
        cache: PagedCache,
        attention: VarlenAttention,
        device: Device,
        adapters: AdapterBank,
        has_graphs: bool,
    ) -> None:
        self._adapters = adapters
        self._forward = forward
        self._cache = cache
        self._attention = attention
        self._device = device
        self._graphs = DecodeGraphs(device, self._decode) if has_graphs else None
        self.places: list[int] | None = None

    def run(self, tokens: StepTokens, drawn: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """See `StepRunner`."""
        spans = tokens.spans
        self._adapters.begin(spans)
        rows = len(tokens.ids)
        is_decode = rows == len(spans) == len(tokens.wanted) == len(tokens.uniforms)
        is_decode = is_decode and not tokens.targets and not self._adapters.is_active
        if is_decode and self._graphs is not None:
            host = paged_inputs(tokens, width=self._cache.max_blocks)
            done = self._graphs.run(host, drawn)
            if done is not None:
                logits, inputs = done
                return logits, inputs.uniforms[:rows], inputs.targets
        inputs = PagedInputs(*self._device.send(paged_inputs(tokens).tensors))
        inputs.take(drawn)
        max_q = max(span.end - span.start for span in spans)
        max_k = max(span.end for span in spans)
        return self._logits(inputs, max_q, max_k), inputs.uniforms, inputs.targets

    def forget(self) -> None:
        """Graphs use the memory that they were recorded with."""
        if self._graphs is not None:
            self._graphs.forget()

    def _decode(self, inputs: PagedInputs) -> Tensor:
        return self._logits(inputs, 1, self._cache.max_context)

    def _logits(self, inputs: PagedInputs, max_q: int, max_k: int) -> Tensor:
        step = PagedStep(self._cache.store, inputs, self._attention, max_q, max_k)
        return self._forward(inputs.ids, inputs.positions, inputs.wanted, step)
