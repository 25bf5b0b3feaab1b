"""Measure the time of a version from the trainer's memory to every server, against the raw transport.

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
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import aiohttp
import torch
from measure import report
from raw_transfers import RAW, SPAWN

from headway.contracts.config.launch import LaunchConfig
from headway.contracts.config.sampling import SamplingConfig
from headway.contracts.http.paths import GENERATE_STREAM
from headway.contracts.types import LLMRequest
from headway.launch.launchers.local import LocalRun
from headway.launch.quickstart import task
from headway.runtime.config import validate_config
from headway.runtime.inference_client import RemoteInferenceEngine
from weight_sync.transports.base import make_publisher

CONTEXT = 4096
STREAMS = 4
"""Sequences that every server generates under `--load`."""
READY_S = 300.0
WARM_UP = 2
"""Versions until memory is written again: one that serves, and one that is staged."""
STEP_S = 2.0
"""Seconds between publications: a trainer computes for that long at least, and servers free replaced
weights.
"""


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
        publisher.collect(version - 1)  # now and not sooner: see `raw_transfers.raw_disk`
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
            "share_gpus": True,  # no rank is started: this process is the trainer
            "threads_per_process": 1,
            "gateway": {"service": {"port": 0}, "ledger": str(folder / "ledger.sqlite")},
            "server": {
                "service": {"port": 0},
                "model": {"dtype": "bfloat16"},
                "backend": {
                    "type": "embedded_torch",
                    "max_sequences": 16,
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
    """Observations of a load's streams around one version."""

    def __init__(self, pauses: list[float], times: list[float], crossings: list[float]) -> None:
        self.pause_s = statistics.median(pauses)
        self.spread_s = max(crossings) - min(crossings)
        """From the first stream's first token of the version to the last one's."""
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
def generating(urls: list[str], num_each: int = STREAMS) -> Iterator[Load]:
    ours, theirs = SPAWN.Pipe()
    process = SPAWN.Process(target=_load_process, args=(theirs, urls, num_each), daemon=True)
    process.start()
    ours.recv()
    try:
        yield Load(ours)
    finally:
        process.terminate()
        process.join()


def _load_process(connection: Connection, urls: list[str], num_each: int) -> None:
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
                        if len(events) == len(urls) * num_each:
                            first.set()

    async def run() -> None:
        timeout = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            await asyncio.gather(
                *(
                    stream(session, url, i * num_each + j)
                    for i, url in enumerate(urls)
                    for j in range(num_each)
                )
            )

    threading.Thread(target=lambda: asyncio.run(run()), daemon=True).start()
    first.wait()
    connection.send(True)
    while True:
        version = connection.recv()
        while any(seen[-1][1] < version for seen in events.values()):
            time.sleep(0.005)
        pauses, times, crossings = [], [], []
        for seen in events.values():
            seen = list(seen)
            times += [when for when, _ in seen]
            gaps = [after[0] - before[0] for before, after in pairwise(seen[-200:])]
            crossing = next(i for i, (_, v) in enumerate(seen) if v >= version)
            crossings.append(seen[crossing][0])
            if crossing:
                pauses.append(
                    max(0.0, seen[crossing][0] - seen[crossing - 1][0] - statistics.median(gaps))
                )
        connection.send((pauses or [0.0], times, crossings))


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        main()
