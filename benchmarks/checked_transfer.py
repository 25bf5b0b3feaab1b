"""Measure the least time that a checked publication can take on this machine.

    python benchmarks/checked_transfer.py --transport shared_memory --servers 3

No service, no manifest, no orders: bytes move as `raw_transfers.py` moves them bare, but the sender
checksums every bucket and each receiver's process checks every bucket, chunk by chunk while it is warm,
and all of it overlaps as far as the transport allows:

    shared_memory   two threads copy into touched shared memory and checksum; readers check what they map
    http            two threads write a file and checksum; a bucket is sent to each receiver when it is
                    whole, and checked by the MiB as it arrives
    collective      gloo broadcasts, two under way; a thread on each side checksums what they carry

In alternation, the bare transport of `raw_transfers.py`. A publication that verifies every server's
weights cannot take less than about `value` times the bare transport.
"""

from __future__ import annotations

import argparse
import mmap
import os
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import xxhash
from measure import report
from raw_transfers import RAW, SPAWN, as_numpy, receivers

BUCKETS = 8
BUCKET_BYTES = 64 << 20
SIZE = BUCKETS * BUCKET_BYTES
CHUNK_BYTES = 1 << 20
WRITERS = 2
TURNS = 4
"""Raw and checked alternate this often: two groups of one process cannot alternate round by round."""
POLL_S = 0.0003


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--transport", choices=tuple(CHECKED), required=True)
    parser.add_argument("--servers", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5, help="of each turn")
    options = parser.parse_args()
    options.bucket_mib = BUCKET_BYTES >> 20
    torch.set_num_threads(1)
    state = {
        str(number): torch.randint(0, 256, (BUCKET_BYTES,), dtype=torch.uint8).view(torch.bfloat16)
        for number in range(BUCKETS)
    }
    raws, ours = [], []
    for _ in range(TURNS):
        raws += measure(RAW[options.transport], state, options)
        ours += measure(CHECKED[options.transport], state, options)
    report(
        "checked_transfer",
        "seconds(checked) / seconds(raw), of medians",
        [statistics.median(ours) / statistics.median(raws)],
        transport=options.transport,
        servers=options.servers,
        gigabytes=round(SIZE / 1e9, 3),
        seconds=[round(second, 4) for second in ours],
        raw_seconds=[round(second, 4) for second in raws],
    )


def measure(
    transfer: Callable[..., Any], state: dict[str, torch.Tensor], options: argparse.Namespace
) -> list[float]:
    """Seconds of each round but the first two, in which memory is touched."""
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm") as folder,
        transfer(state, options, Path(folder)) as once,
    ):
        return [once() for _ in range(options.rounds + 2)][2:]


class Written:
    """Buckets of this round that are whole; processes that read share it."""

    def __init__(self) -> None:
        self.rounds = SPAWN.RawArray("i", BUCKETS)

    def wait(self, index: int, number: int) -> None:
        while self.rounds[index] != number:
            time.sleep(POLL_S)


def write_checked(
    sources: list[Any], written: Written, number: int, put: Callable[[int, Any], None]
) -> list[threading.Thread]:
    """Threads that put every chunk at its offset and checksum it."""
    left, turn = iter(range(BUCKETS)), threading.Lock()

    def write() -> None:
        while True:
            with turn:
                index = next(left, None)
            if index is None:
                return
            checksum = xxhash.xxh3_128()
            for start in range(0, BUCKET_BYTES, CHUNK_BYTES):
                chunk = sources[index][start : start + CHUNK_BYTES]
                put(index * BUCKET_BYTES + start, chunk)
                checksum.update(chunk)
            written.rounds[index] = number

    threads = [threading.Thread(target=write) for _ in range(WRITERS)]
    for thread in threads:
        thread.start()
    return threads


@contextmanager
def checked_shared_memory(
    state: dict[str, torch.Tensor], options: argparse.Namespace, root: Path
) -> Iterator[Callable[[], float]]:
    sources = [as_numpy(tensor) for tensor in state.values()]
    path, written, numbers = root / "checked.bin", Written(), iter(range(1, 10**6))
    with path.open("w+b") as file:
        os.posix_fallocate(file.fileno(), 0, SIZE)
        target = np.frombuffer(mmap.mmap(file.fileno(), SIZE), np.uint8)

        def put(offset: int, chunk: Any) -> None:
            np.copyto(target[offset : offset + len(chunk)], chunk)

        with receivers(options.servers, _check_mapped, (str(path), written)) as connections:

            def once() -> float:
                number, before = next(numbers), time.monotonic()
                for connection in connections:
                    connection.send(number)
                write_checked(sources, written, number, put)
                for connection in connections:
                    connection.recv()
                return time.monotonic() - before

            yield once


