"""The forward of one step over a cache: from the scheduler's lists to logits on the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from inference_server.backends.embedded.adapter_bank import AdapterBank
from inference_server.backends.embedded.attention import Span, Step
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

    def run(
        self,
        ids: Sequence[int],
        positions: Sequence[int],
        wanted: Sequence[int],
        spans: Sequence[Span],
        uniforms: Sequence[float],
        targets: Sequence[int],
        tokens: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """One forward.

        Args:
            ids, positions: [T] the tokens of the step, and where each stands in its sequence.
            wanted: places in the step whose logits are returned.
            spans: where the tokens are in the cache, in the order of the step.
            uniforms: [m] points at which tokens will be drawn.
            targets: [S] tokens that the first logits are to score.
            tokens: [T] in place of `ids` where only the device knows them yet.
        Returns:
            Logits [len(wanted), V], uniforms and targets, on the device; valid until the next step.
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

    def run(
        self,
        ids: Sequence[int],
        positions: Sequence[int],
        wanted: Sequence[int],
        spans: Sequence[Span],
        uniforms: Sequence[float],
        targets: Sequence[int],
        tokens: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """As in `StepRunner`."""
        where = self._where
        order = decode_order(spans) if self._is_host and tokens is None else None
        step: Step
        if order is None:
            self.places = None
            self._adapters.begin(spans)
            step = SlabStep(spans, self._num_kv_heads, where)
        else:
            self._adapters.begin([spans[at] for at in order])
            step = SlabDecodeStep([spans[at] for at in order])
            ids, positions = [ids[at] for at in order], [positions[at] for at in order]
            places = sorted(range(len(order)), key=order.__getitem__)
            wanted = [places[at] for at in wanted]
            self.places = places
        logits = self._forward(
            torch.tensor(ids, device=where) if tokens is None else tokens,
            torch.tensor(positions, device=where),
            torch.tensor(wanted, dtype=torch.long, device=where),
            step,
        )
        return (
            logits,
            torch.tensor(uniforms, dtype=torch.float32, device=where),
            torch.tensor(targets, dtype=torch.long, device=where),
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

    def run(
        self,
        ids: Sequence[int],
        positions: Sequence[int],
        wanted: Sequence[int],
        spans: Sequence[Span],
        uniforms: Sequence[float],
        targets: Sequence[int],
        tokens: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `StepRunner`."""
        self._adapters.begin(spans)
        is_decode = len(ids) == len(spans) == len(wanted) == len(uniforms) and not targets
        if is_decode and self._graphs is not None and not self._adapters.is_active:
            width = self._cache.max_blocks
            host = paged_inputs(ids, positions, wanted, spans, uniforms, targets, width)
            done = self._graphs.run(host, tokens)
            if done is not None:
                logits, inputs = done
                return logits, inputs.uniforms[: len(ids)], inputs.targets
        host = paged_inputs(ids, positions, wanted, spans, uniforms, targets)
        inputs = PagedInputs(*self._device.send(host.tensors))
        inputs.take(tokens)
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
