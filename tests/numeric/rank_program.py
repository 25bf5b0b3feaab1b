"""What every rank of the two-rank tests runs: `torchrun -m tests.numeric.rank_program OUT MODEL...`.

For each model: trains three steps on this rank's share of fixed global batches, publishes and saves;
the first rank writes the figures. One process does the same, so files can be compared.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from headway.runtime.ending import end_process
from tests.numeric.engines import open_engine, random_batch, token_loss, tokens_in_loss
from trainer.api import MicroBatchSpec, SaveLoadMeta
from trainer.batching.balance import partition_by_tokens
from trainer.topology import Topology
from weight_sync.transports.disk import make_local_publisher

STEPS = 3
VERSION = 7


def run(model_dir: Path, out: Path) -> None:
    """Everything for one model, below `out`."""
    topology = Topology.from_environment()
    publisher = None
    if topology.is_main:
        publisher = make_local_publisher(str(out / "weights"))
    engine = open_engine(model_dir, topology=topology, publisher=publisher)
    spec = MicroBatchSpec(25)  # the ranks need different numbers of micro-batches
    metrics = []
    for seed in range(STEPS):
        batch = random_batch(seed)
        share = partition_by_tokens(batch.lengths, topology.world_size)[topology.rank]
        mine = batch.select(share)
        before = engine.eval_batch(mine, spec, token_loss, tokens_in_loss)
        stats = engine.train_batch(mine, spec, token_loss, tokens_in_loss)
        engine.step_lr_scheduler()
        logits = engine.forward(mine, spec)
        sizes = topology.sum([float(logits.double().square().sum())])
        metrics.append(stats | {"eval": float(before), "logits_square": sizes[0]})
    engine.upload_weights(publisher.announce(VERSION) if publisher is not None else None)
    engine.save(SaveLoadMeta(str(out / "checkpoint"))).result()
    engine.save(SaveLoadMeta(str(out / "hf"), weight_format="hf")).result()
    if publisher is not None:
        publisher.close()
        (out / "figures.json").write_text(json.dumps(metrics))


def main() -> None:
    """All models of the command line."""
    torch.set_num_threads(1)
    for model_dir in map(Path, sys.argv[2:]):
        run(model_dir, Path(sys.argv[1]) / model_dir.name)
    Topology.from_environment().leave()
    end_process(0)


if __name__ == "__main__":
    main()
