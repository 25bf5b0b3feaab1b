"""Random requests, cancellations, aborts, swaps, pauses and deaths of a real engine with little memory.

An interleaving is drawn from a seed, which is the test's parameter; what the engine thread has come to
when each action reaches it is up to the machine. Whatever happens: every request ends exactly once,
its runs tell the truth about its tokens, and the cache holds what its bookkeeping says.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from transformers import DynamicCache

from headway.contracts.errors import BackendError
from headway.contracts.types import LLMResponse
from inference_server.backends.embedded import paged_cache
from inference_server.backends.embedded.paged_cache import PagedCache
from tests.numeric.backends import (
    DEADLINE_S,
    Call,
    errors,
    make_backend,
    prompt_of,
    request,
    stage,
    stage_value,
)
from tests.numeric.models import (
    CONTEXT,
    extend_cache,
    load_reference,
    reference_logprobs,
    save_model,
)
from tests.numeric.paged import PagedCpu
from tests.unit.inference_server import test_kv_cache, test_paged_cache
from tests.waiting import until

LONG_RUN = (
    "test_no_request_is_lost_and_no_row_leaks[blocks-21]",
    "test_no_request_is_lost_and_no_row_leaks[blocks-23]",
    "test_no_request_is_lost_and_no_row_leaks[blocks-25]",
    "test_no_request_is_lost_and_no_row_leaks[slabs-3]",
    "test_no_request_is_lost_and_no_row_leaks[slabs-4]",
)
POLICIES = ["keep", "recompute", "abort", "drain"]
MODES = ["in_place", "retract", "abort"]
ACTIONS = {
    "submit": 10,
    "breathe": 6,
    "cancel": 1,
    "abort": 1,
    "abort_all": 0.3,
    "swap": 2,
    "give_up_swap": 0.5,
    "pause": 1,
    "resume": 2,
    "flush": 0.5,
    "inspect": 2,
}
BLOCK_SIZE = 16
"""Small blocks, so that sequences come to need more of them."""
STEMS = [prompt_of(140, seed) for seed in range(3)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Even versions have the first's weights, odd ones the second's; every seventh is not finite."""
    root = tmp_path_factory.mktemp("policies")
    return [save_model(root / f"v{seed}", "llama", seed=seed) for seed in range(2)]


def cases(slabs: range, blocks: range) -> pytest.MarkDecorator:
    """Seeds, on the CPU's slabs, and on blocks with graphs as on a GPU."""
    pairs = [*(("slabs", seed) for seed in slabs), *(("blocks", seed) for seed in blocks)]
    return pytest.mark.parametrize(("device", "seed"), pairs, indirect=["device"])


@pytest.fixture
def device(request, monkeypatch):
    """None for slabs."""
    monkeypatch.setattr(paged_cache, "BLOCK_SIZE", BLOCK_SIZE)
    monkeypatch.setattr(test_paged_cache, "BLOCK_SIZE", BLOCK_SIZE)
    return PagedCpu() if request.param == "blocks" else None


@pytest.fixture(scope="module")
def models(folders):
    return [load_reference(folder) for folder in folders]


def is_finite(version: int) -> bool:
    return version % 7 != 6


