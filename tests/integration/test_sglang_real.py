"""The SGLang backend on a real SGLang server, on the CPU: `make test-sglang`.

One engine serves the module; versions 0, 2, 4, ... have the weights of one tiny Llama, the odd ones
those of another, and every logprob is compared with what transformers computes from the same files.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import sys
import time
from pathlib import Path

import httpx
import pytest
import pytest_asyncio
import torch
from transformers import DynamicCache

from headway.contracts import http
from headway.contracts.config.model import ModelConfig
from headway.contracts.config.sampling import SamplingConfig
from headway.contracts.config.server import SGLangConfig
from headway.contracts.errors import BackendError, DataError, SyncError
from headway.contracts.types import LLMRequest, LLMResponse, WeightUpdateMeta
from headway.rollout.tokenizer import TextTokenizer
from headway.runtime.process import Process, ProcessSpec
from inference_server.backends.sglang.backend import SGLangBackend
from inference_server.backends.sglang.updates import GroupMember, GroupUpdate, TensorBucket
from tests.numeric.models import (
    VOCAB_SIZE,
    load_reference,
    reference_logits,
    reference_logprobs,
    save_model,
    write_char_tokenizer,
)
from weight_sync.transports.disk import DiskPublisher, DiskReader

VENV = Path(
    os.environ.get("HEADWAY_SGLANG_VENV", Path.home() / ".cache" / "headway" / "sglang-cpu")
)
PYTHON = VENV / "bin" / "python"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(
        not next(VENV.glob("lib/python*/site-packages/sglang"), None),
        reason=f"no SGLang in {VENV}; run `make sglang-cpu`, or set HEADWAY_SGLANG_VENV",
    ),
]
PATIENCE_S = 120.0
TOLERANCE = 2e-4
NUM_SLOTS = 8
ENV = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
}
ARGS = {
    "--device": "cpu",
    "--attention-backend": "torch_native",
    "--max-total-tokens": 16384,
    "--max-running-requests": NUM_SLOTS,
    "--skip-server-warmup": True,
}


class Policies:
    """Two models, and versions that alternate between them."""

    def __init__(self, root: Path) -> None:
        self.folders = [save_model(root / f"model{seed}", "llama", seed=seed) for seed in (0, 1)]
        for folder in self.folders:
            write_char_tokenizer(folder)
        self.models = [load_reference(folder) for folder in self.folders]
        self.root = root / "versions"
        self._publisher = DiskPublisher(str(self.root), keep=2, shard_bytes=1 << 14)
        self.newest = 0

    def model(self, version: int) -> torch.nn.Module:
        return self.models[version % 2]

    def publish(self) -> WeightUpdateMeta:
        self.newest += 1
        return self._publisher.publish(self.newest, self.model(self.newest).named_parameters())

    @torch.no_grad()
    def replayed(self, asked: LLMRequest, response: LLMResponse) -> torch.Tensor:
        """Logprobs over one kept cache, each token by the version that is said to have sampled it."""
        cache, fed, logprobs = DynamicCache(), list(asked.input_ids), []
        for token, version in zip(response.output_tokens, response.output_versions, strict=True):
            ids = torch.tensor([fed])
            output = self.model(version)(input_ids=ids, past_key_values=cache, use_cache=True)
            cache, fed = output.past_key_values, [token]
            logprobs.append(torch.log_softmax(output.logits[0, -1].double(), dim=-1)[token])
        return torch.stack(logprobs) if logprobs else torch.zeros(0)

    def recomputed(self, asked: LLMRequest, response: LLMResponse) -> torch.Tensor:
        """Logprobs of each run after a fresh pass of its version over all before it."""
        parts = [
            reference_logprobs(
                self.model(version),
                [*asked.input_ids, *response.output_tokens[:start]],
                response.output_tokens[start:end],
            )
            for version, start, end in response.version_runs
        ]
        return torch.cat(parts) if parts else torch.zeros(0)


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> Policies:
    return Policies(tmp_path_factory.mktemp("sglang"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def backend(policies: Policies, tmp_path_factory: pytest.TempPathFactory):
    log = tmp_path_factory.mktemp("log") / "sglang.log"
    config = SGLangConfig(python=str(PYTHON), args=ARGS, env=ENV, log_file=str(log))
    folder = str(policies.folders[0])
    engine = SGLangBackend(config, ModelConfig(path=folder), 0, TextTokenizer(folder))
    started = time.monotonic()
    await engine.start()
    show(f"SGLang answers after {time.monotonic() - started:.0f} s")
    yield engine
    await engine.aclose()


def show(text: str) -> None:
    """For `pytest -s`."""
    sys.stdout.write(f"\n  {text}")


def request(index: int, count: int = 20, **extra) -> LLMRequest:
    """A prompt of its own per index; past the end of sequence unless told otherwise."""
    fields = {name: extra.pop(name) for name in ("logprob_start", "top_logprobs") if name in extra}
    generator = torch.Generator().manual_seed(index)
    prompt = torch.randint(2, VOCAB_SIZE, (3 + index % 9,), generator=generator).tolist()
    options = {"ignore_eos": True, "max_new_tokens": count} | extra
    return LLMRequest(
        rid=f"r{index}", input_ids=prompt, gconfig=SamplingConfig(**options), **fields
    )


def error_of(response: LLMResponse, expected: torch.Tensor) -> float:
    """Largest difference of the logprobs; 0 without tokens."""
    got = torch.tensor(response.output_logprobs, dtype=torch.float64)
    return (got - expected).abs().max().item() if len(got) else 0.0


def child_of(pid: int) -> int:
    """The one child of a process."""
    [child] = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(child)


class Progress:
    """An `on_delta` that tells when enough tokens have come."""

    def __init__(self, enough: int) -> None:
        self.deltas = []
        self._enough = enough
        self.reached = asyncio.Event()

    def __call__(self, delta) -> None:
        self.deltas.append(delta)
        if len(self.tokens) >= self._enough:
            self.reached.set()

    @property
    def tokens(self) -> list[int]:
        return [token for delta in self.deltas for token in delta.output_tokens]

    @property
    def versions(self) -> list[int]:
        return [delta.version for delta in self.deltas for _ in delta.output_tokens]


async def ready(progress: Progress) -> None:
    await asyncio.wait_for(progress.reached.wait(), PATIENCE_S)


# Generation.


async def test_logprobs_are_those_of_transformers(backend, policies):
    options = [{}, {"temperature": 0.0}, {"temperature": 0.7}, {"top_k": 5, "top_p": 0.8}]
    asked = [request(i, 60, **options[i % 4]) for i in range(16)]
    responses = await asyncio.gather(*map(backend.generate, asked))
    errors = []
    for one, response in zip(asked, responses, strict=True):
        scale = one.gconfig.temperature or 1.0
        model = policies.model(backend.version)
        expected = reference_logprobs(model, list(one.input_ids), response.output_tokens, scale)
        errors.append(error_of(response, expected))
        assert response.version_runs == [(backend.version, 0, 60)]
    show(f"max error of 16 x 60 logprobs: {max(errors):.1e}")
    assert max(errors) < TOLERANCE


def shaped_logprobs(model, asked: LLMRequest, tokens: list[int]) -> torch.Tensor:
    """Logprobs under penalties, biases and temperature, as `SamplingConfig` defines them."""
    gconfig = asked.gconfig
    with torch.no_grad():
        logits = reference_logits(model, [*asked.input_ids, *tokens]).double()
    rows = logits[len(asked.input_ids) - 1 : -1]
    for token, bias in gconfig.logit_bias.items():
        rows[:, token] += bias
    expected = []
    for position, token in enumerate(tokens):
        seen = torch.tensor(tokens[:position], dtype=torch.long)
        counts = torch.bincount(seen, minlength=VOCAB_SIZE)
        penalty = gconfig.frequency_penalty * counts + gconfig.presence_penalty * (counts > 0)
        row = (rows[position] - penalty) / gconfig.temperature
        expected.append(torch.log_softmax(row, dim=-1)[token])
    return torch.stack(expected)


async def test_biases_shape_the_logprobs(backend, policies):
    asked = request(1, 40, temperature=0.8, logit_bias={7: 3.0, 9: -2.0})
    response = await backend.generate(asked)
    model = policies.model(backend.version)
    assert error_of(response, shaped_logprobs(model, asked, response.output_tokens)) < TOLERANCE


async def test_penalties_that_would_come_late_are_refused(backend):
    with pytest.raises(DataError, match="disable-overlap-schedule"):
        await backend.generate(request(1, presence_penalty=0.5))


async def test_prompt_logprobs_and_top_logprobs_are_those_of_transformers(backend, policies):
    for start in (0, 1, 3):
        asked = request(6, 3, logprob_start=start, top_logprobs=64)  # more than the vocabulary
        response = await backend.generate(asked)
        ids = [*asked.input_ids, *response.output_tokens]
        with torch.no_grad():
            table = torch.log_softmax(
                reference_logits(policies.model(backend.version), ids).double(), dim=-1
            )
        wanted = [table[i - 1, ids[i]].item() for i in range(max(1, start), len(asked.input_ids))]
        got = response.prompt_logprobs
        assert got is not None
        assert (got[:1] == [None]) == (start == 0)
        assert [one for one in got if one is not None] == pytest.approx(wanted, abs=TOLERANCE)
        assert len(response.prompt_top_logprobs) == len(got)
        for offset, pairs in enumerate(response.top_logprobs):
            row = table[len(asked.input_ids) - 1 + offset]
            assert len(pairs) == VOCAB_SIZE
            for token, logprob in pairs:
                assert logprob == pytest.approx(row[token].item(), abs=TOLERANCE)


async def test_a_prompt_may_only_be_scored(backend):
    response = await backend.generate(request(2, 0, logprob_start=0))
    assert (response.output_tokens, response.version_runs) == ([], [])
    assert len(response.prompt_logprobs) == len(request(2).input_ids)


async def test_stops_end_where_they_should(backend):
    plain = await backend.generate(request(3, 30, temperature=0.0))
    token = plain.output_tokens[4]
    upto = plain.output_tokens.index(token) + 1
    for ignore_eos in (False, True):
        stopped = await backend.generate(
            request(3, 30, temperature=0.0, ignore_eos=ignore_eos, stop_token_ids=(token,))
        )
        assert stopped.output_tokens == plain.output_tokens[:upto]
        assert (stopped.stop_reason, stopped.stop_match) == ("stop", token)
        assert len(stopped.output_logprobs) == upto
    held = await backend.generate(
        request(3, 12, temperature=0.0, ignore_eos=False, stop_token_ids=(token,), min_new_tokens=9)
    )
    assert token not in held.output_tokens[:9]
    text = chr(ord(" ") + token - 2)
    by_text = await backend.generate(request(3, 30, temperature=0.0, stop=(text,)))
    assert (by_text.output_tokens, by_text.stop_match) == (plain.output_tokens[:upto], text)


async def test_deltas_add_up_to_the_response(backend):
    progress = Progress(1)
    response = await backend.generate(request(4, 40, top_logprobs=2), progress)
    assert progress.tokens == response.output_tokens
    assert progress.versions == response.output_versions
    tops = [row for delta in progress.deltas for row in delta.top_logprobs]
    assert tops == response.top_logprobs
    assert len(progress.deltas) > 10


async def test_what_would_kill_sglang_is_refused_and_the_engine_lives(backend):
    with pytest.raises(DataError, match="vocabulary"):
        asked = request(1).model_copy(update={"input_ids": (3, VOCAB_SIZE)})
        await backend.generate(asked)
    with pytest.raises(DataError, match="enable-deterministic-inference"):
        await backend.generate(request(1, seed=3))
    assert len((await backend.generate(request(1, 5))).output_tokens) == 5
    assert backend.failure is None


async def test_the_longest_sequence_is_served_whole(backend):
    limit = backend.limits.max_context
    assert len((await backend.generate(request(0, limit - 3))).output_tokens) == limit - 3


# Aborts and pauses.


async def test_an_aborted_sequence_goes_on_from_its_prefix(backend, policies):
    asked, progress = request(5, 200), Progress(30)
    task = asyncio.create_task(backend.generate(asked, progress))
    await ready(progress)
    await backend.abort(asked.rid)
    part = await asyncio.wait_for(task, PATIENCE_S)
    assert part.stop_reason == "interrupt"
    assert 30 <= len(part.output_tokens) < 200
    prefix = [*asked.input_ids, *part.output_tokens]
    rest = await backend.generate(
        LLMRequest(
            rid="rest",
            input_ids=prefix,
            gconfig=SamplingConfig(max_new_tokens=20, ignore_eos=True),
        )
    )
    assert rest.cached_tokens >= len(prefix) - 2  # what was computed before is not computed again
    tokens = part.output_tokens + rest.output_tokens
    got = torch.tensor(part.output_logprobs + rest.output_logprobs, dtype=torch.float64)
    model = policies.model(backend.version)
    expected = reference_logprobs(model, list(asked.input_ids), tokens)
    assert (got - expected).abs().max() < TOLERANCE


async def test_a_caller_that_goes_away_frees_the_engine(backend):
    progress = Progress(5)
    task = asyncio.create_task(backend.generate(request(7, 240), progress))
    await ready(progress)
    task.cancel()
    async with asyncio.timeout(PATIENCE_S):
        while not await backend.flush():  # noqa: ASYNC110 - refused while anything runs
            await asyncio.sleep(0.01)
    assert backend.load().running == 0


@pytest.mark.parametrize("mode", ["in_place", "retract"])
async def test_nothing_is_sampled_in_a_pause(backend, policies, mode):
    asked, progress = request(8, 150), Progress(20)
    task = asyncio.create_task(backend.generate(asked, progress))
    await ready(progress)
    await backend.pause(mode)
    await backend._settle()
    seen = len(progress.tokens)
    held = asyncio.create_task(backend.generate(request(9, 5)))
    assert await backend.flush() == (mode == "retract")
    await backend._settle()
    assert len(progress.tokens) == seen < 150
    assert not held.done()
    await backend.resume()
    response, later = await asyncio.wait_for(asyncio.gather(task, held), PATIENCE_S)
    assert len(later.output_tokens) == 5
    assert response.num_recomputes == (mode == "retract")
    assert error_of(response, policies.recomputed(asked, response)) < TOLERANCE


async def test_a_pause_may_end_what_runs(backend):
    progress = Progress(10)
    task = asyncio.create_task(backend.generate(request(10, 200), progress))
    await ready(progress)
    await backend.pause("abort")
    response = await asyncio.wait_for(task, PATIENCE_S)
    assert response.stop_reason == "interrupt"
    assert progress.tokens == response.output_tokens
    await backend.resume()


# Versions.


@pytest.mark.parametrize("policy", ["keep", "recompute", "abort", "drain", "keep"])
async def test_each_token_has_the_version_that_sampled_it(backend, policies, policy):
    old = backend.version
    meta = policies.publish()
    staged = await asyncio.to_thread(backend.stage, meta, DiskReader(str(policies.root)))
    asked = [request(20 + i, 160) for i in range(NUM_SLOTS + 4)]
    readers = {i: Progress(40) for i in range(0, len(asked), 3)}
    tasks = [
        asyncio.create_task(backend.generate(one, readers.get(i))) for i, one in enumerate(asked)
    ]
    await ready(readers[0])
    started = time.monotonic()
    assert await backend.swap(staged, policy) == len(asked)
    took_s = time.monotonic() - started
    assert backend.version == meta.version
    responses = await asyncio.wait_for(asyncio.gather(*tasks), PATIENCE_S)
    expect = policies.recomputed if policy == "recompute" else policies.replayed
    errors = [error_of(r, expect(one, r)) for one, r in zip(asked, responses, strict=True)]
    show(f"{policy}: swap {took_s * 1e3:.0f} ms, max error {max(errors):.1e}")
    assert max(errors) < TOLERANCE
    for index, response in enumerate(responses):
        ends = [0, *(end for _, _, end in response.version_runs)]
        assert [start for _, start, _ in response.version_runs] == ends[:-1]
        assert ends[-1] == len(response.output_tokens)
        assert response.output_versions == sorted(response.output_versions)
        if index in readers:
            assert readers[index].tokens == response.output_tokens
            assert readers[index].versions == response.output_versions
    crossed = [r for r in responses if len(r.version_runs) == 2]
    interrupted = [r for r in responses if r.stop_reason == "interrupt"]
    if policy in ("keep", "recompute"):
        assert len(crossed) == NUM_SLOTS
        assert all(r.num_recomputes == (policy == "recompute") for r in crossed)
        assert {r.version_runs[0][0] for r in crossed} == {old}
    assert bool(interrupted) == (policy == "abort")


async def test_a_prompt_that_old_weights_read_is_read_again_after_keep(backend, policies):
    asked = request(11, 10)
    await backend.generate(asked)
    assert (await backend.generate(asked)).cached_tokens > 0
    meta = policies.publish()
    await backend.swap(backend.stage(meta, DiskReader(str(policies.root))), "keep")
    response = await backend.generate(asked)
    assert response.cached_tokens == 0
    assert error_of(response, policies.recomputed(asked, response)) < TOLERANCE


async def test_a_swap_in_a_pause_is_true_too(backend, policies):
    asked, progress = request(12, 100), Progress(20)
    task = asyncio.create_task(backend.generate(asked, progress))
    await ready(progress)
    await backend.pause("in_place")
    meta = policies.publish()
    await backend.swap(backend.stage(meta, DiskReader(str(policies.root))), "keep")
    assert backend.is_paused
    await backend.resume()
    response = await asyncio.wait_for(task, PATIENCE_S)
    assert [version for version, _, _ in response.version_runs] == [meta.version - 1, meta.version]
    assert error_of(response, policies.recomputed(asked, response)) < TOLERANCE


async def test_a_version_of_another_shape_is_refused_and_the_old_one_serves(
    backend, policies, tmp_path
):
    tensors = dict(policies.models[0].named_parameters())
    tensors["lm_head.weight"] = torch.zeros(VOCAB_SIZE - 1, 32)
    meta = DiskPublisher(str(tmp_path), 2, 1 << 20).publish(999, tensors.items())
    with pytest.raises(SyncError, match="another model"):
        backend.stage(meta, DiskReader(str(tmp_path)))
    asked = request(13)
    response = await backend.generate(asked)
    assert error_of(response, policies.recomputed(asked, response)) < TOLERANCE


async def test_a_version_that_vanished_is_refused_and_the_old_one_serves(backend, policies):
    old = backend.version
    meta = policies.publish()
    staged = backend.stage(meta, DiskReader(str(policies.root)))
    shutil.rmtree(meta.path)
    progress = Progress(10)
    task = asyncio.create_task(backend.generate(request(14, 60), progress))
    await ready(progress)
    with pytest.raises(SyncError, match="refused"):
        await backend.swap(staged, "keep")
    assert backend.version == old
    asked, response = request(14, 60), await asyncio.wait_for(task, PATIENCE_S)
    assert response.version_runs == [(old, 0, 60)]
    assert error_of(response, policies.replayed(asked, response)) < TOLERANCE
    policies.newest += 1  # so that the next version has other weights than the one that serves


async def test_a_trainer_broadcasts_a_version_in_mid_flight(backend, policies):
    version = backend.version + 1
    policies.newest = version
    folder = policies.folders[version % 2]
    names = [name for name, _ in policies.model(version).named_parameters()]
    shapes = [list(p.shape) for _, p in policies.model(version).named_parameters()]
    half = len(names) // 2
    buckets = [
        TensorBucket(names[part], ["float32"] * len(names[part]), shapes[part])
        for part in (slice(half), slice(half, None))
    ]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    program = Path(__file__).with_name("sglang_trainer.py")
    trainer = await asyncio.create_subprocess_exec(
        *(sys.executable, str(program), str(port), "wg"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert await trainer.stdout.readline() == b"here\n"
        await backend.init_group(GroupMember("wg", "127.0.0.1", port, 1, 2, "gloo"), PATIENCE_S)
        asked, progress = request(15, 150), Progress(30)
        task = asyncio.create_task(backend.generate(asked, progress))
        await ready(progress)
        order = {"folder": str(folder), "names": names, "mode": "plain"}
        trainer.stdin.write(json.dumps(order).encode() + b"\n")
        await backend.update_from_group(GroupUpdate(version, "wg", buckets), "recompute")
        assert await trainer.stdout.readline() == b"done\n"
        response = await asyncio.wait_for(task, PATIENCE_S)
        assert [run[0] for run in response.version_runs] == [version - 1, version]
        error = error_of(response, policies.recomputed(asked, response))
        show(f"gloo broadcast: max error {error:.1e}")
        assert error < TOLERANCE
        await backend.destroy_group("wg")
        with pytest.raises(SyncError, match="does not exist"):
            await backend.destroy_group("wg")
    finally:
        trainer.stdin.close()
        trainer.kill()
        await trainer.wait()


async def test_counters_tell_what_was_done(backend):
    load = backend.load()
    assert load.generated_tokens > 1000
    assert load.kv_capacity_tokens == 16384
    assert 0 < load.busy_s < load.uptime_s
    assert (load.running, load.queued) == (0, 0)


async def test_the_death_of_the_engine_is_noticed_and_told(backend):
    """The last one on this engine."""
    progress = Progress(5)
    task = asyncio.create_task(backend.generate(request(16, 240), progress))
    await ready(progress)
    started = time.monotonic()
    os.kill(backend._engine.pid, signal.SIGKILL)
    with pytest.raises(BackendError):
        await task
    async with asyncio.timeout(PATIENCE_S):
        while backend.failure is None:  # noqa: ASYNC110 - a word, no event
            await asyncio.sleep(0.01)
    show(f"death noticed after {time.monotonic() - started:.2f} s")
    assert "ended with status -9" in backend.failure
    with pytest.raises(BackendError, match="ended with status -9"):
        await backend.generate(request(17))


# The whole server.


async def generated(client: httpx.AsyncClient, asked: LLMRequest) -> LLMResponse:
    answer = await client.post(http.GENERATE, json=asked.model_dump())
    return LLMResponse.model_validate_json(answer.content)


async def accepted(client: httpx.AsyncClient, path: str, body: dict) -> None:
    answer = await client.post(path, json=body)
    assert answer.status_code == 200, answer.text


async def has_tokens(client: httpx.AsyncClient) -> None:
    """Wait until a sequence is being decoded."""
    async with asyncio.timeout(PATIENCE_S):
        while (await client.get(http.STATUS)).json()["servers"][0]["running"] == 0:  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def test_a_server_with_sglang_behind_it_serves_updates_and_ends_with_it(policies, tmp_path):
    """Its engine runs without a pipeline: there penalties are exact, and spans need no correction."""
    ready_file = tmp_path / "ready.json"
    config = {
        "service": {"port": 0, "ready_file": str(ready_file)},
        "model": {"path": str(policies.folders[0])},
        "weights_root": str(policies.root),
        "backend": {
            "type": "sglang",
            "python": str(PYTHON),
            "args": {**ARGS, "--disable-overlap-schedule": True},
            "env": ENV,
            "log_file": str(tmp_path / "sglang.log"),
        },
    }
    file = tmp_path / "server.yaml"
    file.write_text(json.dumps(config))
    argv = [sys.executable, "-m", "inference_server", "--config", str(file)]
    spec = ProcessSpec("the server", argv, tmp_path / "server.log", ready_file=ready_file)
    server = Process(spec)
    try:
        url = await asyncio.to_thread(server.wait_ready, 200.0)
        async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as client:
            asked = request(1, 40, presence_penalty=0.7, frequency_penalty=0.4, temperature=0.8)
            response = await generated(client, asked)
            expected = shaped_logprobs(policies.model(0), asked, response.output_tokens)
            show(f"over HTTP: max error under penalties {error_of(response, expected):.1e}")
            assert error_of(response, expected) < TOLERANCE

            policies.newest += policies.newest % 2  # an odd version is the other model
            asked = request(18, 240)
            for policy, expect in (("keep", policies.replayed), ("recompute", policies.recomputed)):
                meta = policies.publish()
                body = {"version": meta.version, "path": meta.path}
                await accepted(client, http.WEIGHTS_PREPARE, body)
                running = asyncio.create_task(generated(client, asked))
                await has_tokens(client)
                await accepted(client, http.WEIGHTS_COMMIT, {**body, "policy": policy})
                response = await running
                error = error_of(response, expect(asked, response))
                show(f"over HTTP, {policy}: {response.version_runs}, max error {error:.1e}")
                assert len(response.version_runs) == 2
                assert error < TOLERANCE
        os.kill(child_of(server.pid), signal.SIGKILL)
        assert await asyncio.to_thread(server.wait, 60.0) is not None
        assert "the backend died" in (tmp_path / "server.log").read_text()
    finally:
        await asyncio.to_thread(server.stop, 20.0)
