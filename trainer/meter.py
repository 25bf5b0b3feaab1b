"""Cost of the passes of a step: operations, padding, memory.

A `Meter` sums up a step's calls of this rank's engines; a `MeteredEngine` reports them,
around any train backend.
"""

from __future__ import annotations

import math
import resource
import threading
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from headway.contracts.config.metrics import MetricsConfig
from headway.contracts.config.model import TrainedModelConfig
from headway.contracts.config.trainer import TokenNormalizeScope
from trainer.api import (
    LossFn,
    LossOutput,
    LossWeightFn,
    MicroBatchSpec,
    ModelOutput,
    PostHook,
    TrainEngine,
)
from trainer.batching.sequences import SequenceBatch
from trainer.model_cost import ModelCost, model_cost, peak_flops
from trainer.topology import Topology
from trainer.wrapper import EngineWrapper


class Meter:
    """Counts of this rank since `begin`."""

    def __init__(self, config: MetricsConfig, topology: Topology) -> None:
        self._topology = topology
        self._lock = threading.Lock()  # engines may run side by side
        self._peak = peak_flops(config.peak_tflops, topology.device)
        self.begin()

    def begin(self) -> None:
        """A step, from nothing: what was asked for before it is of no step."""
        self._flops = 0.0
        self._tokens = self._passed = self._room = 0
        if self._topology.device.type == "cuda" and torch.cuda.is_initialized():
            torch.cuda.reset_peak_memory_stats(self._topology.device)

    def around(self, engine: TrainEngine, model: TrainedModelConfig) -> MeteredEngine:
        """An engine whose passes are counted here."""
        return MeteredEngine(engine, model, self)

    def add_flops(self, flops: float) -> None:
        """Add the operations of a pass; NaN if they are not known."""
        with self._lock:
            self._flops += flops

    def add_training(self, tokens: int, passed: int, room: int) -> None:
        """Tokens that were to be trained on, those that passed, and those that would have fitted."""
        with self._lock:
            self._tokens += tokens
            self._passed += passed
            self._room += room

    def take(
        self, tokens: int, wait_s: float, train_s: float, publish_s: float
    ) -> dict[str, float | None]:
        """The speed of the step that ends here, over all ranks; collective.

        Args:
            tokens: of the step, on all ranks.
            wait_s, train_s, publish_s: this rank's seconds.
        Returns:
            They, and `idle_share`, `train_tokens_per_s` (and `…_per_rank`), `mfu` (None without a known
            device or model), `padding_share`, `micro_batch_fill`, `peak_memory_bytes`.
        """
        flops, trained, passed, room = self._topology.data_parallel.sum(
            [self._flops, float(self._tokens), float(self._passed), float(self._room)]
        )
        (memory,) = self._topology.maxima([float(self._peak_memory())])
        train_s, world = max(train_s, 1e-9), self._topology.world_size
        speed = flops / train_s / world
        mfu = None if self._peak is None or math.isnan(speed) else speed / self._peak
        return {
            "wait_s": wait_s,
            "train_s": train_s,
            "publish_s": publish_s,
            "idle_share": wait_s / (wait_s + train_s + publish_s),
            "train_tokens_per_s": tokens / train_s,
            "train_tokens_per_s_per_rank": tokens / train_s / world,
            "mfu": mfu,
            "padding_share": 1.0 - trained / max(passed, 1.0),
            "micro_batch_fill": trained / max(room, 1.0),
            "peak_memory_bytes": memory,
        }

    def _peak_memory(self) -> int:
        """Bytes: of the GPU since `begin`; of the process since its start without one."""
        if self._topology.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._topology.device)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class MeteredEngine(EngineWrapper[TrainEngine]):
    """A `TrainEngine` that reports its calls to a meter."""

    def __init__(self, engine: TrainEngine, model: TrainedModelConfig, meter: Meter) -> None:
        super().__init__(engine)
        self._model = model
        self._meter = meter

    def train_batch(
        self,
        input_: SequenceBatch,
        mb_spec: MicroBatchSpec,
        loss_fn: LossFn,
        loss_weight_fn: LossWeightFn,
        token_normalize_scope: TokenNormalizeScope = "global",
    ) -> dict[str, float]:
        sizes: list[int] = []

        def counted(output: ModelOutput, batch: SequenceBatch) -> LossOutput:
            sizes.append(batch.num_tokens)
            return loss_fn(output, batch)

        metrics = super().train_batch(
            input_, mb_spec, counted, loss_weight_fn, token_normalize_scope
        )
        room = len(sizes) * mb_spec.max_tokens_per_mb
        self._meter.add_training(input_.num_tokens, sum(sizes), room)
        self._meter.add_flops(self._flops(ModelCost.training_flops, input_.lengths))
        return metrics

    def eval_batch(
        self,
        input_: SequenceBatch,
        mb_spec: MicroBatchSpec,
        loss_fn: LossFn,
        loss_weight_fn: LossWeightFn,
        token_normalize_scope: TokenNormalizeScope = "global",
    ) -> Tensor | None:
        self._meter.add_flops(self._flops(ModelCost.forward_flops, input_.lengths))
        return super().eval_batch(input_, mb_spec, loss_fn, loss_weight_fn, token_normalize_scope)

    def forward(
        self,
        input_: SequenceBatch,
        mb_spec: MicroBatchSpec,
        output_seqlens: list[int] | None = None,
        post_hook: PostHook | None = None,
        aggregate_fn: Callable[[list[Tensor]], Any] = torch.cat,
    ) -> Any:
        self._meter.add_flops(self._flops(ModelCost.forward_flops, input_.lengths))
        return super().forward(input_, mb_spec, output_seqlens, post_hook, aggregate_fn)

    def _flops(
        self, ask: Callable[[ModelCost, Sequence[int]], float], lengths: Sequence[int]
    ) -> float:
        return math.nan if self._cost is None else ask(self._cost, lengths)

    @cached_property
    def _cost(self) -> ModelCost | None:
        return model_cost(self._model)
