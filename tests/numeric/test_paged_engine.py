"""The whole engine on blocks and graphs, as on a GPU, against full float64 forwards of Hugging Face."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
import torch

from headway.contracts.config.model import ModelConfig
from headway.contracts.config.server import EmbeddedTorchConfig
from headway.contracts.errors import BackendError
from inference_server.backends.embedded import sampler
from inference_server.backends.embedded.backend import EmbeddedTorchBackend
from inference_server.backends.embedded.paged_cache import BLOCK_SIZE
from tests.numeric.backends import (
    DEADLINE_S,
    Call,
    errors,
    generate_all,
    prompt_of,
    request,
    stage,
    stage_value,
)
from tests.numeric.models import VOCAB_SIZE, load_reference, reference_logits, save_model
from tests.numeric.paged import PagedCpu

CONTEXT = 700
BLOCK_BYTES = BLOCK_SIZE * 2 * 2 * 2 * 8 * 4
"""Of the models with two layers, two key heads of 8 numbers, float32."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    kinds = ("llama", "sliding")
    made = {
        kind: save_model(tmp_path_factory.mktemp(kind), kind, context=CONTEXT) for kind in kinds
    }
    made["other"] = save_model(tmp_path_factory.mktemp("other"), "llama", seed=1, context=CONTEXT)
    return made


class Serving:
    """A started engine on blocks."""

    def __init__(self, folder, dtype="float32", **config) -> None:
        options = {"max_sequences": 6, "kv_cache_bytes": 40 * BLOCK_BYTES} | config
        self.device = PagedCpu()
        self.backend = EmbeddedTorchBackend(
            EmbeddedTorchConfig(**options),
            ModelConfig(path=str(folder), dtype=dtype),
            0,
            device=self.device,
        )

    async def __aenter__(self):
        await self.backend.start()
        return self

    async def __aexit__(self, *_):
        await self.backend.aclose()


def crowd(**gconfig):
    lengths = [1, 255, 7, 256, 31, 300, 513, 64, 2]
    return [
        request(f"r{i}", prompt_of(n, i), **({"seed": i, "max_new_tokens": 3 + 4 * i} | gconfig))
        for i, n in enumerate(lengths)
    ]


@torch.no_grad()
def check(folder, requests, responses, atol=1e-4):
    """Logprobs of outputs and prompts."""
    model = load_reference(folder).double()
    for asked, got in zip(requests, responses, strict=True):
        ids = [*asked.input_ids, *got.output_tokens]
        table = torch.log_softmax(reference_logits(model, ids), dim=-1)
        behind = len(asked.input_ids)
        expected = [table[behind + i - 1, token] for i, token in enumerate(got.output_tokens)]
        assert errors(got.output_logprobs, torch.stack(expected)).max() < atol
        for position in range(max(1, asked.logprob_start or behind), behind):
            score = got.prompt_logprobs[position - asked.logprob_start]
            assert abs(score - table[position - 1, ids[position]].item()) < atol


@pytest.mark.parametrize("kind", ["llama", "sliding"])
async def test_a_crowd_equals_full_forwards(folders, kind):
    requests = crowd()
    async with Serving(folders[kind]) as engine:
        responses = await generate_all(engine.backend, requests)
    check(folders[kind], requests, responses)
    assert engine.device.num_graphs <= 4  # batches of 1, 2, 4, and of up to 8
    assert engine.device.num_replays > 20


async def test_the_same_tokens_as_on_slabs_with_any_chunks_and_without_graphs(folders):
    requests = crowd(top_p=0.9)
    outputs = []
    for options in ({}, {"max_prefill_tokens": 90}, {"cuda_graphs": False}):
        async with Serving(folders["llama"], **options) as engine:
            responses = await generate_all(engine.backend, requests)
        outputs.append([r.output_tokens for r in responses])
    assert engine.device.num_graphs == 0
    config = EmbeddedTorchConfig(max_sequences=3, kv_cache_bytes=1 << 24)
    slabs = EmbeddedTorchBackend(config, ModelConfig(path=str(folders["llama"])), 0)
    await slabs.start()
    outputs.append([r.output_tokens for r in await generate_all(slabs, requests)])
    await slabs.aclose()
    assert all(output == outputs[0] for output in outputs)


