"""Which type passes run in, by device and setting."""

from __future__ import annotations

import logging

import pytest
import torch

from tests.numeric.engines import (
    TRAINER,
    open_engine,
    parameters_of,
    random_batch,
    token_loss,
    tokens_in_loss,
)
from trainer.api import MicroBatchSpec
from trainer.backends import fsdp2, sharding
from trainer.backends.sharding import compute_dtype

CPU = torch.device("cpu")


@pytest.fixture
def on_a_gpu(monkeypatch):
    """The CPU counts as a GPU that has bfloat16."""
    for module in (sharding, fsdp2):
        monkeypatch.setattr(module, "has_bfloat16", lambda device: True)


@pytest.fixture
def matmul_precision():
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("held", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_a_cpu_computes_in_the_type_of_the_parameters(held):
    assert compute_dtype("auto", held, CPU) is None
    assert compute_dtype("bfloat16", held, CPU) == torch.bfloat16


def test_a_gpu_computes_a_float32_model_in_bfloat16(on_a_gpu):
    assert compute_dtype("auto", torch.float32, CPU) == torch.bfloat16
    assert compute_dtype("float32", torch.float32, CPU) == torch.float32
    assert compute_dtype("auto", torch.float16, CPU) is None


def test_training_is_in_bfloat16_by_itself_and_parameters_stay_float32(llama_dir, on_a_gpu):
    seen = []

    def watching(output, batch):
        seen.append(output.hidden.dtype)
        return token_loss(output, batch)

    engine = open_engine(llama_dir)
    try:
        engine.train_batch(random_batch(0), MicroBatchSpec(40), watching, tokens_in_loss)
        assert set(seen) == {torch.bfloat16}
        assert {p.dtype for p in parameters_of(engine).values()} == {torch.float32}
    finally:
        engine.destroy()


def test_float32_on_a_gpu_takes_tf32_and_says_so(llama_dir, on_a_gpu, matmul_precision, caplog):
    trainer = TRAINER.model_copy(update={"compute_dtype": "float32"})
    with caplog.at_level(logging.WARNING):
        open_engine(llama_dir, trainer=trainer).destroy()
    assert torch.get_float32_matmul_precision() == "high"
    assert "set trainer.compute_dtype=bfloat16" in caplog.text


def test_a_cpu_keeps_its_products_and_its_peace(llama_dir, matmul_precision, caplog):
    with caplog.at_level(logging.WARNING):
        open_engine(llama_dir)
    assert torch.get_float32_matmul_precision() == "highest"
    assert not caplog.records
