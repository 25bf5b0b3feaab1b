"""`TrainEngine` on FSDP2 (`fully_shard`): gloo on CPU, NCCL on GPU; one process needs no group."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from headway.contracts.config.model import TrainedModelConfig
from headway.contracts.config.optimizer import OptimizerConfig
from headway.contracts.config.trainer import TrainerConfig
from headway.contracts.errors import ConfigError
from headway.contracts.types import FinetuneSpec, WeightUpdateMeta
from trainer.algorithms.averaging import move_towards
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
from trainer.backends.export import whole_directory, write_model
from trainer.backends.gradients import clip_gradients
from trainer.backends.loading import (
    SCORE,
    Weights,
    build_without_parameters,
    fill,
    find_trained_weights,
    load_trained_model,
)
from trainer.backends.lora import ADAPTER_FOLDER, Lora, add_lora, base_name, plain_name
from trainer.backends.packed_model import PackedModel
from trainer.backends.schedule import lr_factor
from trainer.backends.sharding import Sharding
from trainer.backends.state import TrainState
from trainer.backends.state_writer import StateWriter, completed
from trainer.backends.upload import Upload, whole
from trainer.batching.packing import pack_by_tokens
from trainer.batching.sequences import SequenceBatch
from trainer.topology import Topology
from weight_sync.channel import WeightPublisher
from weight_sync.manifest import Adapter

log = logging.getLogger(__name__)


class FSDP2Engine:
    """One model, sharded over all ranks or over rows of them."""

    def __init__(
        self,
        model: TrainedModelConfig,
        optimizer: OptimizerConfig,
        trainer: TrainerConfig,
        topology: Topology,
        publisher: WeightPublisher | None,
    ) -> None:
        self._model_config = model
        self._optimizer_config = optimizer
        self._trainer_config = trainer
        self._topology = topology
        self._publisher = publisher

    def initialize(self, addr: str | None, ft_spec: FinetuneSpec | None) -> None:
        """Load the model, each rank its shard; the group comes from torchrun, not from `addr`.

        Raises:
            ConfigError: no such model, or one that these ranks cannot hold as configured.
        """
        self._sharding = Sharding(self._trainer_config, self._topology)
        self._topology.join(alone=self._sharding.is_used)
        self._load()
        config = self._optimizer_config
        self._optimizer = torch.optim.AdamW(
            [p for p in self._model.parameters() if p.requires_grad],
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            weight_decay=config.weight_decay,
            fused=True,
        )
        factor = lr_factor(config, self._trainer_config.total_steps)
        self._scheduler = LambdaLR(self._optimizer, factor)
        model = self._model.model
        self._upload = Upload(model, self._lora, self._sharding, self._topology, self._publisher)
        self._upload.publish_base()
        self._writer = StateWriter(self._topology)

    @property
    def topology(self) -> Topology:
        """Of the ranks that every call meets on."""
        return self._topology

    @property
    def adapter(self) -> Adapter | None:
        """Of what `weights` names as an adapter's; None where all is the model's own."""
        return None if self._lora is None else self._lora.adapter

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """The parameters that there are, under the names that they had before adapters were put in; A and
        B of module m are `m.lora_A.weight` and `m.lora_B.weight`."""
        if self._model_config.head != "lm":
            raise ConfigError("a model of values has no head to generate with; set model.head=lm")
        return ((plain_name(name), p) for name, p in self._model.model.named_parameters())

    def get_scheduling_config(self) -> Scheduling:
        wanted = self._trainer_config.scheduling
        is_cuda = self._topology.device.type == "cuda"
        return Scheduling(
            cpu=wanted.cpu or self._trainer_config.num_threads or 1,
            gpu=int(is_cuda) if wanted.gpu is None else wanted.gpu,
            **wanted.model_dump(exclude={"cpu", "gpu", "nodes", "ranks_per_node"}),
        )

    def train_batch(
        self,
        input_: SequenceBatch,
        mb_spec: MicroBatchSpec,
        loss_fn: LossFn,
        loss_weight_fn: LossWeightFn,
    ) -> dict[str, float]:
        self._optimizer.zero_grad(set_to_none=True)
        with self._dropping():
            stats = self._run_losses(input_, mb_spec, loss_fn, loss_weight_fn, is_training=True)
        grad_norm = clip_gradients(
            self._model.parameters(),
            self._optimizer_config.max_grad_norm,
            self._sharding.sum_of_shards,
        )
        if math.isfinite(grad_norm):
            self._optimizer.step()
        else:
            log.warning("step skipped: the gradient is not finite", extra={"grad_norm": grad_norm})
        stats |= {
            "grad_norm": grad_norm,
            "skipped_steps": float(not math.isfinite(grad_norm)),
            "lr": float(self._scheduler.get_last_lr()[0]),
        }
        return stats

    def eval_batch(
        self,
        input_: SequenceBatch,
        mb_spec: MicroBatchSpec,
        loss_fn: LossFn,
        loss_weight_fn: LossWeightFn,
    ) -> Tensor | None:
        def each(output: ModelOutput, batch: SequenceBatch) -> LossOutput:
            loss = loss_fn(output, batch).loss
            parts = loss.unbind() if loss.ndim else ()
            return LossOutput(loss.sum(), {f"{n:04}": part for n, part in enumerate(parts)})

        with torch.no_grad():
            stats = self._run_losses(input_, mb_spec, each, loss_weight_fn, is_training=False)
        self._sharding.after_pass(self._model)
        whole_loss = stats.pop("loss")
        means = [stats[name] for name in sorted(stats)]
        return torch.tensor(means or whole_loss, dtype=torch.float64)

    def forward(
        self,
        input_: SequenceBatch,
        mb_spec: MicroBatchSpec,
        output_seqlens: list[int] | None = None,
        post_hook: PostHook | None = None,
        aggregate_fn: Callable[[list[Tensor]], Any] = torch.cat,
    ) -> Any:
        seqlens = list(input_.lengths) if output_seqlens is None else output_seqlens
        results: list[Tensor] = [torch.empty(0)] * len(input_.lengths)
        bins = _bins(input_, mb_spec)
        hook = self._whole_output if post_hook is None else post_hook
        with torch.no_grad():
            for indices, on_host in self._micro_batches(input_, bins):
                micro_batch = on_host.to(self._topology.device)
                output = self._model(lambda out, batch=micro_batch: hook(out, batch), micro_batch)
                pieces = torch.split(output.cpu(), [seqlens[i] for i in indices])
                for index, piece in zip(indices, pieces, strict=True):
                    results[index] = piece
        self._sharding.after_pass(self._model)
        return aggregate_fn(results)

    def without_adapters(self) -> AbstractContextManager[None]:
        return nullcontext() if self._lora is None else self._lora.silenced()

    def move_towards(self, source: TrainEngine, eta: float) -> None:
        if not isinstance(source, FSDP2Engine):
            raise ConfigError(f"parameters of a {type(source).__name__} are not those of FSDP2")
        move_towards(self._model.parameters(), source._model.parameters(), eta)

    def upload_weights(self, meta: WeightUpdateMeta | None) -> None:
        """Publish one full tensor at a time, or an adapter alone; only rank 0 writes.

        Raises:
            SyncError: the publication failed; on every rank.
        """
        self._upload.publish(meta)

    def step_lr_scheduler(self) -> None:
        self._scheduler.step()

    def save(self, meta: SaveLoadMeta) -> Future[None]:
        if meta.weight_format == "dcp":
            state = self._state().tree(meta.with_optim)
            return self._writer.write(state, meta.path, meta.asynchronous)
        self._save_hf(Path(meta.path))
        self._topology.barrier()
        return completed()

    def load(self, meta: SaveLoadMeta) -> None:
        if meta.weight_format == "hf":
            raise ConfigError("a Hugging Face directory is loaded by model.path, not by load()")
        state = self._state()
        state.load(meta.path, meta.with_optim)
        self._upload.restore(state.notes)

    def destroy(self) -> None:
        self._topology.leave()

    def _state(self) -> TrainState:
        is_single = self._topology.world_size == 1
        model, notes = self._model.model, self._upload.notes
        return TrainState(model, self._optimizer, self._scheduler, is_single, notes)

    def _load(self) -> None:
        """The model, its parts where they belong."""
        config, is_sharded = self._model_config, self._sharding.is_used
        model = (build_without_parameters if is_sharded else load_trained_model)(config)
        self._lora = self._add_lora(model)
        kept = self._trainer_config.kept_logits_bytes
        self._model = PackedModel(model, config, kept)
        self._sharding.place(self._model)
        if is_sharded:
            fill(model, partial(self._weights, model), self._topology)
        self._model.try_head(self._topology.device)
        self._sharding.after_pass(self._model)

    def _weights(self, model: Any) -> Weights:
        """What the parameters begin with, by their names among adapters."""
        bare = build_without_parameters(self._model_config)
        stored = find_trained_weights(self._model_config, bare)
        names = [name for name, _ in model.named_parameters()]
        weights = {name: stored[base_name(name)] for name in names if base_name(name) in stored}
        if self._lora is not None:
            first = self._lora.first(self._model_config.seed)
            weights |= {name: partial(torch.Tensor.detach, values) for name, values in first}
        return weights

    def _add_lora(self, model: Any) -> Lora | None:
        config = self._model_config
        if config.lora is None:
            return None
        also_trained = (f"{SCORE}.weight",) if config.head == "value" else ()
        return add_lora(model, config.lora, config.seed, also_trained)

    def _dropping(self) -> AbstractContextManager[None]:
        """Dropout of adapters, drawn anew for every step and rank, and alike by a resumed run."""
        if self._lora is None or self._lora.dropout == 0.0:
            return nullcontext()
        steps = max((int(s["step"]) for s in self._optimizer.state.values()), default=0)
        seed = self._trainer_config.seed
        return self._lora.dropping((seed << 48) + (steps << 16) + self._topology.rank)

    def _run_losses(
        self,
        input_: SequenceBatch,
        mb_spec: MicroBatchSpec,
        loss_fn: LossFn,
        loss_weight_fn: LossWeightFn,
        is_training: bool,
    ) -> dict[str, float]:
        """Loss and figures as means over the weight of all ranks, or the largest (`…_max`); gradients of
        exactly that mean."""
        world = self._topology.world_size
        (total_weight,) = self._topology.sum([loss_weight_fn(input_)])
        # On the device: a micro-batch does not wait for the last one's.
        sums: dict[str, Tensor] = {}
        largest: dict[str, Tensor] = {}
        bins = _bins(input_, mb_spec)
        num_passes = self._topology.max(len(bins))
        for number, (_, on_host) in enumerate(self._micro_batches(input_, bins)):
            # Ranks with fewer bins repeat one at weight 0, so that all meet in FSDP's collectives.
            weight = loss_weight_fn(on_host) if number < len(bins) else 0.0
            loss, stats = self._losses(loss_fn, on_host.to(self._topology.device))
            if is_training:
                self._sharding.before_backward(self._model, is_last=number == num_passes - 1)
                # FSDP divides the sum over all ranks, replicas included, by their number.
                (loss * (weight * world / max(total_weight, 1e-9))).backward()
            for name, value in {"loss": loss, **stats}.items():
                precise = value.detach().double()
                if name.endswith("_max"):
                    largest[name] = torch.maximum(largest.get(name, precise), precise)
                else:
                    sums[name] = sums.get(name, 0.0) + precise * weight
        totals = _on_all_ranks(sums, self._topology.sum)
        means = {name: total / max(total_weight, 1e-9) for name, total in totals.items()}
        return means | _on_all_ranks(largest, self._topology.maxima)

    def _losses(
        self, loss_fn: LossFn, micro_batch: SequenceBatch
    ) -> tuple[Tensor, dict[str, Tensor]]:
        def task(output: ModelOutput) -> tuple[Tensor, dict[str, Tensor]]:
            result = loss_fn(output, micro_batch)
            return result.loss, result.stats

        losses: tuple[Tensor, dict[str, Tensor]] = self._model(task, micro_batch)
        return losses

    def _micro_batches(
        self, input_: SequenceBatch, bins: list[list[int]]
    ) -> Iterator[tuple[list[int], SequenceBatch]]:
        """The bins of this rank, padded with repeats to the largest number of any rank."""
        for number in range(self._topology.max(len(bins))):
            indices = bins[min(number, len(bins) - 1)]
            yield indices, input_.select(indices)

    def _whole_output(self, output: ModelOutput, batch: SequenceBatch) -> Tensor:
        return output.logits() if self._model_config.head == "lm" else output.values()

    def _save_hf(self, folder: Path) -> None:
        """The model whole; below it, what was trained of it as an adapter."""
        is_main = self._topology.is_main
        # Other ranks take part in gathering, and keep nothing.
        weights = {name: t.cpu().clone() for name, t in self._upload.parameters() if is_main}
        pairs = iter(()) if self._lora is None else self._lora.tensors(whole)
        adapter = {name: t.cpu().clone() for name, t in pairs if is_main}
        if not is_main:
            return
        source = Path(self._model_config.path)
        with whole_directory(folder) as place:
            write_model(self._model.model, weights, source, place)
            if self._lora is not None:
                self._lora.write(adapter, place / ADAPTER_FOLDER)


def _on_all_ranks(
    figures: Mapping[str, Tensor], reduce: Callable[[list[float]], list[float]]
) -> dict[str, float]:
    """Numbers of this rank -> those of all; collective, unless there are none."""
    if not figures:
        return {}
    names = sorted(figures)
    values = torch.stack([figures[name] for name in names]).tolist()
    return dict(zip(names, reduce(values), strict=True))


def _bins(input_: SequenceBatch, mb_spec: MicroBatchSpec) -> list[list[int]]:
    return pack_by_tokens(
        input_.lengths, mb_spec.max_tokens_per_mb, granularity=mb_spec.granularity
    )
