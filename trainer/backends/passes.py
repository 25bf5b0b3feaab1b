"""Passes of a model over the micro-batches of a batch, and the metrics of all ranks that come of them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from headway.contracts.config.trainer import TokenNormalizeScope
from trainer.api import LossFn, LossWeightFn, MicroBatchSpec, ModelOutput
from trainer.backends.gradients import sum_of_squares
from trainer.backends.loss_scale import LossScale
from trainer.backends.packed_model import PackedModel
from trainer.backends.sharding import Sharding
from trainer.batching.packing import pack_by_tokens
from trainer.batching.sequences import SequenceBatch
from trainer.topology import Topology
from trainer.transfer import to_device

SQUARES = "grad_squares"
"""Among sums of metrics: of the gradient's elements."""


class LossPasses:
    """Runs losses on one model; every rank has to call."""

    def __init__(
        self,
        model: PackedModel,
        sharding: Sharding,
        topology: Topology,
        loss_scale: LossScale | None,
    ) -> None:
        self._model = model
        self._sharding = sharding
        self._topology = topology
        self._loss_scale = loss_scale

    def run(
        self,
        input_: SequenceBatch,
        mb_spec: MicroBatchSpec,
        loss_fn: LossFn,
        loss_weight_fn: LossWeightFn,
        scope: TokenNormalizeScope,
        is_training: bool,
    ) -> dict[str, float]:
        """Loss and metrics as means over the weight that `scope` names, or the largest (`…_max`);
        gradients of exactly that mean, and their norm `grad_norm`. It waits for the device once."""
        total_weight = self._total_weight(loss_weight_fn(input_), scope)
        # FSDP divides the sum over all ranks, replicas included, by their number.
        scale = self._topology.world_size / max(total_weight, 1e-9)
        if self._loss_scale is not None:
            scale *= self._loss_scale.value
        # On the device: a micro-batch does not wait for the last one's.
        sums: dict[str, Tensor] = {}
        largest: dict[str, Tensor] = {}
        bins = bins_of(input_, mb_spec)
        num_passes = self._topology.max(len(bins))
        for number, (_, on_host) in enumerate(self.micro_batches(input_, bins)):
            # Ranks with fewer bins repeat one at weight 0, so that all take part in FSDP's collectives.
            weight = loss_weight_fn(on_host) if number < len(bins) else 0.0
            loss, stats = self._losses(loss_fn, on_host.to(self._topology.device))
            if is_training:
                self._sharding.before_backward(self._model, is_last=number == num_passes - 1)
                (loss * (weight * scale)).backward()
            for name, value in {"loss": loss, **stats}.items():
                precise = value.detach().double()
                if name.endswith("_max"):
                    largest[name] = torch.maximum(largest.get(name, precise), precise)
                else:
                    sums[name] = sums.get(name, 0.0) + precise * weight
        if scope == "dp":  # each rank's own mean; the sum of its shares is that over all ranks
            sums = {name: value / max(total_weight, 1e-9) for name, value in sums.items()}
            total_weight = 1.0
        if is_training:
            squares = sum_of_squares(self._model.parameters())
            sums[SQUARES] = to_device(squares, self._topology.device)  # they may be offloaded
        return self._metrics(sums, largest, total_weight)

    def _total_weight(self, own: float, scope: TokenNormalizeScope) -> float:
        """Return what the weights of this rank are divided by; collective."""
        ranks = self._topology.data_parallel
        return own * ranks.world_size if scope == "dp" else ranks.sum([own])[0]

    def _metrics(
        self, sums: Mapping[str, Tensor], largest: Mapping[str, Tensor], total_weight: float
    ) -> dict[str, float]:
        """Reduce this rank's metrics to those of all ranks; collective."""
        summed, compared = sorted(sums), sorted(largest)
        tensors = [*(sums[name] for name in summed), *(largest[name] for name in compared)]
        values = torch.stack(tensors).tolist() if tensors else []
        totals = dict(
            zip(summed, self._topology.data_parallel.sum(values[: len(sums)]), strict=True)
        )
        squares = totals.pop(SQUARES, None)
        metrics = {name: total / max(total_weight, 1e-9) for name, total in totals.items()}
        if compared:
            maxima = self._topology.maxima(values[len(sums) :])
            metrics |= dict(zip(compared, maxima, strict=True))
        if squares is not None:
            metrics["grad_norm"] = math.sqrt(squares / self._sharding.num_copies)
        return metrics

    def _losses(
        self, loss_fn: LossFn, micro_batch: SequenceBatch
    ) -> tuple[Tensor, dict[str, Tensor]]:
        def task(output: ModelOutput) -> tuple[Tensor, dict[str, Tensor]]:
            result = loss_fn(output, micro_batch)
            return result.loss, result.stats

        losses: tuple[Tensor, dict[str, Tensor]] = self._model(task, micro_batch)
        return losses

    def micro_batches(
        self, input_: SequenceBatch, bins: list[list[int]]
    ) -> Iterator[tuple[list[int], SequenceBatch]]:
        """The bins of this rank, padded with repeats to the largest number of any rank."""
        for number in range(self._topology.max(len(bins))):
            indices = bins[min(number, len(bins) - 1)]
            micro_batch = input_.select(indices)
            yield indices, replace(micro_batch, is_repeat=number >= len(bins))


def bins_of(input_: SequenceBatch, mb_spec: MicroBatchSpec) -> list[list[int]]:
    """Return the sequences of each micro-batch, by their places in the batch."""
    limit, count = mb_spec.max_tokens_per_mb, mb_spec.n_mbs
    return pack_by_tokens(input_.lengths, limit, count, mb_spec.granularity)
