"""Memory that is not there: rows and steps wait, sequences give way, and the engine goes on."""

from __future__ import annotations

import asyncio

import pytest
import torch

from headway.contracts.config.model import ModelConfig
from headway.contracts.config.server import EmbeddedTorchConfig
from headway.contracts.errors import BackendError
from inference_server.backends.embedded import paged_cache, slab_cache
from inference_server.backends.embedded.backend import EmbeddedTorchBackend
from inference_server.backends.embedded.device import Accelerator
from inference_server.backends.embedded.kv_cache import KVShape
from inference_server.backends.embedded.model import POOL_SHARE
from inference_server.backends.embedded.paged_cache import BLOCK_SIZE, PagedCache
from inference_server.backends.embedded.slab_cache import SlabCache
from tests.numeric.backends import (
    DEADLINE_S,
    generate_all,
    make_backend,
    prompt_of,
    request,
    serving,
    stage,
)
from tests.numeric.paged import PagedCpu
from tests.unit.inference_server.test_kv_cache import check_bookkeeping, holds, tokens_of, write

SHAPE = KVShape(2, 2, 3, torch.float32, torch.device("cpu"))


class Allocator:
    """Gives zeros as long as no more than `limit` bytes are held at once, old and new ones together."""

    def __init__(self, limit: int, make=slab_cache._zeros) -> None:
        self.limit = limit
        self.num_refusals = 0
        self._make = make
        self._held: list[torch.Tensor] = []

    def __call__(self, shape, dtype, device):
        size = torch.Size(shape).numel() * dtype.itemsize
        if size > self.limit:
            self.num_refusals += 1
            raise torch.OutOfMemoryError(f"tried to allocate {size} bytes")
        return self._make(shape, dtype=dtype, device=device)


@pytest.fixture
def allocator(monkeypatch):
    """Slabs of at most so many bytes each, from when `limit` is set."""
    made = Allocator(1 << 40)
    monkeypatch.setattr(slab_cache, "_zeros", made)
    return made


def crowd(count=6, size=90):
    return [
        request(f"r{i}", prompt_of(30 + i, i), max_new_tokens=size, seed=i) for i in range(count)
    ]


def test_a_slab_that_cannot_grow_leaves_its_rows_and_refuses_the_new_one(allocator):
    cache = SlabCache(SHAPE, 600, 10_000 * SHAPE.token_bytes)
    rows = [cache.allocate(10) for _ in range(4)]
    for salt, row in enumerate(rows):
        write(row, tokens_of(10, salt))
    allocator.limit = cache.slabs[0].store.nbytes
    assert cache.allocate(10) is None
    assert allocator.num_refusals >= 2  # four more rows, then one
    assert all(holds(row, tokens_of(10, salt)) for salt, row in enumerate(rows))
    cache.release(rows[1], keep=True)
    assert cache.allocate(10) is not None  # the kept one made room
    check_bookkeeping(cache)


def test_a_step_that_failed_is_forgotten():
    cache = SlabCache(SHAPE, 600, 10_000 * SHAPE.token_bytes)
    row = cache.allocate(20)
    write(row, tokens_of(20))
    cache.truncate(row, 8, 20)
    assert holds(row, tokens_of(8))


async def test_slabs_without_memory_preempt_and_lose_nothing(llama_dir, allocator):
    async with serving(llama_dir, max_sequences=6) as backend:
        expected = [r.output_tokens for r in await generate_all(backend, crowd())]
    async with serving(llama_dir, max_sequences=6) as backend:
        token = backend.model.kv_shape.token_bytes
        allocator.limit = 3 * 128 * token  # not six rows of 128
        responses = await generate_all(backend, crowd())
        assert backend.load().preemptions > 0
        assert allocator.num_refusals > 0
        assert backend.failure is None
    assert [r.output_tokens for r in responses] == expected


async def test_a_sequence_that_memory_never_holds_is_refused_and_the_next_one_served(
    llama_dir, allocator
):
    async with serving(llama_dir) as backend:
        allocator.limit = 4 * 96 * backend.model.kv_shape.token_bytes
        small = request("small", prompt_of(9, 1), max_new_tokens=9)
        large = request("large", prompt_of(20, 1), max_new_tokens=200)
        allocator.limit = 130 * backend.model.kv_shape.token_bytes
        with pytest.raises(BackendError, match=r"request large: no memory for 12[89] tokens"):
            await asyncio.wait_for(backend.generate(large), DEADLINE_S)
        assert len((await generate_all(backend, [small]))[0].output_tokens) == 9
        assert backend.load().running == backend.load().queued == 0


