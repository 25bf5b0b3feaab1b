"""A client of SGLang as a reinforcement learning framework writes it, from SGLang's contract alone.

It imports nothing of ours: whatever passes here would pass against SGLang.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

DEADLINE_S = 60.0
TRAINER = Path(__file__).with_name("sglang_trainer.py")


class SGLangClient:
    """One server; every method is one endpoint."""

    def __init__(self, url: str) -> None:
        self._http = httpx.Client(base_url=url, timeout=DEADLINE_S)

    @property
    def url(self) -> httpx.URL:
        return self._http.base_url

    def post(self, path: str, body: Any = None, **options: Any) -> httpx.Response:
        return self._http.post(path, json={} if body is None else body, **options)

    def get(self, path: str, **options: Any) -> httpx.Response:
        return self._http.get(path, **options)

    def request(self, method: str, path: str, **options: Any) -> httpx.Response:
        return self._http.request(method, path, **options)

    def generate(self, **body: Any) -> Any:
        answer = self.post("/generate", body)
        answer.raise_for_status()
        return answer.json()

    def stream(self, **body: Any) -> Iterator[dict[str, Any]]:
        """The chunks; asserts that the stream ends as SGLang's do."""
        with self._http.stream("POST", "/generate", json={**body, "stream": True}) as answer:
            answer.raise_for_status()
            assert answer.headers["content-type"].startswith("text/event-stream")
            last = ""
            for line in answer.iter_lines():
                if not line:
                    continue
                assert line.startswith("data: ")
                last = line.removeprefix("data: ")
                if last != "[DONE]":
                    yield json.loads(last)
            assert last == "[DONE]"

    def model_info(self) -> dict[str, Any]:
        return self.get("/get_model_info").json()

    def checksums(self) -> dict[str, str]:
        answer = self.post("/weights_checker", {"action": "checksum"}).json()
        assert answer["success"] is True
        return answer["ranks"][0]["checksums"]

    def pause(self, mode: str) -> None:
        answer = self.post("/pause_generation", {"mode": mode})
        assert answer.json() == {"message": "Generation paused successfully.", "status": "ok"}

    def resume(self) -> None:
        answer = self.post("/continue_generation", {})
        assert answer.json() == {"message": "Generation continued successfully.", "status": "ok"}

    def update_from_disk(self, path: Path | str, **body: Any) -> httpx.Response:
        return self.post("/update_weights_from_disk", {"model_path": str(path), **body})

    def close(self) -> None:
        self._http.close()


class InFlight:
    """A generation on a thread; constructed once its first token is here."""

    def __init__(self, client: SGLangClient, **body: Any) -> None:
        self.chunks: list[dict[str, Any]] = []
        self._begun = threading.Event()
        self._thread = threading.Thread(target=self._follow, args=(client, body), daemon=True)
        self._thread.start()
        assert self._begun.wait(DEADLINE_S)

    def _follow(self, client: SGLangClient, body: dict[str, Any]) -> None:
        for chunk in client.stream(**body):
            self.chunks.append(chunk)
            self._begun.set()

    def result(self) -> dict[str, Any]:
        """The last chunk."""
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive()
        return self.chunks[-1]

    @property
    def is_over(self) -> bool:
        return not self._thread.is_alive()


class Trainer:
    """Rank 0 of a group of two, a process of its own that broadcasts what it is told to."""

    def __init__(self, group_name: str) -> None:
        self.group_name = group_name
        self._child = subprocess.Popen(
            [sys.executable, str(TRAINER), group_name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._port = int(self.heard())

    @property
    def group(self) -> dict[str, Any]:
        """The body of `/init_weights_update_group`."""
        return {
            "master_address": "127.0.0.1",
            "master_port": self._port,
            "rank_offset": 1,
            "world_size": 2,
            "group_name": self.group_name,
            "backend": "gloo",
        }

    def tell(self, **order: Any) -> None:
        """Send an order; see sglang_trainer.py."""
        assert self._child.stdin is not None
        self._child.stdin.write(json.dumps(order) + "\n")
        self._child.stdin.flush()

    def heard(self) -> str:
        """Its next answer; blocks until it has carried out the order."""
        assert self._child.stdout is not None
        return self._child.stdout.readline().strip()

    def join(self, client: SGLangClient) -> httpx.Response:
        return client.post("/init_weights_update_group", self.group)

    def send(
        self,
        client: SGLangClient,
        folder: Path,
        tensors: dict[str, tuple[str, list[int]]],
        **body: Any,
    ) -> httpx.Response:
        """Broadcast these tensors of a model directory while the server is asked to receive them."""
        is_flat = body.get("load_format") == "flattened_bucket"
        self.tell(folder=str(folder), names=list(tensors), mode="flat" if is_flat else "plain")
        return self.update(client, tensors, **body)

    def update(
        self, client: SGLangClient, tensors: dict[str, tuple[str, list[int]]], **body: Any
    ) -> httpx.Response:
        described = {
            "names": list(tensors),
            "dtypes": [dtype for dtype, _ in tensors.values()],
            "shapes": [shape for _, shape in tensors.values()],
            "group_name": self.group_name,
            "flush_cache": False,
        }
        return client.post("/update_weights_from_distributed", described | body)

    def kill(self) -> None:
        self._child.kill()
        self._child.wait(10)
        for pipe in (self._child.stdin, self._child.stdout):
            if pipe is not None:
                pipe.close()
