"""A train engine's parameters on their way to generation in the same process."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Protocol

from torch import Tensor
from torch.distributed.tensor import DTensor

from headway.contracts.config.hybrid import HybridConfig
from trainer.api import TrainEngine
from trainer.backends.upload import whole
from trainer.topology import Topology
from weight_sync.manifest import Adapter
from weight_sync.published_tensors import renamed
from weight_sync.weight_transfer import TransferredTensor


class ParameterSource(TrainEngine, Protocol):
    """A train engine whose parameters others may read in place."""

    @property
    def topology(self) -> Topology:
        """Ranks that take part in every collective call."""

    @property
    def adapter(self) -> Adapter | None:
        """Adapter whose parameters `weights` names; None where all are the model's own."""

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """The parameters themselves, sharded ones as such, named as without adapters; A and B of an
        adapted module m are `m.lora_A.weight` and `m.lora_B.weight`.

        Raises:
            ConfigError: they are no language model's.
        """


def share_parameters(
    engine: ParameterSource, config: HybridConfig, kept: Collection[str]
) -> Iterator[TransferredTensor]:
    """Every parameter whole, one after the other; those that are sharded are gathered by all ranks.

    Args:
        kept: names, as the generation backend knows them, of what it needs no more.
    """
    for name, parameter in engine.weights():
        new = renamed(name, config.rename)
        if name in config.skip or new in kept:
            continue
        mine = _lies_whole(parameter)
        # In one expression: here, too, nothing holds a gathered tensor while the next one is gathered.
        yield TransferredTensor(
            new,
            whole(parameter) if mine is None else mine,
            is_shared_memory=mine is not None,
            is_frozen=not parameter.requires_grad,
        )


def _lies_whole(parameter: Tensor) -> Tensor | None:
    """This rank's own memory of a parameter, if it is all of it."""
    value = parameter.detach()
    if not isinstance(value, DTensor):
        return value
    local = value.to_local()
    return local if local.shape == value.shape else None
