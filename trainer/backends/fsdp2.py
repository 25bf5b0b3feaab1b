"""`TrainEngine` on FSDP2 (`fully_shard`): gloo on CPU, NCCL on GPU; one process needs no group.

Sequences are packed end to end with their position ids. Where the model allows it, attention runs per
sequence (`packed_attention`); elsewhere transformers builds a block-causal mask from the position
ids, but only when no cache is asked for, hence `use_cache=False` in every forward.
"""

from __future__ import annotations

import logging
import math
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as load_state
from torch.distributed.checkpoint.state_dict_saver import save as save_state
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LambdaLR
from transformers.modeling_layers import GradientCheckpointingLayer

from headway.contracts.config.model import ModelConfig
from headway.contracts.config.optimizer import OptimizerConfig
from headway.contracts.errors import ConfigError, ServiceError, SyncError
from headway.contracts.types import FinetuneSpec, WeightUpdateMeta
from trainer.api import (
    LossFn,
    LossWeightFn,
    MicroBatchSpec,
    PostHook,
    SaveLoadMeta,
    Scheduling,
)
from trainer.backends.packed_attention import NAME, PackedLayout, can_pack, register
from trainer.batching import SequenceBatch, pack_by_tokens
from trainer.topology import Topology
from weight_sync.channel import WeightPublisher
from weight_sync.model_dir import load_model

log = logging.getLogger(__name__)

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
)


