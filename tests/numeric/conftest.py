from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.numeric.models import save_model


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def llama_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture(scope="session", params=["llama", "qwen3", "sliding", "gpt2"])
def model_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One directory per architecture."""
    return save_model(tmp_path_factory.mktemp(request.param), request.param)
