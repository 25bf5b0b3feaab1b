"""Publishes one version; stops for ever after the first shard, or has a small limit on file sizes."""

import resource
import sys
import time

import torch

from headway.contracts.errors import SyncError
from weight_sync.transports.disk import DiskPublisher


def tensors(is_stopped: bool):
    for index in range(4):
        if index == 2 and is_stopped:
            sys.stdout.write("midway\n")
            sys.stdout.flush()
            while True:
                time.sleep(60)
        yield f"w{index}", torch.full((1 << 16,), float(index))


def main(root: str, mode: str) -> None:
    publisher = DiskPublisher(root, keep=3, shard_bytes=1)
    if mode == "limited":
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 15, 1 << 15))
    try:
        publisher.publish(2, tensors(is_stopped=mode == "stopped"))
    except SyncError as error:
        sys.stdout.write(f"refused: {error}\n")
    else:
        sys.stdout.write("published\n")


main(*sys.argv[1:])