class FSDP2Engine:
    """One causal LM, sharded over all ranks."""

    def __init__(
        self,
        model: ModelConfig,
        optimizer: OptimizerConfig,
        topology: Topology,
        publisher: WeightPublisher | None,
        total_steps: int,
    ) -> None:
        self._model_config = model
        self._optimizer_config = optimizer
        self._topology = topology
        self._publisher = publisher
        self._total_steps = total_steps

    def initialize(self, addr: str | None, ft_spec: FinetuneSpec | None) -> None:
        """Load the model on every rank and shard it; the group comes from torchrun, not from `addr`."""
        self._topology.join()
        self._model = load_model(self._model_config).to(self._topology.device)
        self._is_packed = self._model_config.attn_implementation == "sdpa" and can_pack(self._model)
        if self._is_packed:
            register()
            self._model.set_attn_implementation(NAME)
        if self._topology.world_size > 1:
            for layer in _decoder_layers(self._model):
                fully_shard(layer)
            fully_shard(self._model)
        config = self._optimizer_config
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(),
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            weight_decay=config.weight_decay,
        )
        self._scheduler = LambdaLR(self._optimizer, _schedule(config, self._total_steps))
        self._model.eval()  # no dropout: proximal and current logprobs must differ by the update only
        if self._model_config.gradient_checkpointing:
            _recompute_activations(self._model)

    def get_scheduling_config(self) -> Scheduling:
        return Scheduling(gpu=int(self._topology.device.type == "cuda"))

    def train_batch(
        self,
        input_: SequenceBatch,
        mb_spec: MicroBatchSpec,
        loss_fn: LossFn,
        loss_weight_fn: LossWeightFn,
    ) -> dict[str, float]:
        self._optimizer.zero_grad(set_to_none=True)
        stats = self._run_losses(input_, mb_spec, loss_fn, loss_weight_fn, is_training=True)
        norm = torch.nn.utils.clip_grad_norm_(
            self._model.parameters(), self._optimizer_config.max_grad_norm
        )
        grad_norm = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
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
        with torch.no_grad():
            stats = self._run_losses(input_, mb_spec, loss_fn, loss_weight_fn, is_training=False)
        self._reshard()
        return torch.tensor(stats["loss"])

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
        bins = pack_by_tokens(input_.lengths, mb_spec.max_tokens_per_mb)
        with torch.no_grad():
            for indices, micro_batch in self._micro_batches(input_, bins):
                logits = self._logits(micro_batch)
                output = logits if post_hook is None else post_hook(logits, micro_batch)
                pieces = torch.split(output.cpu(), [seqlens[i] for i in indices])
                for index, piece in zip(indices, pieces, strict=True):
                    results[index] = piece
        self._reshard()
        return aggregate_fn(results)

    def upload_weights(self, meta: WeightUpdateMeta | None) -> None:
        """Publish one full tensor at a time; only rank 0 writes.

        Raises:
            SyncError: the publication failed; on every rank.
        """
        tensors = self._full_parameters()
        failure: Exception | None = None
        if self._topology.is_main:
            try:
                self._publish(meta, tensors)
            except ServiceError as error:
                failure = error
        for _ in tensors:
            pass  # gathering is collective: what rank 0 did not take, it takes part in all the same
        if failure is not None:
            self._topology.max(1)
            raise failure
        if self._topology.max(0):
            raise SyncError("the first rank could not publish this version; see its log")

    def _publish(
        self, meta: WeightUpdateMeta | None, tensors: Iterator[tuple[str, Tensor]]
    ) -> None:
        if self._publisher is None or meta is None:
            raise ConfigError("this engine has no weight channel to publish through")
        self._publisher.publish(meta.version, tensors)

    def step_lr_scheduler(self) -> None:
        self._scheduler.step()

    def save(self, meta: SaveLoadMeta) -> None:
        if meta.weight_format == "hf":
            self._save_hf(Path(meta.path))
        else:
            state = self._state(meta.with_optim)
            with _quiet_about_no_group():
                save_state(state, checkpoint_id=meta.path, no_dist=self._is_single)
        self._topology.barrier()

    def load(self, meta: SaveLoadMeta) -> None:
        if meta.weight_format == "hf":
            raise ConfigError("a Hugging Face directory is loaded by model.path, not by load()")
        state = self._state(meta.with_optim)
        try:
            _refuse_more(meta.path, state["model"])
            with _quiet_about_no_group():
                load_state(state, checkpoint_id=meta.path, no_dist=self._is_single)
        except (CheckpointException, OSError, RuntimeError, ValueError) as error:
            raise ConfigError(
                f"checkpoint {meta.path} does not fit the model at {self._model_config.path}: {error}"
            ) from error
        set_state_dict(
            self._model,
            [self._optimizer] if meta.with_optim else [],
            model_state_dict=state["model"],
            optim_state_dict=state.get("optimizer", {}),
        )
        if meta.with_optim:
            self._scheduler.load_state_dict(state["scheduler"])

    def destroy(self) -> None:
        self._topology.leave()

    @property
    def _is_single(self) -> bool:
        return self._topology.world_size == 1

    def _run_losses(
        self,
        input_: SequenceBatch,
        mb_spec: MicroBatchSpec,
        loss_fn: LossFn,
        loss_weight_fn: LossWeightFn,
        is_training: bool,
    ) -> dict[str, float]:
        """Loss and figures as means over the weight of all ranks; gradients of exactly that mean."""
        world = self._topology.world_size
        (total_weight,) = self._topology.sum([loss_weight_fn(input_)])
        sums: dict[str, float] = {}
        bins = pack_by_tokens(input_.lengths, mb_spec.max_tokens_per_mb)
        for number, (_, micro_batch) in enumerate(self._micro_batches(input_, bins)):
            # Ranks with fewer bins repeat one at weight 0, so that all meet in FSDP's collectives.
            weight = loss_weight_fn(micro_batch) if number < len(bins) else 0.0
            output = loss_fn(self._logits(micro_batch), micro_batch)
            if is_training:
                (output.loss * (weight * world / max(total_weight, 1e-9))).backward()
            for name, value in {"loss": output.loss, **output.stats}.items():
                sums[name] = sums.get(name, 0.0) + float(value.detach()) * weight
        names = sorted(sums)
        totals = self._topology.sum([sums[name] for name in names])
        return {n: total / max(total_weight, 1e-9) for n, total in zip(names, totals, strict=True)}

    def _micro_batches(
        self, input_: SequenceBatch, bins: list[list[int]]
    ) -> Iterator[tuple[list[int], SequenceBatch]]:
        """The bins of this rank, padded with repeats to the largest number of any rank."""
        for number in range(self._topology.max(len(bins))):
            indices = bins[min(number, len(bins) - 1)]
            yield indices, input_.select(indices).to(self._topology.device)

    def _logits(self, micro_batch: SequenceBatch) -> Tensor:
        """[T, V] for packed sequences."""
        device = self._topology.device
        layout = (
            {"packed_layout": PackedLayout.of(micro_batch.lengths, device)}
            if self._is_packed
            else {}
        )
        output = self._model(
            input_ids=micro_batch["input_ids"][None],
            position_ids=micro_batch.position_ids[None].to(device),
            use_cache=False,
            **layout,
        )
        logits: Tensor = output.logits[0]
        return logits

    def _reshard(self) -> None:
        """Free what a pass without gradients leaves gathered: the root's parameters, kept by FSDP for
        a backward pass. Whoever reads parameters then finds shards again."""
        if isinstance(self._model, FSDPModule):
            self._model.reshard()

    def _full_parameters(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self._model.named_parameters():
            value = parameter.detach()
            yield name, value.full_tensor() if isinstance(value, DTensor) else value

    def _state(self, with_optim: bool) -> dict[str, Any]:
        model, optimizer = get_state_dict(self._model, [self._optimizer] if with_optim else [])
        state: dict[str, Any] = {"model": model}
        if with_optim:
            state |= {"optimizer": optimizer, "scheduler": self._scheduler.state_dict()}
        return state

    def _save_hf(self, folder: Path) -> None:
        weights = {name: tensor.cpu().clone() for name, tensor in self._full_parameters()}
        if not self._topology.is_main:
            return
        folder.mkdir(parents=True, exist_ok=True)
        self._model.save_pretrained(folder, state_dict=weights)
        for name in TOKENIZER_FILES:
            source = Path(self._model_config.path) / name
            if source.is_file() and source.resolve() != (folder / name).resolve():
                shutil.copy2(source, folder / name)


def _recompute_activations(model: Any) -> None:
    """Checkpoint every decoder layer of a model in evaluation mode."""
    # transformers 5 renamed the method on its way.
    enable = getattr(model, "activation_checkpointing_enable", None)
    (enable or model.gradient_checkpointing_enable)({"use_reentrant": False})
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            # It recomputes only in training mode; the modules in it stay without dropout.
            module.training = True


def _refuse_more(path: str, wanted: Mapping[str, Any]) -> None:
    """Raise if a checkpoint holds parameters that the model has not: loading would leave them out."""
    stored = FileSystemReader(path).read_metadata().state_dict_metadata
    extra = [n for n in stored if n.startswith("model.") and n.removeprefix("model.") not in wanted]
    if extra:
        raise ValueError(f"it also holds {sorted(extra)[:3]}")


@contextmanager
def _quiet_about_no_group() -> Iterator[None]:
    """One process without a group is what we mean; torch warns that it might not be."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _decoder_layers(model: Any) -> list[torch.nn.Module]:
    """The repeated blocks, which are the units of sharding."""
    stacks = [list(m) for m in model.modules() if isinstance(m, torch.nn.ModuleList)]
    return max(stacks, key=len, default=[])


def _schedule(config: OptimizerConfig, total_steps: int) -> Callable[[int], float]:
    """Factor on the peak learning rate at a step."""
    floor, warmup = config.min_lr_ratio, config.warmup_steps

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        if config.schedule == "constant":
            return 1.0
        done = min(1.0, (step - warmup) / max(1, total_steps - warmup))
        shape = (
            1.0 - done if config.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
        )
        return floor + (1.0 - floor) * shape

    return factor
