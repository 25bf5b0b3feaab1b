"""What each update policy and each pause does to requests that run, wait and come later."""

from __future__ import annotations

import asyncio
import time

import pytest
import torch

from headway.contracts.config.weight_sync import ReceiverConfig
from headway.contracts.errors import BackendError, SyncError
from headway.contracts.http.weights import WeightCommitRequest, WeightPrepareRequest
from inference_server.backends.embedded.decode_loop import DecodeLoop
from inference_server.version_gate import VersionGate
from tests.numeric.backends import (
    DEADLINE_S,
    Call,
    errors,
    generate_all,
    prompt_of,
    request,
    serving,
    stage,
    stage_value,
)
from tests.numeric.models import (
    VOCAB_SIZE,
    load_reference,
    reference_logits,
    reference_logprobs,
    save_model,
)
from tests.numeric.test_swap_in_flight import replay
from tests.waiting import until
from weight_sync.channel import StagedWeights
from weight_sync.receiver import make_receiver

CONTEXT = 512
POLICIES = ["keep", "recompute", "abort", "drain"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Directories of versions 0, 1 and 2 of one architecture."""
    root = tmp_path_factory.mktemp("policies")
    return [save_model(root / f"v{i}", "llama", seed=i, context=CONTEXT) for i in range(3)]


@pytest.fixture(scope="module")
def models(folders):
    return [load_reference(folder) for folder in folders]


class HeldVersions:
    """A `WeightReceiver` over those directories."""

    def __init__(self, folders):
        self._folders = folders
        self.kept = []

    def within(self, deadline):
        return self

    def stage(self, meta, expected):
        return stage(meta.version, self._folders[meta.version])

    def keep(self, staged):
        self.kept.append(staged)


def prepared(epoch, version):
    return WeightPrepareRequest(epoch=epoch, version=version, path=f"/v{version}")


def committed(epoch, version, policy=None):
    return WeightCommitRequest(epoch=epoch, version=version, policy=policy)


async def publish(gate, folders, version, policy):
    """Stage and commit; what was in flight."""
    backend = gate._backend
    update = gate.update(
        lambda _: version, lambda _: backend.model.fit(stage(version, folders[version])), policy
    )
    return await asyncio.wait_for(update, DEADLINE_S)


def long(name, seed, length=10, count=300):
    return request(name, prompt_of(length, seed), seed=seed, max_new_tokens=count)


def start(backend, *requests):
    return [Call(backend, asked) for asked in requests]


def assert_fresh(models, call, response):
    """Each token has the logprob of a full forward of its version over all tokens before it."""
    whole = [reference_logprobs(model, call.prompt, response.output_tokens) for model in models]
    expected = [whole[version][i] for i, version in enumerate(response.output_versions)]
    if expected:
        assert errors(response.output_logprobs, torch.stack(expected)).max() < 1e-4


def assert_truthful(call, response):
    assert call.heard.tokens == response.output_tokens
    assert [d.version for d in call.heard.deltas] == response.output_versions
    assert len(response.output_versions) == len(response.output_tokens)
    assert response.output_versions == sorted(response.output_versions)


async def test_recompute_gives_the_logprobs_of_a_fresh_prefill(folders, models):
    prompt = prompt_of(40, 8)  # two siblings among them
    asked = [
        long("a", 1),
        long("b", 2, length=33),
        request("c", prompt, seed=3, max_new_tokens=300),
        request("d", prompt, seed=4, max_new_tokens=300),
    ]
    async with serving(folders[0], max_sequences=4, max_prefill_tokens=64) as backend:
        gate = VersionGate(backend, make_receiver(ReceiverConfig()))
        calls = start(backend, *asked)
        for version in (1, 2):
            for call in calls:
                await call.heard.until(60 * version)
            assert await publish(gate, folders, version, "recompute") == 4
        responses = [await call.response() for call in calls]
    for call, response in zip(calls, responses, strict=True):
        assert_truthful(call, response)
        assert_fresh(models, call, response)
        assert [version for version, _, _ in response.version_runs] == [0, 1, 2]
        assert len(response.output_tokens) == 300
        assert response.num_recomputes == 2
    assert (gate.served.updates, gate.served.updates_in_flight) == (2, 2)


async def test_recompute_under_little_memory_loses_nothing(folders, models):
    room = 3 * 256 + 128
    options = {"max_sequences": 6, "kv_cache_bytes": room * 256, "max_prefill_tokens": 50}
    async with serving(folders[0], **options) as backend:
        calls = start(backend, *(long(f"r{i}", i, count=200) for i in range(6)))
        await calls[0].heard.until(60)
        await backend.swap(stage(1, folders[1]), "recompute")
        responses = [await call.response() for call in calls]
    for call, response in zip(calls, responses, strict=True):
        assert_truthful(call, response)
        assert_fresh(models, call, response)
        assert len(response.output_tokens) == 200


async def test_abort_answers_with_the_tokens_so_far_and_leaves_waiting_requests_alone(
    folders, models
):
    async with serving(folders[0], max_sequences=2) as backend:
        gate = VersionGate(backend, make_receiver(ReceiverConfig()), "abort")
        calls = start(backend, *(long(f"r{i}", i) for i in range(4)))
        for call in calls[:2]:
            await call.heard.until(25)
        assert await publish(gate, folders, 1, None) == 2
        partial = [await call.response() for call in calls[:2]]
        for call, response in zip(calls, partial, strict=False):
            assert_truthful(call, response)
            assert_fresh(models, call, response)
            assert response.stop_reason == "interrupt"
            assert response.stop_match is None
            assert 25 <= len(response.output_tokens) < 300
            assert response.version_runs == [(0, 0, len(response.output_tokens))]
        for call in calls[2:]:
            response = await call.response()
            assert_truthful(call, response)
            assert_fresh(models, call, response)
            assert response.version_runs == [(1, 0, 300)]
            assert response.num_recomputes == 0
        for call, response in zip(calls, partial, strict=False):
            prefix = call.prompt + response.output_tokens
            left = 300 - len(response.output_tokens)
            rest = Call(backend, request("rest", prefix, seed=9, max_new_tokens=left))
            resumed = await rest.response()
            assert_fresh(models, rest, resumed)
            assert resumed.version_runs == [(1, 0, left)]
            assert resumed.cached_tokens == 0  # not what the old weights computed


async def test_drain_ends_running_ones_under_the_old_version_and_starts_waiting_ones_under_the_new(
    folders, models
):
    async with serving(folders[0], max_sequences=3) as backend:
        gate = VersionGate(backend, make_receiver(ReceiverConfig()), "drain")
        calls = start(backend, *(long(f"old{i}", i, count=150) for i in range(2)))
        for call in calls:
            await call.heard.until(10)
        commit = asyncio.create_task(publish(gate, folders, 1, None))
        await until(lambda: backend._decode_loop.scheduler.is_draining)
        late = start(backend, *(long(f"new{i}", i + 5, count=50) for i in range(4)))
        assert backend.version == 0
        assert await commit == 0
        assert all(call.task.done() or call.heard.tokens for call in calls)
        old = [await call.response() for call in calls]
        new = [await call.response() for call in late]
    for call, response in zip([*calls, *late], [*old, *new], strict=True):
        assert_truthful(call, response)
        assert_fresh(models, call, response)
    assert [r.version_runs for r in old] == [[(0, 0, 150)]] * 2
    assert [r.version_runs for r in new] == [[(1, 0, 50)]] * 4


async def test_a_commit_goes_on_to_drain_when_its_caller_is_gone(folders):
    async with serving(folders[0], max_sequences=3) as backend:
        gate = VersionGate(backend, HeldVersions(folders))
        [running] = start(backend, long("running", 1, count=200))
        await running.heard.until(5)
        await gate.prepare(prepared(1, 1))
        commit = asyncio.create_task(gate.commit(committed(1, 1, "drain")))
        await until(lambda: backend._decode_loop.scheduler.is_draining)
        [late] = start(backend, long("late", 2, count=5))
        commit.cancel()
        with pytest.raises(asyncio.CancelledError):
            await commit
        again = asyncio.create_task(gate.commit(committed(1, 1)))
        assert (await running.response()).version_runs == [(0, 0, 200)]
        assert (await again).version == 1
        assert (await late.response()).version_runs == [(1, 0, 5)]
        assert gate.served.updates == 1


async def test_a_swap_whose_caller_gives_up_lets_waiting_ones_start(folders):
    async with serving(folders[0], max_sequences=3) as backend:
        [running] = start(backend, long("running", 1, count=490))
        await running.heard.until(5)
        update = backend.model.fit(stage(1, folders[1]))
        swap = asyncio.create_task(backend.swap(update, "drain"))
        await until(lambda: backend._decode_loop.scheduler.is_draining)
        [late] = start(backend, long("late", 2, count=5))
        await running.heard.until(len(running.heard.tokens) + 30)
        assert late.heard.tokens == []
        swap.cancel()
        with pytest.raises(asyncio.CancelledError):
            await swap
        assert (await late.response()).version_runs == [(0, 0, 5)]
        assert not running.task.done()
        assert not backend._decode_loop.scheduler.is_draining
        assert await backend.swap(update, "keep") == 1
        response = await running.response()
    assert [version for version, _, _ in response.version_runs] == [0, 1]


async def test_a_rollback_under_running_requests_is_sampled_and_stamped_as_such(folders, models):
    async with serving(folders[0], max_sequences=2) as backend:
        gate = VersionGate(backend, HeldVersions(folders))
        calls = start(backend, *(long(f"r{i}", i, count=490) for i in range(2)))
        for epoch, version in enumerate((2, 1, 2, 0), start=1):
            await backend.pause("in_place")
            await gate.prepare(prepared(epoch, version))
            heard = len(calls[0].heard.tokens)
            await backend.resume()
            for call in calls:
                await call.heard.until(heard + 20)
            answer = await gate.commit(committed(epoch, version, "recompute"))
            assert (answer.version, answer.running) == (version, 2)
        responses = [await call.response() for call in calls]
    for call, response in zip(calls, responses, strict=True):
        assert call.heard.tokens == response.output_tokens
        assert [d.version for d in call.heard.deltas] == response.output_versions
        assert_fresh(models, call, response)
        assert [version for version, _, _ in response.version_runs] == [0, 2, 1, 2, 0]


async def test_nobody_writes_to_a_version_that_is_held(folders):
    async with serving(folders[0]) as backend:
        peer_store = HeldVersions(folders)
        gate = VersionGate(backend, peer_store)
        for epoch, version in enumerate((1, 2), start=1):
            await gate.prepare(prepared(epoch, version))
            await gate.commit(committed(epoch, version))
        first, second = peer_store.kept
        parameters = backend.model._parameters
        assert all(parameters[n].data_ptr() == t.data_ptr() for n, t in second.tensors.items())
        name = "model.embed_tokens.weight"
        with torch.inference_mode():
            backend.read_parameter(name).zero_()  # a copy
        for staged, folder in ((first, folders[1]), (second, folders[2])):
            wanted = stage(staged.version, folder).tensors
            assert all(torch.equal(t, wanted[n]) for n, t in staged.tensors.items())


@pytest.mark.parametrize("policy", POLICIES)
async def test_a_swap_during_a_pause_in_place_takes_effect_at_once(folders, models, policy):
    async with serving(folders[0], max_sequences=2) as backend:
        gate = VersionGate(backend, make_receiver(ReceiverConfig()))
        calls = start(backend, *(long(f"r{i}", i) for i in range(2)))
        waiting = start(backend, long("waiting", 7, count=20))
        for call in calls:
            await call.heard.until(30)
        await backend.pause("in_place")
        before = backend.load().generated_tokens
        assert await publish(gate, folders, 1, policy) == 2
        assert backend.version == 1
        assert backend.load().generated_tokens == before
        assert backend.is_paused
        if policy == "abort":  # they need no resume to answer
            assert {(await call.response()).stop_reason for call in calls} == {"interrupt"}
        await backend.resume()
        responses = [await call.response() for call in calls]
        late = await waiting[0].response()
    assert late.version_runs == [(1, 0, 20)]
    assert_fresh(models, waiting[0], late)
    for call, response in zip(calls, responses, strict=True):
        assert_truthful(call, response)
        if policy == "abort":
            assert response.version_runs == [(0, 0, len(response.output_tokens))]
            continue
        assert len(response.output_tokens) == 300
        assert [version for version, _, _ in response.version_runs] == [0, 1]
        assert response.num_recomputes == (policy == "recompute")
        if policy == "recompute":
            assert_fresh(models, call, response)
        else:  # the cache was kept
            expected = replay(models, call.prompt, response)
            assert errors(response.output_logprobs, expected).max() < 1e-4


@pytest.mark.parametrize("policy", POLICIES)
async def test_a_swap_during_a_retracting_pause_finds_no_old_cache(folders, models, policy):
    async with serving(folders[0], max_sequences=2) as backend:
        calls = start(backend, *(long(f"r{i}", i) for i in range(2)))
        for call in calls:
            await call.heard.until(30)
        await backend.pause("retract")
        assert (backend.load().running, backend.load().queued) == (0, 2)
        assert backend.load().kv_tokens == 0
        assert await backend.flush()
        await backend.swap(stage(1, folders[1]), policy)
        await backend.resume()
        responses = [await call.response() for call in calls]
    for call, response in zip(calls, responses, strict=True):
        assert_truthful(call, response)
        assert_fresh(models, call, response)
        assert response.num_recomputes == 1
        assert response.stop_reason == ("interrupt" if policy == "abort" else "length")


async def test_an_aborting_pause_ends_all_and_holds_back_newcomers(folders, models):
    async with serving(folders[0], max_sequences=2) as backend:
        calls = start(backend, *(long(f"r{i}", i) for i in range(3)))
        await calls[1].heard.until(30)
        await backend.pause("abort")
        responses = [await call.response() for call in calls]
        assert {r.stop_reason for r in responses} == {"interrupt"}
        assert responses[2].output_tokens == []
        [late] = start(backend, long("late", 5, count=20))
        await until(lambda: backend.load().queued == 1)
        await backend.swap(stage(1, folders[1]), "drain")
        assert late.heard.tokens == []
        await backend.resume()
        response = await late.response()
    for call, partial in zip(calls, responses, strict=True):
        assert_truthful(call, partial)
    assert response.version_runs == [(1, 0, 20)]
    assert_fresh(models, late, response)


async def test_one_request_is_aborted_by_its_id_and_an_unknown_id_is_no_error(folders):
    async with serving(folders[0], max_sequences=2) as backend:
        calls = start(backend, *(long(f"r{i}", i) for i in range(3)))
        await calls[1].heard.until(30)
        for rid in ("unknown", "r2", "r1"):
            await backend.abort(rid)
        ended = [await call.response() for call in calls[1:]]
        assert [r.stop_reason for r in ended] == ["interrupt"] * 2
        assert ended[1].output_tokens == []
        await backend.pause("in_place")
        await backend.abort(None)  # answered although paused
        first = await calls[0].response()
    assert first.stop_reason == "interrupt"
    assert_truthful(calls[0], first)


@pytest.mark.parametrize("policy", POLICIES)
async def test_a_prefix_of_old_weights_is_not_shared_after_a_swap(folders, models, policy):
    """Kept rows, rows that run, and rows that were being computed when the weights changed."""
    prompt = prompt_of(200, 1)
    async with serving(folders[0], max_sequences=8, max_prefill_tokens=50) as backend:
        await backend.generate(request("kept", prompt, max_new_tokens=2))
        shared = await backend.generate(request("shared", prompt, max_new_tokens=2))
        assert shared.cached_tokens == 199
        [running] = start(backend, request("running", prompt, seed=1, max_new_tokens=250))
        await running.heard.until(5)
        other = prompt_of(400, 2)
        [halfway] = start(backend, request("halfway", other, seed=2, max_new_tokens=30))
        await until(lambda: backend.load().prefill_tokens > 250)
        await backend.swap(stage(1, folders[1]), policy)
        after = start(
            backend,
            request("after", prompt, seed=3),
            request("after-half", other, seed=4),
        )
        responses = [await call.response() for call in after]
        for call, response in zip(after, responses, strict=True):
            assert_fresh(models, call, response)
            assert response.version_runs == [(1, 0, 20)]
        again = Call(backend, request("again", prompt, seed=5))
        response = await again.response()
        assert response.cached_tokens == 199
        assert_fresh(models, again, response)
        for call in (running, halfway):
            assert_truthful(call, await call.response())


@pytest.mark.parametrize(("first", "second"), [("drain", "keep"), ("keep", "recompute")])
async def test_two_swaps_in_line_take_effect_in_their_order(folders, models, first, second):
    async with serving(folders[0], max_sequences=2) as backend:
        calls = start(backend, *(long(f"r{i}", i, count=150) for i in range(2)))
        waiting = start(backend, long("waiting", 7, count=20))
        for call in calls:
            await call.heard.until(10)
        updates = [backend.model.fit(stage(version, folders[version])) for version in (1, 2)]
        swaps = [
            asyncio.create_task(backend.swap(update, policy))
            for update, policy in zip(updates, (first, second), strict=True)
        ]
        done = await asyncio.wait_for(asyncio.gather(*swaps), DEADLINE_S)
        responses = [await call.response() for call in calls]
        late = await waiting[0].response()
    assert backend.version == 2
    assert late.version_runs == [(2, 0, 20)]
    assert_fresh(models, waiting[0], late)
    assert done == ([0, 0] if first == "drain" else [2, 2])
    for call, response in zip(calls, responses, strict=True):
        assert_truthful(call, response)
        assert_fresh(models, call, response)  # the second one recomputed, or nobody saw it
        assert len(response.output_tokens) == 150
        versions = {version for version, _, _ in response.version_runs}
        assert versions == ({0} if first == "drain" else versions & {0, 1, 2})


async def test_versions_of_an_idle_server_take_effect_at_once_under_every_policy(folders, models):
    async with serving(folders[0]) as backend:
        for policy in POLICIES:
            await backend.swap(stage(1, folders[1]), "keep")
            assert await backend.swap(stage(2, folders[2]), policy) == 0
            call = Call(backend, long(policy, 3, count=20))
            response = await call.response()
            assert response.version_runs == [(2, 0, 20)]
            assert_fresh(models, call, response)


async def test_the_gate_refuses_what_is_not_staged_and_requests_go_on(folders):
    async with serving(folders[0]) as backend:
        gate = VersionGate(backend, make_receiver(ReceiverConfig()))
        [call] = start(backend, long("r", 1, count=100))
        with pytest.raises(SyncError, match="version 3 is not prepared here"):
            await gate.commit(committed(1, 3))
        assert (await call.response()).version_runs == [(0, 0, 100)]


def with_bad_token(version, folder, token):
    """Good weights, but for the embedding of one token, which is not finite."""
    tensors = dict(stage(version, folder).tensors)
    tensors["model.embed_tokens.weight"][token] = float("nan")
    return StagedWeights(version, "0" * 64, tensors)


async def end_one_in_its_prompt(backend, asked):
    """Abort a request while its prompt is being computed; tried again if it was faster."""

    def paced_step(loop):
        step(loop)
        time.sleep(0.02)  # else a fast machine has computed all parts before the abort comes

    step = DecodeLoop.step
    for _ in range(50):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(DecodeLoop, "step", paced_step)
            call = Call(backend, asked)
            seen = backend.load().prefill_tokens
            await until(lambda seen=seen: backend.load().prefill_tokens > seen)
            await backend.abort(asked.rid)
        try:
            assert (await call.response()).stop_reason == "interrupt"
        except BackendError:
            continue
        return
    raise AssertionError("no request could be caught in its prompt")


@pytest.mark.parametrize("policy", ["keep", "recompute"])
async def test_a_request_that_is_not_finite_is_named_and_the_others_are_not_touched(
    folders, models, policy
):
    """Healthy and bad rows lie side by side, exchange places and use each other's memory."""
    bad = 7
    model = models[1]

    def prompt(index, is_bad):
        # Shorter and shorter: each finds what a longer one left.
        tokens = [t if t != bad else 8 for t in prompt_of(max(4, 110 - 9 * index), index)]
        return [*tokens[:3], bad, *tokens[3:]] if is_bad else tokens

    def ask(index, is_bad):
        name = f"{'bad' if is_bad else 'good'}{index}"
        options = {"logit_bias": {bad: -100.0}, "max_new_tokens": 30 + 20 * (index % 3)}
        return request(name, prompt(index, is_bad), seed=index, **options)

    options = {"max_sequences": 6, "max_prefill_tokens": 40}
    async with serving(folders[0], **options) as backend:
        await backend.swap(with_bad_token(1, folders[1], bad), policy)
        calls = start(backend, *(ask(i, i % 2 == 0) for i in range(16)))
        outcomes = await asyncio.gather(*(c.response() for c in calls), return_exceptions=True)
        await end_one_in_its_prompt(backend, ask(0, True))
        after = [ask(i, False) for i in range(1, 16, 2)]
        again = await generate_all(backend, after)
    for call, outcome in zip(calls, outcomes, strict=True):
        if call.asked.rid.startswith("bad"):
            assert isinstance(outcome, BackendError)
            expected = f"request {call.asked.rid}: version 1 gave logits that are not finite"
            assert outcome.message == expected
    healthy = [(c.asked, o) for c, o in zip(calls, outcomes, strict=True) if "good" in c.asked.rid]
    for asked, response in [*healthy, *zip(after, again, strict=True)]:
        with torch.no_grad():
            logits = reference_logits(model, [*asked.input_ids, *response.output_tokens]).double()
        logits[:, bad] -= 100.0
        table = torch.log_softmax(logits, dim=-1)[len(asked.input_ids) - 1 : -1]
        expected = table.gather(1, torch.tensor(response.output_tokens)[:, None])[:, 0]
        assert errors(response.output_logprobs, expected).max() < 1e-4
        assert response.version_runs == [(1, 0, asked.gconfig.max_new_tokens)]
    assert [r.output_tokens for _, r in healthy] == [r.output_tokens for r in again]


@pytest.mark.parametrize("policy", POLICIES)
async def test_good_weights_bring_a_server_back_from_bad_ones(folders, models, policy):
    async with serving(folders[0], max_sequences=3, max_prefill_tokens=40) as backend:
        calls = start(backend, *(long(f"r{i}", i) for i in range(3)))
        for call in calls:
            await call.heard.until(20)
        await backend.pause("in_place")
        await backend.swap(stage_value(1, folders[1], float("nan")), "keep")
        waiting = start(backend, long("waiting", 7, length=100, count=30))
        await backend.resume()
        for call in calls:
            with pytest.raises(BackendError, match=f"request {call.asked.rid}: version 1 gave"):
                await call.response()
        with pytest.raises(BackendError, match="request waiting: version 1"):
            await waiting[0].response()
        await backend.swap(stage(2, folders[2]), policy)
        late = start(backend, *(long(f"late{i}", i, length=1 + 40 * i, count=90) for i in range(4)))
        responses = [await call.response() for call in late]
    for call, response in zip(late, responses, strict=True):
        assert_fresh(models, call, response)
        assert response.version_runs == [(2, 0, 90)]
        assert all(0 <= token < VOCAB_SIZE for token in response.output_tokens)