class Play:
    """One interleaving: the backend, and everything that was asked of it."""

    def __init__(self, folders, seed: int, device: PagedCpu | None) -> None:
        self.rng = random.Random(seed)
        room = self.rng.choice([CONTEXT, CONTEXT + 200, 4 * CONTEXT])
        self.backend = make_backend(
            folders[0],
            max_sequences=self.rng.randint(1, 6),
            max_prefill_tokens=self.rng.choice([7, 40, 2048]),
            kv_cache_bytes=(room + (BLOCK_SIZE if device else 0)) * 256,
            device=device,
        )
        fit = self.backend.model.fit
        self._weights = [fit(stage(0, folder)) for folder in folders]
        self._bad = fit(stage_value(0, folders[0], float("nan")))
        self.calls: list[Call] = []
        self.born: dict[Call, int] = {}
        self.swaps: list[asyncio.Task[int]] = []
        self.newest = 0

    async def act(self) -> None:
        [action] = self.rng.choices(list(ACTIONS), ACTIONS.values())
        await getattr(self, action)()

    async def submit(self) -> None:
        rng = self.rng
        prompt = rng.choice(STEMS)[: rng.randint(1, 140)] + prompt_of(
            rng.randint(0, 20), rng.randint(0, 99)
        )
        asked = request(
            f"r{len(self.calls)}",
            prompt,
            seed=rng.randint(0, 9),
            max_new_tokens=rng.randint(0, CONTEXT - len(prompt)) // rng.choice([1, 4]),
            logprob_start=rng.choice([None, None, None, 0, len(prompt) // 2]),
            top_logprobs=rng.choice([0, 0, 2]),
        )
        call = Call(self.backend, asked)
        self.calls.append(call)
        self.born[call] = self.backend.version
        await asyncio.sleep(0)

    async def breathe(self) -> None:
        """Let the engine go on for a while, if it can."""
        load = self.backend.load()
        wanted = load.generated_tokens + self.rng.randint(1, 40)

        def has_gone_on() -> bool:
            now = self.backend.load()
            is_idle = now.running == now.queued == 0
            return now.generated_tokens >= wanted or is_idle or self.backend.is_paused

        await until(has_gone_on)

    async def cancel(self) -> None:
        if self.calls:
            self.rng.choice(self.calls).task.cancel()

    async def abort(self) -> None:
        if self.calls:
            await self.backend.abort(self.rng.choice(self.calls).asked.rid)

    async def abort_all(self) -> None:
        await self.backend.abort(None)

    async def swap(self) -> None:
        self.newest += 1
        weights = self._weights[self.newest % 2] if is_finite(self.newest) else self._bad
        policy = self.rng.choice(POLICIES)
        held = replace(weights.held, version=self.newest)
        call = self.backend.swap(replace(weights, held=held), policy)
        self.swaps.append(asyncio.create_task(call))
        await asyncio.sleep(0)

    async def give_up_swap(self) -> None:
        if self.swaps:
            self.swaps[-1].cancel()

    async def pause(self) -> None:
        await self.backend.pause(self.rng.choice(MODES))

    async def resume(self) -> None:
        await self.backend.resume()

    async def flush(self) -> None:
        was_dropped = await self.backend.flush()
        assert was_dropped or self.backend.load().uptime_s > 0

    async def inspect(self) -> None:
        """On the engine thread, between two steps."""
        await asyncio.wrap_future(self.backend._decode_loop.call(self._check_cache))

    def _check_cache(self) -> None:
        cache, scheduler = self.backend._decode_loop.cache, self.backend._decode_loop.scheduler
        if isinstance(cache, PagedCache):
            test_paged_cache.check_bookkeeping(cache)
        else:
            test_kv_cache.check_bookkeeping(cache)
            assert cache.used_tokens <= cache.allocated_tokens
        running = {row for row in cache if row.is_running}
        assert running == {s.row for s in scheduler.running}
        assert all(s.row.tokens is s.tokens for s in scheduler.running)
        assert all(s.row is None for s in scheduler.waiting)
        assert all(row.is_pure for row in cache if not row.is_running)
        assert len(scheduler.running) <= scheduler.max_sequences
        assert cache.allocated_tokens <= cache.budget_tokens

    async def outcomes(self) -> list[object]:
        """How every request ended; every one does."""
        tasks = [call.task for call in self.calls]
        gathered = asyncio.gather(*tasks, return_exceptions=True)
        return await asyncio.wait_for(gathered, DEADLINE_S)


def assert_told_once(call: Call, response: LLMResponse) -> None:
    """The response is what the deltas said, and its runs cover it."""
    assert response.rid == call.asked.rid
    assert call.heard.tokens == response.output_tokens
    logprobs = [x for delta in call.heard.deltas for x in delta.output_logprobs]
    assert logprobs == response.output_logprobs
    bounds = [0, *(end for _, _, end in response.version_runs)]
    assert [start for _, start, _ in response.version_runs] == bounds[:-1]
    assert bounds[-1] == len(response.output_tokens)
    assert all(a < b for a, b in pairwise(version for version, _, _ in response.version_runs))
    if response.stop_reason == "length":
        assert len(response.output_tokens) == call.asked.gconfig.max_new_tokens
    if call.asked.top_logprobs:
        assert len(response.top_logprobs) == len(response.output_tokens)


def assert_of_one_version(models, call: Call, response: LLMResponse, born: int) -> None:
    """No swap came between its arrival and its end: all of it is of the version it arrived under."""
    if [version for version, _, _ in response.version_runs] != [born]:
        return
    expected = reference_logprobs(models[born % 2], call.prompt, response.output_tokens)
    assert errors(response.output_logprobs, expected).max() < 1e-4


def assert_kept_rows_are_of(model, cache) -> None:
    """What the next prompt may copy is what the weights now in place would compute."""
    for row in cache:
        fresh = DynamicCache()
        with torch.no_grad():
            extend_cache(model, fresh, row.tokens[: row.length])
        for layer, states in enumerate(fresh.layers):
            for which, wanted in enumerate((states.keys, states.values)):
                error = (held_of(cache, row, which, layer) - wanted[0]).abs().max()
                assert error < 1e-3


def held_of(cache, row, which: int, layer: int) -> torch.Tensor:
    """Keys (0) or values (1) of a row [kv_heads, length, head_dim]."""
    if isinstance(cache, PagedCache):
        blocks = cache.store[which, layer, row.blocks].flatten(0, 1)
        return blocks[: row.length].transpose(0, 1)
    return row.slab.store[which, layer, row.index, :, : row.length]


@cases(range(16), range(20, 26))
async def test_no_request_is_lost_and_no_row_leaks(folders, models, seed, device):
    play = Play(folders, seed, device)
    backend = play.backend
    await backend.start()
    try:
        for _ in range(60):
            await play.act()
        await backend.resume()
        outcomes = await play.outcomes()
        await asyncio.wait_for(asyncio.gather(*play.swaps, return_exceptions=True), DEADLINE_S)
        assert backend.failure is None
        await play.inspect()
        load = backend.load()
        assert (load.running, load.queued, load.kv_tokens) == (0, 0, 0)
        assert not any(row.is_running for row in backend._decode_loop.cache)
        if is_finite(backend.version):
            assert_kept_rows_are_of(models[backend.version % 2], backend._decode_loop.cache)
        assert await backend.flush()
        assert backend._decode_loop.cache.used_tokens == 0
        for call, outcome in zip(play.calls, outcomes, strict=True):
            if isinstance(outcome, LLMResponse):
                assert_told_once(call, outcome)
                assert_of_one_version(models, call, outcome, play.born[call])
            elif isinstance(outcome, BackendError):
                assert f"request {call.asked.rid}: version " in outcome.message
                assert "not finite" in outcome.message
            else:
                assert isinstance(outcome, asyncio.CancelledError)
        applied = [v for v, task in enumerate(play.swaps, 1) if not task.cancelled()]
        assert backend.version >= max(applied, default=0)
    finally:
        await backend.aclose()


@cases(range(100, 108), range(108, 111))
async def test_an_engine_that_dies_ends_every_request_and_swap(folders, seed, device, caplog):
    play = Play(folders, seed, device)
    backend = play.backend
    await backend.start()
    try:
        for _ in range(play.rng.randint(5, 40)):
            await play.act()
        await play.submit()

        def die(*_):
            raise RuntimeError("the device is gone")

        backend.model.module.register_forward_pre_hook(die)
        await backend.resume()
        for _ in range(5):
            if backend.failure is None:
                await play.submit()
        outcomes = await play.outcomes()
        swaps = await asyncio.wait_for(
            asyncio.gather(*play.swaps, return_exceptions=True), DEADLINE_S
        )
        assert isinstance(outcomes[-1], BackendError)
        for call, outcome in zip(play.calls, outcomes, strict=True):
            if isinstance(outcome, LLMResponse):
                assert_told_once(call, outcome)
            elif isinstance(outcome, BackendError):
                assert "the device is gone" in outcome.message or "not finite" in outcome.message
            else:
                assert isinstance(outcome, asyncio.CancelledError)
        for outcome in swaps:
            assert isinstance(outcome, int | BackendError | asyncio.CancelledError)
        await until(lambda: backend.failure is not None)
        assert "the device is gone" in backend.failure
        with pytest.raises(BackendError, match="the device is gone"):
            await backend.generate(request("late", [3]))
        assert (backend.load().running, backend.load().queued) == (0, 0)
    finally:
        await backend.aclose()
    assert "the engine thread died" in caplog.text
