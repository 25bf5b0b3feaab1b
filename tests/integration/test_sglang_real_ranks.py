"""A real SGLang whose model is divided over two ranks, on the CPU: `make test-sglang`.

One engine serves the file. Half of every layer is on each rank, so logprobs are right only if a version
has reached both.
"""

from __future__ import annotations

import asyncio
import time

import psutil
import pytest
import pytest_asyncio

from headway.contracts.config.server import SGLangConfig
from headway.contracts.errors import BackendError
from headway.contracts.http.weights import GroupRankBody, WeightCommitRequest
from tests.integration import test_sglang_real as real
from tests.integration.real_engines import check_logprobs, needs, show
from tests.integration.test_sglang_real import Crowd, Progress, assert_serves, ready, request

pytestmark = [*needs("sglang"), pytest.mark.asyncio(loop_scope="module")]
TOLERANCE = 1e-4
NUM_RANKS = 2
ENV = {**real.ENV, "SGLANG_CPU_OMP_THREADS_BIND": "0|1"}  # a core for each
ARGS = {**real.ARGS, "--tp-size": NUM_RANKS}

policies, slowly, trainer = real.policies, real.slowly, real.trainer


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def backend(policies, tmp_path_factory: pytest.TempPathFactory):
    log = tmp_path_factory.mktemp("log") / "sglang.log"
    config = SGLangConfig(
        python=str(real.PYTHON), args=ARGS, env=ENV, log_file=str(log), receive="group"
    )
    async with real.serving(config, policies) as engine:
        yield engine


async def test_logprobs_are_those_of_transformers(backend, policies):
    asked = [request(i, 60, temperature=(1.0, 0.0, 0.7)[i % 3]) for i in range(12)]
    await check_logprobs(backend, policies.model(backend.version), asked, TOLERANCE)


@pytest.mark.usefixtures("slowly")
async def test_a_version_in_files_reaches_both_ranks_in_flight(backend, policies):
    meta = policies.publish()
    staged = await asyncio.to_thread(backend.stage, meta, policies.reader())
    crowd = Crowd(backend, 20)
    await crowd.is_under_way()
    assert await backend.swap(staged, "keep") == len(crowd.asked)
    responses = await crowd.assert_truthful(policies.replayed)
    assert sum(len(one.version_runs) == 2 for one in responses) == real.NUM_SLOTS
    await assert_serves(backend, policies, meta.version)


@pytest.mark.usefixtures("slowly")
@pytest.mark.parametrize("policy", ["keep", "recompute"])
async def test_a_version_flows_into_the_live_weights_of_both_ranks(
    backend, policies, trainer, policy
):
    assert backend.num_ranks == NUM_RANKS
    gate = real.gate_of(backend, policies)
    policies.newest = version = backend.version + 1
    crowd = Crowd(backend, 40)
    await crowd.is_under_way()
    ranks = GroupRankBody(rank=1, world_size=1 + backend.num_ranks)  # behind the trainer
    order = (await trainer.announce(version)).model_copy(update={"group_rank": ranks})
    trainer.tell(f"publish {version}")
    digest = await gate.prepare(order)
    assert await trainer.heard() == digest
    assert backend.version == version - 1
    commit = WeightCommitRequest(epoch=order.epoch, version=version, policy=policy)
    assert (await gate.commit(commit)).digest == digest
    expect = policies.recomputed if policy == "recompute" else policies.replayed
    responses = await crowd.assert_truthful(expect)
    assert sum(len(one.version_runs) == 2 for one in responses) == real.NUM_SLOTS
    await assert_serves(backend, policies, version)


@pytest.mark.usefixtures("slowly")
async def test_the_death_of_one_rank_is_noticed_and_told(backend):
    """The last one: nothing serves after it."""
    progress = Progress(5)
    running = asyncio.create_task(backend.generate(request(16, 240), progress))
    await ready(progress)
    children = psutil.Process(backend._engine.pid).children(recursive=True)
    [rank] = [child for child in children if "scheduler_TP1" in " ".join(child.cmdline())]
    started = time.monotonic()
    rank.kill()
    with pytest.raises(BackendError):
        await running
    async with asyncio.timeout(real.DEADLINE_S):
        while backend.failure is None:  # noqa: ASYNC110 - a word, no event
            await asyncio.sleep(0.01)
    show(f"death of a rank noticed after {time.monotonic() - started:.2f} s")
    assert "ended with status" in backend.failure
    with pytest.raises(BackendError, match="ended with status"):
        await backend.generate(request(17))