def _check_mapped(connection: Connection, where: tuple[str, Written]) -> None:
    path, written = where
    with open(path, "rb") as file:
        view = np.frombuffer(mmap.mmap(file.fileno(), SIZE, prot=mmap.PROT_READ), np.uint8)
    xxhash.xxh3_128(view)  # maps every page
    connection.send(True)
    while True:
        number = connection.recv()
        for index in range(BUCKETS):
            written.wait(index, number)
            xxhash.xxh3_128(view[index * BUCKET_BYTES : (index + 1) * BUCKET_BYTES]).digest()
        connection.send(True)


@contextmanager
def checked_http(
    state: dict[str, torch.Tensor], options: argparse.Namespace, root: Path
) -> Iterator[Callable[[], float]]:
    sources = [as_numpy(tensor) for tensor in state.values()]
    path, written, numbers = root / "checked.bin", Written(), iter(range(1, 10**6))
    with socket.create_server(("127.0.0.1", 0)) as server, path.open("w+b", buffering=0) as file:
        path.write_bytes(bytes(SIZE))
        port = server.getsockname()[1]
        with receivers(options.servers, _receive_checked, port) as connections:
            streams = [server.accept()[0] for _ in connections]

            def put(offset: int, chunk: Any) -> None:
                os.pwrite(file.fileno(), chunk, offset)

            def send(stream: socket.socket, number: int) -> None:
                for index in range(BUCKETS):
                    written.wait(index, number)
                    offset = index * BUCKET_BYTES
                    while offset < (index + 1) * BUCKET_BYTES:
                        count = (index + 1) * BUCKET_BYTES - offset
                        offset += os.sendfile(stream.fileno(), file.fileno(), offset, count)

            def once() -> float:
                number, before = next(numbers), time.monotonic()
                write_checked(sources, written, number, put)
                for stream in streams:
                    threading.Thread(target=send, args=(stream, number)).start()
                for connection in connections:
                    connection.recv()
                return time.monotonic() - before

            yield once
            for stream in streams:
                stream.close()


def _receive_checked(connection: Connection, port: int) -> None:
    buffer: Any = memoryview(bytearray(SIZE))
    stream = socket.create_connection(("127.0.0.1", port))
    connection.send(True)
    while True:
        for offset in range(0, SIZE, CHUNK_BYTES):
            chunk = buffer[offset : offset + CHUNK_BYTES]
            if offset % BUCKET_BYTES == 0:
                checksum = xxhash.xxh3_128()
            if stream.recv_into(chunk, CHUNK_BYTES, socket.MSG_WAITALL) < CHUNK_BYTES:
                return
            checksum.update(chunk)
        connection.send(True)


@contextmanager
def checked_collective(
    state: dict[str, torch.Tensor], options: argparse.Namespace, root: Path
) -> Iterator[Callable[[], float]]:
    flats, world = list(state.values()), options.servers + 1
    store = dist.TCPStore("127.0.0.1", 0, world, is_master=True, wait_for_workers=False)
    with receivers(options.servers, _broadcast_checked, (store.port, world)) as connections:
        dist.init_process_group(
            "gloo", store=store, rank=0, world_size=world, timeout=timedelta(seconds=60)
        )

        def once() -> float:
            for connection in connections:
                connection.send(True)
            for connection in connections:
                connection.recv()
            before = time.monotonic()
            threading.Thread(target=check, args=(flats,)).start()
            for work in under_way(flats):
                work.wait()
            for connection in connections:
                connection.recv()
            return time.monotonic() - before

        yield once
        dist.destroy_process_group()


def _broadcast_checked(connection: Connection, group: tuple[int, int]) -> None:
    port, world = group
    torch.set_num_threads(1)
    rank = int(SPAWN.current_process().name)
    connection.send(True)
    store = dist.TCPStore("127.0.0.1", port, world, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    flats = [torch.zeros(BUCKET_BYTES // 2, dtype=torch.bfloat16) for _ in range(BUCKETS)]
    while connection.recv():
        connection.send(True)
        checks = []
        for flat, work in zip(flats, under_way(flats), strict=True):
            work.wait()
            checks.append(threading.Thread(target=check, args=([flat],)))
            checks[-1].start()
        for thread in checks:
            thread.join()
        connection.send(True)


def under_way(flats: list[torch.Tensor]) -> Iterator[Any]:
    """Broadcasts in order; the next one has begun when one is handed out."""
    works = [dist.broadcast(flats[0], src=0, async_op=True)]
    for flat in flats[1:]:
        works.append(dist.broadcast(flat, src=0, async_op=True))
        yield works.pop(0)
    yield works.pop(0)


def check(flats: list[torch.Tensor]) -> None:
    for flat in flats:
        xxhash.xxh3_128(as_numpy(flat)).digest()


CHECKED: dict[str, Callable[..., Any]] = {
    "shared_memory": checked_shared_memory,
    "http": checked_http,
    "collective": checked_collective,
}


if __name__ == "__main__":
    main()
