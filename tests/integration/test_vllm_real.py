"""The vLLM backend on a real vLLM server, on the CPU: `make test-vllm`.

One engine, a child of the first backend, serves the module; a second backend attaches to its URL. Every
logprob is compared with what transformers computes from the same weights.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path

import psutil
import pytest
import torch

from headway.contracts.config.model import ModelConfig
from headway.contracts.config.server import UpdatePolicy, VLLMConfig
from headway.contracts.errors import BackendError
from headway.contracts.types import LLMResponse
from headway.text.tokenizer import TextTokenizer
from inference_server.backends.base import GenerationBackend
from inference_server.backends.vllm.backend import VLLMBackend
from inference_server.testing import FIRST_VERSION, GenerationBackendContract, Running
from tests.integration.real_engines import (
    ROOT,
    allowed_logprobs,
    check_bundled_run,
    engine_python,
    error_of,
    needs,
    recomputed,
    replayed,
    shaped_logprobs,
    show,
)
from tests.numeric.adapters import merged, save_adapter
from tests.numeric.models import (
    EOS,
    VOCAB_SIZE,
    load_reference,
    reference_logits,
    reference_logprobs,
    save_wide_llama,
    write_char_tokenizer,
)

pytestmark = needs("vllm")
TOLERANCE = 2e-4
NUM_PLACES = 8
BLOCK = 128
"""Tokens of vLLM's smallest prefix on a CPU."""
PYTHON = engine_python("vllm")
SPAWNED = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "TORCH_COMPILE_DISABLE": "1",  # its first requests would wait for a C++ compiler
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "PYTHONPATH": str(ROOT / "tests" / "engines_cpu"),
}
"""Its processes start as they do for users."""
ENV = SPAWNED | {"VLLM_WORKER_MULTIPROC_METHOD": "fork"}
"""They start with all that is imported, in half the time."""
ARGS = {
    "--max-model-len": 2048,
    "--max-num-seqs": NUM_PLACES,
    "--enforce-eager": True,
    "--worker-cls": "vllm_paced.PacedWorker",
}


