"""How long does a version take from the trainer's memory to every server, against the raw transport?

    python benchmarks/weight_publication.py --transport shared_memory --servers 1
    python benchmarks/weight_publication.py --transport disk --servers 3 --load

A gateway and servers (embedded backend) run as processes of their own, over a random Qwen3-style model
of half a GB in bfloat16; this process is the trainer. A publication is timed from `announce` until the
gateway answers that every server has committed. In alternation with it, in the same run, the raw limit
of the transport is timed with the same bytes in the same buckets, to as many receivers:

    shared_memory   memcpy into shared memory that was touched before, where receivers map it
    disk            write + fsync, then one read per receiver into memory that was touched before
    http            one TCP stream per receiver over loopback, sendfile to recv_into
    collective      gloo broadcast

`--load` has every server generate all the time, under both. `pause_ms` is the time between the last
token of the old version and the first of the new one, less the median step; `pause_share` is that
against the transfer time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import mmap
import multiprocessing
import os
import shutil
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import torch
import torch.distributed as dist
from measure import report

from headway.contracts.config.launch import LaunchConfig
from headway.contracts.config.sampling import SamplingConfig
from headway.contracts.http.paths import GENERATE_STREAM
from headway.contracts.types import LLMRequest
from headway.launch.launchers.local import LocalRun
from headway.launch.quickstart import task
from headway.runtime.config import validate_config
from headway.runtime.inference_client import RemoteInferenceEngine
from weight_sync.outgoing import buckets
from weight_sync.transports.base import make_publisher

CONTEXT = 4096
STREAMS = 4
"""Sequences that every server generates under `--load`."""
READY_S = 300.0
WARM_UP = 2
"""Versions until memory is written again: one that serves, and one that is staged."""
STEP_S = 2.0
"""Between publications: a trainer computes for that long at least, and servers free what was replaced."""
SPAWN = multiprocessing.get_context("spawn")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--transport", choices=("shared_memory", "disk", "http", "collective"), required=True
    )
    parser.add_argument("--servers", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--layers", type=int, default=18)
    parser.add_argument("--bucket-mib", type=int, default=64)
    parser.add_argument("--load", action="store_true")
    parser.add_argument("--pack-weights", action="store_true")
    parser.add_argument("--root", default=None, help="directory of the versions")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with ExitStack() as stack:
        folder = Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="headway-", dir="/var/tmp"))
        )
        measure(folder, options, stack)


def measure(folder: Path, options: argparse.Namespace, stack: ExitStack) -> None:
    """Alternate raw and ours; the first rounds warm everything up and are not counted."""
    state = make_model(folder / "model", options.layers)
    root = Path(options.root or default_root(folder, options.transport))
    stack.callback(shutil.rmtree, root, ignore_errors=True)
    config = run_config(folder, root, options)
    publisher = make_publisher(config.trainer.weight_sync)
    stack.callback(publisher.close)
    run = LocalRun(config)
    stack.callback(run.stop)
    run.start_gateway()
    run.start_servers()
    client = RemoteInferenceEngine(run.url, request_timeout_s=READY_S)
    stack.callback(client.destroy)
    client.initialize()
    urls = [server.url for server in client.status().servers]
    raw = stack.enter_context(RAW[options.transport](state, options, root))
    load = stack.enter_context(generating(urls)) if options.load else None
    raws, ours, uploaded, pauses, tokens = [], [], [], [], []
    for version in range(1, options.rounds + WARM_UP + 1):
        time.sleep(STEP_S)
        raws.append(raw())
        state = {name: tensor.roll(1, 0) for name, tensor in state.items()}
        publisher.collect(version - 1)  # now and not sooner: see `raw_disk`
        before = time.monotonic()
        meta = publisher.announce(version)
        commit = client.update_weights(meta)
        publisher.publish(version, state.items())
        uploaded.append(time.monotonic() - before)
        commit.result(READY_S)
        after = time.monotonic()
        ours.append(after - before)
        if load is not None:
            seen = load.after(version, len(urls))
            pauses.append(seen.pause_s)
            tokens.append(seen.tokens_between(before, after))
    seconds, limit = ours[WARM_UP:], raws[WARM_UP:]
    more: dict[str, Any] = {}
    if load is not None:
        share = [pause / second for pause, second in zip(pauses[WARM_UP:], seconds, strict=True)]
        more = {
            "pause_ms": round(1e3 * statistics.median(pauses[WARM_UP:]), 1),
            "pause_share": round(statistics.median(share), 4),
            "tokens_during_transfer": statistics.median(tokens[WARM_UP:]),
        }
    report(
        "weight_publication",
        "seconds(publish to committed) / seconds(raw), of medians",
        [statistics.median(seconds) / statistics.median(limit)],
        transport=options.transport,
        servers=options.servers,
        load=options.load,
        pack_weights=options.pack_weights,
        gigabytes=round(sum(t.nbytes for t in state.values()) / 1e9, 3),
        seconds=[round(second, 4) for second in seconds],
        upload_seconds=[round(second, 4) for second in uploaded[WARM_UP:]],
        raw_seconds=[round(second, 4) for second in limit],
        ratios=[round(a / b, 3) for a, b in zip(seconds, limit, strict=True)],
        **more,
    )


def default_root(folder: Path, transport: str) -> str:
    return str(folder / "weights") if transport == "disk" else f"/dev/shm/{folder.name}"


def make_model(folder: Path, layers: int) -> dict[str, torch.Tensor]:
    """Write a random model; its parameters."""
    from transformers import Qwen3Config, Qwen3ForCausalLM  # slow, and receivers need it not

    torch.manual_seed(0)
    config = Qwen3Config(
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=layers,
        vocab_size=32_000,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
    )
    model = Qwen3ForCausalLM(config).to(torch.bfloat16)
    task.write_model(folder, {})
    model.save_pretrained(folder)
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def run_config(folder: Path, root: Path, options: argparse.Namespace) -> LaunchConfig:
    sync: dict[str, Any] = {"type": options.transport, "shard_bytes": options.bucket_mib << 20}
    if options.transport != "collective":
        sync |= {"root": str(root), "keep": 1}
    return validate_config(
        LaunchConfig,
        {
            "model": str(folder / "model"),
            "num_servers": options.servers,
            "threads_per_process": 1,
            "gateway": {"service": {"port": 0}, "ledger": str(folder / "ledger.sqlite")},
            "server": {
                "service": {"port": 0},
                "model": {"dtype": "bfloat16"},
                "backend": {
                    "type": "embedded_torch",
                    "max_sequences": 8,
                    "max_context": CONTEXT,
                    "pack_weights": options.pack_weights,
                    "num_threads": 1,
                },
                "heartbeat_s": 0.5,
            },
            "trainer": {
                "run_dir": str(folder / "run"),
                "data": {"path": str(folder / "none.jsonl"), "batch_size": 1},
                "rollout": {"reward": {"name": "exact"}},
                "weight_sync": sync,
            },
        },
    )


class Seen:
    """What the streams of a load saw around one version."""

    def __init__(self, pauses: list[float], times: list[float]) -> None:
        self.pause_s = statistics.median(pauses)
        self._times = times

    def tokens_between(self, start: float, end: float) -> int:
        return sum(start <= when <= end for when in self._times)


class Load:
    """Streams on every server, read in a process of its own."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def after(self, version: int, servers: int) -> Seen:
        """Wait until every stream has sampled under this version."""
        self._connection.send(version)
        return Seen(*self._connection.recv())