@pytest.mark.parametrize("max_prefill_tokens", [2048, 37])
async def test_scores_and_alternatives(folders, max_prefill_tokens):
    requests = [
        request(
            f"r{n}-{start}",
            prompt_of(n, n),
            logprob_start=start,
            top_logprobs=top,
            max_new_tokens=3,
            seed=0,
        )
        for n, start, top in ((5, 0, 3), (300, 0, 0), (300, 200, 5), (20, 20, 2))
    ]
    async with Serving(folders["llama"], max_prefill_tokens=max_prefill_tokens) as engine:
        responses = await generate_all(engine.backend, requests)
    check(folders["llama"], requests, responses)
    model = load_reference(folders["llama"]).double()
    for asked, got in zip(requests, responses, strict=True):
        tops = [*(got.prompt_top_logprobs or []), *(got.top_logprobs or [])]
        ids = [*asked.input_ids, *got.output_tokens]
        with torch.no_grad():
            table = torch.log_softmax(reference_logits(model, ids), dim=-1)
        for position, top in zip(range(asked.logprob_start, len(ids)), tops, strict=False):
            if top is None:
                continue
            values, tokens = table[position - 1].topk(min(asked.top_logprobs, VOCAB_SIZE))
            assert [token for token, _ in top] == tokens.tolist()
            assert errors([x for _, x in top], values).max() < 1e-4
        assert len(tops) == (len(ids) - asked.logprob_start if asked.top_logprobs else 0)


async def test_sequences_that_lose_their_blocks_go_on_from_their_tokens(folders):
    requests = [
        request(f"r{i}", prompt_of(240 + i, i), seed=i, max_new_tokens=40) for i in range(4)
    ]
    outputs = []
    for blocks in (40, 6):
        async with Serving(folders["llama"], kv_cache_bytes=blocks * BLOCK_BYTES) as engine:
            responses = await generate_all(engine.backend, requests)
            preemptions = engine.backend.load().preemptions
            assert engine.backend.load().kv_usage == 0.0
        outputs.append([r.output_tokens for r in responses])
    assert preemptions > 0
    assert outputs[0] == outputs[1]
    check(folders["llama"], requests, responses)


@pytest.mark.parametrize("policy", ["keep", "recompute"])
async def test_graphs_replay_with_the_weights_of_the_swap(folders, policy):
    """Copied into place: a graph goes on reading where it was recorded."""
    async with Serving(folders["llama"]) as engine:
        backend = engine.backend
        call = Call(backend, request("r", prompt_of(9, 1), max_new_tokens=200, seed=0))
        await call.heard.until(20)
        graphs = engine.device.num_graphs
        staged = stage(1, folders["other"])
        kept = {name: tensor.clone() for name, tensor in staged.tensors.items()}
        memory = [p.data_ptr() for p in backend.model.module.parameters()]
        await backend.swap(staged, policy)
        asked = request("new", prompt_of(300, 2), max_new_tokens=30, seed=1)
        fresh = (await generate_all(backend, [asked]))[0]
        response = await call.response()
        assert [p.data_ptr() for p in backend.model.module.parameters()] == memory
    assert engine.device.num_graphs <= graphs + 1  # a batch of two
    assert all(torch.equal(tensor, kept[name]) for name, tensor in staged.tensors.items())
    assert [version for version, _, _ in response.version_runs] == [0, 1]
    check(folders["other"], [asked], [fresh])


async def test_prompts_that_begin_alike_share_full_blocks_and_copy_the_rest(folders):
    stem = prompt_of(600, 0)
    requests = [
        request(f"r{i}", [*stem, *prompt_of(1 + i, i)], max_new_tokens=30, seed=i) for i in range(5)
    ]
    async with Serving(folders["llama"]) as engine:
        responses = await generate_all(engine.backend, requests)
        assert [r.cached_tokens for r in responses] == [0, 600, 600, 600, 600]
        users = engine.backend._decode_loop.cache._num_users
        assert max(users.values()) == 5  # kept rows
        assert len(users) == 2 + 5
    check(folders["llama"], requests, responses)


