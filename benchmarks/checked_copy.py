"""What is the least that a checked publication over shared memory can take on this machine?

    python benchmarks/checked_copy.py --servers 3

No service, no manifest, no orders: two threads copy the buckets into touched shared memory and checksum
them, and each reader's process checks every bucket as soon as it was written. In alternation, the bare
copy that `weight_publication.py` compares with. Nothing that proves on every server what it serves is
faster than `value` times the bare copy.
"""

from __future__ import annotations

import argparse
import mmap
import multiprocessing
import os
import tempfile
import threading
import time
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import xxhash
from measure import report

BUCKET_BYTES = 64 << 20
CHUNK_BYTES = 1 << 20
BUCKETS = 8
WRITERS = 2
POLL_S = 0.0003
SPAWN = multiprocessing.get_context("spawn")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--servers", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    random = np.random.default_rng(0)
    sources = [random.integers(0, 256, BUCKET_BYTES, np.uint8) for _ in range(BUCKETS)]
    with tempfile.NamedTemporaryFile(dir="/dev/shm") as file:
        os.posix_fallocate(file.fileno(), 0, BUCKET_BYTES * BUCKETS)
        target = np.frombuffer(mmap.mmap(file.fileno(), BUCKET_BYTES * BUCKETS), np.uint8)
        written = SPAWN.RawArray("i", BUCKETS)
        readers = [start_reader(file.name, written) for _ in range(options.servers)]
        raws, ours = [], []
        for number in range(1, options.rounds + 2):
            raws.append(copy(sources, target))
            ours.append(copy_checked(sources, target, written, number, readers))
    ratios = [a / b for a, b in zip(ours, raws, strict=True)][1:]
    report(
        "checked_copy",
        "seconds(copied and checked) / seconds(copied)",
        ratios,
        servers=options.servers,
        gigabytes=round(BUCKETS * BUCKET_BYTES / 1e9, 3),
        seconds=[round(second, 4) for second in ours[1:]],
        raw_seconds=[round(second, 4) for second in raws[1:]],
    )


def copy(sources: list[Any], target: Any) -> float:
    """Seconds of the bare copy."""
    before = time.monotonic()
    for number, source in enumerate(sources):
        np.copyto(bucket(target, number), source)
    return time.monotonic() - before


def copy_checked(
    sources: list[Any], target: Any, written: Any, number: int, readers: list[Connection]
) -> float:
    """Seconds until every reader has checked what was copied."""
    before = time.monotonic()
    for reader in readers:
        reader.send(number)
    left = iter(range(BUCKETS))
    turn = threading.Lock()

    def write() -> None:
        while True:
            with turn:
                index = next(left, None)
            if index is None:
                return
            checksum, destination = xxhash.xxh3_128(), bucket(target, index)
            for start in range(0, BUCKET_BYTES, CHUNK_BYTES):
                chunk = sources[index][start : start + CHUNK_BYTES]
                np.copyto(destination[start : start + CHUNK_BYTES], chunk)
                checksum.update(chunk)
            written[index] = number

    writers = [threading.Thread(target=write) for _ in range(WRITERS)]
    for writer in writers:
        writer.start()
    for reader in readers:
        reader.recv()
    for writer in writers:
        writer.join()
    return time.monotonic() - before


def start_reader(path: str, written: Any) -> Connection:
    """A process that checks what it is told was written."""
    ours, theirs = SPAWN.Pipe()
    SPAWN.Process(target=read, args=(path, written, theirs), daemon=True).start()
    ours.recv()
    return ours


def read(path: str, written: Any, connection: Connection) -> None:
    with open(path, "rb") as file:
        mapped = mmap.mmap(file.fileno(), BUCKET_BYTES * BUCKETS, prot=mmap.PROT_READ)
    view = np.frombuffer(mapped, np.uint8)
    xxhash.xxh3_128(view)  # maps every page
    connection.send(True)
    while True:
        number = connection.recv()
        for index in range(BUCKETS):
            while written[index] != number:
                time.sleep(POLL_S)
            xxhash.xxh3_128(bucket(view, index)).digest()
        connection.send(True)


def bucket(whole: Any, index: int) -> Any:
    return whole[index * BUCKET_BYTES : (index + 1) * BUCKET_BYTES]


if __name__ == "__main__":
    main()
