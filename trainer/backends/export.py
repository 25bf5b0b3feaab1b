"""Whole models on disk as Hugging Face directories."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
)


@contextmanager
def whole_directory(folder: Path) -> Iterator[Path]:
    """A directory to write into, which gets its name once everything is there.

    One that exists is written into as it is: it may hold files of others.
    """
    if folder.exists():
        yield folder
        return
    staging = folder.with_name(f".{folder.name}.staging")
    shutil.rmtree(staging, ignore_errors=True)  # what a crash left
    staging.mkdir(parents=True)
    yield staging
    staging.rename(folder)


def write_model(model: Any, weights: Mapping[str, Tensor], source: Path, folder: Path) -> None:
    """Write a model with the tokenizer that it came with.

    Args:
        weights: every parameter whole, on the CPU.
        source: the directory that the model was loaded from.
        folder: written to; it may be `source`.
    """
    with _writing_on_this_rank(model):
        model.save_pretrained(folder, state_dict=dict(weights))
    for name in TOKENIZER_FILES:
        file = source / name
        if file.is_file() and file.resolve() != (folder / name).resolve():
            shutil.copy2(file, folder / name)


@contextmanager
def _writing_on_this_rank(model: Any) -> Iterator[None]:
    """Let transformers write here: it leaves that to the first of all ranks, which may not hold the
    model."""
    model.should_save_on_this_rank = lambda is_main_process: is_main_process
    try:
        yield
    finally:
        del model.should_save_on_this_rank
