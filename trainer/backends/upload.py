"""Weights on their way out of an engine: gathered by the ranks of the first row, written by rank 0."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from headway.contracts.errors import ConfigError, ServiceError, SyncError
from headway.contracts.types import WeightUpdateMeta
from trainer.backends.lora import Lora, Whole
from trainer.backends.sharding import Sharding
from trainer.topology import Topology
from weight_sync.channel import WeightPublisher
from weight_sync.checkpoint_names import CheckpointNames
from weight_sync.device_copy import snapshot
from weight_sync.manifest import DTYPES, Base
from weight_sync.publisher import StoredPublisher
from weight_sync.transports.daemon_calls import start_detached

log = logging.getLogger(__name__)

FIRST = 0
"""The version of the weights that a run starts with."""

Tensors = Iterator[tuple[str, Tensor]]


class Upload:
    """One model's way out, whole or as an adapter.

    An adapter is published where its base was: before the first step, the base goes into an empty store
    as version 0. Without it (another transport, a store in use, 8 bits) versions are whole, the adapter
    merged.
    """

    def __init__(
        self,
        model: Any,
        lora: Lora | None,
        sharding: Sharding,
        topology: Topology,
        publisher: WeightPublisher | None,
        goes_behind: bool,
    ) -> None:
        """Args:
        goes_behind: versions go out from a copy, while training goes on.
        """
        self._goes_behind = goes_behind
        self._model = model
        self._lora = lora
        self._sharding = sharding
        self._topology = topology
        self._publisher = publisher
        self._base: Base | None = None
        self._names = CheckpointNames(model)

    def publish_base(self) -> None:
        """Make adapters possible, if this store can hold them and nothing yet; collective."""
        if self._lora is None:
            return
        publisher = self._publisher
        store = publisher if isinstance(publisher, StoredPublisher) else None
        is_possible = store is not None and store.takes_adapters and store.latest() is None
        if not self._topology.max(int(is_possible)):
            log.info(
                "versions will be whole, with the adapter merged, unless a checkpoint knows a base"
            )
            return
        self._send(self._lora.base(self._gathering()), self._write_base)
        self._share_base()

    def publish(self, meta: WeightUpdateMeta | None) -> Future[None] | None:
        """The current weights as a version; collective.

        Returns:
            None once it is published; on rank 0 the future of a copy that goes out behind.
        Raises:
            SyncError: the publication failed; on every rank.
        """
        gather, publisher = self._gathering(), self._publisher
        if self._lora is not None and self._base is not None:
            tensors, write = self._lora.tensors(gather), partial(self._write_adapter, meta)
        else:
            tensors, write = self._whole_model(gather), partial(self._write, meta)
        if not self._goes_behind or publisher is None or publisher.sends_from_device:
            self._send(tensors, write)
            return None
        kept: list[tuple[str, Tensor]] = []
        dtype = DTYPES.get(publisher.dtype or "")
        self._send(tensors, lambda given: kept.extend(snapshot(given, dtype)))
        return start_detached(lambda: write(iter(kept)))

    def parameters(self) -> Tensors:
        """The model as others know it, adapters merged, on the ranks of the first row; gathering
        concerns no other."""
        return self._whole_model(whole) if self._sharding.is_first_row else iter(())

    def published(self) -> Tensors:
        """As `parameters`, under the names of a checkpoint."""
        return self._names.split(self.parameters())

    @property
    def notes(self) -> dict[str, Any]:
        """Return what a resumed run has to know about the base; equal on every rank, always with the
        same keys.
        """
        if self._lora is None:
            return {}
        version, digest = (
            (-1, "") if self._base is None else (self._base.version, self._base.digest)
        )
        return {"base_version": version, "base_digest": digest}

    def restore(self, notes: dict[str, Any]) -> None:
        """Go on with a base that an earlier run published, if it is still there; collective."""
        if not notes:
            return
        publisher = self._publisher
        if isinstance(publisher, StoredPublisher) and notes["base_version"] >= 0:
            base = Base(version=notes["base_version"], digest=notes["base_digest"])
            self._base = base if publisher.base(base.version) == base else None
        self._share_base()

    def _share_base(self) -> None:
        """Rank 0 knows it; the others take part in what follows from it, and in checkpoints."""
        known = b"" if self._base is None else self._base.model_dump_json().encode()
        received = self._topology.broadcast_bytes(known)
        self._base = Base.model_validate_json(received) if received else None

    def _gathering(self) -> Whole:
        """Return the function that gathers parameters in the type that rank 0's publisher sends;
        collective.
        """
        mine = None if self._publisher is None else self._publisher.dtype
        received = self._topology.broadcast_bytes((mine or "").encode()).decode()
        return partial(whole, dtype=DTYPES.get(received))

    def _whole_model(self, gather: Whole) -> Tensors:
        if self._lora is not None:
            return self._lora.merged(whole)  # in the trainer's type: a sum is rounded once
        return ((name, gather(p)) for name, p in self._model.named_parameters())

    def _send(self, tensors: Tensors, write: Callable[[Tensors], None]) -> None:
        if not self._sharding.is_first_row:
            tensors = iter(())
        failure: Exception | None = None
        if self._topology.is_main:
            try:
                write(tensors)
            except ServiceError as error:
                failure = error
        for _ in tensors:
            pass  # gathering is collective: what rank 0 did not take, it takes part in all the same
        if failure is not None:
            self._topology.max(1)
            raise failure
        if self._topology.max(0):
            raise SyncError("the first rank could not publish this version; see its log")

    def _write(self, meta: WeightUpdateMeta | None, tensors: Tensors) -> None:
        if self._publisher is None or meta is None:
            raise ConfigError("this engine has no weight channel to publish through")
        self._publisher.publish(meta.version, self._names.split(tensors))

    def _write_adapter(self, meta: WeightUpdateMeta | None, tensors: Tensors) -> None:
        assert isinstance(self._publisher, StoredPublisher)
        assert self._lora is not None and self._base is not None and meta is not None
        self._publisher.publish_adapter(meta.version, tensors, self._lora.adapter, self._base)

    def _write_base(self, tensors: Tensors) -> None:
        assert isinstance(self._publisher, StoredPublisher)
        digest = self._publisher.publish(FIRST, self._names.split(tensors)).digest
        assert digest is not None
        self._base = Base(version=FIRST, digest=digest)


def whole(parameter: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return all of a parameter; collective within its row if it is sharded.

    Args:
        dtype: what a shard is cast to before it is gathered, which takes as many bytes less and gives the
            same bits as a cast afterwards. None, and tensors that are whole here, keep their type.
    """
    value = parameter.detach()
    if not isinstance(value, DTensor):
        return value
    if dtype is not None:
        value = cast(DTensor, value.to(dtype))
    on_device = cast(DTensor, value.to(value.device_mesh.device_type))  # it may be offloaded
    return on_device.full_tensor()
