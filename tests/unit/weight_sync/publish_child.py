"""A process that publishes one version; stops for ever midway, or may write small files only."""

import json
import resource
import sys
import threading
from collections.abc import Iterator

import torch
from pydantic import TypeAdapter

from headway.contracts.config.weight_sync import WeightSyncConfig
from headway.contracts.errors import SyncError
from weight_sync.transports.base import make_publisher

SIZE = 1 << 18


def tensors(is_stopped: bool) -> Iterator[tuple[str, torch.Tensor]]:
    for index in range(4):
        if index == 3 and is_stopped:
            say("midway")
            threading.Event().wait()
        yield f"w{index}", torch.full((SIZE,), float(index))


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main(section: str, version: str, mode: str) -> None:
    publisher = make_publisher(TypeAdapter(WeightSyncConfig).validate_json(section))
    if mode == "limited":
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 19, 1 << 19))
    try:
        meta = publisher.publish(int(version), tensors(is_stopped=mode == "stopped"))
    except SyncError as error:
        say(f"refused: {error}")
        publisher.close()
        return
    say(json.dumps([meta.path, meta.digest]))
    sys.stdin.readline()
    publisher.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
