"""Supervised fine-tuning on a JSON Lines file of prompts and completions."""

from __future__ import annotations

import time
import uuid
from pathlib import Path

import torch
from transformers import AutoTokenizer

from headway.contracts.config.experiment import SFTExperiment
from headway.contracts.errors import DataError
from headway.contracts.types import FinetuneSpec
from headway.runtime.config import write_resolved
from trainer.api import MicroBatchSpec, SaveLoadMeta
from trainer.backends.base import make_engine
from trainer.batching.balance import partition_by_tokens
from trainer.batching.sequences import SequenceBatch, shift_left
from trainer.data import PromptData
from trainer.experiments.base import Experiment
from trainer.interfaces.sft import SFT
from trainer.meter import Meter
from trainer.topology import Topology
from trainer.tracking.tracker import open_tracker

Row = tuple[list[int], int]
"""Token ids of prompt and completion, and how many of them are the prompt's."""


def run(config: SFTExperiment) -> None:
    """Train `trainer.total_steps` steps and write a Hugging Face directory to `output_dir`."""
    topology = Topology.from_environment()
    if config.trainer.num_threads is not None:
        torch.set_num_threads(config.trainer.num_threads)
    torch.manual_seed(config.trainer.seed)
    run_dir = Path(config.run_dir)
    data = PromptData(config.data)
    rows = tokenize(data, config.model.path)
    meter = Meter(config.metrics, topology)
    engine = meter.around(make_engine(config, topology, None), config.model)
    engine.initialize(None, FinetuneSpec(1, len(data), config.data.batch_size))
    sft = SFT(engine, MicroBatchSpec(config.trainer.max_tokens_per_mb))
    metrics = open_tracker(config, topology, uuid.uuid4().hex[:8])
    if topology.is_main:
        write_resolved(config, run_dir)
    started = time.monotonic()
    size = config.data.batch_size
    for step in range(config.trainer.total_steps):
        begun = time.monotonic()
        chosen = [rows[data.row_index(step * size + offset)] for offset in range(size)]
        share = partition_by_tokens([len(ids) for ids, _ in chosen], topology.world_size)
        stats = sft.train_step(pack_rows([chosen[i] for i in share[topology.rank]]))
        engine.step_lr_scheduler()
        elapsed_s, train_s = time.monotonic() - started, time.monotonic() - begun
        speed = meter.take(sum(len(ids) for ids, _ in chosen), 0.0, train_s, 0.0)
        metrics.write({"step": step, "seconds": elapsed_s, **stats, **speed})
        if config.time_limit_s is not None and topology.max(int(elapsed_s > config.time_limit_s)):
            break
    engine.save(SaveLoadMeta(config.output_dir, weight_format="hf"))
    metrics.close()
    engine.destroy()


def tokenize(data: PromptData, model_path: str) -> list[Row]:
    """Every row as prompt + completion + end of sequence.

    Raises:
        DataError: the tokenizer has no end-of-sequence token.
    """
    tokenizer = AutoTokenizer.from_pretrained(model_path, local_files_only=True)
    if tokenizer.eos_token_id is None:
        raise DataError(f"the tokenizer of {model_path} has no end-of-sequence token")
    prompts = tokenizer([data.text_of(i) for i in range(len(data))])["input_ids"]
    completions = tokenizer(
        [data.completion_of(i) for i in range(len(data))], add_special_tokens=False
    )["input_ids"]
    return [
        (prompt + completion + [tokenizer.eos_token_id], len(prompt))
        for prompt, completion in zip(prompts, completions, strict=True)
    ]


def pack_rows(rows: list[Row]) -> SequenceBatch:
    """Columns `input_ids`, and shifted to the predicted token `labels` and `loss_mask`."""
    lengths = tuple(len(ids) for ids, _ in rows)
    input_ids = torch.tensor([token for ids, _ in rows for token in ids])
    mask = torch.cat([torch.arange(len(ids)) >= num_prompt for ids, num_prompt in rows])
    return SequenceBatch(
        lengths,
        {
            "input_ids": input_ids,
            "labels": shift_left(input_ids, lengths, 0),
            "loss_mask": shift_left(mask, lengths, False),
        },
    )


SFT_EXPERIMENT = Experiment(SFTExperiment, run)
