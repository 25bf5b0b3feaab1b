"""The suite that every generation backend passes, for pytest: ours, and those of other packages.

    from inference_server.testing import GenerationBackendContract

    class TestMyEngine(GenerationBackendContract):
        def make_backend(self, model, version):
            return MyEngine(MyEngine.Args(), model, version, None)

The backend is started once per class. Requests of up to 2,000 tokens have to be met while they run: a
backend that is done with them within milliseconds needs a delay per token. What only some backends have
(scores of a prompt, stop strings) is not compared with anything; it must be there, or be refused.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

import pytest

from headway.contracts.config.model import ModelConfig
from headway.contracts.config.sampling import SamplingConfig
from headway.contracts.config.server import UpdatePolicy
from headway.contracts.errors import BackendError, DataError, RequestTooLong, SyncError
from headway.contracts.types import LLMDelta, LLMRequest, LLMResponse
from inference_server.backends.base import GenerationBackend
from inference_server.testing_backend import PROMPT, Running, Served
from weight_sync.testing import save_tiny_model

FIRST_VERSION = 3


class GenerationBackendContract:
    """Subclass it under a name that begins with `Test`, and define `make_backend`."""

    timeout_s: ClassVar[float] = 60.0
    """Seconds that a part of a test may take; more for engines that are slow to answer."""
    start_timeout_s: ClassVar[float] = 600.0
    """Seconds that the backend may take to start."""
    policies: ClassVar[tuple[UpdatePolicy, ...]] = ("keep", "recompute", "abort", "drain")
    """Update policies that the backend follows on sequences that are running."""
    served: ClassVar[Served]
    _stack: ClassVar[ExitStack]

    def make_backend(self, model: ModelConfig, version: int) -> GenerationBackend:
        """Return a backend that was not started.

        Args:
            model: the directory of `model_path`, float32.
            version: of the weights in it.
        """
        raise NotImplementedError("a subclass of GenerationBackendContract defines make_backend")

    def save_model(self, folder: Path) -> None:
        """Write the model to test with; override it for another, with a context of 64 tokens or more."""
        save_tiny_model(folder)

    @asynccontextmanager
    async def serving(self, model_path: Path) -> AsyncIterator[GenerationBackend]:
        """Start a backend, and close it; override it to start what the backend needs beside it."""
        model = ModelConfig(path=str(model_path), dtype="float32")
        backend = self.make_backend(model, FIRST_VERSION)
        await backend.start()
        try:
            yield backend
        finally:
            await backend.aclose()

    @classmethod
    def setup_class(cls) -> None:
        """Start the backend that the tests of a class share; each leaves it idle and not paused."""
        suite, cls._stack = cls(), ExitStack()
        folder = Path(cls._stack.enter_context(TemporaryDirectory()))
        model_path, weights = folder / "model", folder / "weights"
        suite.save_model(model_path)
        runner = cls._stack.enter_context(asyncio.Runner())
        started = suite.serving(model_path)
        backend = runner.run(asyncio.wait_for(started.__aenter__(), cls.start_timeout_s))
        cls._stack.callback(lambda: runner.run(started.__aexit__(None, None, None)))
        cls.served = Served(backend, runner, model_path, weights, cls.timeout_s)

    @classmethod
    def teardown_class(cls) -> None:
        """Close it."""
        cls._stack.close()

    def test_a_started_backend_tells_its_limits_and_its_load(self) -> None:
        backend = self.served.backend
        assert backend.limits.vocab_size > max(PROMPT)
        assert backend.limits.max_context >= 64, "the suite needs a context of 64 tokens"
        assert backend.version >= 0 and backend.num_ranks >= 1
        assert (backend.is_paused, backend.failure) == (False, None)
        load = backend.load()
        assert (load.running, load.queued) == (0, 0) and load.uptime_s >= 0.0

    def test_every_token_has_a_logprob_and_the_version_that_sampled_it(self) -> None:
        request = self.served.request(max_new_tokens=20)
        before = self.served.backend.load().generated_tokens
        response = self.served.run(self.served.backend.generate(request))
        assert (response.rid, response.stop_reason) == (request.rid, "length")
        assert len(response.output_tokens) == len(response.output_logprobs) == 20
        assert all(0 <= t < self.served.backend.limits.vocab_size for t in response.output_tokens)
        assert all(math.isfinite(p) and p <= 0.0 for p in response.output_logprobs)
        assert response.output_versions == [self.served.backend.version] * 20
        assert 0.0 <= response.ttft_s <= response.latency_s
        assert self.served.backend.load().generated_tokens >= before + 20

    def test_greedy_requests_are_answered_alike(self) -> None:
        one = self.served.run(self.served.generate(temperature=0.0))
        assert (
            self.served.run(self.served.generate(temperature=0.0)).output_tokens
            == one.output_tokens
        )

    def test_deltas_add_up_to_the_response(self) -> None:
        deltas: list[LLMDelta] = []
        response = self.served.run(
            self.served.backend.generate(self.served.request(), deltas.append)
        )
        assert [t for delta in deltas for t in delta.output_tokens] == response.output_tokens
        assert [p for delta in deltas for p in delta.output_logprobs] == response.output_logprobs
        versions = [delta.version for delta in deltas for _ in delta.output_tokens]
        assert versions == response.output_versions

    def test_requests_at_once_are_answered_each_for_itself(self) -> None:
        requests = [self.served.request(8 + i, (*PROMPT, i + 2)) for i in range(6)]

        async def all_of_them() -> list[LLMResponse]:
            return await asyncio.gather(*map(self.served.backend.generate, requests))

        responses = self.served.run(all_of_them())
        assert [response.rid for response in responses] == [request.rid for request in requests]
        assert [len(response.output_tokens) for response in responses] == list(range(8, 14))

    def test_a_stop_token_ends_a_sequence_and_is_its_last_token(self) -> None:
        free = self.served.run(self.served.generate(temperature=0.0)).output_tokens
        stop = free[5]
        response = self.served.run(self.served.generate(temperature=0.0, stop_token_ids=(stop,)))
        assert response.output_tokens == free[: free.index(stop) + 1]
        assert response.stop_reason == "stop"

    def test_what_no_request_may_ask_is_refused(self) -> None:
        limits = self.served.backend.limits
        with pytest.raises(RequestTooLong):
            self.served.run(self.served.generate(limits.max_context))
        with pytest.raises(DataError):
            self.served.run(self.served.generate(prompt=(limits.vocab_size,)))
        assert len(self.served.run(self.served.generate()).output_tokens) == 12

    @pytest.mark.parametrize(
        "fields",
        [{"logprob_start": 0}, {"top_logprobs": 2}, {"stop": ("x",)}, {"min_p": 0.1}],
        ids=lambda fields: next(iter(fields)),
    )
    def test_a_field_is_honoured_or_refused(
        self, fields: dict[str, Any], record_property: Callable[[str, object], None]
    ) -> None:
        try:
            response = self.served.run(self.served.generate(**fields))
        except DataError:
            record_property("remark", "refused by name")
            return
        assert len(response.output_tokens) == len(response.output_logprobs)
        if "logprob_start" in fields:
            assert response.prompt_logprobs is not None
            assert len(response.prompt_logprobs) == len(PROMPT)
            assert response.prompt_logprobs[0] is None
        if "top_logprobs" in fields:
            assert response.top_logprobs is not None
            assert [len(tops) for tops in response.top_logprobs] == [2] * len(
                response.output_tokens
            )

    def test_abort_ends_one_request_or_all_with_the_tokens_so_far(self) -> None:
        async def work() -> tuple[LLMResponse, LLMResponse]:
            one, other = self.served.start_long(), self.served.start_long()
            await one.until()
            await other.until()
            await self.served.backend.abort("nobody")
            await self.served.backend.abort(one.rid)
            first = await one.task
            assert not other.task.done()
            await self.served.backend.abort(None)
            return first, await other.task

        for response in self.served.run(work()):
            assert response.stop_reason == "interrupt"
            assert 0 < len(response.output_tokens) == len(response.output_logprobs)

    def test_cancelling_a_call_frees_what_it_holds(self) -> None:
        async def work() -> None:
            running = self.served.start_long()
            await running.until()
            running.task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running.task
            await self.served.until_idle()

        self.served.run(work())
        assert len(self.served.run(self.served.generate()).output_tokens) == 12

    def test_a_pause_samples_nothing_and_new_requests_wait(self) -> None:
        async def work() -> tuple[LLMResponse, LLMResponse]:
            backend, running = self.served.backend, self.served.start_long()
            await running.until()
            await backend.pause("in_place")
            assert backend.is_paused
            waiting = asyncio.create_task(self.served.generate())
            await asyncio.wait((waiting, running.task), timeout=0.1)  # what is on its way arrives
            sampled = len(running.deltas)
            ended, _ = await asyncio.wait((waiting, running.task), timeout=0.1)
            assert not ended and len(running.deltas) == sampled
            await backend.resume()
            assert not backend.is_paused
            answered = await waiting
            await backend.abort(running.rid)
            return answered, await running.task

        answered, ended = self.served.run(work())
        assert (answered.stop_reason, ended.stop_reason) == ("length", "interrupt")
        assert ended.num_recomputes == 0

    def test_a_pause_may_end_what_runs(self) -> None:
        async def work() -> LLMResponse:
            running = self.served.start_long()
            await running.until()
            await self.served.backend.pause("abort")
            response = await running.task
            await self.served.backend.resume()
            return response

        assert self.served.run(work()).stop_reason == "interrupt"

    def test_flush_drops_prefixes_only_when_nothing_runs(self) -> None:
        async def work() -> tuple[bool, bool]:
            running = self.served.start_long()
            await running.until()
            busy = await self.served.backend.flush()
            await self.served.backend.abort(None)
            await running.task
            await self.served.until_idle()
            return busy, await self.served.backend.flush()

        assert self.served.run(work()) == (False, True)

    @pytest.mark.parametrize("policy", ["keep", "recompute", "abort", "drain"])
    def test_a_version_serves_once_it_is_swapped_in(self, policy: UpdatePolicy) -> None:
        async def work() -> LLMResponse:
            old, meta = self.served.backend.version, self.served.publish()
            staged = await self.served.stage(meta)
            assert (staged.version, self.served.backend.version) == (meta.version, old)
            assert (await self.served.generate()).output_versions == [old] * 12
            assert await self.served.backend.swap(staged, policy) == 0
            assert self.served.backend.version == meta.version
            return await self.served.generate()

        assert self.served.run(work()).output_versions == [self.served.backend.version] * 12

    @pytest.mark.parametrize("policy", ["keep", "recompute", "abort"])
    def test_a_swap_does_to_running_sequences_what_its_policy_says(
        self, policy: UpdatePolicy
    ) -> None:
        if policy not in self.policies:
            pytest.skip(f"this backend does not follow {policy}")

        async def work() -> tuple[int, LLMResponse]:
            old, staged = (
                self.served.backend.version,
                await self.served.stage(self.served.publish()),
            )
            running = self.served.start_long()
            await running.until()
            assert await self.served.backend.swap(staged, policy) == 1
            if policy != "abort":
                await running.until(lambda delta: delta.version == staged.version)
                await self.served.backend.abort(running.rid)
            return old, await running.task

        old, response = self.served.run(work())
        assert response.stop_reason == "interrupt"
        new = () if policy == "abort" else (self.served.backend.version,)
        assert tuple(version for version, _, _ in response.version_runs) == (old, *new)
        assert (response.num_recomputes > 0) == (policy == "recompute")

    def test_a_swap_that_drains_lets_sequences_end_first(self) -> None:
        if "drain" not in self.policies:
            pytest.skip("this backend does not follow drain")

        async def work() -> tuple[int, LLMResponse]:
            old, staged = (
                self.served.backend.version,
                await self.served.stage(self.served.publish()),
            )
            running = Running(self.served.backend, self.served.request(60))
            await running.until()
            await self.served.backend.swap(staged, "drain")
            return old, await running.task

        old, response = self.served.run(work())
        assert (response.stop_reason, set(response.output_versions)) == ("length", {old})
        assert self.served.backend.version > old

    def test_a_damaged_version_is_refused_and_the_old_one_goes_on(self) -> None:
        old, meta = self.served.backend.version, self.served.publish()
        shard = next(Path(meta.path).glob("*.safetensors"))
        content = bytearray(shard.read_bytes())
        content[-5] ^= 1
        shard.write_bytes(content)
        with pytest.raises(SyncError):
            self.served.run(self.served.stage(meta))
        assert self.served.run(self.served.generate()).output_versions == [old] * 12

    def test_close_fails_what_runs(self) -> None:
        async def work() -> float:
            async with self.serving(self.served.model_path) as backend:
                size = min(backend.limits.max_context - len(PROMPT), 2000)
                gconfig = SamplingConfig(ignore_eos=True, max_new_tokens=size)
                running = Running(backend, LLMRequest(rid="r", input_ids=PROMPT, gconfig=gconfig))
                await running.until()
                began = time.monotonic()
                await backend.aclose()
                with pytest.raises(BackendError):
                    await running.task
            return time.monotonic() - began

        assert asyncio.run(asyncio.wait_for(work(), 2 * self.timeout_s)) < self.timeout_s