async def test_weights_that_are_not_finite_leave_nothing_behind(folders):
    async with Serving(folders["llama"]) as engine:
        backend = engine.backend
        await backend.swap(stage_value(1, folders["llama"], float("nan")))
        outcomes = await asyncio.wait_for(
            asyncio.gather(*map(backend.generate, crowd()), return_exceptions=True), DEADLINE_S
        )
        assert {type(outcome) for outcome in outcomes} == {BackendError}
        await backend.swap(stage(2, folders["llama"]))
        requests = crowd()
        check(folders["llama"], requests, await generate_all(backend, requests))


async def test_bfloat16_weights_hold_bfloat16_keys_and_give_float32_logprobs(folders):
    requests = crowd(logprob_start=0)
    async with Serving(folders["llama"], dtype="bfloat16") as engine:
        assert engine.backend._decode_loop.cache.store.dtype == torch.bfloat16
        responses = await generate_all(engine.backend, requests)
    check(folders["llama"], requests, responses, atol=1.0)
    distances = [x for r in responses for x in r.output_logprobs]
    assert torch.tensor(distances, dtype=torch.float64).bfloat16().double().tolist() != distances


async def test_an_engine_without_weights_wakes_with_other_memory_and_sleeps_without_any(folders):
    """As in a trainer's process: graphs and blocks are of one turn."""
    device = PagedCpu()
    backend = EmbeddedTorchBackend(
        EmbeddedTorchConfig(max_sequences=6, kv_cache_bytes=40 * BLOCK_BYTES),
        ModelConfig(path=str(folders["llama"])),
        0,
        without_weights=True,
        device=device,
    )
    await backend.start()
    assert backend._decode_loop.cache.allocated_tokens == 0
    graphs = 0
    for turn, name in enumerate(("llama", "other", "llama")):
        weights = dict(load_reference(folders[name]).named_parameters())
        await asyncio.to_thread(backend.take_weights, turn + 1, weights, None)
        requests = crowd()
        responses = await generate_all(backend, requests)
        check(folders[name], requests, responses)
        assert device.num_graphs > graphs
        graphs = device.num_graphs
        await asyncio.to_thread(backend.drop_weights)
        assert (
            backend._decode_loop.cache.allocated_tokens
            == backend._decode_loop.cache.used_tokens
            == 0
        )
        assert not backend.model.runner._graphs._recorded
    await backend.aclose()


async def test_an_engine_that_cannot_wake_holds_no_blocks(folders):
    backend = EmbeddedTorchBackend(
        EmbeddedTorchConfig(max_sequences=6, kv_cache_bytes=40 * BLOCK_BYTES),
        ModelConfig(path=str(folders["llama"])),
        0,
        without_weights=True,
        device=PagedCpu(),
    )
    await backend.start()
    weights = dict(load_reference(folders["llama"]).named_parameters())
    weights["model.norm.weight"] = torch.ones(3)
    with pytest.raises(BackendError, match="the model does not run on these weights"):
        await asyncio.to_thread(backend.take_weights, 1, weights, None)
    assert backend._decode_loop.cache.allocated_tokens == 0
    await backend.aclose()


class Unrecordable(PagedCpu):
    """A model that waits for the device in its forward."""

    def capture(self, work, beside=None):
        raise RuntimeError("operation not permitted when stream is capturing")


class Wrong(PagedCpu):
    """Graphs that miss a launch."""

    def capture(self, work, beside=None):
        graph = super().capture(work, beside)
        return replace(graph, replay=lambda: graph.output.add_(graph.output.abs().amax()))


@pytest.mark.parametrize(
    ("device", "reason"),
    [(Unrecordable(), "not permitted when stream"), (Wrong(), "a replay gave other logits")],
)
async def test_without_sound_graphs_steps_are_launched(folders, device, reason, caplog):
    requests = crowd()
    config = EmbeddedTorchConfig(max_sequences=6, kv_cache_bytes=40 * BLOCK_BYTES)
    backend = EmbeddedTorchBackend(
        config, ModelConfig(path=str(folders["llama"])), 0, device=device
    )
    await backend.start()
    responses = await generate_all(backend, requests)
    await backend.aclose()
    check(folders["llama"], requests, responses)
    warnings = [r.message for r in caplog.records if "without CUDA graphs" in r.message]
    assert len(warnings) == 1
    assert reason in warnings[0]


