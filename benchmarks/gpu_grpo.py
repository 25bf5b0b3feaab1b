"""Check a whole run on GPUs: a GPU for each process, versions over a transport, deaths survived.

    python benchmarks/gpu_grpo.py --ranks 4 --servers 4 --transport collective --backend nccl
    python benchmarks/gpu_grpo.py --ranks 1 --servers 2 --transport collective --backend nccl --kill
    python benchmarks/gpu_grpo.py --ranks 4 --servers 2 --sglang ENV/bin/python --receive group ...

`headway run` on a random model. `gpus_shared` counts GPUs with more than one process of the run (by
nvidia-smi; it must be 0 unless there are fewer GPUs than processes). With `--kill`, a server gets SIGKILL
as soon as a version that is being published is seen; the run must still end well.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
from day.models import write_model
from measure import report

from headway.contracts.config.launch import LaunchConfig, shared_root
from headway.contracts.http.paths import WEIGHTS
from headway.contracts.http.weights import WeightStatus
from headway.launch.launchers.local import LocalRun
from headway.launch.quickstart import task
from headway.runtime.config import validate_config
from headway.runtime.gpus import survey_gpus, visible_devices

METRICS = ("wait_s", "train_s", "publish_s", "train_tokens_per_s", "mfu", "peak_memory_bytes")
NEW_TOKENS = {"tiny": 16, "1.5b": 64}
POLL_S = 0.02
LOOK_S = 2.0
"""Seconds between calls of nvidia-smi."""
SHARED_KV_BYTES = 4 << 30
"""Keys and values of a server whose GPU others use, too."""


def main() -> int:
    """Run to the end."""
    options = parse()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_model(folder / "model", options.size)
        task.write_rows(folder / "rows.jsonl", task.make_rows(8 * (options.steps + 8), 0))
        config = configure(folder, options)
        with LocalRun(config) as run:
            run.start()
            code, shared, killed = follow(run, options)
        metrics = folder / "run" / "metrics.jsonl"
        lines = metrics.read_text().splitlines() if metrics.exists() else []
        if code:
            show_logs(folder / "run" / "logs")
    steps: list[dict[str, Any]] = [json.loads(line) for line in lines]
    labels = {"ranks": options.ranks, "servers": options.servers, "transport": options.transport}
    for name in METRICS:
        values = [step[name] for step in steps[1:] if step.get(name) is not None]
        if values:
            report(f"grpo_{name}", name, values, **labels)
    if shared is not None:
        report("gpus_shared", "GPUs", [shared], **labels)
    report("grpo_steps", "steps", [len(steps)], wanted=options.steps, killed=killed, **labels)
    is_wrong = bool(code) or len(steps) < options.steps or (options.kill and not killed)
    return int(is_wrong or (bool(shared) and not config.share_gpus))


def parse() -> argparse.Namespace:
    """Read the options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", default="1.5b")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--servers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--transport", default="disk")
    parser.add_argument("--backend", default="nccl", help="of the transport `collective`")
    parser.add_argument("--kill", action="store_true", help="a server, in a publication")
    parser.add_argument("--sglang", help="interpreter of an environment with SGLang")
    parser.add_argument("--receive", default="files", help="how SGLang takes versions")
    return parser.parse_args()


def configure(folder: Path, options: argparse.Namespace) -> LaunchConfig:
    """A run of `--steps` steps."""
    sync: dict[str, Any] = {"type": options.transport, "dtype": "bfloat16"}
    if options.transport == "collective":
        sync["backend"] = options.backend
    elif options.transport == "shared_memory":
        sync["root"] = shared_root(str(folder / "run"))  # the run frees it
    else:
        sync["root"] = str(folder / "weights")
    backend: dict[str, Any] = {"type": "embedded_torch", "max_context": 256}
    if options.sglang:
        backend = {"type": "sglang", "python": options.sglang, "receive": options.receive}
    num_gpus = len(visible_devices(survey_gpus(), os.environ))
    is_shared = 0 < num_gpus < options.ranks + options.servers
    if is_shared and not options.sglang:
        backend["kv_cache_bytes"] = SHARED_KV_BYTES
    tree = {
        "model": str(folder / "model"),
        "num_servers": options.servers,
        "num_trainer_ranks": options.ranks,
        "share_gpus": is_shared,
        "start_timeout_s": 900.0,
        "gateway": {"service": {"port": 0}, "ledger": str(folder / "ledger.sqlite")},
        "server": {
            "service": {"port": 0},
            "model": {"dtype": "bfloat16"},
            "backend": backend,
        },
        "trainer": {
            "run_dir": str(folder / "run"),
            "data": {"path": str(folder / "rows.jsonl"), "batch_size": 8},
            "sampling": {"max_new_tokens": NEW_TOKENS[options.size], "ignore_eos": True},
            "rollout": {
                "reward": {"name": "exact", "args": {"pattern": r"^\d+;(\d\d)$"}},
                "group_size": 4,
            },
            "weight_sync": sync,
            "trainer": {
                "total_steps": options.steps,
                "max_tokens_per_mb": 8192,
                "compute_dtype": "bfloat16",
            },
            "recovery": {"every_steps": options.steps + 1},
        },
    }
    return validate_config(LaunchConfig, tree)


def follow(run: LocalRun, options: argparse.Namespace) -> tuple[int, int | None, bool]:
    """Exit status of the trainer, GPUs that were shared, and whether a server was killed."""
    shared: int | None = None
    killed, looked = False, 0.0
    with httpx.Client(base_url=run.url, timeout=30.0) as gateway:
        while (code := run.watch()) is None:
            if options.kill and not killed:
                if is_publishing(gateway):
                    os.kill(run.process("server-1").pid, signal.SIGKILL)
                    killed = True
            else:
                time.sleep(POLL_S)
            if time.monotonic() > looked + LOOK_S:
                seen, looked = gpus_shared(), time.monotonic()
                shared = seen if shared is None else max(shared, seen or 0)
    return code, shared, killed


def is_publishing(gateway: httpx.Client) -> bool:
    """True if a version is being published; the first one does not count."""
    status = WeightStatus.model_validate(gateway.get(WEIGHTS).json())
    return status.publishing is not None and status.committed is not None


def gpus_shared() -> int | None:
    """Number of GPUs with several processes; None without nvidia-smi."""
    if shutil.which("nvidia-smi") is None:
        return None
    ask = ["nvidia-smi", "--query-compute-apps=gpu_uuid,pid", "--format=csv,noheader"]
    lines = subprocess.run(ask, capture_output=True, text=True, check=False).stdout.splitlines()
    return sum(count > 1 for count in Counter(line.split(",")[0] for line in lines).values())


def show_logs(folder: Path) -> None:
    """The ends of what the processes said."""
    for log in sorted(folder.glob("*.log")):
        print(f"== {log.name}", *log.read_text(errors="replace").splitlines()[-15:], sep="\n")


if __name__ == "__main__":
    sys.exit(main())
