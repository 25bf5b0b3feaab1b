"""A reward model of a JSON Lines file of chosen and rejected answers.

transformers reads a score at the last token that is no padding, so a model that pads with its end of
sequence is scored in front of it: there, answers go without one.
"""

from __future__ import annotations

import json
from pathlib import Path

from transformers import AutoConfig

from headway.contracts.config.experiment import RWExperiment
from trainer.data_supervised import Encoder, pairs
from trainer.dataflow.supervised import rw_flow
from trainer.experiments.base import Experiment
from trainer.experiments.supervised import run_supervised
from trainer.topology import Topology


def run(config: RWExperiment) -> None:
    """Train a score, and write it as a sequence classification model with one label."""
    encoder = Encoder(config.model.path)
    padding = padding_of(encoder)
    if encoder.end == [padding]:
        encoder.end = []
    run_supervised(config, rw_flow(config), encoder, pairs)
    if padding is not None and Topology.from_environment(config.trainer.device).is_main:
        note_padding(Path(config.output_dir), padding)


def padding_of(encoder: Encoder) -> int | None:
    """The token that transformers skips when it looks for the end of a sequence."""
    model = AutoConfig.from_pretrained(encoder.path, local_files_only=True).get_text_config()
    padding: int | None = model.pad_token_id
    return encoder.tokenizer.pad_token_id if padding is None else padding


def note_padding(folder: Path, padding: int) -> None:
    """Let transformers score several sequences at a time, as a model with padding only can."""
    file = folder / "config.json"
    settings = json.loads(file.read_text())
    if settings.get("pad_token_id") is None:
        file.write_text(json.dumps(settings | {"pad_token_id": padding}, indent=2) + "\n")


RW_EXPERIMENT = Experiment(RWExperiment, run, rw_flow)