class TestVLLM(GenerationBackendContract):
    timeout_s = 180.0

    def save_model(self, folder: Path) -> None:
        """Deep enough to be met in the middle."""
        save_wide_llama(folder, num_layers=12)
        write_char_tokenizer(folder)

    @asynccontextmanager
    async def serving(self, model_path: Path) -> AsyncIterator[GenerationBackend]:
        first = getattr(type(self), "served", None)
        if first is None:
            log = str(model_path.parent / "vllm.log")
            child = {"python": str(PYTHON), "args": ARGS, "env": SPAWNED, "log_file": log}
            config = VLLMConfig(max_adapters=2, max_adapter_rank=8, **child)
        else:
            config = VLLMConfig(url=first.backend._engine.process.url, max_adapters=2)
        model = ModelConfig(path=str(model_path), dtype="float32")
        backend = VLLMBackend(config, model, FIRST_VERSION)
        started = time.monotonic()
        await backend.start()
        show(f"vLLM answers after {time.monotonic() - started:.0f} s")
        try:
            yield backend
        finally:
            await backend.aclose()

    async def swap_in(self, factor: float, policy: UpdatePolicy = "keep") -> int:
        """Publish the first weights times a factor, and swap them in."""
        staged = await self.served.stage(self.served.publish(factor))
        return await self.served.backend.swap(staged, policy)

    def model(self, factor: float) -> torch.nn.Module:
        return scaled_model(self.served.model_path, factor)

    def test_logprobs_are_those_of_transformers(self) -> None:
        options = [
            {},
            {"temperature": 0.0},
            {"temperature": 0.7, "seed": 5},
            {"temperature": 1.5, "logit_bias": {7: 3.0, 9: -2.0}},
            {"presence_penalty": 0.7, "frequency_penalty": 0.4},
        ]
        asked = [
            self.served.request(60, tuple(range(2, 5 + i)), **options[i % len(options)])
            for i in range(15)
        ]

        async def work() -> list[LLMResponse]:
            await self.swap_in(1.1)
            return await asyncio.gather(*map(self.served.backend.generate, asked))

        errors = [
            error_of(response, shaped_logprobs(self.model(1.1), one, response.output_tokens))
            for one, response in zip(asked, self.served.run(work()), strict=True)
        ]
        show(f"max error of 15 x 60 logprobs: {max(errors):.1e}")
        assert max(errors) < TOLERANCE

    def test_adapters_change_the_base_that_serves(self, tmp_path: Path) -> None:
        backend = self.served.backend
        lora = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"]}
        folders = {
            # Larger ones make logits so large that float32 is off by more than is allowed.
            name: save_adapter(tmp_path / name, self.served.model_path, seed, spread=0.1, **lora)
            for seed, name in enumerate("ab", 1)
        }
        names = ["a", "b", None] * 3

        async def work(factor: float) -> list[LLMResponse]:
            await self.swap_in(factor)
            asked = [
                self.served.request(30, (2, 3, 4 + i)).model_copy(update={"adapter": name})
                for i, name in enumerate(names)
            ]
            return await asyncio.gather(*map(backend.generate, asked))

        async def load(version: int) -> None:
            for name, folder in folders.items():
                await backend.load_adapter(name, folder, version)

        errors = []
        for factor, version in ((1.1, 3), (0.9, 4)):
            self.served.run(load(version))
            for i, response in enumerate(self.served.run(work(factor))):
                base = scaled_model.__wrapped__(
                    self.served.model_path, factor
                )  # not the cached one
                model = merged(base, names[i] and folders[names[i]])
                expected = reference_logprobs(model, [2, 3, 4 + i], response.output_tokens)
                errors.append(error_of(response, expected))
                if names[i]:
                    assert response.version_runs == [(version, 0, 30)]
        show(f"max error of 18 x 30 logprobs: {max(errors):.1e}")
        assert max(errors) < 5 * TOLERANCE  # unlikely tokens, in float32
        for name in folders:
            self.served.run(backend.unload_adapter(name))
        assert dict(backend.adapters) == {}

    def test_prompt_logprobs_and_top_logprobs_are_those_of_transformers(self) -> None:
        prompt = (5, 9, 3, 7, 11)
        asked = self.served.request(4, prompt, logprob_start=1, top_logprobs=64)

        async def work() -> LLMResponse:
            await self.swap_in(1.0)
            return await self.served.backend.generate(asked)

        response = self.served.run(work())
        with torch.no_grad():
            logits = reference_logits(self.model(1.0), [*prompt, *response.output_tokens])
        table = torch.log_softmax(logits.double(), dim=-1)
        wanted = [table[i - 1, prompt[i]].item() for i in range(1, len(prompt))]
        assert response.prompt_logprobs == pytest.approx(wanted, abs=TOLERANCE)
        assert response.top_logprobs is not None
        for offset, pairs in enumerate(response.top_logprobs):
            assert len(pairs) == VOCAB_SIZE  # 64 are more than there are
            for token, logprob in pairs:
                wanted_one = table[len(prompt) - 1 + offset, token].item()
                assert logprob == pytest.approx(wanted_one, abs=TOLERANCE)

    def test_outputs_follow_a_regular_expression_or_a_schema(self) -> None:
        values, bound = [12, "AB", "C"], {"ignore_eos": False}
        prompts = [tuple(range(2, 5 + i)) for i in range(6)]
        by_regex = [self.served.request(40, p, regex="[A-C]{3}-[0-9]{2}", **bound) for p in prompts]
        by_schema = [
            self.served.request(40, p, json_schema={"enum": values}, **bound) for p in prompts
        ]
        asked = by_regex + by_schema

        async def work() -> list[LLMResponse]:
            await self.swap_in(1.0)
            return await asyncio.gather(*map(self.served.backend.generate, asked))

        responses = self.served.run(work())
        tokenizer = TextTokenizer(str(self.served.model_path))
        texts = [tokenizer.decode(response.output_tokens) for response in responses]
        show(f"texts: {texts}")
        assert all((r.stop_reason, r.stop_match) == ("stop", EOS) for r in responses)
        assert all(re.fullmatch("[A-C]{3}-[0-9]{2}", text) for text in texts[:6])
        assert all(json.loads(text) in values for text in texts[6:])
        places = [*["ABC"] * 3, "-", *["0123456789"] * 2]
        allowed = [sorted(ord(c) - ord(" ") + 2 for c in place) for place in places]
        for one, response in zip(by_regex, responses[:6], strict=True):
            expected = allowed_logprobs(
                self.model(1.0), one, response.output_tokens, [*allowed, [EOS]]
            )
            assert error_of(response, expected) < TOLERANCE

    @pytest.mark.parametrize("policy", ["keep", "recompute"])
    def test_each_token_has_the_version_that_sampled_it(self, policy: UpdatePolicy) -> None:
        asked = [self.served.request(2000, (3 + i, 4, 5)) for i in range(NUM_PLACES + 4)]

        async def work() -> tuple[int, list[LLMResponse]]:
            await self.swap_in(1.0)
            old, staged = (
                self.served.backend.version,
                await self.served.stage(self.served.publish(0.9)),
            )
            running = [Running(self.served.backend, one) for one in asked[:NUM_PLACES]]
            for one in running:
                await one.until()
            waiting = [
                asyncio.create_task(self.served.backend.generate(one)) for one in asked[NUM_PLACES:]
            ]
            await asyncio.sleep(0)
            started = time.monotonic()
            assert await self.served.backend.swap(staged, policy) == len(asked)
            show(f"{policy}: swapped in {time.monotonic() - started:.2f} s")
            for one in running:
                await one.until(lambda delta: delta.version == staged.version)
            await self.served.backend.abort(None)
            return old, await asyncio.gather(*(one.task for one in running), *waiting)

        old, responses = self.served.run(work())
        models = {old: self.model(1.0), self.served.backend.version: self.model(0.9)}
        expect = recomputed if policy == "recompute" else replayed
        errors = [
            error_of(response, expect(models.__getitem__, one, response))
            for one, response in [*zip(asked, responses, strict=True)][:NUM_PLACES:4]
        ]
        show(f"{policy}: max error {max(errors):.1e}")
        assert max(errors) < TOLERANCE
        runs = [tuple(version for version, _, _ in one.version_runs) for one in responses]
        assert runs[:NUM_PLACES] == [tuple(models)] * NUM_PLACES
        assert self.served.run(self.preemptions()) == 0

    async def preemptions(self) -> int:
        """As they are once the engine has counted all that was."""
        backend = self.served.backend
        count = backend.load().generated_tokens
        await self.served.generate()
        async with asyncio.timeout(self.timeout_s):
            while backend._gauges.generated < count:  # noqa: ASYNC110 - nobody announces it
                await asyncio.sleep(0.05)
        return backend.load().preemptions

    def test_a_prefix_of_old_weights_is_not_used(self) -> None:
        async def work() -> tuple[int, int]:
            prompt = tuple(2 + i % 50 for i in range(2 * BLOCK + 3))
            await self.served.generate(4, prompt)
            before = (await self.served.generate(4, prompt)).cached_tokens
            await self.swap_in(1.1)
            return before, (await self.served.generate(4, prompt)).cached_tokens

        assert self.served.run(work()) == (2 * BLOCK, 0)

    def test_the_death_of_the_engine_is_noticed_and_told(self) -> None:
        """The last one: nothing serves after it."""

        async def work() -> None:
            backend, running = self.served.backend, self.served.start_long()
            await running.until()
            core = next(
                child
                for child in psutil.Process(backend._engine.process.pid).children(recursive=True)
                if "EngineCore" in " ".join(child.cmdline())
            )
            core.kill()
            with pytest.raises(BackendError):
                await running.task
            while backend.failure is None:  # noqa: ASYNC110 - a word, no event
                await asyncio.sleep(0.01)
            with pytest.raises(BackendError):
                await self.served.generate()

        self.served.run(work())


@cache
def scaled_model(folder: Path, factor: float) -> torch.nn.Module:
    """Weights of `other_weights(folder, factor)`."""
    model = load_reference(folder)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(factor)
    return model


async def test_the_bundled_file_trains_on_it_with_other_flags_alone(tmp_path: Path):
    args = {**ARGS, "--gpu-memory-utilization": None}
    await check_bundled_run(tmp_path, "run_vllm.yaml", {"python": PYTHON, "args": args, "env": ENV})
