"""What the passes of a step cost: operations, padding, memory.

A `Meter` collects over a step what the engines of this rank were asked for; a `MeteredEngine` tells it,
around any train backend.
"""

from __future__ import annotations

import math
import resource
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from headway.contracts.config.metrics import MetricsConfig
from headway.contracts.config.model import TrainedModelConfig
from headway.contracts.types import FinetuneSpec, WeightUpdateMeta
from trainer.api import (
    LossFn,
    LossOutput,
    LossWeightFn,
    MicroBatchSpec,
    ModelOutput,
    PostHook,
    SaveLoadMeta,
    Scheduling,
    TrainEngine,
)
from trainer.batching.sequences import SequenceBatch
from trainer.model_cost import ModelCost, model_cost, peak_flops
from trainer.topology import Topology


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
        if self._topology.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._topology.device)

    def around(self, engine: TrainEngine, model: TrainedModelConfig) -> MeteredEngine:
        """An engine whose passes are counted here."""
        return MeteredEngine(engine, model, self)

    def add_flops(self, flops: float) -> None:
        """What a pass asked for; NaN where nobody knows."""
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
        flops, trained, passed, room = self._topology.sum(
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


class MeteredEngine:
    """A `TrainEngine` that tells a meter what passes through it."""

    def __init__(self, engine: TrainEngine, model: TrainedModelConfig, meter: Meter) -> None:
        self._engine = engine
        self._model = model
        self._meter = meter

    def initialize(self, addr: str | None, ft_spec: FinetuneSpec | None) -> None:
        self._engine.initialize(addr, ft_spec)

    def get_scheduling_config(self) -> Scheduling:
        return self._engine.get_scheduling_config()

    def train_batch(
        self,
        input_: SequenceBatch,
        mb_spec: MicroBatchSpec,
        loss_fn: LossFn,
        loss_weight_fn: LossWeightFn,
    ) -> dict[str, float]:
        sizes: list[int] = []

        def counted(output: ModelOutput, batch: SequenceBatch) -> LossOutput:
            sizes.append(batch.num_tokens)
            return loss_fn(output, batch)

        figures = self._engine.train_batch(input_, mb_spec, counted, loss_weight_fn)
        room = len(sizes) * mb_spec.max_tokens_per_mb
        self._meter.add_training(input_.num_tokens, sum(sizes), room)
        self._meter.add_flops(self._flops(ModelCost.training_flops, input_.lengths))
        return figures

    def eval_batch(
        self,
        input_: SequenceBatch,
        mb_spec: MicroBatchSpec,
        loss_fn: LossFn,
        loss_weight_fn: LossWeightFn,
    ) -> Tensor | None:
        self._meter.add_flops(self._flops(ModelCost.forward_flops, input_.lengths))
        return self._engine.eval_batch(input_, mb_spec, loss_fn, loss_weight_fn)

    def forward(
        self,
        input_: SequenceBatch,
        mb_spec: MicroBatchSpec,
        output_seqlens: list[int] | None = None,
        post_hook: PostHook | None = None,
        aggregate_fn: Callable[[list[Tensor]], Any] = torch.cat,
    ) -> Any:
        self._meter.add_flops(self._flops(ModelCost.forward_flops, input_.lengths))
        return self._engine.forward(input_, mb_spec, output_seqlens, post_hook, aggregate_fn)

    def without_adapters(self) -> AbstractContextManager[None]:
        return self._engine.without_adapters()

    def move_towards(self, source: TrainEngine, eta: float) -> None:
        bare = source._engine if isinstance(source, MeteredEngine) else source
        self._engine.move_towards(bare, eta)

    def upload_weights(self, meta: WeightUpdateMeta | None) -> None:
        self._engine.upload_weights(meta)

    def step_lr_scheduler(self) -> None:
        self._engine.step_lr_scheduler()

    def save(self, meta: SaveLoadMeta) -> Future[None]:
        return self._engine.save(meta)

    def load(self, meta: SaveLoadMeta) -> None:
        self._engine.load(meta)

    def destroy(self) -> None:
        self._engine.destroy()

    def _flops(
        self, ask: Callable[[ModelCost, Sequence[int]], float], lengths: Sequence[int]
    ) -> float:
        return math.nan if self._cost is None else ask(self._cost, lengths)

    @cached_property
    def _cost(self) -> ModelCost | None:
        return model_cost(self._model)
