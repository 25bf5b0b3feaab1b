"""Decode steps as graphs: on a GPU, launching a layer's kernels one by one takes longer than they do.

A graph reads and writes the memory that it was recorded with. So it is recorded for a batch size, its
inputs are copied to where they were then, smaller batches are filled up, weights are swapped by copying
them into place, and all graphs are dropped when weights, keys or values get other memory.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from inference_server.backends.embedded.device import Device, Graph, packed_places
from inference_server.backends.embedded.paged_attention import PagedInputs, padded

log = logging.getLogger(__name__)

LARGEST = 256
"""Rows of the largest graph: in larger batches the kernels take longer than their launches."""
TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""Largest difference between a replay and the launches it stands for, in parts of the largest logit."""


def graph_size(num_rows: int) -> int:
    """Rows of the graph for a batch: 1, 2, 4, then multiples of 8."""
    return next((size for size in (1, 2, 4) if num_rows <= size), -(-num_rows // 8) * 8)


@dataclass(frozen=True, slots=True)
class _Recorded:
    graph: Graph
    memory: Tensor
    """Memory of the inputs."""
    inputs: PagedInputs
    """Views of `memory`."""


class DecodeGraphs:
    """One graph per batch size, recorded when it is first wanted."""

    def __init__(self, device: Device, forward: Callable[[PagedInputs], Tensor]) -> None:
        """
        Args:
            forward: logits [n, V] of a decode step, from inputs on the device.
        """
        self._device = device
        self._forward = forward
        self._recorded: dict[int, _Recorded] = {}
        self._is_usable = True

    def run(self, inputs: PagedInputs, tokens: Tensor | None) -> tuple[Tensor, PagedInputs] | None:
        """Logits [n, V] of a decode step, and its inputs on the device with more rows; valid until the
        next one. None where there is no graph for it.

        Args:
            inputs: on the host, with a block table of full width.
            tokens: [n] on the device, instead of the ids.
        """
        num_rows = len(inputs.ids)
        if not self._is_usable or num_rows > LARGEST:
            return None
        size = graph_size(num_rows)
        filled = padded(inputs, size)
        recorded = self._recorded.get(size)
        if recorded is None:
            recorded = self._record(filled, tokens)
            if recorded is None:
                return None
            self._recorded[size] = recorded
        else:
            self._device.send(filled.tensors, recorded.memory)
            recorded.inputs.take(tokens)
            recorded.graph.replay()
        return recorded.graph.output[:num_rows], recorded.inputs

    def forget(self) -> None:
        """Drop all graphs, to be recorded again: memory that they use is released."""
        self._recorded.clear()

    def _record(self, filled: PagedInputs, tokens: Tensor | None) -> _Recorded | None:
        """A graph of this step, replayed once; None if there cannot be one, now and later."""
        _, size = packed_places(filled.tensors)
        memory = torch.zeros(size, dtype=torch.uint8, device=self._device.where)
        inputs = PagedInputs(*self._device.send(filled.tensors, memory))
        inputs.take(tokens)
        launched = self._forward(inputs)  # kernels are loaded and chosen now, not while recording
        self._device.synchronize()
        try:
            other = next((each.graph for each in self._recorded.values()), None)
            graph = self._device.capture(lambda: self._forward(inputs), other)
        except RuntimeError as error:
            log.warning("decode steps run without CUDA graphs: %s", error)
            graph = None
        if graph is None:
            self._is_usable = False
            return None
        graph.replay()
        if not self._is_same(graph.output, launched):
            log.warning("decode steps run without CUDA graphs: a replay gave other logits")
            self._is_usable = False
            return None
        return _Recorded(graph, memory, inputs)

    def _is_same(self, replayed: Tensor, launched: Tensor) -> bool:
        bound = TOLERANCE.get(launched.dtype, 1e-3)
        one, two = (tensor.float().nan_to_num(0.0, 0.0, 0.0) for tensor in (replayed, launched))
        off = (one - two).abs().amax() - bound * two.abs().amax()
        return self._device.fetch([off.reshape(1)])()[0].item() <= 0.0
