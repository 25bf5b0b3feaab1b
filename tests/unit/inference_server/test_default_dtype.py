"""`model.dtype: auto`: bfloat16 where a GPU generates, float32 elsewhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from headway.contracts.config.model import ModelConfig
from headway.contracts.config.server import (
    EmbeddedTorchConfig,
    FakeBackendConfig,
    ServerConfig,
    SGLangConfig,
    VLLMConfig,
)
from inference_server import default_dtype
from inference_server.default_dtype import settled_model


@pytest.fixture(params=["cuda", "cpu"])
def machine(request, monkeypatch) -> str:
    """What there is."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: request.param == "cuda")
    monkeypatch.setattr(default_dtype, "choose_device", lambda setting: torch.device(request.param))
    return request.param


def settled(backend: Any, **fields: Any) -> str:
    config = ServerConfig(model=ModelConfig(path="m", **fields), backend=backend)
    return settled_model(config).dtype


@pytest.mark.parametrize("backend", [EmbeddedTorchConfig(), SGLangConfig(), VLLMConfig()])
def test_auto_is_that_of_the_device(machine, backend):
    assert settled(backend) == ("bfloat16" if machine == "cuda" else "float32")


@pytest.mark.parametrize("backend", [FakeBackendConfig(), SGLangConfig(args={"--device": "cpu"})])
def test_auto_is_float32_where_the_gpu_is_not_used(machine, backend):
    assert settled(backend) == "float32"


def test_a_type_by_name_is_kept(machine):
    assert settled(EmbeddedTorchConfig(), dtype="float16") == "float16"
