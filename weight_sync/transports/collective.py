"""Versions broadcast to all servers at once, in a process group made for those that take part.

    gloo://trainer:29500/v00000007     on CPUs; nccl:// from GPU to GPU; ipc:// on one host, by handles

The trainer hosts the rendezvous (`group_setup`); the gateway gives every server its rank. A group lives
as long as its members stay the same: they report which one they hold, and the trainer uses it again only
if all hold the same as itself. Otherwise a new one is made, which costs milliseconds with Gloo and up to
seconds with NCCL. A group in which anything failed is never used again.

A version flows once: a server that comes too late, or finds a tensor damaged, has to turn to its
peers. Neither the rendezvous nor the group knows passwords or encryption: use a private network, and
`GLOO_SOCKET_IFNAME` or `NCCL_SOCKET_IFNAME` to choose it.
"""

from __future__ import annotations

from typing import get_args

from headway.contracts.config.weight_sync import CollectiveSync, ReceiverConfig
from headway.contracts.errors import SyncError
from headway.contracts.types import WeightUpdateMeta
from weight_sync.buffers import Buffers
from weight_sync.deadline import Deadline
from weight_sync.transports.collective_publisher import CollectivePublisher
from weight_sync.transports.collective_source import CollectiveSource, GroupCache
from weight_sync.transports.process_group import GroupBackend


class CollectiveChannel:
    """`WeightChannel` of process groups."""

    schemes = get_args(GroupBackend)

    def __init__(self) -> None:
        self._kept = GroupCache()
        self._memory = Buffers()

    def make_publisher(self, config: CollectiveSync) -> CollectivePublisher:
        return CollectivePublisher(config)

    def open_source(
        self, path: str, meta: WeightUpdateMeta, config: ReceiverConfig, deadline: Deadline
    ) -> CollectiveSource:
        if meta.group_rank is None:
            raise SyncError(f"{path} is a process group, and no rank was given to this server")
        return CollectiveSource(
            path,
            meta.version,
            meta.group_rank,
            deadline,
            self._kept,
            self._memory,
            config.on_device,
        )


CHANNEL = CollectiveChannel()
