"""Measure the update of a trainer that is not ours, over a fleet whose servers generate meanwhile.

    python benchmarks/foreign_update.py --servers 3 --streams 11

A gateway and servers (embedded backend) over a random model of half a GB in bfloat16, as in
`weight_publication.py`. The trainer saves a directory as Hugging Face's `save_pretrained` does, and asks
the gateway to `/update_weights_from_disk`, as SGLang's clients ask a server. In one row:

    value           seconds from the request to the answer
    staging_s       from the request until every server has the version beside the one that serves
    commit_s        from the record of the version to the last server's swap
    pause_ms        between a stream's last token of the old version and its first of the new one, less
                    the median step
    spread_ms       from the first stream's first token of the new version to the last one's
    gigabytes       that each server reads
"""

from __future__ import annotations

import argparse
import re
import shutil
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import httpx
import torch
from measure import report
from safetensors.torch import save_file
from weight_publication import READY_S, STEP_S, WARM_UP, generating, make_model, run_config

from headway.launch.launchers.local import LocalRun
from headway.runtime.inference_client import RemoteInferenceEngine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--servers", type=int, default=3)
    parser.add_argument("--streams", type=int, default=11, help="on each server")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=18)
    options = parser.parse_args()
    options.transport, options.bucket_mib, options.pack_weights = "disk", 64, False
    torch.set_num_threads(1)
    with ExitStack() as stack:
        made = tempfile.TemporaryDirectory(prefix="headway-", dir="/var/tmp")
        measure(Path(stack.enter_context(made)), options, stack)


def measure(folder: Path, options: argparse.Namespace, stack: ExitStack) -> None:
    """The first updates warm everything up, and are not counted."""
    state = make_model(folder / "model", options.layers)
    weights = folder / "weights"
    run = LocalRun(run_config(folder, weights, options))
    stack.callback(run.stop)
    run.start_gateway()
    run.start_servers()
    client = RemoteInferenceEngine(run.url, request_timeout_s=READY_S)
    stack.callback(client.destroy)
    client.initialize()
    urls = [server.url for server in client.status().servers]
    load = stack.enter_context(generating(urls, options.streams))
    trainer = stack.enter_context(httpx.Client(base_url=run.url, timeout=READY_S))
    seconds, staging, commits, pauses, spreads = [], [], [], [], []
    for version in range(1, options.rounds + WARM_UP + 1):
        time.sleep(STEP_S)
        state = {name: tensor.roll(1, 0) for name, tensor in state.items()}
        saved = save(weights, folder / "model", version, state)
        earlier = sums(trainer)
        before = time.monotonic()
        body = {"model_path": str(saved), "weight_version": str(version)}
        answer = trainer.post("/update_weights_from_disk", json=body)
        seconds.append(time.monotonic() - before)
        assert answer.json()["success"], answer.text
        staged, committed = (now - then for now, then in zip(sums(trainer), earlier, strict=True))
        staging.append(staged)
        commits.append(committed)
        seen = load.after(version, len(urls))
        pauses.append(seen.pause_s)
        spreads.append(seen.spread_s)
    counted = slice(WARM_UP, None)
    report(
        "foreign_update",
        "seconds",
        seconds[counted],
        servers=options.servers,
        streams=options.streams * options.servers,
        gigabytes=round(sum(t.nbytes for t in state.values()) / 1e9, 3),
        staging_s=round(statistics.median(staging[counted]), 3),
        commit_s=round(statistics.median(commits[counted]), 4),
        pause_ms=round(1e3 * statistics.median(pauses[counted]), 1),
        spread_ms=round(1e3 * statistics.median(spreads[counted]), 1),
    )


def save(weights: Path, model: Path, version: int, state: dict[str, torch.Tensor]) -> Path:
    """The weights of a version as trainers save them; the one before the last goes."""
    shutil.rmtree(weights / f"step-{version - 2}", ignore_errors=True)
    saved = weights / f"step-{version}"
    saved.mkdir(parents=True)
    for file in model.glob("*.json"):
        shutil.copy(file, saved)
    save_file({n: t.contiguous() for n, t in state.items()}, saved / "model.safetensors")
    return saved


def sums(gateway: httpx.Client) -> list[float]:
    """Seconds of staging and of commits so far, by the gateway's metrics."""
    text = gateway.get("/metrics").text
    found = [
        re.search(rf"^headway_weight_{name}_seconds_sum (\S+)", text, re.MULTILINE)
        for name in ("staging", "commit")
    ]
    return [0.0 if match is None else float(match[1]) for match in found]


if __name__ == "__main__":
    main()
