"""What the engine asks of a device: packed copies, the thread it works in, and what kernels it has."""

from __future__ import annotations

import asyncio
import threading
from contextlib import contextmanager

import pytest
import torch
from torch.nn.attention import varlen

from headway.contracts.config.model import ModelConfig
from headway.contracts.config.server import EmbeddedTorchConfig
from inference_server.backends.embedded import device as devices
from inference_server.backends.embedded.backend import EmbeddedTorchBackend
from inference_server.backends.embedded.device import Accelerator, CudaDevice, Device, packed_places
from tests.numeric.backends import generate_all, prompt_of, request, stage


def columns():
    return [
        torch.arange(5),
        torch.tensor([[1.5, -2.5]]),
        torch.tensor([], dtype=torch.int64),
        torch.tensor([True, False, True]),
        torch.arange(6, dtype=torch.int32).view(2, 3),
        torch.tensor(7.0, dtype=torch.bfloat16),
        torch.arange(12.0).view(3, 4).T,
    ]


@pytest.mark.parametrize("device", [Device(), Accelerator(torch.device("cpu"))])
def test_what_was_sent_is_fetched_as_it_was(device):
    sent = device.send(columns())
    for got in (sent, device.fetch(sent)()):
        assert all(torch.equal(one, two) for one, two in zip(got, columns(), strict=True))
        assert [t.dtype for t in got] == [t.dtype for t in columns()]
    assert device.fetch([])() == []


def test_a_copy_into_given_memory_is_seen_where_the_first_one_was():
    device = Accelerator(torch.device("cpu"))
    _, size = packed_places(columns())
    memory = torch.zeros(size, dtype=torch.uint8)
    first = device.send(columns(), memory)
    device.send([column + column for column in columns()], memory)
    assert first[0].tolist() == [0, 2, 4, 6, 8]
    assert all(tensor.data_ptr() % devices.ALIGNMENT == 0 for tensor in first if tensor.numel())


@pytest.fixture
def cuda(monkeypatch):
    """As much of CUDA as a device is made of; the calls that name a device, with their threads."""
    calls = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "Stream", lambda where: where)
    monkeypatch.setattr(
        torch.cuda, "set_device", lambda where: calls.append((where, threading.current_thread()))
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda where: (9, 0))
    return calls


def test_a_gpu_has_an_index_the_one_of_the_thread_that_made_it(cuda):
    assert CudaDevice(torch.device("cuda")).where == torch.device("cuda", 3)
    assert CudaDevice(torch.device("cuda:1")).where == torch.device("cuda", 1)


def test_a_thread_that_decodes_says_on_which_gpu(cuda):
    device = CudaDevice(torch.device("cuda"))

    def work():
        with device.decoding():
            assert torch.is_inference_mode_enabled()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert cuda == [(torch.device("cuda", 3), thread)]


def test_a_gpu_has_paged_attention_for_types_and_heads_of_flash_attention_only(cuda, monkeypatch):
    device = CudaDevice(torch.device("cuda"))
    assert device.varlen_attention(torch.bfloat16, 128) is varlen.varlen_attn
    for dtype, head_dim in ((torch.float32, 128), (torch.bfloat16, 12), (torch.float16, 512)):
        assert device.varlen_attention(dtype, head_dim) is None
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda where: (7, 5))
    assert device.varlen_attention(torch.bfloat16, 128) is None
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda where: (8, 0))

    def older(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None):
        raise AssertionError

    monkeypatch.setattr(varlen, "varlen_attn", older)
    assert device.varlen_attention(torch.bfloat16, 128) is None


class Watched(Device):
    """Notes which threads said what they are going to do."""

    def __init__(self) -> None:
        super().__init__()
        self.decoding_threads: set[str] = set()
        self.staging_threads: set[str] = set()

    @contextmanager
    def decoding(self):
        self.decoding_threads.add(threading.current_thread().name)
        with super().decoding():
            yield

    @contextmanager
    def staging(self):
        self.staging_threads.add(threading.current_thread().name)
        yield


async def test_every_thread_of_the_engine_says_what_it_does(llama_dir):
    device = Watched()
    config = EmbeddedTorchConfig(max_sequences=2, kv_cache_bytes=1 << 22)
    backend = EmbeddedTorchBackend(config, ModelConfig(path=str(llama_dir)), 0, device=device)
    device.decoding_threads.clear()  # of the probe
    await backend.start()
    await generate_all(backend, [request("r", prompt_of(5, 0), max_new_tokens=3)])
    await backend.swap(stage(1, llama_dir))
    await asyncio.to_thread(backend.model.fit, stage(2, llama_dir))
    await backend.aclose()
    assert device.decoding_threads == {"decode"}
    assert device.staging_threads
    assert "decode" not in device.staging_threads
