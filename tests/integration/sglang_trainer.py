"""A trainer process: `sglang_trainer.py GROUP`, orders as JSON lines on stdin.

It says its port first, and makes the group as SGLang's trainers do. Orders:
`{"folder", "names", "mode"}`; `plain` broadcasts each tensor, `flat` one bucket of bytes, `half` the
first tensor and then dies, `silent` nothing.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed import distributed_c10d as c10d


def say(word: str) -> None:
    sys.stdout.write(word + "\n")
    sys.stdout.flush()


def join(store: dist.TCPStore, name: str) -> dist.ProcessGroup:
    store = c10d.PrefixStore(name, store)
    group, _ = c10d._new_process_group_helper(
        2, 0, [], c10d.Backend("gloo"), store, group_name=name, timeout=c10d.default_pg_timeout
    )
    c10d._world.pg_group_ranks[group] = {0: 0, 1: 1}
    return group


def broadcast(tensors: list[torch.Tensor], group: dist.ProcessGroup) -> None:
    for work in [dist.broadcast(t, src=0, group=group, async_op=True) for t in tensors]:
        work.wait()


def carry_out(order: dict, group: dist.ProcessGroup) -> None:
    weights = load_file(Path(order["folder"]) / "model.safetensors")
    tensors = [weights[name].contiguous() for name in order["names"]]
    if order["mode"] == "plain":
        broadcast(tensors, group)
    elif order["mode"] == "flat":
        broadcast([torch.cat([t.flatten().view(torch.uint8) for t in tensors])], group)
    elif order["mode"] == "half":
        broadcast(tensors[:1], group)
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    store = dist.TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
    say(str(store.port))
    joined = join(store, sys.argv[1])
    for line in sys.stdin:
        carry_out(json.loads(line), joined)
        say("done")
