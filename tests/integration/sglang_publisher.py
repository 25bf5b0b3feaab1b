"""A trainer process that broadcasts versions: `sglang_publisher.py FOLDER FOLDER`, orders on stdin.

    announce V      -> the version's path
    publish V [N]   -> "stalled" after N buckets if given, and in the end the digest or "failed ..."
    go              go on after a stall
    cancel V        as a gateway that refuses the version

Versions alternate between the weights of the two folders. Buckets are small, so that a tiny model has
several.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import torch
from safetensors.torch import load_file

from headway.contracts.config.weight_sync import CollectiveSync
from headway.contracts.errors import SyncError
from weight_sync.transports.collective_publisher import CollectivePublisher

BUCKET_BYTES = 1 << 14
TENSORS_PER_BUCKET = 3
"""At least: for the length of a stall."""


def say(word: str) -> None:
    sys.stdout.write(word + "\n")
    sys.stdout.flush()


class Trainer:
    def __init__(self, folders: list[str]) -> None:
        self._models = [load_file(Path(folder) / "model.safetensors") for folder in folders]
        config = CollectiveSync(timeout_s=60.0).model_copy(update={"shard_bytes": BUCKET_BYTES})
        self._publisher = CollectivePublisher(config)
        self._may_go = threading.Event()

    def announce(self, version: str) -> None:
        say(self._publisher.announce(int(version)).path)

    def publish(self, version: str, stall: str = "") -> None:
        threading.Thread(target=self._publish, args=(int(version), stall)).start()

    def go(self) -> None:
        self._may_go.set()

    def cancel(self, version: str) -> None:
        decision: Future[int] = Future()
        decision.set_exception(SyncError("nobody wants it"))
        self._publisher.follow(int(version), decision)
        self._may_go.set()

    def _publish(self, version: int, stall: str) -> None:
        self._may_go.clear()
        try:
            meta = self._publisher.publish(version, self._tensors(version, stall))
        except SyncError as error:
            say(f"failed {error.message}".replace("\n", " "))
        else:
            say(str(meta.digest))

    def _tensors(self, version: int, stall: str) -> Iterator[tuple[str, torch.Tensor]]:
        for number, named in enumerate(self._models[version % 2].items()):
            if stall and number == TENSORS_PER_BUCKET * int(stall):
                say("stalled")
                self._may_go.wait()
            yield named


if __name__ == "__main__":
    trainer = Trainer(sys.argv[1:])
    say("here")
    for line in sys.stdin:
        verb, *words = line.split()
        getattr(trainer, verb)(*words)
