"""Runs a page's examples as they stand: in a folder of their own, on free ports, with the fake backend.

- bash is a script. What it leaves running ends with the page. `MODEL` and `DIR` are folders with a
  tokenizer, `DATA` has rows, `/shared/weights` versions.
- YAML and Python whose first line names a file (`# gateway.yaml`, `# judge.py`) lie there from the
  start; every gateway reads all of the page's YAML that is a file.
- JSON is a part of a rollout (`workflow`, `reward`, `filter`), which is submitted and waited for, or
  else the last answer that bash got: the same fields, values of the same kinds.
- Python without a file's name runs at the end, all of it as one script.

A gateway on port 8000 and a generation server on port 8001 are there already (`page_services`), unless
the page starts them itself.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from headway.contracts.http import paths
from headway.launch.launchers.run import GRACE_S
from tests.contract.page_services import SHARED, PageServices
from tests.contract.pages import ROOT, Example
from tests.unit.gateway.games import byte_tokenizer
from tests.waiting import eventually

PORT = re.compile(r"\b(8[0-9]{3}|9[0-9]{3}|6379)\b")
FRAGMENT = {"workflow", "reward", "filter"}
"""A block of JSON with one of these is a part of a rollout."""
LIMIT_S = 180.0
WAIT_S = 60.0
"""The longest wait that a gateway takes."""
SHELL = """set -eu
curl() { case "$1" in *f*) command curl "$@";; *) command curl --fail-with-body "$@";; esac; }
"""
"""A request that is refused ends a block, unless it is asked until it succeeds."""
QUESTION = {
    "prompt": {
        "group_size": 2,
        "messages": [{"role": "user", "content": "What is 2 + 2?"}],
        "data": {"answer": "4"},
    },
    "reward": {"name": "exact"},
    "gconfig": {"max_new_tokens": 16},
}
"""What a part of a rollout is filled up with."""
ROWS = "".join(
    json.dumps({"question": f"What is {n} + {n}?", "answer": f"#### {n + n}"}) + "\n"
    for n in range(16)
)
"""The rows of `DATA/train.jsonl`."""


@dataclass
class PageRunner:
    """Runs blocks in a folder, on ports of its own."""

    folder: Path
    ports: dict[str, str] = field(default_factory=dict)
    output: str = ""
    """Of the last commands."""
    _groups: list[int] = field(default_factory=list)
    _submitted: int = 0
    _on_close: list[Callable[[], None]] = field(default_factory=list)

    def run_page(self, examples: Sequence[Example]) -> None:
        """Run all blocks of a page, and see that no rollout was lost, doubled, failed or left behind."""
        self.write_files(examples)
        uses_gateway = any(":8000" in block.text or _is_part(block) for block in examples)
        self._start_services(examples, uses_gateway)
        script = ""
        for block in examples:
            if block.language == "bash":
                self.shell(block.text)
            elif block.language == "json":
                self.show(json.loads(block.text))
            elif block.language == "python" and block.file is None:
                script += block.text
        if script:
            self.run([sys.executable, "-c", self.moved(script)])
        if uses_gateway:
            self.audit()

    @property
    def url(self) -> str:
        """Of the gateway."""
        return self.moved("http://127.0.0.1:8000")

    def moved(self, text: str) -> str:
        """The same on other ports, with weights in the folder."""
        text = text.replace(SHARED, str(self.folder / "weights"))
        return PORT.sub(lambda m: self.ports.setdefault(m.group(), str(free_port())), text)

    def _start_services(self, examples: Sequence[Example], uses_gateway: bool) -> None:
        gateway, server = self.moved("8000 8001").split()
        services = PageServices(self.folder, gateway, server)
        self._on_close.append(services.close)
        services.start(examples, uses_gateway)

    def write_files(self, examples: Sequence[Example]) -> None:
        """What lies in the folder before anything runs."""
        byte_tokenizer(self.folder / "MODEL")
        byte_tokenizer(self.folder / "DIR")
        (self.folder / "DATA").mkdir()
        (self.folder / "DATA" / "train.jsonl").write_text(ROWS)
        for name in ("benchmarks", "docker"):
            (self.folder / name).symlink_to(ROOT / name)
        shutil.copytree(ROOT / "examples", self.folder / "examples")
        for file in (self.folder / "examples").rglob("*.yaml"):
            file.write_text(self.moved(file.read_text()))
        for number, block in enumerate(examples):
            if block.file is not None:
                name = f"{number}.yaml" if block.language == "yaml" else block.file
                (self.folder / name).write_text(self.moved(block.text))

    def run(self, command: list[str]) -> None:
        """Run to its end; what it leaves running is ended by `close`."""
        log, errors = self.folder / "output", self.folder / "errors"
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        with log.open("wb") as output, errors.open("ab") as errors_file:
            process = subprocess.Popen(
                command,
                cwd=self.folder,
                env={**os.environ, "PATH": path, "PYTHONPATH": f"{self.folder}{os.pathsep}{ROOT}"},
                stdout=output,
                stderr=errors_file,
                start_new_session=True,
            )
        self._groups.append(process.pid)
        status = process.wait(LIMIT_S)
        self.output = log.read_text()
        assert status == 0, f"{command}\n{self.output}\n{errors.read_text()}"

    def shell(self, text: str) -> None:
        """Run a block of bash."""
        text = text.replace(" --config gateway.yaml", "")  # among those that every gateway reads
        configs = " ".join(f"--config {file.name}" for file in sorted(self.folder.glob("*.yaml")))
        text = text.replace("headway gateway", f"headway gateway {configs}")
        fake = "--backend.type fake --backend.vocab-size 258 --model.path MODEL"
        text = text.replace("--model.path MODEL", fake)
        self.run(["bash", "-c", SHELL + self.moved(text)])

    def show(self, value: Mapping[str, Any]) -> None:
        """A block of JSON: a part of a rollout, or the last answer."""
        if FRAGMENT & value.keys():
            self.play(value)
            return
        values = list(_values(self.output))
        assert values, f"no answer to compare with {value}: {self.output}"
        assert_alike(value, values[-1])

    def play(self, part: Mapping[str, Any]) -> None:
        """Submit a rollout with this part, and wait for its end."""
        self._submitted += 1
        name = f"part-{self._submitted}"
        whole = {"rollout_id": name, "prompt": {"group_id": name}}
        for tree in (QUESTION, json.loads(self.moved(json.dumps(part)))):
            _merge(whole, tree)
        answer = httpx.post(self.url + paths.ROLLOUTS, json={"rollouts": [whole]}, timeout=LIMIT_S)
        assert answer.status_code == 200, answer.text
        wait = {"delivery_id": name, "count": 1, "rollout_ids": [name], "timeout_s": WAIT_S}
        answer = httpx.post(self.url + paths.ROLLOUTS_WAIT, json=wait, timeout=2 * LIMIT_S)
        is_filtered = "filter" in part and f"{name!r} is filtered" in answer.text
        assert answer.status_code == 200 or is_filtered, (part, answer.text)

    def audit(self) -> None:
        """The ledger's word on all that the page submitted, once it has ended."""
        eventually(lambda: not self._is_busy(), LIMIT_S, "every rollout of the page ends")
        proof = httpx.get(self.url + paths.LEDGER).json()
        assert (proof["lost"], proof["duplicated"], proof["counts"]["failed"]) == (0, 0, 0), proof

    def _is_busy(self) -> bool:
        counts = httpx.get(self.url + paths.LEDGER).json()["counts"]
        return bool(counts["queued"] or counts["leased"])

    def close(self) -> None:
        """End what was started, and see that nothing is left."""
        for end in self._on_close:
            end()
        for sent in (signal.SIGTERM, signal.SIGKILL):
            left = [p for p in psutil.process_iter() if _group_of(p) in self._groups]
            for process in left:
                with suppress(psutil.NoSuchProcess):
                    process.send_signal(sent)
            psutil.wait_procs(left, GRACE_S)


