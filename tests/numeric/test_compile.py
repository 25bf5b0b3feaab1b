"""Compiled blocks give the same numbers, and are compiled once for all sizes and layers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from headway.contracts.config.model import LoraConfig
from tests.numeric.engines import (
    TRAINER,
    assert_close,
    assert_same_figures,
    open_engine,
    parameters_of,
    random_batch,
    token_loss,
    tokens_in_loss,
)
from tests.numeric.models import save_model
from trainer.api import MicroBatchSpec
from trainer.backends import packed_model

COMPILED = TRAINER.model_copy(update={"compile": True})
SHARDED = COMPILED.model_copy(update={"compute_dtype": "float32"})
SPEC = MicroBatchSpec(30)
SHORT_RUN = ()
# PyTorch's compiler warns of its own code.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")


@pytest.fixture(autouse=True)
def compiler() -> Iterator[None]:
    """Without the cache of shapes: here each operation comes once."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with torch._dynamo.config.patch(fake_tensor_cache_enabled=False):
        yield
    torch._dynamo.reset()


def train(engine, seed: int) -> dict[str, float]:
    return engine.train_batch(random_batch(seed), SPEC, token_loss, tokens_in_loss)


def num_graphs() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.parametrize(
    ("trainer", "model"),
    [
        (COMPILED, {"lora": LoraConfig(rank=2)}),
        (SHARDED, {"gradient_checkpointing": True}),
    ],
    ids=["lora", "recomputed in shards"],
)
def test_steps_equal_those_of_blocks_that_are_not_compiled(llama_dir, monkeypatch, trainer, model):
    monkeypatch.setattr(packed_model, "COMPILER", "aot_eager")
    engine, plain = (
        open_engine(llama_dir, trainer=trainer, **model),
        open_engine(llama_dir, **model),
    )
    try:
        before = num_graphs()
        for seed in range(2):
            assert_same_figures(train(engine, seed), train(plain, seed), grad_norm=2e-6)
        assert num_graphs() > before
        assert_close(parameters_of(engine), parameters_of(plain), atol=2e-6)
    finally:
        engine.destroy()


def test_layers_and_sizes_share_what_is_compiled(tmp_path, monkeypatch):
    monkeypatch.setattr(packed_model, "COMPILER", "eager")
    graphs = {}
    for num_layers in (2, 12):
        torch._dynamo.reset()
        folder = save_model(tmp_path / str(num_layers), "llama", num_layers=num_layers, spread=0.1)
        before = num_graphs()
        engine = open_engine(folder, trainer=COMPILED)
        train(engine, 0)
        graphs[num_layers] = num_graphs() - before
        for seed in (1, 2):
            engine.train_batch(
                random_batch(seed, (9, 40, 3 + seed)),
                MicroBatchSpec(60),
                token_loss,
                tokens_in_loss,
            )
        assert num_graphs() - before == graphs[num_layers]
    assert graphs[12] == graphs[2] > 0


def test_a_block_is_compiled_for_every_model_of_a_process(monkeypatch):
    """Each width of a model, with and without gradients, is one more time."""
    monkeypatch.setattr(packed_model, "COMPILER", "eager")

    def block(x: torch.Tensor, model: str) -> torch.Tensor:
        return x * len(model)

    compiled = packed_model._compiled(block)
    before = num_graphs()
    for number in range(20):
        compiled(torch.ones(3), "m" * number)
    assert num_graphs() == before + 20


def test_the_real_compiler_gives_the_same_numbers(llama_dir):
    engine, plain = open_engine(llama_dir, trainer=COMPILED), open_engine(llama_dir)
    for seed in range(2):
        assert_same_figures(train(engine, seed), train(plain, seed), grad_norm=5e-6)
    assert_close(parameters_of(engine), parameters_of(plain), atol=2e-6)