async def test_the_engine_draws_again_where_a_nucleus_is_wider_than_it_looked(folders, monkeypatch):
    """Found out with the tokens, not before: no step waits twice but these."""
    requests = crowd(top_p=0.95, frequency_penalty=0.3, max_new_tokens=20)
    outputs, fetches = [], []
    for likely in (VOCAB_SIZE, 3):
        monkeypatch.setattr(sampler, "LIKELY", likely)
        async with Serving(folders["llama"]) as engine:
            fetch = engine.device.fetch
            count = []
            monkeypatch.setattr(
                engine.device, "fetch", lambda t, c=count, f=fetch: c.append(1) or f(t)
            )
            responses = await generate_all(engine.backend, requests)
        outputs.append([(r.output_tokens, r.output_logprobs) for r in responses])
        fetches.append(len(count))
    assert fetches[1] > fetches[0]
    for (one, ones), (two, twos) in zip(*outputs, strict=True):
        assert one == two
        assert ones == pytest.approx(twos, abs=1e-5)


@pytest.mark.parametrize("wishes", [{}, {"frequency_penalty": 0.4, "min_new_tokens": 20}])
async def test_a_step_is_launched_before_the_tokens_of_the_last_one_are_read(folders, wishes):
    """And all is drawn as if it were not."""
    requests = [
        request(f"r{i}", prompt_of(20 + i, i), max_new_tokens=30 + i, seed=i, **wishes)
        for i in range(3)
    ]
    outputs = []
    for is_ahead in (True, False):
        events = []
        async with Serving(folders["llama"]) as engine:
            backend = engine.backend
            if not is_ahead:
                backend._decode_loop._launch_behind = lambda: None
            run, land = backend.model.runner.run, backend._decode_loop.decoder.land
            backend.model.runner.run = lambda *a, e=events, f=run: e.append("run") or f(*a)
            backend._decode_loop.decoder.land = lambda step, e=events, f=land: (
                e.append("land") or f(step)
            )
            responses = await generate_all(backend, requests)
        outputs.append([r.output_tokens for r in responses])
        alternating = "".join(event[0] for event in events)
        assert ("rrlrlrl" in alternating) == is_ahead
        assert alternating.count("r") == alternating.count("l")
    assert outputs[0] == outputs[1]
    if not wishes:
        check(folders["llama"], requests, responses)


async def test_a_sequence_that_ended_in_the_step_before_takes_nothing_of_the_one_behind(folders):
    """Which was launched when nobody knew."""
    asked = [
        request(f"r{i}", prompt_of(5 + i, i), max_new_tokens=60, seed=i, stop_token_ids=(3, 4))
        for i in range(12)
    ]
    async with Serving(folders["llama"], max_sequences=12) as engine:
        responses = await generate_all(engine.backend, asked)
        assert engine.backend.load().generated_tokens == sum(
            len(r.output_tokens) for r in responses
        )
    assert len([r for r in responses if r.stop_reason == "stop"]) > 4
    assert all(len(r.output_tokens) == 60 for r in responses if r.stop_reason == "length")
    assert all({3, 4}.isdisjoint(r.output_tokens[:-1]) for r in responses)
    check(folders["llama"], asked, responses)


async def test_no_order_comes_between_a_step_and_its_tokens(folders):
    """A pause that was answered is one, though steps are launched ahead."""
    async with Serving(folders["llama"]) as engine:
        backend = engine.backend
        call = Call(backend, request("r", prompt_of(9, 1), max_new_tokens=400, seed=0))
        for count in range(5, 50, 5):
            await call.heard.until(count)
            assert (
                await asyncio.wrap_future(
                    backend._decode_loop.call(lambda: backend._decode_loop._in_flight)
                )
                is None
            )
        await backend.pause("in_place")
        before = backend.load().generated_tokens
        await backend.abort("nobody")
        assert backend.load().generated_tokens == before
        await backend.resume()
        response = await call.response()
    assert len(response.output_tokens) == 400
    check(folders["llama"], [call.asked], [response])