def _is_part(block: Example) -> bool:
    return block.language == "json" and bool(FRAGMENT & json.loads(block.text).keys())


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def _group_of(process: psutil.Process) -> int | None:
    try:
        return os.getpgid(process.pid)
    except ProcessLookupError:
        return None


def _values(text: str) -> Iterator[Any]:
    decoder, at = json.JSONDecoder(), 0
    while (start := text.find("{", at)) >= 0:
        value, at = decoder.raw_decode(text, start)
        yield value


def _merge(target: dict[str, Any], given: Mapping[str, Any]) -> None:
    for name, value in given.items():
        if isinstance(value, Mapping) and isinstance(target.get(name), dict) and name != "reward":
            _merge(target[name], value)
        else:
            target[name] = json.loads(json.dumps(value))


def assert_alike(shown: Any, real: Any, place: str = "answer") -> None:
    """The same fields with values of the same kinds."""
    if isinstance(shown, dict):
        assert isinstance(real, dict) and (shown.keys() == real.keys() or not shown), place
        for name, value in shown.items():
            assert_alike(value, real[name], f"{place}.{name}")
    elif isinstance(shown, list):
        assert isinstance(real, list), place
        for one in real[:1] if shown else []:
            assert_alike(shown[0], one, f"{place}[0]")
    elif isinstance(shown, float | int) and not isinstance(shown, bool):
        assert isinstance(real, float | int) and not isinstance(real, bool), place
    else:
        assert type(shown) is type(real), place
