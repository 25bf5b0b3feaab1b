"""The images hold what their pods need, and a run of the rendered chart outlives its pods."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headway.launch.quickstart import task
from headway.runtime.command import EXIT_INTERRUPTED
from headway.runtime.inference_client import RemoteInferenceEngine
from headway.runtime.journal import METRICS_NAME, read_steps
from tests.contract.test_chart import helm
from tests.integration.hosts import can_make_hosts, hosts_of_a_network
from tests.integration.images import (
    REGISTRY,
    TAG,
    build,
    build_redis,
    missing_programs,
    podman_run,
    sent_mb,
    size_mb,
)
from tests.integration.pods import KILLED, Pods
from tests.integration.real_engines import needs, show
from tests.waiting import eventually

pytestmark = [
    pytest.mark.deploy,
    pytest.mark.timeout(3000),
    pytest.mark.skipif(not can_make_hosts(), reason="it wants root, and iproute2"),
    pytest.mark.skipif(bool(missing_programs()), reason=missing_programs()),
    *needs("helm"),
]
CONTROL_MB = 250
HAS_TORCH = "import importlib.util as u; print(u.find_spec('torch') is not None)"
LIMIT_S = 180.0
STEPS = 10
SECRETS = {key: f"the-token-to-{key}" for key in ("admin", "server", "consume", "submit")}
ONE_THREAD = [{"name": "OMP_NUM_THREADS", "value": "1"}]
VALUES: dict[str, Any] = {
    "image": {"registry": REGISTRY, "tag": TAG},
    "gateway": {"resources": {"limits": {"memory": "2Gi"}}},
    "server": {
        "env": ONE_THREAD,
        "sharedMemory": "1Gi",
        "resources": {"limits": {"memory": "4Gi"}},
        "config": {"heartbeat_s": 0.2, "backend": {"max_context": 256}},
    },
    "trainer": {
        "env": ONE_THREAD,
        "sharedMemory": "1Gi",
        "resources": {"limits": {"memory": "6Gi"}},
        "config": {
            "data": {"batch_size": 4, "chat": False, "prompt_template": "{prompt}"},
            "sampling": {"max_new_tokens": 12, "ignore_eos": True},
            "rollout": {
                "reward": {"name": "exact", "args": {"pattern": "[0-9]"}},
                "group_size": 4,
                "max_staleness": 1,
            },
            "trainer": {"total_steps": STEPS, "max_tokens_per_mb": 256, "num_threads": 1},
            "recovery": {"every_steps": 2},
        },
    },
}


@pytest.mark.parametrize("target", ["control", "inference", "trainer", "engine"])
def test_an_image_holds_what_its_pod_needs(target: str, tmp_path: Path) -> None:
    image = build(target)
    sent = sent_mb(image, tmp_path / "layers")
    show(f"{image}: {sent:.0f} MB to fetch, {size_mb(image):.0f} MB on disk")
    python = "/opt/headway/bin/python" if target == "engine" else "python"
    words = ["--rm", "--network", "none", "--entrypoint", python, image, "-c", HAS_TORCH]
    assert json.loads(podman_run(*words).lower()) is (target != "control")
    if target == "control":
        assert sent < CONTROL_MB


@pytest.fixture
def claims(tmp_path: Path, model_dir: Path) -> dict[str, Path]:
    """Folders of the volumes, which any user may read."""
    folders = {name: tmp_path / name for name in ("headway-model", "headway-data", "headway-runs")}
    shutil.copytree(model_dir, folders["headway-model"])
    for file in folders["headway-model"].iterdir():
        file.chmod(0o644)
    for folder in folders.values():
        folder.mkdir(exist_ok=True)
        folder.chmod(0o755)
    task.write_rows(folders["headway-data"] / "train.jsonl", task.make_rows(64, seed=1))
    return folders


@pytest.fixture
def pods(tmp_path: Path, claims: dict[str, Path]) -> Iterator[Pods]:
    """Those of the chart; all are gone after the test."""
    for target in ("control", "inference", "trainer"):
        build(target)
    values = {**VALUES, "redis": {"image": build_redis()}}
    (rendered,) = helm([("headway", values)])["rendered"]
    with hosts_of_a_network(tmp_path) as hosts:
        release = Pods(rendered["manifests"], hosts, tmp_path, claims, SECRETS)
        try:
            yield release
        finally:
            release.close()


def test_a_run_outlives_its_pods(pods: Pods, claims: dict[str, Path], tmp_path: Path) -> None:
    pods.start("redis")
    gateway = pods.start("gateway")
    killed, told = pods.start("server"), pods.start("server")
    trainer = pods.start("trainer")
    url = f"http://{gateway.address}:8000"
    client = RemoteInferenceEngine(url, connect_timeout_s=LIMIT_S, token=SECRETS["admin"])
    metrics = claims["headway-runs"] / "train" / METRICS_NAME

    def until_steps(count: int) -> None:
        done = lambda: metrics.exists() and len(read_steps(metrics)) >= count  # noqa: E731
        eventually(done, LIMIT_S, f"{count} steps are done; logs are in {tmp_path}")

    until_steps(2)
    killed.kill()
    pods.start("server")
    until_steps(5)
    told.terminate()
    assert told.wait() == EXIT_INTERRUPTED, told.log()
    assert trainer.wait(LIMIT_S) == 0, trainer.log()
    assert [step["step"] for step in read_steps(metrics)] == list(range(STEPS))
    audit = client.audit()
    assert (audit.lost, audit.duplicated) == (0, 0)
    client.destroy()
    gateway.terminate()
    assert gateway.wait() == EXIT_INTERRUPTED, gateway.log()
    assert killed.wait() == KILLED
