"""A gateway and generation servers, each a process, and the clients of somebody else's trainer.

The model's tokens say by themselves which weights sampled them (`version_model`).
"""

from __future__ import annotations

import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from openai import OpenAI
from safetensors.torch import save_file

from headway.contracts.config.gateway import FollowConfig
from headway.contracts.config.launch import LaunchConfig
from headway.contracts.config.weight_sync import DiskSync
from headway.launch.launchers.local import LocalRun
from headway.runtime.inference_client import RemoteInferenceEngine
from tests.integration.conftest import run_config, with_weight_sync
from tests.integration.fault_fleet import TrappedRun
from tests.integration.sglang_client import SGLangClient
from tests.integration.traps import Traps, is_stopped
from tests.integration.version_model import logprob_of, token_of, weights_of, write_version_model
from tests.processes import local_run
from tests.waiting import eventually

LIMIT_S = 60.0
PROMPT = [1, 4, 5, 6]


class Fleet:
    """A gateway with servers that come and go, and the directories that a trainer writes."""

    def __init__(
        self,
        folder: Path,
        num_servers: int = 3,
        follow: FollowConfig | None = None,
        has_traps: bool = False,
        write_model: Callable[[Path], Path] = write_version_model,
    ) -> None:
        """
        Args:
            follow: of the gateway; servers may read what is below.
            has_traps: see `trapped_service`.
            write_model: fills a directory, and returns it.
        """
        self._folder = folder
        self._follow = follow
        self._has_traps = has_traps
        (folder / "model").mkdir()
        self.model = write_model(folder / "model")
        self.weights = folder / "weights"
        self._names = count()
        self.runs = [self._run("run-0", num_servers)]
        self.runs[0].start_gateway()
        self.runs[0].start_servers()
        self.url = self.runs[0].url
        self.sglang = SGLangClient(self.url)
        self.openai = OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)
        self.engine = RemoteInferenceEngine(self.url, connect_timeout_s=30.0)
        self.engine.initialize()
        self.version = 0

    def name(self) -> str:
        """A name that nobody else uses."""
        return f"name-{next(self._names)}"

    def ready(self) -> list[Any]:
        return [one for one in self.engine.status().servers if one.state == "ready"]

    def join(self) -> None:
        """Start one more server; returns once it takes traffic."""
        before = len(self.ready())
        run = self._run(f"run-{len(self.runs)}", 1)
        run.url = self.url
        self.runs.append(run)
        run.start_servers()
        eventually(lambda: len(self.ready()) == before + 1, LIMIT_S, "one more server is ready")

    def kill(self, run: int, server: int) -> None:
        process = self.runs[run].process(f"server-{server}")
        os.kill(process.pid, signal.SIGKILL)
        assert process.wait(LIMIT_S) == -signal.SIGKILL

    def traps(self, run: int, server: int) -> Traps:
        return Traps(self._folder / f"run-{run}" / "traps" / f"server-{server}")

    def until_stopped(self, run: int, server: int) -> None:
        pid = self.runs[run].process(f"server-{server}").pid
        eventually(lambda: is_stopped(pid), LIMIT_S, "it is in its trap")

    def until_served(self, version: int, num_servers: int) -> None:
        def is_served() -> bool:
            return [one.version for one in self.ready()] == [version] * num_servers

        eventually(is_served, LIMIT_S, f"{num_servers} servers have version {version}")

    def save(self, version: int) -> Path:
        """The weights of a version as trainers save them."""
        folder = self.weights / f"step-{version}-{self.name()}"
        folder.mkdir(parents=True)
        for file in self.model.glob("*.json"):
            shutil.copy(file, folder)
        save_file(self.tensors(version), folder / "model.safetensors")
        return folder

    def tensors(self, version: int) -> dict[str, torch.Tensor]:
        """The weights of a version."""
        return {name: tensor.clone() for name, tensor in weights_of(self.model, version)}

    def publish(self, **body: Any) -> httpx.Response:
        """Publish the next version."""
        answer = self.sglang.update_from_disk(self.save(self.version + 1), **body)
        if answer.status_code == 200:
            self.version += 1
        return answer

    def close(self) -> None:
        self.sglang.close()
        self.openai.close()
        self.engine.destroy()
        for run in reversed(self.runs):
            run.stop()

    def _run(self, name: str, num_servers: int) -> LocalRun:
        folder = self._folder / name
        config = self._config(folder, num_servers)
        if self._has_traps:
            return TrappedRun(config, folder / "traps", (str(self.weights),))
        return local_run(config)

    def _config(self, folder: Path, num_servers: int) -> LaunchConfig:
        config = run_config(folder, self.model, num_servers=num_servers, num_slots=16)
        fleet = config.gateway.fleet.model_copy(update={"max_deaths": 100})
        gateway = config.gateway.model_copy(
            update={
                "fleet": fleet,
                "served_model_name": "org/versions",
                "follow": self._follow,
            }
        )
        config = config.model_copy(update={"gateway": gateway})
        root = str(self.weights) if self._follow is None else self._follow.path
        return with_weight_sync(config, DiskSync(root=root))


