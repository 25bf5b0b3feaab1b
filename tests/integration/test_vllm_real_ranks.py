"""A real vLLM whose model is divided over two ranks, on the CPU: `make test-vllm`.

One engine serves the file. Half of every layer is on each rank, so logprobs are right only if a version
has reached both.
"""

from __future__ import annotations

import asyncio
import time

import psutil
import pytest
import pytest_asyncio

from headway.contracts.config.model import ModelConfig
from headway.contracts.config.server import VLLMConfig
from headway.contracts.errors import BackendError
from inference_server.backends.vllm.backend import VLLMBackend
from inference_server.testing import Running
from tests.integration import test_sglang_real, test_vllm_real
from tests.integration.real_engines import check_logprobs, error_of, needs, show
from tests.integration.test_sglang_real import Policies, assert_serves, gate_of, request
from tests.numeric.models import save_wide_llama

pytestmark = [*needs("vllm"), pytest.mark.asyncio(loop_scope="module")]
DEADLINE_S = 180.0
TOLERANCE = 1e-4
NUM_RANKS = 2
ARGS = {**test_vllm_real.ARGS, "--tensor-parallel-size": NUM_RANKS}
NUM_REQUESTS = test_vllm_real.NUM_PLACES + 4
FOREVER = 2000
"""Tokens of a request that is met in the middle."""


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory):
    policies = Policies(tmp_path_factory.mktemp("vllm"), save_wide_llama)
    yield policies
    policies.publisher.close()


trainer = test_sglang_real.trainer


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def backend(policies, tmp_path_factory: pytest.TempPathFactory):
    config = VLLMConfig(
        python=str(test_vllm_real.PYTHON),
        args=ARGS,
        env=test_vllm_real.ENV,
        log_file=str(tmp_path_factory.mktemp("log") / "vllm.log"),
        health_timeout_s=15,
    )
    engine = VLLMBackend(config, ModelConfig(path=str(policies.folders[0]), dtype="float32"), 0)
    started = time.monotonic()
    await engine.start()
    show(f"vLLM answers on {NUM_RANKS} ranks after {time.monotonic() - started:.0f} s")
    yield engine
    await engine.aclose()


class Crowd:
    """More requests than fit, in flight until all that fit have tokens of the next version."""

    def __init__(self, backend: VLLMBackend) -> None:
        self._backend = backend
        self.asked = [request(i, FOREVER) for i in range(NUM_REQUESTS)]
        self._first: list[Running] = []
        self._waiting: list[asyncio.Task] = []

    async def is_under_way(self) -> None:
        num_places = test_vllm_real.NUM_PLACES
        self._first = [Running(self._backend, one) for one in self.asked[:num_places]]
        for one in self._first:
            await one.until()
        self._waiting = [
            asyncio.create_task(self._backend.generate(one)) for one in self.asked[num_places:]
        ]
        await asyncio.sleep(0)

    async def assert_truthful(self, expect, old: int, new: int) -> None:
        """Each token as probable as under the version that is said to have sampled it."""
        for one in self._first:
            await one.until(lambda delta: delta.version == new)
        await self._backend.abort(None)
        responses = await asyncio.gather(*(one.task for one in self._first), *self._waiting)
        errors = [error_of(r, expect(one, r)) for one, r in zip(self.asked, responses, strict=True)]
        show(f"  {len(responses)} requests, versions {old} and {new}, max error {max(errors):.1e}")
        assert max(errors) < TOLERANCE
        for response in responses[: len(self._first)]:
            assert [version for version, _, _ in response.version_runs] == [old, new]


async def test_logprobs_are_those_of_transformers(backend, policies):
    asked = [request(i, 60, temperature=(1.0, 0.0, 0.7)[i % 3]) for i in range(NUM_REQUESTS)]
    await check_logprobs(backend, policies.model(backend.version), asked, TOLERANCE)


@pytest.mark.parametrize("policy", ["keep", "recompute"])
async def test_a_version_in_files_reaches_both_ranks_in_flight(backend, policies, policy):
    old, meta = backend.version, policies.publish()
    staged = await asyncio.to_thread(backend.stage, meta, policies.reader())
    crowd = Crowd(backend)
    await crowd.is_under_way()
    assert await backend.swap(staged, policy) == NUM_REQUESTS
    expect = policies.recomputed if policy == "recompute" else policies.replayed
    await crowd.assert_truthful(expect, old, meta.version)
    await assert_serves(backend, policies, meta.version)


async def test_a_broadcast_over_gloo_reaches_both_ranks_while_they_generate(
    backend, policies, trainer
):
    gate = gate_of(backend, policies)
    old, version = backend.version, backend.version + 1
    crowd = Crowd(backend)
    await crowd.is_under_way()
    await test_sglang_real.broadcast(backend, gate, trainer, version)
    await crowd.assert_truthful(policies.replayed, old, version)
    await assert_serves(backend, policies, version)
    gate.receiver.close()


async def test_the_death_of_one_rank_is_noticed_and_told(backend):
    """The last one: nothing serves after it."""
    running = Running(backend, request(16, FOREVER))
    await running.until()
    children = psutil.Process(backend._engine.process.pid).children(recursive=True)
    [rank] = [child for child in children if "Worker_TP1" in " ".join(child.cmdline())]
    started = time.monotonic()
    rank.kill()
    with pytest.raises(BackendError):
        await running.task
    async with asyncio.timeout(DEADLINE_S):
        while backend.failure is None:  # noqa: ASYNC110 - a word, no event
            await asyncio.sleep(0.01)
    show(f"death of a rank noticed after {time.monotonic() - started:.2f} s")
    # vLLM ends, or the process in front stays and answers nothing.
    with pytest.raises(BackendError, match=r"ended with status|is hung"):
        await backend.generate(request(17))
