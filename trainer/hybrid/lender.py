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
from weight_sync.handover import Handed
from weight_sync.manifest import Adapter
from weight_sync.outgoing import renamed


class Lender(TrainEngine, Protocol):
    """A train engine whose parameters others may read where they lie."""

    @property
    def topology(self) -> Topology:
        """Of the ranks that every call meets on."""

    @property
    def adapter(self) -> Adapter | None:
        """Of what `weights` names as an adapter's; None where all is the model's own."""

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """The parameters themselves, sharded ones as such, named as without adapters; A and B of an
        adapted module m are `m.lora_A.weight` and `m.lora_B.weight`.

        Raises:
            ConfigError: they are no language model's.
        """


def lend(engine: Lender, config: HybridConfig, kept: Collection[str]) -> Iterator[Handed]:
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
        yield Handed(
            new,
            whole(parameter) if mine is None else mine,
            is_lent=mine is not None,
            is_frozen=not parameter.requires_grad,
        )


def _lies_whole(parameter: Tensor) -> Tensor | None:
    """This rank's own memory of a parameter, if it is all of it."""
    value = parameter.detach()
    if not isinstance(value, DTensor):
        return value
    local = value.to_local()
    return local if local.shape == value.shape else None
