"""A training step on a GPU beside that of the CPU: attention, precision, waits and checkpoints."""

from __future__ import annotations

import math

import pytest
import torch

from tests.numeric.engines import (
    assert_close,
    open_engine,
    parameters_of,
    random_batch,
    token_loss,
    tokens_in_loss,
)
from tests.numeric.models import save_model
from trainer.api import MicroBatchSpec, SaveLoadMeta
from trainer.backends.packed_attention import PackedLayout, in_buckets, in_one_call, takes_varlen
from trainer.topology import Topology

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, there is none"),
]
GPU, CPU = torch.device("cuda", 0), torch.device("cpu")
LENGTHS = (5, 1, 300, 300, 7, 128, 129)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("llama"), "llama")


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (8, 2)])
def test_one_call_equals_buckets_forward_and_backward(heads, kv_heads):
    size = sum(LENGTHS)
    results = []
    for device, dtype, attend in (
        (GPU, torch.bfloat16, in_one_call),
        (GPU, torch.bfloat16, in_buckets),
        (CPU, torch.float32, in_buckets),
    ):
        torch.manual_seed(0)
        columns = [  # of numbers that both types hold
            torch.randn(size, count, 64).bfloat16().to(device, dtype).requires_grad_()
            for count in (heads, kv_heads, kv_heads)
        ]
        assert takes_varlen(columns[0]) is (device == GPU)
        output = attend(*columns, PackedLayout(LENGTHS, device), None)
        slopes = torch.randn(output.shape).bfloat16().to(device, dtype)
        grads = torch.autograd.grad(output, columns, slopes)
        results.append([tensor.cpu().float() for tensor in (output, *grads)])
    for got, other, expected in zip(*results, strict=True):
        bound = 1e-2 * expected.norm() / math.sqrt(expected.numel()) * 10
        assert (got - expected).abs().max() < bound
        assert (other - expected).abs().max() < bound


@pytest.mark.parametrize("model", [{}, {"gradient_checkpointing": True}, {"dtype": "bfloat16"}])
def test_a_step_on_a_gpu_is_that_of_the_cpu(folder, model):
    spec = MicroBatchSpec(40)
    expected = open_engine(folder).train_batch(random_batch(0), spec, token_loss, tokens_in_loss)
    engine = open_engine(folder, topology=Topology(0, 1, GPU), **model)
    try:
        got = engine.train_batch(random_batch(0), spec, token_loss, tokens_in_loss)
    finally:
        engine.destroy()
    assert got["loss"] == pytest.approx(expected["loss"], rel=0.05)
    assert got["grad_norm"] == pytest.approx(expected["grad_norm"], rel=0.1)


def test_a_pass_waits_for_nothing(folder):
    """What the device that is not there counts, told by CUDA itself."""
    engine = open_engine(folder, topology=Topology(0, 1, GPU), dtype="bfloat16")
    batch = random_batch(0).to(GPU)
    try:
        engine._passes._losses(token_loss, batch)[0].backward()
        torch.cuda.set_sync_debug_mode("error")
        engine._passes._losses(token_loss, batch)[0].backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
        engine.destroy()


def test_a_checkpoint_holds_what_there_was_when_it_began(folder, tmp_path):
    engine = open_engine(folder, topology=Topology(0, 1, GPU), dtype="bfloat16")
    try:
        for seed in range(2):
            saved = {name: p.cpu() for name, p in parameters_of(engine).items()}
            written = engine.save(SaveLoadMeta(str(tmp_path / str(seed)), asynchronous=True))
            for step in range(2):
                batch = random_batch(step)
                engine.train_batch(batch, MicroBatchSpec(40), token_loss, tokens_in_loss)
            written.result(60)
            engine.load(SaveLoadMeta(str(tmp_path / str(seed))))
            loaded = {name: p.cpu() for name, p in parameters_of(engine).items()}
            assert_close(loaded, saved, atol=0.0)
    finally:
        engine.destroy()


@pytest.mark.parametrize("model", [{}, {"dtype": "bfloat16"}])
def test_what_is_offloaded_leaves_the_gpu_and_comes_back(folder, model):
    """Beside an engine that stays on the GPU."""
    engines = [open_engine(folder, topology=Topology(0, 1, GPU), **model) for _ in range(2)]
    moving, staying = engines
    spec = MicroBatchSpec(40)
    try:
        for step in range(3):
            for engine in engines:
                engine.train_batch(random_batch(step), spec, token_loss, tokens_in_loss)
            before = torch.cuda.memory_allocated()
            moving.place_on_device(parameters=False, optimizer=False)
            held = sum(p.nbytes for p in parameters_of(staying).values())
            assert before - torch.cuda.memory_allocated() >= 3 * held  # weights and two moments
            assert all(p.device == CPU for p in moving._model.parameters())
            moving.place_on_device(parameters=True, optimizer=False)
            assert before - torch.cuda.memory_allocated() >= 2 * held
            moving.forward(random_batch(step), spec)
            moving.place_on_device(parameters=True, optimizer=True)
        assert_close(parameters_of(moving), parameters_of(staying), atol=1e-5)
    finally:
        moving.destroy()
