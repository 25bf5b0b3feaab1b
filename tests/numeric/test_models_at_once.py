"""Models that threads make at once are whole, and so is what the process makes after them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from headway.contracts.config.model import ModelConfig
from tests.numeric.models import save_model
from weight_sync.model_dir import load_model, model_without_weights

NUM_THREADS = 3
ROUNDS = 8


@pytest.fixture
def restless() -> Iterator[None]:
    """Threads that take turns a hundred times as often."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(5e-5)
    yield
    sys.setswitchinterval(before)


def test_models_that_threads_make_at_once_are_whole(tmp_path: Path, restless: None) -> None:
    config = ModelConfig(path=str(save_model(tmp_path, "qwen3")))  # its head is tied
    scratch = config.model_copy(update={"init_from_scratch": True, "seed": 3})
    alone = load_model(scratch).get_output_embeddings().weight

    def make(number: int) -> Any:
        if number % NUM_THREADS == 2:
            return model_without_weights(config)
        kind = (config, scratch)[number % NUM_THREADS]
        model = load_model(kind)
        assert kind is config or torch.equal(model.get_output_embeddings().weight, alone)
        return model

    with ThreadPoolExecutor(NUM_THREADS) as threads:
        for model in threads.map(make, range(NUM_THREADS * ROUNDS)):
            table = model.get_input_embeddings().weight
            assert model.get_output_embeddings().weight is table
            assert table.is_meta or torch.isfinite(table).all()
