"""Where the parameters lie: rows of ranks, each with one whole copy (FSDP2, HybridShard).

    ranks 0..7, trainer.shard_size 4        shard (within a row: gather, reduce-scatter)
                                            0 1 2 3
                                replicate   4 5 6 7   (between rows: all-reduce)

Every rank trains on data of its own, whatever the mesh. Ranks of a row are neighbours, so a row that
is as long as a machine has devices keeps gathering within the machine.
"""

from __future__ import annotations

import torch
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


class Sharding:
    """How FSDP2 holds a model."""

    def __init__(self, config: TrainerConfig, topology: Topology) -> None:
        """
        Raises:
            ConfigError: the ranks make no whole rows, or nothing can be offloaded from this device.
        """
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

    @property
    def is_used(self) -> bool:
        """One rank alone needs FSDP only for its precision or for offloading."""
        config = self._config
        return (
            self._topology.world_size > 1 or config.compute_dtype is not None or config.cpu_offload
        )

    @property
    def is_first_row(self) -> bool:
        """Whether this rank's row has the copy that goes out."""
        return self._topology.rank < self._shape[1]

    def place(self, model: PackedModel) -> None:
        """Bring a whole model from the CPU to its device; or make room for the parts of one that is
        sharded, whose parameters are on the meta device."""
        if not self.is_used:
            model.to(self._topology.device)
            return
        mesh, precision = self._mesh(), self._precision(next(model.parameters()).dtype)
        offload = CPUOffloadPolicy() if self._config.cpu_offload else OffloadPolicy()
        for module in (*model.decoder_layers, model):
            fully_shard(module, mesh=mesh, mp_policy=precision, offload_policy=offload)
        is_offloaded = self._config.cpu_offload
        materialize(model, torch.device("cpu") if is_offloaded else self._topology.device)

    def before_backward(self, model: PackedModel, is_last: bool) -> None:
        """Rows meet once per step: earlier micro-batches are summed within the row."""
        if isinstance(model, FSDPModule) and self._shape[0] > 1:
            model.set_requires_all_reduce(is_last)

    def sum_of_shards(self, value: float) -> float:
        """Over the ranks of a row; all rows hold the same, and count once."""
        return self._topology.sum([value])[0] / self._shape[0]

    def after_pass(self, model: PackedModel) -> None:
        """Free what a pass without gradients leaves gathered: the root's parameters, kept by FSDP for
        a backward pass. Whoever reads parameters then finds shards again."""
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
        return init_device_mesh(device, self._shape, mesh_dim_names=("replicate", "shard"))

    def _precision(self, held: torch.dtype) -> MixedPrecisionPolicy:
        """Gradients are summed in at least float32 whatever they were computed in."""
        name = self._config.compute_dtype
        compute = None if name is None else getattr(torch, name)
        reduced = torch.promote_types(held, torch.float32)
        return MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduced)