@contextmanager
def generating(urls: list[str]) -> Iterator[Load]:
    ours, theirs = SPAWN.Pipe()
    process = SPAWN.Process(target=_load_process, args=(theirs, urls), daemon=True)
    process.start()
    ours.recv()
    try:
        yield Load(ours)
    finally:
        process.terminate()
        process.join()


def _load_process(connection: Connection, urls: list[str]) -> None:
    events: dict[int, list[tuple[float, int]]] = {}
    first = threading.Event()

    async def stream(session: aiohttp.ClientSession, url: str, number: int) -> None:
        for attempt in range(10**9):
            request = LLMRequest(
                rid=f"load-{number}-{attempt}",
                input_ids=tuple(range(1, 33)),
                gconfig=SamplingConfig(max_new_tokens=CONTEXT - 40, ignore_eos=True),
            )
            body = request.model_dump_json().encode()
            headers = {"content-type": "application/json"}
            async with session.post(url + GENERATE_STREAM, data=body, headers=headers) as answer:
                async for line in answer.content:
                    if line.startswith(b'data: {"output_tokens"'):
                        delta = json.loads(line[6:])
                        events.setdefault(number, []).append((time.monotonic(), delta["version"]))
                        if len(events) == len(urls) * STREAMS:
                            first.set()

    async def run() -> None:
        timeout = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            await asyncio.gather(
                *(
                    stream(session, url, i * STREAMS + j)
                    for i, url in enumerate(urls)
                    for j in range(STREAMS)
                )
            )

    threading.Thread(target=lambda: asyncio.run(run()), daemon=True).start()
    first.wait()
    connection.send(True)
    while True:
        version = connection.recv()
        while any(seen[-1][1] < version for seen in events.values()):
            time.sleep(0.005)
        pauses, times = [], []
        for seen in events.values():
            seen = list(seen)
            times += [when for when, _ in seen]
            gaps = [after[0] - before[0] for before, after in pairwise(seen[-200:])]
            crossing = next(i for i, (_, v) in enumerate(seen) if v >= version)
            if crossing:
                pauses.append(
                    max(0.0, seen[crossing][0] - seen[crossing - 1][0] - statistics.median(gaps))
                )
        connection.send((pauses or [0.0], times))


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


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        main()
