"""Sharding of the parameters over rows of ranks, each with one whole copy (FSDP2, HybridShard).

    ranks 0..7, trainer.shard_size 4        shard (within a row: gather, reduce-scatter)
                                            0 1 2 3
                                replicate   4 5 6 7   (between rows: all-reduce)

Every rank trains on data of its own, whatever the mesh. Ranks of a row are neighbours, so a row that
is as long as a machine has devices keeps gathering within the machine.
"""

from __future__ import annotations

import logging

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from headway.contracts.config.trainer import TrainerConfig
from headway.contracts.errors import ConfigError
from trainer.backends.loading import materialize
from trainer.backends.packed_model import PackedModel
from trainer.topology import Topology

log = logging.getLogger(__name__)


class Sharding:
    """Sharding of a model by FSDP2."""

    def __init__(self, config: TrainerConfig, topology: Topology, held: torch.dtype) -> None:
        """
        Args:
            held: type of the parameters in memory.
        Raises:
            ConfigError: the ranks make no whole rows or share sequences, or nothing can be offloaded
                from this device.
        """
        num_shares = topology.data_parallel.world_size
        if num_shares != topology.world_size:
            raise ConfigError(
                f"{topology.world_size} ranks have {num_shares} shares of a batch; FSDP2 wants one for "
                "each rank: it has no tensor or pipeline parallel ranks"
            )
        world, size = topology.world_size, config.shard_size or topology.world_size
        if world % size:
            raise ConfigError(
                f"{world} ranks cannot be cut into rows of {size}; set trainer.shard_size to a "
                f"divisor of {world}"
            )
        if config.cpu_offload and topology.device.type != "cuda":
            raise ConfigError(
                f"trainer.cpu_offload moves parameters off a GPU, and this rank trains on the "
                f"{topology.device.type}; unset it"
            )
        self._config = config
        self._topology = topology
        self._shape = (world // size, size)
        self._compute_dtype = compute_dtype(config.compute_dtype, held, topology.device)
        """None is that of the parameters."""
        self._held = held

    @property
    def is_used(self) -> bool:
        """One rank alone needs FSDP only for its precision or for offloading."""
        is_cast = self._compute_dtype is not None
        return self._topology.world_size > 1 or is_cast or self._config.cpu_offload

    @property
    def compute_dtype(self) -> torch.dtype:
        """Type that passes run in."""
        return self._compute_dtype or self._held

    @property
    def is_first_row(self) -> bool:
        """True if this rank's row has the copy that is published and saved."""
        return self._topology.rank < self._shape[1]

    def place(self, model: PackedModel) -> None:
        """Bring a whole model from the CPU to its device; or allocate the parts of one that is
        sharded, whose parameters are on the meta device."""
        if not self.is_used:
            model.to(self._topology.device)
            return
        mesh, precision = self._mesh(), self._precision()
        offload = CPUOffloadPolicy() if self._config.cpu_offload else OffloadPolicy()
        for module in (*model.decoder_layers, model):
            fully_shard(module, mesh=mesh, mp_policy=precision, offload_policy=offload)
        is_offloaded = self._config.cpu_offload
        materialize(model, torch.device("cpu") if is_offloaded else self._topology.device)

    def before_backward(self, model: PackedModel, is_last: bool) -> None:
        """Reduce between rows once per step: earlier micro-batches are summed within the row."""
        if isinstance(model, FSDPModule) and self._shape[0] > 1:
            model.set_requires_all_reduce(is_last)

    @property
    def num_copies(self) -> int:
        """Rows of ranks, each with one copy of the parameters: what all ranks sum of their shards is so
        many times that of one copy."""
        return self._shape[0]

    def after_pass(self, model: PackedModel) -> None:
        """Free what a pass without gradients leaves gathered: the root's parameters, kept by FSDP for
        a backward pass. Parameters are shards again afterwards."""
        if isinstance(model, FSDPModule):
            model.reshard()

    def _mesh(self) -> DeviceMesh:
        device = self._topology.device.type
        rows, size = self._shape
        group = self._topology.group
        if rows == 1 and group is not None:
            return DeviceMesh.from_group(group, device, mesh_dim_names=("shard",))
        if rows == 1:
            return init_device_mesh(device, (size,), mesh_dim_names=("shard",))
        ranks = torch.arange(rows * size).view(rows, size)
        return DeviceMesh.from_group(
            [self._subgroup(ranks.T), self._subgroup(ranks)],
            device,
            mesh=ranks,
            mesh_dim_names=("replicate", "shard"),
        )

    def _subgroup(self, ranks: Tensor) -> dist.ProcessGroup:
        """The group of this rank among the rows of `ranks`; it waits as long as that of all."""
        timeout = self._topology.timeout
        group, _ = dist.new_subgroups_by_enumeration(ranks.tolist(), timeout=timeout)
        return group

    def _precision(self) -> MixedPrecisionPolicy:
        """Gradients are summed in at least float32 whatever they were computed in."""
        reduced = torch.promote_types(self._held, torch.float32)
        return MixedPrecisionPolicy(param_dtype=self._compute_dtype, reduce_dtype=reduced)


def compute_dtype(asked: str, held: torch.dtype, device: torch.device) -> torch.dtype | None:
    """Return the type that passes run in; None is that of the parameters.

    Args:
        asked: `trainer.compute_dtype`.
        held: type of the parameters in memory.
    """
    if asked != "auto":
        return getattr(torch, asked)
    return torch.bfloat16 if held == torch.float32 and has_bfloat16(device) else None


def has_bfloat16(device: torch.device) -> bool:
    """True if products of bfloat16 are faster on this device than those of float32."""
    return device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)


def allow_tf32() -> None:
    """Let this process multiply float32 matrices on the GPU's tensor cores, with 10 bits of mantissa."""
    torch.set_float32_matmul_precision("high")
    log.warning(
        "passes run in float32, their products in TF32: bfloat16 is about twice as fast; set "
        "trainer.compute_dtype=bfloat16"
    )
