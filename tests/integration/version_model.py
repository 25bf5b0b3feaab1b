"""A model whose every token says, by itself, which weights sampled it.

The embedding puts a constant into one channel of the residual stream, no layer writes there, and the last
norm lets nothing else through. So each logit is one weight of the head times one of the norm, whatever
the input: the head of version v makes token `FIRST + v` the most likely one, and the norm of version v
decides how likely. A token and its logprob come from two tensors, far apart in a version; both must say
the same. All other weights are random, and different in every version.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.nn.functional import log_softmax

from headway.contracts.config.model import ModelConfig
from headway.launch.quickstart import task
from weight_sync.model_dir import load_model

FIRST = 20
"""Token of version 0, behind those of the tokenizer."""
VERSIONS = 30
CHANNEL = 7
CONSTANT = 1e4
"""Beside it, nothing else in the residual stream counts in the norm."""
HIDDEN = 128
SHAPE = {
    "hidden_size": HIDDEN,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "vocab_size": FIRST + VERSIONS,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}


def write_version_model(folder: Path) -> Path:
    """A model directory with the weights of version 0."""
    task.write_model(folder, SHAPE)
    model = load_model(ModelConfig(path=str(folder), init_from_scratch=True))
    model.load_state_dict(dict(weights_of(folder, 0)))
    model.save_pretrained(folder)
    return folder


def weights_of(folder: Path, version: int) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a version, in the order of the model."""
    model = load_model(ModelConfig(path=str(folder), init_from_scratch=True, seed=version))
    for name, parameter in model.named_parameters():
        tensor = parameter.detach()
        if name == "model.embed_tokens.weight":
            tensor[:, CHANNEL] = CONSTANT
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor[CHANNEL] = 0.0
        elif name == "model.norm.weight":
            tensor.zero_()
            tensor[CHANNEL] = _scale(version)
        elif name == "lm_head.weight":
            tensor[:, CHANNEL] = 0.0
            tensor[token_of(version), CHANNEL] = 1.0
        yield name, tensor


def token_of(version: int) -> int:
    """The most likely token under this version."""
    return FIRST + version


def logprob_of(version: int) -> float:
    """And its logprob."""
    logits = torch.zeros(FIRST + VERSIONS, dtype=torch.float64)
    logits[token_of(version)] = _scale(version) * math.sqrt(HIDDEN)
    return float(log_softmax(logits, -1)[token_of(version)])


def _scale(version: int) -> float:
    """So that a version's logprob is at least 0.02 away from every other one's."""
    return 0.25 + 0.006 * version
