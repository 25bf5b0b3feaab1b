"""A group of processes of one host: the trainer lays a bucket out, and each member copies it.

    buffer/<name>/<rank>   the handle of a buffer, for one member; it is opened once
    sent/<n>               the n-th payload: in which buffer, and how long
    got/<n>/<rank>         that member has copied it

Two buffers are used in turn. One is written to again when all have said `got` of what was in it. A member
that copies from a group that has failed may copy anything: its copy is discarded with the failed epoch,
and no tensor is accepted without its checksum.

There is no connection that could break. It is the gateway that notices that a member has died; its next
epoch ends the waiting here.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from pydantic import ValidationError
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store

from headway.contracts.config.base import Config
from headway.contracts.errors import SyncError
from weight_sync.transports.daemon_calls import Watch
from weight_sync.transports.handles import (
    Handle,
    SharedMemory,
    allocate,
    open_handle,
    retire,
    settle,
)
from weight_sync.transports.process_group import TICK_S, GroupAddress

SLOTS = 2


class _Sent(Config):
    """One payload."""

    slot: int
    buffer: str
    size: int


class IpcGroup:
    """A joined group, used as `WeightGroup` is."""

    def __init__(self, address: GroupAddress, store: Store, device: torch.device) -> None:
        self.address = address
        self.device = device
        """The trainer's, or that of a member's own memory."""
        self._store: Store | None = PrefixStore(f"{address.name}/ipc", store)
        self._own: dict[int, tuple[str, SharedMemory]] = {}
        """The trainer's: name and memory by slot."""
        self._opened: dict[int, tuple[str, Tensor]] = {}
        """The same, as a member sees it."""
        self._num_buffers = 0
        self._num_begun = 0
        self._begun: deque[tuple[int, Tensor | None]] = deque()
        """Payloads under way, the oldest first; of a member's, where they go."""

    def begin_sending(self, payload: Tensor, watch: Watch) -> None:
        """Lay out [size] uint8, from any device; for rank 0.

        Raises:
            SyncError: there is no memory, or the group was closed.
        """
        assert len(self._begun) < SLOTS
        slot, size = self._num_begun % SLOTS, payload.numel()
        with self._asking() as store:
            name, buffer = self._buffer(store, slot, size)
            buffer[:size].copy_(payload)
            settle(self.device)
            sent = _Sent(slot=slot, buffer=name, size=size)
            store.set(f"sent/{self._num_begun}", sent.model_dump_json())
        self._begin(None)

    def begin_receiving(self, target: Tensor, watch: Watch) -> None:
        """The next payload goes into [size] uint8 of any device; it is there when it was finished."""
        self._begin(target)

    def finish(self, watch: Watch) -> None:
        """End the oldest payload that was begun.

        Raises:
            SyncError: `watch` raised it, or the trainer is gone; close the group.
        """
        number, target = self._begun[0]
        if target is None:
            self._finish_sending(number, watch)
        else:
            self._finish_receiving(number, target, watch)
        self._begun.popleft()

    def close(self) -> None:
        """Leave; does not block. Members that still have a buffer open keep its memory alive."""
        self._store = None
        self._begun.clear()
        while self._own:
            retire(self._own.popitem()[1][1])
        self._opened.clear()

    def _begin(self, target: Tensor | None) -> None:
        self._begun.append((self._num_begun, target))
        self._num_begun += 1

    def _finish_sending(self, number: int, watch: Watch) -> None:
        keys = [f"got/{number}/{rank}" for rank in range(1, self.address.world_size)]
        self._wait_for(keys, watch)
        with self._asking() as store:
            for key in (*keys, f"sent/{number}"):
                store.delete_key(key)

    def _finish_receiving(self, number: int, target: Tensor, watch: Watch) -> None:
        self._wait_for([f"sent/{number}"], watch)
        with self._asking() as store:
            sent = _Sent.model_validate_json(store.get(f"sent/{number}"))
            source = self._open(store, sent)
            if sent.size != target.numel() or source.numel() < sent.size:
                raise SyncError(
                    f"payload {number} of group {self.address.name!r} has {sent.size} bytes, "
                    f"announced were {target.numel()}"
                )
            target.copy_(source[: sent.size])
            settle(source.device)
            settle(target.device)
            store.set(f"got/{number}/{self.address.rank}", "")

    def _buffer(self, store: Store, slot: int, size: int) -> tuple[str, Tensor]:
        """Return the memory of a slot; every member has to open a larger one again."""
        name, memory = self._own.pop(slot, ("", None))
        if memory is not None and memory.tensor.numel() < size:
            retire(memory)
            memory = None
        if memory is None:
            name, memory = str(self._num_buffers), allocate(size, self.device)
            self._num_buffers += 1
            for rank in range(1, self.address.world_size):
                store.set(f"buffer/{name}/{rank}", memory.export().model_dump_json())
        self._own[slot] = (name, memory)
        return name, memory.tensor

    def _open(self, store: Store, sent: _Sent) -> Tensor:
        known = self._opened.pop(sent.slot, None)
        if known is None or known[0] != sent.buffer:  # the trainer has dropped the one before, too
            key = f"buffer/{sent.buffer}/{self.address.rank}"
            known = (sent.buffer, open_handle(Handle.model_validate_json(store.get(key))))
            store.delete_key(key)
        self._opened[sent.slot] = known
        return known[1]

    def _wait_for(self, keys: list[str], watch: Watch) -> None:
        while True:
            with self._asking() as store:
                if store.check(keys):
                    return
            watch()
            time.sleep(TICK_S)

    @contextmanager
    def _asking(self) -> Iterator[Store]:
        if self._store is None:
            raise SyncError(f"the group {self.address.name!r} was closed; join it again")
        try:
            yield self._store
        except ValidationError as error:
            first = error.errors()[0]["msg"]
            raise SyncError(f"group {self.address.name!r} holds no handle: {first}") from error
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            raise SyncError(f"group {self.address.name!r} has failed: {reason}") from error
