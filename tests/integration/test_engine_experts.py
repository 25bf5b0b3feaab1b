"""A mixture of experts on a real SGLang and a real vLLM on the CPU: `make test-engines`.

Logprobs and experts are compared with what transformers computes from the same files.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from headway.contracts.config.model import ModelConfig
from headway.contracts.config.sampling import SamplingConfig
from headway.contracts.config.server import SGLangConfig, VLLMConfig
from headway.contracts.errors import DataError, SyncError
from headway.contracts.types import LLMRequest, LLMResponse
from inference_server.backends.base import GenerationBackend
from inference_server.backends.engine_experts import FLAG
from inference_server.backends.sglang.backend import SGLangBackend
from inference_server.backends.vllm.backend import VLLMBackend
from inference_server.testing import Running
from tests.integration import test_sglang_real, test_vllm_real
from tests.integration.real_engines import error_of, needs, show
from tests.integration.test_sglang_real import Policies
from tests.numeric.models import EOS, VOCAB_SIZE

TOLERANCE = 1e-4
TOP_K = 2
CONTEXT = 1024
COUNT = 24
FOREVER = 900
"""Tokens of a request that is met in the middle."""


def save_mixture(folder: Path, seed: int) -> None:
    """Every layer has experts: SGLang takes all layers of a Qwen3-MoE for such. Heads are as wide as vLLM
    wants them."""
    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=8,
        num_experts_per_tok=TOP_K,
        norm_topk_prob=True,
        max_position_embeddings=CONTEXT,
        initializer_range=0.2,
        bos_token_id=0,
        eos_token_id=EOS,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(folder)


@torch.no_grad()
def chosen_experts(model: torch.nn.Module, asked: LLMRequest, response: LLMResponse) -> np.ndarray:
    """[n, L, K] ids in ascending order, of every token but the last, as the router of a model chooses."""
    ids = torch.tensor([[*asked.input_ids, *response.output_tokens[:-1]]])
    logits = model(ids, output_router_logits=True).router_logits
    chosen = torch.stack([each.topk(TOP_K).indices for each in logits], dim=1)
    return chosen.sort(dim=-1).values.numpy()


@asynccontextmanager
async def serving(engine: str, model_path: Path, log: Path) -> AsyncIterator[GenerationBackend]:
    model = ModelConfig(path=str(model_path), dtype="float32")
    backend: GenerationBackend
    if engine == "sglang":
        real = test_sglang_real
        args = {**real.ARGS, FLAG: True}
        config = SGLangConfig(python=str(real.PYTHON), args=args, env=real.ENV, log_file=str(log))
        backend = SGLangBackend(config, model, 0)
        await backend.start()
        await backend._engine.post("/slow_down", {"forward_sleep_time": real.FORWARD_S})
    else:
        python, env = str(test_vllm_real.PYTHON), test_vllm_real.ENV
        args = {**test_vllm_real.ARGS, "--max-model-len": CONTEXT}
        backend = VLLMBackend(
            VLLMConfig(python=python, args=args, env=env, log_file=str(log)), model, 0
        )
        await backend.start()
    try:
        yield backend
    finally:
        await backend.aclose()


def request(index: int, count: int = COUNT, **extra) -> LLMRequest:
    generator = torch.Generator().manual_seed(index)
    prompt = torch.randint(2, VOCAB_SIZE, (3 + 7 * index % 23,), generator=generator).tolist()
    gconfig = SamplingConfig(ignore_eos=True, max_new_tokens=count)
    return LLMRequest(rid=f"r{index}", input_ids=prompt, gconfig=gconfig, **extra)


async def check_served(backend: GenerationBackend, policies: Policies, **extra) -> None:
    """What new requests get is what transformers computes from the version that serves."""
    asked = [request(i, **extra) for i in range(10)]
    responses = await asyncio.gather(*map(backend.generate, asked))
    errors = []
    for one, response in zip(asked, responses, strict=True):
        assert response.version_runs == [(backend.version, 0, COUNT)]
        errors.append(error_of(response, policies.replayed(one, response)))
        if one.routed_experts:
            got = np.sort(response.routed_experts.experts, axis=-1)
            expected = chosen_experts(policies.model(backend.version), one, response)
            assert np.array_equal(got, expected)
        else:
            assert response.routed_experts is None
    show(f"version {backend.version}: max error of 10 x {COUNT} logprobs {max(errors):.1e}")
    assert max(errors) < TOLERANCE


async def check_swaps(backend: GenerationBackend, policies: Policies) -> None:
    """Each token is of the version that is said to have sampled it, also where one is swapped in."""
    for policy in ("keep", "recompute"):
        old, meta = backend.version, policies.publish()
        staged = await asyncio.to_thread(backend.stage, meta, policies.reader())
        asked = [request(i, FOREVER, routed_experts=True) for i in range(4)]
        running = [Running(backend, one) for one in asked]
        for one in running:
            await one.until()
        assert await backend.swap(staged, policy) == len(asked)
        for one in running:
            await one.until(lambda delta, new=meta.version: delta.version == new)
        await backend.abort(None)
        responses = await asyncio.gather(*(one.task for one in running))
        expect = policies.recomputed if policy == "recompute" else policies.replayed
        errors = [error_of(r, expect(one, r)) for one, r in zip(asked, responses, strict=True)]
        show(f"{policy}: max error {max(errors):.1e}")
        assert max(errors) < TOLERANCE
        for response in responses:
            assert [version for version, _, _ in response.version_runs] == [old, meta.version]
        await check_served(backend, policies, routed_experts=True)


async def check_refusals(backend: GenerationBackend, policies: Policies) -> None:
    """What vLLM has not on a CPU is refused by name, and it serves on."""
    with pytest.raises(DataError, match=FLAG):
        await backend.generate(request(0, routed_experts=True))
    with pytest.raises(SyncError, match="packs the weights of experts once"):
        await asyncio.to_thread(backend.stage, policies.publish(), policies.reader())
    assert (backend.version, backend.failure) == (0, None)


@pytest.mark.parametrize(
    "engine", [pytest.param(name, marks=needs(name)) for name in ("sglang", "vllm")]
)
async def test_a_mixture_is_served(engine: str, tmp_path: Path) -> None:
    policies = Policies(tmp_path, save_mixture)
    async with serving(engine, policies.folders[0], tmp_path / "log") as backend:
        if engine == "sglang":
            await check_served(backend, policies, routed_experts=True)
            await check_swaps(backend, policies)
        else:
            await check_served(backend, policies)
            await check_refusals(backend, policies)
            await check_served(backend, policies)
    policies.publisher.close()
