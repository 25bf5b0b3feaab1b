"""Measure how long training stands still for a checkpoint, written at once or in the background.

    python benchmarks/checkpoint.py
    python benchmarks/checkpoint.py --megabytes 2000 --folder /mnt/shared

One process trains a model of `--megabytes` (with AdamW's moments, a checkpoint holds three times that).
In alternation: a checkpoint that is written at once, and one that is written while steps go on. `value`
is the share of the first's seconds that the second takes from the loop. `copy_s` is the stop itself,
`steps_s` what the steps beside the writing took longer than steps alone, `durable_s` the time until the
checkpoint counts.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch
from measure import report
from transformers import LlamaConfig, LlamaForCausalLM

from headway.contracts.config.model import TrainedModelConfig
from headway.contracts.config.optimizer import OptimizerConfig
from headway.contracts.config.recovery import RecoveryConfig
from headway.contracts.config.trainer import TrainerConfig
from trainer.api import LossOutput, MicroBatchSpec, ModelOutput
from trainer.backends.fsdp2 import FSDP2Engine
from trainer.batching.sequences import SequenceBatch
from trainer.checkpoint import CheckpointContents, Checkpoints, RunState
from trainer.topology import Topology

HIDDEN = 512
LAYER_MEGABYTES = 16 * HIDDEN * HIDDEN * 4 / 1e6
ALONE = Topology(0, 1, torch.device("cpu"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=float, default=200.0, help="of parameters")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64, help="of a training step")
    parser.add_argument("--folder", help="where checkpoints go; a temporary directory")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        bench = Bench(Path(folder), options.megabytes, options.tokens)
        bench.at_once()  # a first one of each kind finds memory and files for the others
        bench.behind()
        pairs = [(bench.at_once(), bench.behind()) for _ in range(options.rounds)]
    stops = [once for once, _ in pairs]
    report(
        "checkpoint_stop",
        "seconds(loop stands still, asynchronous) / seconds(synchronous)",
        [(copy + longer) / once for once, (copy, longer, _) in pairs],
        megabytes=round(bench.megabytes),
        synchronous_s=middle(stops),
        copy_s=middle([copy for _, (copy, _, _) in pairs]),
        steps_s=middle([longer for _, (_, longer, _) in pairs]),
        durable_s=middle([durable for _, (_, _, durable) in pairs]),
        step_s=round(bench.step_s, 4),
    )


class Bench:
    """One engine that trains, and checkpoints of it."""

    def __init__(self, folder: Path, megabytes: float, tokens: int) -> None:
        layers = max(1, round(megabytes / LAYER_MEGABYTES))
        config = LlamaConfig(
            vocab_size=512,
            hidden_size=HIDDEN,
            intermediate_size=4 * HIDDEN,
            num_hidden_layers=layers,
            num_attention_heads=8,
        )
        LlamaForCausalLM(config).save_pretrained(folder / "model")
        model = TrainedModelConfig(path=str(folder / "model"))
        self._engine = FSDP2Engine(model, OptimizerConfig(), TrainerConfig(), ALONE, None)
        self._engine.initialize(None, None)
        self._parts = CheckpointContents({"model": self._engine})
        self._checkpoints = {
            kind: Checkpoints(folder, RecoveryConfig(asynchronous=kind, keep=1), ALONE)
            for kind in (False, True)
        }
        self._number = 0
        ids = torch.arange(tokens) % 512
        self._batch = SequenceBatch((tokens,), {"input_ids": ids, "labels": ids})
        self._train()
        self.step_s = statistics.median(self._train() for _ in range(5))
        parameters = self._engine._model.parameters()
        self.megabytes = 3 * sum(p.nbytes for p in parameters) / 1e6

    def at_once(self) -> float:
        """Seconds of a checkpoint that is written at once."""
        return self._save(asynchronous=False)

    def behind(self) -> tuple[float, float, float]:
        """Seconds of the stop, by which steps took longer, and until the checkpoint was durable."""
        checkpoints, started = self._checkpoints[True], time.perf_counter()
        stop = self._save(asynchronous=True)
        longer, step = 0.0, self._number - 1
        while checkpoints.safe_step < step:
            longer += self._train() - self.step_s
        durable = time.perf_counter() - started
        checkpoints.finish()
        return stop, max(0.0, longer), durable

    def _save(self, asynchronous: bool) -> float:
        self._number += 1
        started = time.perf_counter()
        self._checkpoints[asynchronous].save(self._parts, RunState("bench", step=self._number))
        return time.perf_counter() - started

    def _train(self) -> float:
        started = time.perf_counter()
        self._engine.train_batch(self._batch, MicroBatchSpec(1 << 20), loss, weight)
        return time.perf_counter() - started


def loss(output: ModelOutput, batch: SequenceBatch) -> LossOutput:
    return LossOutput(-output.logprobs(batch["labels"]).mean())


def weight(batch: SequenceBatch) -> float:
    return float(sum(batch.lengths))


def middle(values: list[float]) -> float:
    return round(statistics.median(values), 4)


if __name__ == "__main__":
    main()