@pytest.mark.parametrize("device", [None, PagedCpu()])
async def test_a_step_without_memory_makes_the_youngest_wait(llama_dir, device):
    """Three sequences at once are too many: none is lost, and seeds give what they give."""
    async with serving(llama_dir, max_sequences=6) as backend:
        expected = [r.output_tokens for r in await generate_all(backend, crowd())]
    config = EmbeddedTorchConfig(max_sequences=6, kv_cache_bytes=1 << 24, cuda_graphs=False)
    backend = EmbeddedTorchBackend(config, ModelConfig(path=str(llama_dir)), 0, device=device)
    refused = []

    def refuse(module, args, kwargs):
        if len(backend._decode_loop.scheduler.running) > 2:
            refused.append(1)
            raise torch.OutOfMemoryError("no memory for activations")

    backend.model.module.register_forward_pre_hook(refuse, with_kwargs=True)
    await backend.start()
    responses = await generate_all(backend, crowd())
    assert backend.load().preemptions == len(refused) > 0
    assert backend.failure is None
    await backend.aclose()
    assert [r.output_tokens for r in responses] == expected


async def test_a_step_of_one_sequence_without_memory_ends_it_alone(llama_dir):
    async with serving(llama_dir) as backend:

        def refuse(module, args, kwargs):
            if kwargs["input_ids"].shape[1] > 50:
                raise torch.OutOfMemoryError("no memory for activations")

        backend.model.module.register_forward_pre_hook(refuse, with_kwargs=True)
        with pytest.raises(BackendError, match="request long: no memory for 60 tokens"):
            await backend.generate(request("long", prompt_of(60, 0)))
        assert len(await generate_all(backend, crowd(2, 5))) == 2
        assert backend.failure is None


def test_a_pool_is_as_large_as_memory_allows_and_holds_one_sequence_at_least(monkeypatch):
    block = BLOCK_SIZE * SHAPE.token_bytes
    allocator = Allocator(12 * block, torch.zeros)
    monkeypatch.setattr(paged_cache.torch, "zeros", allocator)
    cache = PagedCache(SHAPE, 2 * BLOCK_SIZE, lambda: 41 * block)
    assert cache.budget_tokens == 40 * BLOCK_SIZE
    assert cache.allocate(5) is not None
    assert cache.budget_tokens == cache.allocated_tokens == 10 * BLOCK_SIZE
    allocator.limit = 2 * block
    with pytest.raises(BackendError, match="no memory for keys and values of one sequence of 512"):
        PagedCache(SHAPE, 2 * BLOCK_SIZE, lambda: 41 * block).allocate(5)


class Gpu(PagedCpu):
    """With so much free memory."""

    def __init__(self, free: int) -> None:
        super().__init__()
        self.free = free

    def free_bytes(self) -> int:
        return self.free


def on(device, folder, **config):
    options = EmbeddedTorchConfig(**{"max_sequences": 1000} | config)
    return EmbeddedTorchBackend(options, ModelConfig(path=str(folder)), 0, device=device)


def test_keys_and_values_leave_room_for_a_second_copy_of_the_weights(llama_dir):
    weights = sum(t.nbytes for t in stage(1, llama_dir).tensors.values())
    token = make_backend(llama_dir).model.kv_shape.token_bytes
    held = on(Gpu(50 * weights), llama_dir)._decode_loop.cache.store.nbytes
    assert held <= POOL_SHARE * 49 * weights < held + BLOCK_SIZE * token
    # No room for both: swaps copy from the host, and one sequence fits.
    tight = on(Gpu(int(1.5 * weights) + 4 * BLOCK_SIZE * token), llama_dir)
    assert tight._decode_loop.cache.store.nbytes > 2 * BLOCK_SIZE * token


async def test_a_version_that_finds_no_room_is_held_by_the_host_until_the_swap(
    llama_dir, monkeypatch, caplog
):
    device = PagedCpu()
    backend = on(device, llama_dir, kv_cache_bytes=1 << 22)
    held = []
    monkeypatch.setattr(device, "hold", lambda tensor: held.append(tensor) or tensor.clone())

    def refuse(tensors):
        raise torch.OutOfMemoryError("no memory for weights")

    monkeypatch.setattr(backend.model, "_placed", refuse)
    await backend.start()
    staged = stage(1, llama_dir)
    doubled = {name: 2 * tensor for name, tensor in staged.tensors.items()}
    staged.tensors.update(doubled)
    await backend.swap(staged)
    assert len(held) == len(doubled)
    assert "the swap copies from the host" in caplog.text
    for name, tensor in doubled.items():
        assert torch.equal(backend.read_parameter(name), tensor)
    await backend.aclose()


def test_slabs_of_a_gpu_leave_that_room_too(llama_dir):
    class Old(Gpu):
        def varlen_attention(self, dtype, head_dim):
            return None

    weights = sum(t.nbytes for t in stage(1, llama_dir).tensors.values())
    backend = on(Old(100 * weights), llama_dir)
    assert isinstance(backend.model.device, Accelerator)
    budget = backend._decode_loop.cache.budget_tokens * backend.model.kv_shape.token_bytes
    assert budget <= 0.4 * 99 * weights
