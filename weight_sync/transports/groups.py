"""Groups that a version is broadcast in, for each backend: Gloo, NCCL, or handles on one host."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch._C._distributed_c10d import Store

from weight_sync.transports.daemon_calls import Watch
from weight_sync.transports.ipc_group import IpcGroup
from weight_sync.transports.process_group import GroupAddress, make_group


class BroadcastGroup(Protocol):
    """A joined group; one thread sends or receives, any thread may close it."""

    address: GroupAddress
    device: torch.device
    """Device that it sends from and receives to."""

    def begin_sending(self, payload: Tensor, watch: Watch) -> None:
        """One broadcast of [size] uint8, from any device; for rank 0.

        The payload must not be written to until it is finished.

        Raises:
            SyncError: a peer died, or `watch` raised it; close the group.
        """

    def begin_receiving(self, target: Tensor, watch: Watch) -> None:
        """One broadcast into [size] uint8 on any device, which it fills until it is finished.

        Raises:
            SyncError: as for `begin_sending`; leave the target alone.
        """

    def finish(self, watch: Watch) -> None:
        """End the oldest broadcast that was begun.

        Raises:
            SyncError: as for `begin_sending`.
        """

    def close(self) -> None:
        """Leave; does not block."""


def meet_group(
    address: GroupAddress, store: Store, timeout_s: float, device: torch.device
) -> BroadcastGroup:
    """As `make_group`, by handles of memory too."""
    if address.backend == "ipc":
        return IpcGroup(address, store, device)
    return make_group(address, store, timeout_s, device)
