"""What each rank of an upload gathers, and whether what comes is the model's."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from headway.contracts.config.weight_sync import DiskSync, ReceiverConfig
from tests.numeric.engines import open_engine
from trainer.topology import Topology
from weight_sync.deadline import Deadline
from weight_sync.receiver import make_receiver
from weight_sync.transports.base import make_publisher

LIMIT_S = 60.0


class Gathered(TorchDispatchMode):
    """Types and bytes of the shards that are gathered."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "all_gather" in func.__name__:
            self.dtypes.add(args[0].dtype)
            self.nbytes += args[0].nbytes
        return func(*args, **(kwargs or {}))


def upload(topology: Topology, model_dir: Path, root: Path, dtype: str | None) -> dict[str, Any]:
    """Publish a sharded model once; what this rank gathered, and on rank 0 what was published."""
    config = DiskSync(root=str(root), dtype=dtype)  # type: ignore[arg-type] # validated there
    publisher = make_publisher(config) if topology.is_main else None
    engine = open_engine(model_dir, topology=topology, publisher=publisher)
    gathered = Gathered()
    with gathered:
        meta = None if publisher is None else publisher.announce(7)
        engine.upload_weights(meta)
    told: dict[str, Any] = {"dtypes": gathered.dtypes, "nbytes": gathered.nbytes}
    wanted = {name: t.cpu().clone() for name, t in engine._upload.parameters()}
    if publisher is not None and meta is not None:
        with closing(make_receiver(ReceiverConfig(allow=(str(root),)))) as receiver:
            shapes = {name: tensor.shape for name, tensor in wanted.items()}
            staged = receiver.within(Deadline(LIMIT_S)).stage(meta, shapes)
        told |= {"wanted": wanted, "published": dict(staged.tensors)}
        publisher.close()
    return told
