"""The embedded engine on a GPU: FlashAttention over blocks, graphs, swaps, and not the first GPU."""

from __future__ import annotations

import asyncio

import pytest
import torch
from torch.nn.attention import varlen

from headway.contracts.config.model import ModelConfig
from headway.contracts.config.server import EmbeddedTorchConfig
from inference_server.backends.embedded.attention import Span, StepTokens
from inference_server.backends.embedded.backend import EmbeddedTorchBackend
from inference_server.backends.embedded.device import CudaDevice
from inference_server.backends.embedded.kv_cache import KVShape
from inference_server.backends.embedded.paged_attention import (
    PagedInputs,
    PagedStep,
    paged_inputs,
)
from inference_server.backends.embedded.paged_cache import BLOCK_SIZE, PagedCache
from tests.numeric import paged
from tests.numeric.backends import Call, generate_all, prompt_of, request, stage
from tests.numeric.models import load_reference, reference_logprobs, save_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, there is none"),
]
CONTEXT = 700


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return [
        save_model(tmp_path_factory.mktemp(f"m{seed}"), "llama", seed=seed, context=CONTEXT)
        for seed in range(2)
    ]


def attended(device, dtype, window, heads, kv_heads, dim) -> torch.Tensor:
    """A step of decoding rows and chunks over blocks in no order."""
    where = torch.device("cpu") if device is None else device.where
    shape = KVShape(1, kv_heads, dim, dtype, where)
    cache = PagedCache(shape, 1024, lambda: 40 * BLOCK_SIZE * shape.token_bytes)
    generator = torch.Generator().manual_seed(0)
    held = torch.randn(cache.store.shape, generator=generator).to(where, dtype)
    cache.store.copy_(held)
    spans, first = [], 0
    for start, count in ((0, 1), (255, 1), (256, 1), (900, 1), (0, 300), (500, 77)):
        spans.append(Span(cache.allocate(1000), start, start + count, first))
        first += count
    positions = [p for span in spans for p in range(span.start, span.end)]
    host = paged_inputs(StepTokens(range(first), positions, range(first), spans, []))
    inputs = host if device is None else PagedInputs(*device.send(host.tensors))
    step = PagedStep(cache.store, inputs, varlen.varlen_attn, 300, 901)
    q, k, v = (
        torch.randn(first, n, dim, generator=generator).to(where, dtype)
        for n in (heads, kv_heads, kv_heads)
    )
    return step.attend(0, q, k, v, dim**-0.5, window).float().cpu()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("window", [None, 24, 300])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 4, 64), (14, 2, 64), (32, 8, 128)])
def test_flash_attention_over_blocks_is_the_slow_loops(dtype, window, heads, kv_heads, dim):
    device = CudaDevice(torch.device("cuda"))
    assert device.varlen_attention(dtype, dim) is not None
    assert paged.CALLS is not None  # the slow kernel of the CPU is registered
    got, expected = (attended(d, dtype, window, heads, kv_heads, dim) for d in (device, None))
    assert torch.isfinite(got).all()
    assert (got - expected).abs().max() < 2e-2


def crowd():
    lengths = [1, 255, 7, 256, 31, 300, 513, 64, 2]
    return [
        request(f"r{i}", prompt_of(n, i), seed=i, max_new_tokens=5 + 9 * i, logprob_start=0)
        for i, n in enumerate(lengths)
    ]


def backend_of(folder, dtype, device=None, **config) -> EmbeddedTorchBackend:
    options = EmbeddedTorchConfig(**{"max_sequences": 6, "max_prefill_tokens": 300} | config)
    return EmbeddedTorchBackend(
        options, ModelConfig(path=str(folder), dtype=dtype), 0, device=device
    )


async def played(backend, requests):
    await backend.start()
    try:
        return await generate_all(backend, requests)
    finally:
        await backend.aclose()


def distance(folder, requests, responses) -> float:
    """Of logprobs from those of float32 forwards, on average."""
    model = load_reference(folder)
    return float(
        torch.cat(
            [
                reference_logprobs(model, list(asked.input_ids), got.output_tokens)
                - torch.tensor(got.output_logprobs, dtype=torch.float64)
                for asked, got in zip(requests, responses, strict=True)
            ]
        )
        .abs()
        .mean()
    )


@pytest.mark.parametrize(
    ("dtype", "bound"), [("float32", 1e-2), ("bfloat16", 0.3), ("float16", 0.1)]
)
async def test_logprobs_are_those_of_transformers(folders, dtype, bound):
    """float32 has no FlashAttention, and lies on slabs; TensorFloat-32 may round its products."""
    requests = crowd()
    responses = await played(backend_of(folders[0], dtype), requests)
    assert distance(folders[0], requests, responses) < bound


async def test_graphs_give_what_launches_give(folders, caplog):
    outputs = []
    for has_graphs in (True, False):
        backend = backend_of(folders[0], "bfloat16", cuda_graphs=has_graphs)
        responses = await played(backend, crowd())
        outputs.append(torch.tensor([x for r in responses for x in r.output_logprobs[:4]]))
        graphs = backend.model.runner._graphs
        assert graphs is None or len(graphs._recorded) >= 2
    assert "without CUDA graphs" not in caplog.text
    assert (outputs[0] - outputs[1]).abs().mean() < 0.1


async def test_a_swap_is_seen_by_graphs_while_they_are_in_use(folders):
    backend = backend_of(folders[0], "bfloat16")
    await backend.start()
    call = Call(backend, request("r", prompt_of(9, 1), max_new_tokens=300, seed=0))
    await call.heard.until(20)
    for version in (1, 2, 3):
        await backend.swap(stage(version, folders[version % 2]))
    asked = crowd()
    responses = await generate_all(backend, asked)
    await call.response()
    await backend.aclose()
    assert distance(folders[1], asked, responses) < 0.3


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
async def test_an_engine_on_the_last_gpu_leaves_the_first_alone(folders):
    last = torch.cuda.device_count() - 1
    before = torch.cuda.mem_get_info(0)[0]
    backend = backend_of(folders[0], "bfloat16", CudaDevice(torch.device("cuda", last)))
    await backend.start()
    await generate_all(backend, crowd())
    await asyncio.to_thread(backend.model.fit, stage(1, folders[1]))
    assert backend.device == torch.device("cuda", last)
    assert torch.cuda.memory_allocated(0) == 0
    assert before - torch.cuda.mem_get_info(0)[0] < 1 << 20
    await backend.aclose()
