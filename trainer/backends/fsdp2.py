"""`TrainEngine` on FSDP2 (`fully_shard`): gloo on CPU, NCCL on GPU; one process needs no group."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from headway.contracts.config.model import TrainedModelConfig
from headway.contracts.config.optimizer import EMPTY, OptimizerConfig
from headway.contracts.config.trainer import TokenNormalizeScope, TrainerConfig
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
from trainer.backends.loss_scale import LossScale, scale_back
from trainer.backends.offload import move_optimizer, move_parameters
from trainer.backends.optimizer import make_optimizer
from trainer.backends.packed_model import PackedModel
from trainer.backends.passes import LossPasses, bins_of
from trainer.backends.schedule import lr_factor
from trainer.backends.sharding import Sharding, allow_tf32, has_bfloat16
from trainer.backends.state import TrainState
from trainer.backends.state_writer import StateWriter, completed
from trainer.backends.upload import Upload, whole
from trainer.batching.sequences import SequenceBatch
from trainer.topology import Topology
from trainer.transfer import finish_copies, to_host
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
        held = getattr(torch, self._model_config.dtype)
        self._sharding = Sharding(self._trainer_config, self._topology, held)
        self._topology.join(alone=self._sharding.is_used)
        if self._sharding.compute_dtype == torch.float32 and has_bfloat16(self._topology.device):
            allow_tf32()
        self._load()
        config = self._optimizer_config
        trained = [p for p in self._model.parameters() if p.requires_grad]
        self._optimizer = make_optimizer(config, trained)
        is_scaled = self._sharding.compute_dtype == torch.float16 != held
        self._loss_scale = LossScale(config) if is_scaled else None
        self._passes = LossPasses(self._model, self._sharding, self._topology, self._loss_scale)
        factor = lr_factor(config, self._trainer_config.total_steps)
        self._scheduler = LambdaLR(self._optimizer, factor)
        model = self._model.model
        self._upload = Upload(
            model,
            self._lora,
            self._sharding,
            self._topology,
            self._publisher,
            goes_behind=self._topology.device.type == "cuda",
        )
        self._upload.publish_base()
        self._writer = StateWriter(self._topology)
        self._on_device = {"parameters": True, "optimizer": True}

    @property
    def topology(self) -> Topology:
        """Ranks that take part in every collective call."""
        return self._topology

    @property
    def adapter(self) -> Adapter | None:
        """Adapter whose parameters `weights` names; None where all are the model's own."""
        return None if self._lora is None else self._lora.adapter

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """The parameters that there are, under the names that they had before adapters were put in; A and
        B of module m are `m.lora_A.weight` and `m.lora_B.weight`."""
        if self._model_config.head != "lm":
            raise ConfigError("a model of values has no head to generate with; set model.head=lm")
        return ((plain_name(name), p) for name, p in self._model.model.named_parameters())

    def published_weights(self) -> Iterator[tuple[str, Tensor]]:
        """The model as others know it: each tensor whole, adapters merged, under the names of a
        checkpoint; collective. Ranks beyond the first row get none."""
        return self._upload.published()

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
        token_normalize_scope: TokenNormalizeScope = "global",
    ) -> dict[str, float]:
        """See `TrainEngine`; in float16 the loss is scaled, and the gradients are scaled back.

        Raises:
            ConfigError: `optimizer.type` is empty.
        """
        if self._optimizer_config.type == "empty":
            raise ConfigError("optimizer.type=empty trains nothing; set optimizer.type=adam")
        self._optimizer.zero_grad(set_to_none=True)
        with self._dropping():
            stats = self._passes.run(
                input_, mb_spec, loss_fn, loss_weight_fn, token_normalize_scope, is_training=True
            )
        if self._loss_scale is not None:
            stats |= scale_back(self._model.parameters(), self._loss_scale, stats["grad_norm"])
        grad_norm = stats["grad_norm"]
        max_norm = self._optimizer_config.max_grad_norm
        clip_gradients(self._model.parameters(), max_norm, grad_norm)
        self._writer.finish_snapshot()
        if math.isfinite(grad_norm):
            self._optimizer.step()
        else:
            log.warning("step skipped: the gradient is not finite", extra={"grad_norm": grad_norm})
        stats |= {
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
        token_normalize_scope: TokenNormalizeScope = "global",
    ) -> Tensor | None:
        def each(output: ModelOutput, batch: SequenceBatch) -> LossOutput:
            loss = loss_fn(output, batch).loss
            parts = loss.unbind() if loss.ndim else ()
            return LossOutput(loss.sum(), {f"{n:04}": part for n, part in enumerate(parts)})

        with torch.no_grad():
            stats = self._passes.run(
                input_, mb_spec, each, loss_weight_fn, token_normalize_scope, is_training=False
            )
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
        hook = self._whole_output if post_hook is None else post_hook
        with torch.no_grad():
            for indices, on_host in self._passes.micro_batches(input_, bins_of(input_, mb_spec)):
                micro_batch = on_host.to(self._topology.device)
                output = self._model(lambda out, batch=micro_batch: hook(out, batch), micro_batch)
                pieces = torch.split(to_host(output), [seqlens[i] for i in indices])
                for index, piece in zip(indices, pieces, strict=True):
                    results[index] = piece
        finish_copies(self._topology.device)
        self._sharding.after_pass(self._model)
        return aggregate_fn(results)

    def without_adapters(self) -> AbstractContextManager[None]:
        return nullcontext() if self._lora is None else self._lora.disabled()

    def move_towards(self, source: TrainEngine, eta: float) -> None:
        if not isinstance(source, FSDP2Engine):
            raise ConfigError(f"parameters of a {type(source).__name__} are not those of FSDP2")
        self._writer.finish_snapshot()
        move_towards(self._model.parameters(), source._model.parameters(), eta)

    def upload_weights(self, meta: WeightUpdateMeta | None) -> Future[None] | None:
        """Publish one full tensor at a time, or an adapter alone; only rank 0 writes.

        From a GPU into a store the tensors are copied to the host, and go out behind what comes next.

        Raises:
            SyncError: the publication failed; on every rank, unless it goes out behind.
        """
        return self._upload.publish(meta)

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
        self._writer.finish_snapshot()
        state = self._state()
        state.load(meta.path, meta.with_optim)
        self._upload.restore({name: state.notes[name] for name in self._upload.notes})
        if self._loss_scale is not None:
            self._loss_scale.restore(state.notes)

    def place_on_device(self, parameters: bool, optimizer: bool) -> None:
        """Move parameters and optimizer to this rank's device, or to the CPU's memory.

        Args:
            parameters, optimizer: true on the device.
        """
        wanted = {"parameters": parameters, "optimizer": optimizer}
        moving = {name for name, is_on in wanted.items() if is_on != self._on_device[name]}
        if not moving or self._topology.device.type == "cpu":
            return
        self._writer.finish_snapshot()
        cpu, device = torch.device("cpu"), self._topology.device
        if "parameters" in moving:
            move_parameters(self._model, device if parameters else cpu)
        if "optimizer" in moving:
            move_optimizer(self._optimizer, device if optimizer else cpu)
        if not parameters or not optimizer:
            torch.cuda.empty_cache()
        self._on_device = wanted

    def destroy(self) -> None:
        self._topology.leave()

    def _state(self) -> TrainState:
        is_single = self._topology.world_size == 1
        scale = {} if self._loss_scale is None else self._loss_scale.notes
        model, notes = self._model.model, self._upload.notes | scale
        group = self._topology.group
        return TrainState(model, self._optimizer, self._scheduler, is_single, notes, group)

    def _load(self) -> None:
        """The model, its parts where they belong."""
        config, is_sharded = self._model_config, self._sharding.is_used
        model = (build_without_parameters if is_sharded else load_trained_model)(config)
        self._lora = self._add_lora(model)
        kept = self._trainer_config.kept_logits_bytes
        self._model = PackedModel(model, config, kept)
        if config.head == "lm" and self._optimizer_config.type != EMPTY.type:
            self._model.replay_experts()  # of the policy: the choices were not a reference model's
        if self._trainer_config.compile:
            self._model.compile_layers()
        elif self._topology.device.type == "cpu":
            self._model.fuse_layers()
        self._sharding.place(self._model)
        if is_sharded:
            fill(model, partial(self._weights, model), self._topology)
        self._model.try_head(self._topology.device)
        self._sharding.after_pass(self._model)

    def _weights(self, model: Any) -> Weights:
        """Return the initial values of the parameters, by their names among adapters."""
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
        """Dropout of adapters, drawn again for every step and rank, and equally by a resumed run."""
        if self._lora is None or self._lora.dropout == 0.0:
            return nullcontext()
        done = [state["step"] for state in self._optimizer.state.values()]
        steps = int(torch.stack(done).max()) if done else 0
        seed = self._trainer_config.seed
        return self._lora.with_dropout(
            (seed << 48) + (steps << 16) + self._topology.data_parallel.rank
        )

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
