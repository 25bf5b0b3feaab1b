"""Measure what a step of `headway run` costs besides generating and training.

    python benchmarks/step_overhead.py --rounds 3

A tiny model (hidden 64, 2 layers) writes 32 answers of 16 tokens per step, without staleness, so that
generating, training and publishing follow one another. The `value` is the time of a step, less the time
of training and less the time that the generation server had sequences to work on: submission, delivery,
verifiers, publication, and waiting. `publish_ms` is the part of it that publishes the new version. Steps
at the start are left out.
"""

from __future__ import annotations

import argparse
import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
from against_trl import environment, our_command, our_config
from against_trl_task import Setting, write_model, write_prompts
from measure import report
from prometheus_client.parser import text_string_to_metric_families

from headway.contracts.http.paths import METRICS, STATUS
from headway.runtime.journal import METRICS_NAME, read_steps

SKIPPED = 10
"""Steps at the start, and at the end, that are left out."""
DEADLINE_S = 120.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--trainer-threads", type=int, default=1)
    parser.add_argument("--server-threads", type=int, default=1)
    options = parser.parse_args()
    setting = Setting(
        hidden=64,
        layers=2,
        max_new_tokens=16,
        steps=options.steps,
        prompts=4,
        group_size=8,
        lr=1e-3,
        beta2=0.999,
        schedule="constant",
        max_grad_norm=1.0,
        eps_clip=0.2,
        seed=0,
    )
    with tempfile.TemporaryDirectory(prefix="headway-") as place:
        write_model(Path(place) / "model", setting)
        write_prompts(Path(place) / "prompts.jsonl", setting.seed)
        places = [Path(place) / str(number) for number in range(options.rounds)]
        rounds = [measure(each, setting, options) for each in places]
    medians = {name: statistics.median(each[name] for each in rounds) for name in rounds[0]}
    report(
        "step_overhead",
        "ms per step besides generating and training",
        [each.pop("besides_ms") for each in rounds],
        **{name: round(value, 1) for name, value in medians.items() if name != "besides_ms"},
        steps=options.steps,
        threads={"trainer": options.trainer_threads, "server": options.server_threads},
    )


def measure(folder: Path, setting: Setting, options: argparse.Namespace) -> dict[str, float]:
    """Run once; milliseconds per step, by what they went into."""
    folder.mkdir()
    tree = our_config(folder, folder / "weights", setting, 0, options)
    port = free_port()
    tree["gateway"]["service"]["port"] = port
    del tree["trainer"]["weight_sync"]  # what a user gets
    command = our_command(folder / "run.yaml", tree, ())
    with (folder / "log").open("wb") as log:
        run = subprocess.Popen(command, env=environment(1), stdout=log, stderr=log)
    try:
        first = seen(folder, SKIPPED, port, run)
        last = seen(folder, setting.steps - SKIPPED, port, run)
        if run.wait(DEADLINE_S) != 0:
            raise SystemExit((folder / "log").read_text()[-4000:])
    finally:
        run.kill()
        run.wait()
    steps = [
        row for row in read_steps(journal(folder)) if first["rows"] <= row["step"] < last["rows"]
    ]
    count = last["rows"] - first["rows"]
    whole_s = (last["time"] - first["time"]) / count
    generate_s = (last["busy_s"] - first["busy_s"]) / count
    train_s = mean(steps, "train_s")
    return {
        "besides_ms": 1e3 * (whole_s - generate_s - train_s),
        "step_ms": 1e3 * whole_s,
        "generate_ms": 1e3 * generate_s,
        "train_ms": 1e3 * train_s,
        "publish_ms": 1e3 * mean(steps, "publish_s"),
    }


def journal(folder: Path) -> Path:
    return folder / "run" / METRICS_NAME


def mean(rows: Sequence[dict[str, Any]], name: str) -> float:
    return statistics.fmean(row[name] for row in rows)


def seen(folder: Path, rows: int, port: int, run: subprocess.Popen[bytes]) -> dict[str, Any]:
    """The server's time with work, right after a step of this number has been written."""
    until = time.monotonic() + DEADLINE_S
    while (count := len(read_steps(journal(folder)))) < rows:
        if run.poll() is not None or time.monotonic() > until:
            raise SystemExit((folder / "log").read_text()[-4000:])
        time.sleep(0.002)
    now = time.time()
    with httpx.Client(base_url=f"http://127.0.0.1:{port}") as gateway:
        (server,) = gateway.get(STATUS).json()["servers"]
    return {"rows": count, "time": now, "busy_s": busy_s(server["url"])}


def busy_s(url: str) -> float:
    families = text_string_to_metric_families(httpx.get(url + METRICS).text)
    (family,) = [each for each in families if each.name == "headway_generation_busy_seconds"]
    return float(family.samples[0].value)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


if __name__ == "__main__":
    main()
