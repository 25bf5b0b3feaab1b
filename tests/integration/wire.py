"""What the kernel's netem does, for kernels without it: a link that delays frames and loses some."""

from __future__ import annotations

import fcntl
import os
import random
import select
import struct
import threading
import time
from collections import deque
from contextlib import suppress

TUNSETIFF, IFF_TAP, IFF_NO_PI = 0x4004_54CA, 0x0002, 0x1000
FRAME_BYTES = 65_536
BURST = 64
"""Frames that one end may bring before the other has its turn."""


class Wire:
    """Two interfaces and the way between them; what the first one sends comes late, or not at all."""

    def __init__(self, near: str, far: str, delay_ms: float, loss_percent: float) -> None:
        """Make interfaces of these names in this network namespace; they may be moved from it."""
        self._near, self._far = _make_tap(near), _make_tap(far)
        self._delay_s = delay_ms / 1000
        self._loss = loss_percent / 100
        self._chance = random.Random(far)
        self._stop = os.eventfd(0)
        self._thread = threading.Thread(target=self._carry, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Remove both interfaces."""
        os.eventfd_write(self._stop, 1)
        self._thread.join()
        for descriptor in (self._near, self._far, self._stop):
            os.close(descriptor)

    def _carry(self) -> None:
        under_way: deque[tuple[float, bytes]] = deque()
        while True:
            wait_s = max(0.0, under_way[0][0] - time.monotonic()) if under_way else None
            ready, _, _ = select.select([self._near, self._far, self._stop], [], [], wait_s)
            if self._stop in ready:
                return
            if self._near in ready:
                due = time.monotonic() + self._delay_s
                kept = [f for f in _frames(self._near) if self._chance.random() >= self._loss]
                under_way += ((due, frame) for frame in kept)
            if self._far in ready:
                for frame in _frames(self._far):
                    _send(self._near, frame)
            while under_way and under_way[0][0] <= time.monotonic():
                _send(self._far, under_way.popleft()[1])


def _make_tap(name: str) -> int:
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    request = struct.pack("16sH22x", name.encode(), IFF_TAP | IFF_NO_PI)
    fcntl.ioctl(descriptor, TUNSETIFF, request)
    return descriptor


def _frames(descriptor: int) -> list[bytes]:
    frames: list[bytes] = []
    with suppress(OSError):  # there are no more, or the interface is down
        while len(frames) < BURST:
            frames.append(os.read(descriptor, FRAME_BYTES))
    return frames


def _send(descriptor: int, frame: bytes) -> None:
    with suppress(OSError):  # the interface is down or full: the frame is lost
        os.write(descriptor, frame)