def sampling(tokens: int, **more: Any) -> dict[str, Any]:
    return {"temperature": 0.0, "max_new_tokens": tokens, "ignore_eos": True, **more}


def version_of(fleet: Fleet, label: str) -> int:
    """The number in a label: `step-7`, `7`, or what the start is called."""
    return 0 if label == "default" else int(label.rpartition("-")[2])


def check(fleet: Fleet, answer: dict[str, Any], tokens: int) -> set[int]:
    """Every token is of the version that it is said to be; returns the versions."""
    meta = answer["meta_info"]
    spans = meta["weight_versions"]
    versions = [version_of(fleet, s["version"]) for s in spans for _ in range(s["start"], s["end"])]
    assert [0, *(s["end"] for s in spans)][:-1] == [s["start"] for s in spans]
    assert answer["output_ids"] == [token_of(version) for version in versions]
    assert len(versions) == meta["completion_tokens"] == tokens
    got = [logprob for logprob, _, _ in meta["output_token_logprobs"]]
    assert got == pytest.approx([logprob_of(version) for version in versions], abs=1e-4)
    assert version_of(fleet, meta["weight_version"]) == versions[-1]
    return set(versions)


class Clients:
    """Streams and whole answers without a pause, over both APIs; every token is checked."""

    def __init__(self, fleet: Fleet, num_each: int = 3) -> None:
        """
        Args:
            num_each: streams at once, and as many whole answers; and two completions that stream.
        """
        self._num_each = num_each
        self._fleet = fleet
        self._is_over = threading.Event()
        self.answered = 0
        self.seen: set[int] = set()

    @contextmanager
    def flowing(self) -> Iterator[None]:
        with ThreadPoolExecutor(2 * self._num_each + 2) as pool:
            works: list[Callable[[], None]] = [self._stream, self._whole] * self._num_each
            tasks = [pool.submit(self._repeat, work) for work in (*works, self._chat, self._chat)]
            try:
                yield
            finally:
                self._is_over.set()
            for task in tasks:
                task.result(LIMIT_S)

    def _repeat(self, work: Callable[[], None]) -> None:
        while not self._is_over.is_set():
            work()
            self.answered += 1

    def _body(self) -> dict[str, Any]:
        return {"input_ids": PROMPT, "sampling_params": sampling(80), "return_logprob": True}

    def _stream(self) -> None:
        last: dict[str, Any] = {}
        shown: list[int] = []
        for last in self._fleet.sglang.stream(**self._body()):
            assert "output_ids" in last, last
            assert last["output_ids"][: len(shown)] == shown, "nothing is taken back"
            shown = last["output_ids"]
        self.seen |= check(self._fleet, last, 80)

    def _whole(self) -> None:
        self.seen |= check(self._fleet, self._fleet.sglang.generate(**self._body()), 80)

    def _chat(self) -> None:
        ids: list[int] = []
        runs: list[Any] = []
        for chunk in self._fleet.openai.completions.create(
            model="default", prompt=PROMPT, max_tokens=80, temperature=0, stream=True,
            extra_body={"ignore_eos": True},
        ):  # fmt: skip
            extra = chunk.choices[0].model_extra or {}
            ids += extra.get("token_ids", ())
            runs = extra.get("version_runs", runs)
        assert ids == [token_of(v) for v, start, end in runs for _ in range(start, end)]
        assert len(ids) == 80
