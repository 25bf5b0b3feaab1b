"""The SGLang backend against a stand-in that speaks SGLang's contract over HTTP, token by token."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch
from aiohttp import web
from safetensors.torch import save_file

from headway.contracts.config.model import ModelConfig
from headway.contracts.config.sampling import SamplingConfig
from headway.contracts.config.server import SGLangConfig
from headway.contracts.config.weight_sync import ReceiverConfig
from headway.contracts.errors import BackendError, ConfigError, DataError, RequestTooLong, SyncError
from headway.contracts.types import LLMRequest, WeightUpdateMeta
from inference_server.backends.sglang import control
from inference_server.backends.sglang.backend import SGLangBackend
from inference_server.backends.sglang.features import sglang_command
from inference_server.backends.sglang.updates import FolderUpdate
from tests.unit.inference_server.sglang_stand_in import StandIn
from tests.waiting import until
from weight_sync.channel import StagedWeights, VerifiedVersion
from weight_sync.deadline import Deadline
from weight_sync.receiver import make_receiver
from weight_sync.transports.disk import make_local_publisher

DEADLINE_S = 20.0
SHAPES = {"model.embed.weight": (60, 4), "lm_head.weight": (60, 4)}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps({"vocab_size": 60}))
    save_file(
        {name: torch.zeros(shape) for name, shape in SHAPES.items()}, folder / "a.safetensors"
    )
    return folder


def request(rid: str, count: int = 6, prompt=(3, 4, 5), **extra) -> LLMRequest:
    fields = {name: extra.pop(name) for name in ("logprob_start", "top_logprobs") if name in extra}
    options = {"ignore_eos": True, "max_new_tokens": count} | extra
    return LLMRequest(rid=rid, input_ids=prompt, gconfig=SamplingConfig(**options), **fields)


@asynccontextmanager
async def attached(model_dir: Path, engine: StandIn, **config):
    """A backend on a stand-in, both closed at the end."""
    async with engine.serving():
        backend = SGLangBackend(
            SGLangConfig(url=engine.url, **config), ModelConfig(path=str(model_dir)), version=4
        )
        async with asyncio.timeout(DEADLINE_S):
            await backend.start()
            engine.calls.clear()
            try:
                yield backend
            finally:
                await backend.aclose()


async def begin(backend: SGLangBackend, engine: StandIn, *requests: LLMRequest, on_delta=None):
    """Start calls, each of them in the engine."""
    running = len(engine.running)
    tasks = []
    for req in requests:
        tasks.append(asyncio.create_task(backend.generate(req, on_delta)))
        running += 1
        await engine.until_running(running)
    return tasks


# Starting.


async def test_a_fresh_engine_takes_our_version_and_tells_its_limits(model_dir):
    engine = StandIn()
    async with attached(model_dir, engine) as backend:
        assert engine.label == "4"
        assert backend.version == 4
        assert (backend.limits.vocab_size, backend.limits.max_context) == (60, 250)


async def test_an_engine_that_serves_a_version_keeps_it(model_dir):
    async with attached(model_dir, StandIn(label="9")) as backend:
        assert backend.version == 9


async def test_an_engine_left_in_a_pause_goes_on(model_dir):
    engine = StandIn()
    engine.paused = "in_place"
    async with attached(model_dir, engine):
        assert engine.paused is None


async def test_weights_of_an_unknown_name_are_refused(model_dir):
    with pytest.raises(BackendError, match="'step-8', which is no version"):
        async with attached(model_dir, StandIn(label="step-8")):
            pass


async def test_streams_of_parts_are_refused(model_dir):
    engine = StandIn()
    engine.info["incremental_streaming_output"] = True
    with pytest.raises(ConfigError, match="incremental-streaming-output"):
        async with attached(model_dir, engine):
            pass


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"init_from_scratch": True}, "random weights"), ({"attn_implementation": "eager"}, "kernel")],
)
def test_model_settings_that_sglang_has_not_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        SGLangBackend(SGLangConfig(), ModelConfig(path="x", **settings), 0)


@pytest.mark.parametrize("flag", ["--model-path", "--model", "--dtype", "--weight-version"])
async def test_flags_that_we_set_are_refused(model_dir, flag):
    config = SGLangConfig(args={flag: "x"})
    backend = SGLangBackend(config, ModelConfig(path=str(model_dir)), 0)
    with pytest.raises(ConfigError, match=f"sets {flag}; set"):
        await backend.start()


@pytest.mark.parametrize(("args", "sleeps"), [({"--device": "cpu"}, True), ({}, None)])
def test_an_idle_engine_leaves_the_cpu_to_others(args, sleeps):
    config = SGLangConfig(args=args)
    command = sglang_command(config, ModelConfig(path="x"), version=0, has_tokenizer=True)
    assert command.args.get("--sleep-on-idle") is sleeps


# One call.


async def test_every_sampling_field_arrives_in_sglangs_words(model_dir):
    engine = StandIn()
    engine.info |= {"enable_deterministic_inference": True, "disable_overlap_schedule": True}
    fields = {
        "max_new_tokens": 3,
        "min_new_tokens": 2,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "stop_token_ids": (50, 51),
        "stop": ("ab",),
        "presence_penalty": 0.25,
        "frequency_penalty": 0.5,
        "logit_bias": {7: -2.0},
        "seed": 11,
    }
    async with attached(model_dir, engine) as backend:
        req = LLMRequest(rid="r", input_ids=(3, 4), gconfig=SamplingConfig(**fields))
        [task] = await begin(backend, engine, req)
        params = dict(engine.running[0].body["sampling_params"])
        engine.step(4)
        await task
    params.pop("stream_interval")
    seed = fields.pop("seed")
    expected = fields | {
        "stop_token_ids": [50, 51],
        "stop": ["ab"],
        "logit_bias": {"7": -2.0},
        "ignore_eos": False,
        "sampling_seed": seed,
    }
    assert params == expected


async def test_no_top_k_is_all_and_zero_temperature_stays_zero(model_dir):
    engine = StandIn()
    async with attached(model_dir, engine) as backend:
        [task] = await begin(backend, engine, request("r", temperature=0.0))
        params = engine.running[0].body["sampling_params"]
        assert (params["top_k"], params["temperature"]) == (-1, 0.0)
        engine.step(7)
        await task


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seed": 1}, "enable-deterministic-inference"),
        ({"repetition_penalty": 1.5}, "repetition_penalty=1.5 would leave out the prompt"),
        ({"presence_penalty": 0.1}, "start it with --disable-overlap-schedule"),
        ({"frequency_penalty": 0.1}, "start it with --disable-overlap-schedule"),
        ({"stop_token_ids": (9,), "min_new_tokens": 1}, "leave one of the three out"),
        ({"prompt": (3, 60)}, "input_ids holds 60"),
        ({"stop_token_ids": (61,)}, "stop_token_ids holds 61"),
    ],
)
async def test_what_sglang_would_ignore_or_die_of_never_reaches_it(model_dir, options, message):
    engine = StandIn()
    async with attached(model_dir, engine) as backend:
        with pytest.raises(DataError, match=message):
            await backend.generate(request("r", **options))
        with pytest.raises(RequestTooLong):
            await backend.generate(request("r", count=248))
        assert engine.asked("/generate") == []


async def test_a_response_holds_tokens_logprobs_versions_and_counts(model_dir):
    engine = StandIn()
    async with attached(model_dir, engine) as backend:
        asked = request("r", logprob_start=2, top_logprobs=2)
        [task] = await begin(backend, engine, asked)
        assert engine.running[0].body["logprob_start_len"] == 1
        assert (backend.load().running, backend.load().queued) == (0, 1)
        engine.step(3)
        await until(lambda: backend.load().running == 1)
        engine.step(4)
        response = await task
        assert response.output_tokens == [6, 7, 8, 9, 10, 11]
        assert response.output_logprobs == [-4.0] * 6
        assert response.version_runs == [(4, 0, 6)]
        assert (response.stop_reason, response.cached_tokens) == ("length", 1)
        assert response.prompt_logprobs == [-1.0]
        assert response.prompt_top_logprobs == [[(5, -1.0)] * 2]
        assert response.top_logprobs == [[(token, -4.0)] * 2 for token in range(6, 12)]
        load = backend.load()
        assert (load.generated_tokens, load.running, load.prefill_tokens) == (6, 0, 2)
        assert load.busy_s > 0
        await until(lambda: backend.load().kv_tokens == 17)
        load = backend.load()
        assert (load.kv_capacity_tokens, load.kv_usage) == (4096, 17 / 4096)
        assert (load.preemptions, load.max_running) == (0, 64)


async def test_the_first_token_of_a_prompt_has_no_logprob(model_dir):
    engine = StandIn()
    async with attached(model_dir, engine) as backend:
        [task] = await begin(backend, engine, request("r", logprob_start=0))
        engine.step(7)
        assert (await task).prompt_logprobs == [None, -0.5, -1.0]


async def test_more_top_logprobs_than_tokens_are_not_asked_for(model_dir):
    engine = StandIn()
    async with attached(model_dir, engine) as backend:
        [task] = await begin(backend, engine, request("r", top_logprobs=64))
        assert engine.running[0].body["top_logprobs_num"] == 60
        engine.step(7)
        await task


async def test_deltas_add_up_to_the_response(model_dir):
    engine = StandIn()
    deltas = []
    async with attached(model_dir, engine) as backend:
        [task] = await begin(backend, engine, request("r"), on_delta=deltas.append)
        for count in range(1, 5):
            engine.step()
            await until(lambda count=count: len(deltas) == count - 1)
        engine.step(3)
        response = await task
    assert [token for delta in deltas for token in delta.output_tokens] == response.output_tokens
    assert [one for delta in deltas for one in delta.output_logprobs] == response.output_logprobs
    assert {delta.version for delta in deltas} == {4}


async def test_a_call_that_is_not_streamed_costs_two_events(model_dir):
    engine = StandIn()
    async with attached(model_dir, engine) as backend:
        [task] = await begin(backend, engine, request("r", count=100))
        assert engine.running[0].body["sampling_params"]["stream_interval"] > 10**6
        engine.step(101)
        assert (await task).ttft_s <= (await task).latency_s


async def test_stop_tokens_end_a_call_that_ignores_eos_too(model_dir):
    engine = StandIn()
    deltas = []
    async with attached(model_dir, engine) as backend:
        req = request("r", count=40, stop_token_ids=(8,))
        [task] = await begin(backend, engine, req, on_delta=deltas.append)
        engine.step(6)
        response = await task
    assert response.output_tokens == [6, 7, 8]
    assert (response.stop_reason, response.stop_match) == ("stop", 8)
    assert [token for delta in deltas for token in delta.output_tokens] == [6, 7, 8]


async def test_the_matched_stop_is_told(model_dir):
    engine = StandIn()
    async with attached(model_dir, engine) as backend:
        [task] = await begin(backend, engine, request("r", ignore_eos=False, stop_token_ids=(7,)))
        engine.step(6)
        response = await task
    assert (response.output_tokens, response.stop_match) == ([6, 7], 7)


async def test_equal_ids_are_different_requests_to_the_engine(model_dir):
    engine = StandIn()
    async with attached(model_dir, engine) as backend:
        tasks = await begin(backend, engine, request("same"), request("same"))
        assert len({one.rid for one in engine.running}) == 2
        engine.step(7)
        assert [response.rid for response in await asyncio.gather(*tasks)] == ["same", "same"]


async def test_a_cancelled_call_ends_in_the_engine(model_dir):
    engine = StandIn()
    async with attached(model_dir, engine) as backend:
        [task] = await begin(backend, engine, request("r"))
        rid = engine.running[0].rid
        task.cancel()
        await until(lambda: {"rid": rid} in engine.asked("/abort_request"))
        await until(lambda: not engine.running)


async def test_abort_ends_one_request_with_its_tokens(model_dir):
    engine = StandIn()
    async with attached(model_dir, engine) as backend:
        tasks = await begin(backend, engine, request("one"), request("two"))
        engine.step(3)
        await backend.abort("nobody")
        await backend.abort("one")
        response = await tasks[0]
        assert (response.stop_reason, response.output_tokens) == ("interrupt", [6, 7])
        assert response.version_runs == [(4, 0, 2)]
        engine.step(4)
        assert (await tasks[1]).stop_reason == "length"


@pytest.mark.parametrize("status", [400, 500])
async def test_a_refusal_of_the_engine_is_told(model_dir, status):
    engine = StandIn()

    async def refuse(http_request, body):
        return web.json_response({"error": {"message": "not like this"}}, status=status)

    async with attached(model_dir, engine) as backend:
        engine._generate = refuse
        error = DataError if status == 400 else BackendError
        with pytest.raises(error, match="not like this"):
            await backend.generate(request("r"))


async def test_an_engine_that_goes_away_fails_its_calls_and_is_noticed(model_dir):
    engine = StandIn()
    async with engine.serving():
        config = SGLangConfig(url=engine.url, health_interval_s=0.05, health_timeout_s=0.3)
        backend = SGLangBackend(config, ModelConfig(path=str(model_dir)), 0)
        await backend.start()
        [task] = await begin(backend, engine, request("r"))
    with pytest.raises(BackendError):
        await task
    async with asyncio.timeout(DEADLINE_S):
        await until(lambda: backend.failure is not None)
    with pytest.raises(BackendError, match="is hung"):
        await backend.generate(request("r"))
    await backend.aclose()


# Pauses.


@pytest.mark.parametrize("mode", ["in_place", "retract"])
async def test_a_pause_holds_new_requests_here(model_dir, mode):
    engine = StandIn()
    async with attached(model_dir, engine) as backend:
        await backend.pause(mode)
        held = asyncio.create_task(backend.generate(request("held")))
        doomed = asyncio.create_task(backend.generate(request("doomed")))
        await until(lambda: backend.load().queued == 2)
        await backend.abort("doomed")
        assert (await doomed).stop_reason == "interrupt"
        assert backend.is_paused
        assert engine.asked("/generate") == []
        await backend.resume()
        await engine.until_running(1)
        engine.step(7)
        assert (await held).stop_reason == "length"
        assert not backend.is_paused


async def test_a_pause_may_end_what_runs(model_dir):
    engine = StandIn()
    async with attached(model_dir, engine) as backend:
        [task] = await begin(backend, engine, request("r"))
        engine.step(3)
        await backend.pause("in_place")
        await backend.pause("abort")
        response = await task
        assert (response.stop_reason, response.output_tokens) == ("interrupt", [6, 7])
        assert engine.paused == "abort"


async def test_flush_says_whether_it_did(model_dir):
    engine = StandIn()
    async with attached(model_dir, engine) as backend:
        assert await backend.flush()
        [task] = await begin(backend, engine, request("r"))
        assert not await backend.flush()
        engine.step(7)
        await task


# Swaps.


async def swap_in_flight(model_dir, engine: StandIn, policy: str, on_delta=None):
    """Three tokens are known and one may be in flight when version 5 comes; then all runs to its end."""
    async with attached(model_dir, engine) as backend:
        [task] = await begin(backend, engine, request("r"), on_delta=on_delta)
        engine.step(3 if engine.info["disable_overlap_schedule"] else 4)
        await until(lambda: backend.load().running == 1)
        swapping = asyncio.create_task(backend.swap(FolderUpdate(5, "/v5"), policy))
        if policy == "drain":
            await until(lambda: not backend._requests.is_open)
            engine.step(9)
        running = await swapping
        assert (backend.version, running) == (5, 1)
        engine.step(9)
        response = await task
        assert engine.paused is None
    # The stand-in's logprob is minus the version that sampled.
    assert response.output_versions == [-logprob for logprob in response.output_logprobs]
    return response


async def test_keep_counts_the_token_in_flight_to_the_version_that_sampled_it(model_dir):
    engine = StandIn()
    deltas = []
    response = await swap_in_flight(model_dir, engine, "keep", deltas.append)
    assert response.version_runs == [(4, 0, 4), (5, 4, 6)]
    versions = [delta.version for delta in deltas for _ in delta.output_tokens]
    assert versions == response.output_versions
    assert [body["mode"] for body in engine.asked("/pause_generation")] == ["in_place"]
    [update] = engine.asked("/update_weights_from_disk")
    assert update == {
        "model_path": "/v5",
        "weight_version": "5",
        "flush_cache": False,
        "abort_all_requests": False,
    }


async def test_keep_on_an_engine_without_pipeline_takes_its_word(model_dir):
    engine = StandIn()
    engine.info["disable_overlap_schedule"] = True
    response = await swap_in_flight(model_dir, engine, "keep")
    assert response.version_runs == [(4, 0, 3), (5, 3, 6)]


async def test_recompute_rebuilds_the_cache(model_dir):
    engine = StandIn()
    deltas = []
    response = await swap_in_flight(model_dir, engine, "recompute", deltas.append)
    assert response.version_runs == [(4, 0, 4), (5, 4, 6)]
    assert response.num_recomputes == 1
    assert [d.version for d in deltas for _ in d.output_tokens] == response.output_versions
    assert [body["mode"] for body in engine.asked("/pause_generation")] == ["retract"]
    assert engine.asked("/update_weights_from_disk")[0]["flush_cache"]


async def test_abort_answers_with_the_tokens_so_far(model_dir):
    response = await swap_in_flight(model_dir, StandIn(), "abort")
    assert (response.stop_reason, response.version_runs) == ("interrupt", [(4, 0, 3)])


async def test_drain_lets_requests_end_first(model_dir):
    response = await swap_in_flight(model_dir, StandIn(), "drain")
    assert (response.stop_reason, response.version_runs) == ("length", [(4, 0, 6)])


@pytest.mark.parametrize("policy", ["abort", "drain"])
async def test_no_weights_change_while_a_request_of_others_is_in_the_engine(
    model_dir, monkeypatch, policy
):
    engine = StandIn()
    statuses = iter([400, 400, 200])
    monkeypatch.setattr(engine, "_on_flush_cache", lambda _: web.Response(status=next(statuses)))
    async with attached(model_dir, engine) as backend:
        await backend.swap(FolderUpdate(5, "/v5"), policy)
        assert [path for path, _ in engine.calls if path != "/v1/loads"] == [
            "/pause_generation",
            *["/flush_cache"] * 3,
            "/update_weights_from_disk",
            "/continue_generation",
        ]


async def test_a_swap_is_refused_if_a_request_of_others_does_not_end(model_dir, monkeypatch):
    monkeypatch.setattr(control, "IDLE_S", 0.05)
    engine = StandIn()
    async with attached(model_dir, engine) as backend:
        monkeypatch.setattr(engine, "_on_flush_cache", lambda body: web.Response(status=400))
        with pytest.raises(SyncError, match="still runs requests of others"):
            await backend.swap(FolderUpdate(5, "/v5"), "abort")
        assert (backend.version, engine.asked("/update_weights_from_disk")) == (4, [])
        assert engine.paused is None


@pytest.mark.parametrize("reason", ["speculative", "old streams"])
async def test_keep_rebuilds_the_cache_where_it_cannot_know_what_is_in_flight(model_dir, reason):
    engine = StandIn()
    if reason == "speculative":
        engine.info["speculative_algorithm"] = "EAGLE"
    else:
        engine.can_thin_streams = False
    async with attached(model_dir, engine) as backend:
        [task] = await begin(backend, engine, request("r"))
        engine.step(4)
        await backend.swap(FolderUpdate(5, "/v5"), "keep")
        engine.step(9)
        response = await task
    assert response.version_runs == [(4, 0, 4), (5, 4, 6)]
    assert response.num_recomputes == 1


async def test_keep_sends_back_requests_without_a_token_and_they_come_again(model_dir):
    engine = StandIn(max_running=1)
    async with attached(model_dir, engine) as backend:
        tasks = await begin(backend, engine, request("first"), request("second"))
        engine.step(3)
        await until(lambda: backend.load().running == 1)
        sent_back = engine.running[1].rid
        await backend.swap(FolderUpdate(5, "/v5"), "keep")
        assert {"rid": sent_back} in engine.asked("/abort_request")
        await engine.until_running(2)
        assert engine.running[1].body["extra_key"] == "5"
        engine.step(9)
        await until(lambda: tasks[0].done())
        engine.step(9)
        first, second = await asyncio.gather(*tasks)
    assert first.version_runs == [(4, 0, 3), (5, 3, 6)]
    assert (second.version_runs, second.stop_reason) == ([(5, 0, 6)], "length")


async def test_without_spans_no_request_crosses_a_swap(model_dir):
    engine = StandIn()
    engine.has_spans = False
    async with attached(model_dir, engine) as backend:
        [task] = await begin(backend, engine, request("r"))
        engine.step(4)
        await backend.swap(FolderUpdate(5, "/v5"), "keep")
        response = await task
        assert (response.stop_reason, response.version_runs) == ("interrupt", [(4, 0, 3)])
        [task] = await begin(backend, engine, request("r"))
        engine.step(7)
        assert (await task).version_runs == [(5, 0, 6)]


async def test_a_refused_version_leaves_the_old_one_serving(model_dir):
    engine = StandIn()
    engine.refusal = (400, {"success": False, "message": "no such directory"})
    async with attached(model_dir, engine) as backend:
        [task] = await begin(backend, engine, request("r"))
        engine.step(3)
        await until(lambda: backend.load().running == 1)
        with pytest.raises(SyncError, match="no such directory"):
            await backend.swap(FolderUpdate(5, "/v5"), "keep")
        assert (backend.version, engine.paused) == (4, None)
        engine.step(9)
        assert (await task).version_runs == [(4, 0, 6)]
        assert backend.failure is None


async def test_weights_that_changed_count_even_if_the_engine_complains(model_dir):
    engine = StandIn()
    async with attached(model_dir, engine) as backend:
        engine.refusal = (400, {"success": False, "message": "the cache was not flushed"})
        engine.label = "5"
        await backend.swap(FolderUpdate(5, "/v5"), "recompute")
        assert backend.version == 5


async def test_a_swap_under_a_pause_leaves_it_paused(model_dir):
    engine = StandIn()
    async with attached(model_dir, engine) as backend:
        [task] = await begin(backend, engine, request("r"))
        engine.step(4)
        await backend.pause("in_place")
        with pytest.raises(SyncError, match="resume it or take another policy"):
            await backend.swap(FolderUpdate(5, "/v5"), "drain")
        await backend.swap(FolderUpdate(5, "/v5"), "keep")
        assert backend.is_paused
        assert engine.paused == "retract"
        await backend.resume()
        engine.step(9)
        assert (await task).version_runs == [(4, 0, 4), (5, 4, 6)]


# Staging.


def staged_by(model_dir: Path, root: Path, tensors: dict[str, torch.Tensor]):
    backend = SGLangBackend(SGLangConfig(), ModelConfig(path=str(model_dir)), 0)
    publisher = make_local_publisher(str(root))
    meta = publisher.publish(1, tensors.items())
    publisher.close()
    receiver = make_receiver(ReceiverConfig(allow=(str(root),)))
    return meta, backend.stage(meta, receiver.within(Deadline(10.0)))


def test_a_proven_version_is_staged_as_a_directory(model_dir, tmp_path):
    tensors = {name: torch.ones(shape) for name, shape in SHAPES.items()}
    meta, staged = staged_by(model_dir, tmp_path, tensors)
    folder = tmp_path / "v00000001"
    proven = VerifiedVersion(1, meta.digest, folder)
    assert staged == FolderUpdate(1, str(folder), meta.digest, proven)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lm_head.weight": torch.ones(59, 4)}, r"lm_head.weight has shape \(59, 4\)"),
        ({"extra.weight": torch.ones(2)}, "extra"),
    ],
)
def test_a_version_of_another_model_never_reaches_the_engine(model_dir, tmp_path, change, message):
    tensors = {name: torch.ones(shape) for name, shape in SHAPES.items()}
    with pytest.raises(SyncError, match=message):
        staged_by(model_dir, tmp_path, tensors | change)


def test_a_reader_that_only_stages_proves_too(model_dir):
    class Reader:
        def stage(self, meta, expected):
            assert {name: tuple(shape) for name, shape in expected.items()} == SHAPES
            return StagedWeights(meta.version, "d1", {})

    backend = SGLangBackend(SGLangConfig(), ModelConfig(path=str(model_dir)), 0)
    assert backend.stage(WeightUpdateMeta(3, "/v3"), Reader()) == FolderUpdate(3, "/v3", "d1")


async def test_what_another_backend_staged_is_refused(model_dir):
    backend = SGLangBackend(SGLangConfig(), ModelConfig(path=str(model_dir)), 0)
    with pytest.raises(SyncError, match="not staged by this backend"):
        await backend.swap(VerifiedVersion(3, "", Path("/v3")))


async def test_a_sampling_mask_is_refused_by_name_and_only_where_something_is_cut(model_dir):
    engine = StandIn()
    async with attached(model_dir, engine) as backend:
        asked = request("r", top_p=0.9).model_copy(update={"sampling_mask": True})
        with pytest.raises(DataError, match="the backend sglang reports none; cut nothing"):
            await backend.generate(asked)
        assert not engine.calls
