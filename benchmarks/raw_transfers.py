"""The raw limit of each transport: a version's bytes in its buckets to as many receivers, and no more."""

from __future__ import annotations

import argparse
import mmap
import multiprocessing
import os
import socket
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

from weight_sync.published_tensors import buckets

SPAWN = multiprocessing.get_context("spawn")

Raw = Callable[[], float]


@contextmanager
def raw_shared_memory(
    state: dict[str, torch.Tensor], options: argparse.Namespace, root: Path
) -> Iterator[Raw]:
    """memcpy into touched shared memory; receivers map it, so their number does not matter."""
    root.mkdir(parents=True, exist_ok=True)
    sources = [as_numpy(tensor) for tensor in state.values()]
    total = sum(source.nbytes for source in sources)
    with (root / "raw.bin").open("w+b") as file:
        os.posix_fallocate(file.fileno(), 0, total)
        target = np.frombuffer(mmap.mmap(file.fileno(), total), np.uint8)

        def copy() -> float:
            before, offset = time.monotonic(), 0
            for source in sources:
                np.copyto(target[offset : offset + source.nbytes], source)
                offset += source.nbytes
            return time.monotonic() - before

        yield copy


@contextmanager
def raw_disk(
    state: dict[str, torch.Tensor], options: argparse.Namespace, root: Path
) -> Iterator[Raw]:
    """write + fsync, then a read by each receiver's process.

    Right before, the file of the last round is deleted, as is the old version before a publication: a
    virtual machine gives memory that stays free back to its host, and has it again at a tenth of the
    speed. So both write into pages that were in use a moment ago.
    """
    root.mkdir(parents=True, exist_ok=True)
    sources = [as_numpy(tensor) for tensor in state.values()]
    path = root / "raw.bin"
    with receivers(options.servers, _read_process, sum(s.nbytes for s in sources)) as connections:

        def write_and_read() -> float:
            path.unlink(missing_ok=True)
            before = time.monotonic()
            with path.open("wb", buffering=0) as file:
                write_all(file, sources)
                os.fsync(file.fileno())
            for connection in connections:
                connection.send(str(path))
            for connection in connections:
                connection.recv()
            return time.monotonic() - before

        yield write_and_read


def _read_process(connection: Connection, size: int) -> None:
    buffer = memoryview(np.zeros(size, np.uint8))
    connection.send(True)
    while True:
        with open(connection.recv(), "rb", buffering=0) as file:
            done = 0
            while done < size:
                done += file.readinto(buffer[done:])
        connection.send(True)


@contextmanager
def raw_http(
    state: dict[str, torch.Tensor], options: argparse.Namespace, root: Path
) -> Iterator[Raw]:
    """A file on the tmpfs, sent to each receiver's process over a TCP stream of its own."""
    root.mkdir(parents=True, exist_ok=True)
    sources = [as_numpy(tensor) for tensor in state.values()]
    size = sum(source.nbytes for source in sources)
    path = root / "raw.bin"
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        receivers(
            options.servers, _receive_process, (server.getsockname()[1], size)
        ) as connections,
    ):
        streams = [server.accept()[0] for _ in connections]
        path.write_bytes(bytes(size))

        def write_and_send() -> float:
            before = time.monotonic()
            with path.open("r+b", buffering=0) as file:
                write_all(file, sources)
                threads = [threading.Thread(target=_send_file, args=(s, path)) for s in streams]
                for thread in threads:
                    thread.start()
                for connection in connections:
                    connection.recv()
            return time.monotonic() - before

        yield write_and_send
        for stream in streams:
            stream.close()


def _send_file(stream: socket.socket, path: Path) -> None:
    with path.open("rb") as file:
        stream.sendfile(file)


def _receive_process(connection: Connection, where: tuple[int, int]) -> None:
    port, size = where
    buffer = memoryview(np.zeros(size, np.uint8))
    stream = socket.create_connection(("127.0.0.1", port))
    connection.send(True)
    while True:
        done = 0
        while done < size:
            count = stream.recv_into(buffer[done:])
            if count == 0:
                return
            done += count
        connection.send(True)


@contextmanager
def raw_collective(
    state: dict[str, torch.Tensor], options: argparse.Namespace, root: Path
) -> Iterator[Raw]:
    """A gloo broadcast of each bucket, as one flat tensor."""
    flats = [
        torch.cat([tensor.view(-1) for _, tensor in bucket])
        for bucket in buckets(state.items(), options.bucket_mib << 20)
    ]
    sizes = [flat.numel() for flat in flats]
    world = options.servers + 1
    store = dist.TCPStore("127.0.0.1", 0, world, is_master=True, wait_for_workers=False)
    with receivers(options.servers, _broadcast_process, (store.port, world, sizes)) as connections:
        dist.init_process_group(
            "gloo", store=store, rank=0, world_size=world, timeout=timedelta(seconds=60)
        )

        def broadcast() -> float:
            for connection in connections:
                connection.send(True)
            for connection in connections:
                connection.recv()
            before = time.monotonic()
            for flat in flats:
                dist.broadcast(flat, src=0)
            for connection in connections:
                connection.recv()
            return time.monotonic() - before

        yield broadcast
        dist.destroy_process_group()


def _broadcast_process(connection: Connection, group: tuple[int, int, list[int]]) -> None:
    port, world, sizes = group
    torch.set_num_threads(1)
    rank = int(multiprocessing.current_process().name)
    connection.send(True)
    store = dist.TCPStore("127.0.0.1", port, world, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    flats = [torch.zeros(size, dtype=torch.bfloat16) for size in sizes]
    while connection.recv():
        connection.send(True)
        for flat in flats:
            dist.broadcast(flat, src=0)
        connection.send(True)


@contextmanager
def receivers(count: int, target: Callable[..., None], argument: Any) -> Iterator[list[Connection]]:
    """Processes that take part in a raw transfer."""
    pipes = [SPAWN.Pipe() for _ in range(count)]
    processes = [
        SPAWN.Process(target=target, args=(theirs, argument), name=str(number + 1), daemon=True)
        for number, (_, theirs) in enumerate(pipes)
    ]
    for process in processes:
        process.start()
    for ours, _ in pipes:
        ours.recv()
    try:
        yield [ours for ours, _ in pipes]
    finally:
        for process in processes:
            process.kill()
            process.join()


def write_all(file: Any, sources: list[Any]) -> None:
    """Into a file without a buffer of its own."""
    for source in sources:
        view = memoryview(source)
        while view.nbytes:
            view = view[file.write(view) :]


def as_numpy(tensor: torch.Tensor) -> Any:
    return tensor.view(-1).view(torch.uint8).numpy()


RAW: dict[str, Any] = {
    "shared_memory": raw_shared_memory,
    "disk": raw_disk,
    "http": raw_http,
    "collective": raw_collective,
}
