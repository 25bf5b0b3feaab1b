"""What a page's examples find when they start: a gateway, a generation server, a model, versions.

The processes are forked from one that has imported the project, so they are there in a second.
"""

from __future__ import annotations

import re
import runpy
import shutil
import sys
from collections.abc import Sequence
from contextlib import chdir
from dataclasses import dataclass, field
from pathlib import Path

import torch

from headway.contracts.config.weight_sync import DiskSync
from headway.runtime.inference_client import RemoteInferenceEngine
from headway.runtime.process import Process, ProcessSpec
from tests.contract.pages import ROOT, Example
from tests.numeric.adapters import save_adapter
from tests.processes import start_process
from weight_sync.transports.base import WeightPublisher, make_publisher

GATEWAY_STARTS = "headway gateway"
SERVER_STARTS = "python -m inference_server"
GATEWAY_NAMED, SERVER_NAMED = ":8000", ":8001"
FAKE = ("--backend.type", "fake", "--backend.vocab-size", "258")
REFUSED_BY_FAKE = ("top_logprobs", "logprob_start")
"""Who asks for one of these gets a random model instead of the fake backend."""
SHARED = "/shared/weights"
"""Where versions lie on pages: `b` is a model, `v00000008` was published, `sql` is an adapter."""
VERSIONS = re.compile(r"headway (?:rollback|pin) \S+ (\d+)")
START_S = 60.0
STOP_S = 10.0


@dataclass
class PageServices:
    """The services that a page uses and does not start."""

    folder: Path
    """Where the page's examples run; it has a tokenizer in `MODEL`."""
    gateway_port: str
    server_port: str
    _processes: list[Process] = field(default_factory=list)

    @property
    def weights(self) -> Path:
        """What stands for `/shared/weights`."""
        return self.folder / "weights"

    def start(self, examples: Sequence[Example], uses_gateway: bool) -> None:
        """Start what the blocks name, and publish what they expect."""
        text = "\n".join(block.text for block in examples)
        has_gateway = uses_gateway and GATEWAY_STARTS not in text
        has_server = SERVER_NAMED in text and SERVER_STARTS not in text
        if has_server or has_gateway:
            publishes = has_gateway and f"{SHARED}/b" in text  # what the fake backend does not read
            is_real = publishes or any(name in text for name in REFUSED_BY_FAKE)
            self._make_versions(text, is_real)
            if has_gateway:
                self._start_gateway()
            self._start_server(is_real, has_gateway)
        if has_gateway:
            self._publish([int(number) for number in VERSIONS.findall(text)])

    def _make_versions(self, text: str, is_real: bool) -> None:
        model = self.folder / "MODEL"
        if is_real:
            make = runpy.run_path(str(ROOT / "examples/gsm8k/make_tiny_model.py"))
            make["make_tiny_model"](None, self.folder / "random")
            shutil.copytree(self.folder / "random", model, dirs_exist_ok=True)
        if f"{SHARED}/b" in text:
            shutil.copytree(model, self.weights / "b")
        if f"{SHARED}/sql" in text:
            lora = {"r": 4, "target_modules": ["q_proj", "v_proj"]}
            save_adapter(self.weights / "sql", model, seed=0, **lora)
        if f"{SHARED}/v00000008" in text:
            publisher = self._publisher()
            publisher.publish(8, tensors())
            publisher.close()

    def _publisher(self) -> WeightPublisher:
        return make_publisher(DiskSync(root=str(self.weights), keep=3))

    def _start_gateway(self) -> None:
        files = sorted(self.folder.glob("*.yaml"))
        configs = [word for file in files for word in ("--config", file.name)]
        flags = ["--tokenizer", "MODEL", "--ledger", "ledger.sqlite"]
        module = ["-m", "headway.launch.cli", "gateway", *configs, *flags]
        self._start("gateway", module, self.gateway_port)

    def _start_server(self, is_real: bool, has_gateway: bool) -> None:
        flags = ["--model.path", "MODEL", "--weights.allow", f"[{self.weights}]"]
        flags += () if is_real else FAKE
        if has_gateway:
            flags += ["--gateway", f"http://127.0.0.1:{self.gateway_port}"]
        self._start("server", ["-m", "inference_server", *flags], self.server_port)

    def _start(self, name: str, command: Sequence[str], port: str) -> None:
        ready = self.folder / f"{name}.ready"
        argv = [sys.executable, *command, "--service.port", port]
        argv += ["--service.ready-file", str(ready)]
        log = self.folder / f"{name}.log"
        spec = ProcessSpec(name, argv, log, {"PYTHONPATH": str(self.folder)}, ready)
        with chdir(self.folder):
            self._processes.append(start_process(spec))
        self._processes[-1].wait_ready(START_S)

    def _publish(self, versions: Sequence[int]) -> None:
        if not versions:
            return
        client = RemoteInferenceEngine(f"http://127.0.0.1:{self.gateway_port}")
        publisher = self._publisher()
        for version in range(min(versions), max(versions) + 2):
            committed = client.update_weights(publisher.announce(version))
            publisher.publish(version, tensors())
            publisher.collect(committed.result(START_S))
        publisher.close()
        client.destroy()

    def close(self) -> None:
        """End them."""
        for process in reversed(self._processes):
            process.stop(STOP_S)


def tensors() -> list[tuple[str, torch.Tensor]]:
    """Weights of no model; the fake backend takes any."""
    return [("weight", torch.ones(4, 4))]
