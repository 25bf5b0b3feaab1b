"""The SGLang backend on a real SGLang server, on the CPU: `make test-sglang`.

One engine serves the module; versions 0, 2, 4, ... have the weights of one tiny Llama, the odd ones
those of another, and every logprob is compared with what transformers computes from the same files.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import sys
import time
from asyncio.subprocess import PIPE, STDOUT
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import pytest_asyncio
import torch

from headway.contracts.config.model import ModelConfig
from headway.contracts.config.sampling import SamplingConfig
from headway.contracts.config.server import SGLangConfig
from headway.contracts.config.weight_sync import DeltaConfig, ReceiverConfig, StoredSync
from headway.contracts.errors import BackendError, DataError, SyncError
from headway.contracts.http import paths
from headway.contracts.http.weights import (
    GroupRankBody,
    WeightAbortRequest,
    WeightCommitRequest,
    WeightPrepareRequest,
)
from headway.contracts.types import LLMRequest, LLMResponse, WeightUpdateMeta
from headway.runtime.process import Process, ProcessSpec
from headway.text.tokenizer import TextTokenizer
from inference_server.backends.sglang.backend import SGLangBackend
from inference_server.version_gate import VersionGate
from tests.integration.real_engines import (
    allowed_logprobs,
    check_bundled_run,
    check_logprobs,
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
    CONTEXT,
    EOS,
    VOCAB_SIZE,
    load_reference,
    reference_logits,
    reference_logprobs,
    save_wide_llama,
    write_char_tokenizer,
)
from weight_sync.checkpoint_names import CheckpointNames
from weight_sync.deadline import Deadline
from weight_sync.publisher import StoredPublisher
from weight_sync.receiver import make_receiver
from weight_sync.transports.disk import make_local_publisher
from weight_sync.transports.shared_memory import SharedMemoryStore

PYTHON = engine_python("sglang")
pytestmark = [*needs("sglang"), pytest.mark.asyncio(loop_scope="module")]
DEADLINE_S = 120.0
TOLERANCE = 2e-4
NUM_SLOTS = 8
FORWARD_S = 0.02
ENV = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
}
ARGS = {
    "--device": "cpu",
    "--attention-backend": "torch_native",
    "--lora-backend": "torch_native",
    "--max-total-tokens": 16384,
    "--max-running-requests": NUM_SLOTS,
    "--skip-server-warmup": True,
}


def save_llama(folder: Path, seed: int) -> None:
    save_wide_llama(folder, seed, context=CONTEXT)


class Policies:
    """Two models, and versions that alternate between them."""

    def __init__(self, root: Path, save: Callable[[Path, int], None] = save_llama) -> None:
        """
        Args:
            root: what is written goes there.
            save: writes the model of a seed to a folder.
        """
        self.folders = [root / f"model{seed}" for seed in (0, 1)]
        for seed, folder in enumerate(self.folders):
            save(folder, seed)
            write_char_tokenizer(folder)
        self.models = [load_reference(folder) for folder in self.folders]
        self.root = root / "versions"
        self.publisher = make_local_publisher(str(self.root))
        self.newest = 0

    def model(self, version: int) -> torch.nn.Module:
        return self.models[version % 2]

    def publish(self) -> WeightUpdateMeta:
        self.newest += 1
        model = self.model(self.newest)
        weights = CheckpointNames(model).split(model.named_parameters())
        return self.publisher.publish(self.newest, weights)

    def reader(self):
        receiver = make_receiver(ReceiverConfig(allow=(str(self.root),)))
        return receiver.within(Deadline(DEADLINE_S))

    def replayed(self, asked: LLMRequest, response: LLMResponse) -> torch.Tensor:
        return replayed(self.model, asked, response)

    def recomputed(self, asked: LLMRequest, response: LLMResponse) -> torch.Tensor:
        return recomputed(self.model, asked, response)


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory):
    policies = Policies(tmp_path_factory.mktemp("sglang"))
    yield policies
    policies.publisher.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def backend(policies: Policies, tmp_path_factory: pytest.TempPathFactory):
    log = tmp_path_factory.mktemp("log") / "sglang.log"
    config = SGLangConfig(
        python=str(PYTHON),
        args=ARGS,
        env=ENV,
        log_file=str(log),
        receive="group",
        max_adapters=2,
        max_adapter_rank=8,
    )
    async with serving(config, policies) as engine:
        yield engine


@asynccontextmanager
async def serving(config: SGLangConfig, policies: Policies) -> AsyncIterator[SGLangBackend]:
    """An engine that answers, with the first policy's weights."""
    folder = str(policies.folders[0])
    model = ModelConfig(path=folder, dtype="float32")
    engine = SGLangBackend(config, model, 0, TextTokenizer(folder))
    started = time.monotonic()
    await engine.start()
    show(f"SGLang answers after {time.monotonic() - started:.0f} s")
    yield engine
    await engine.aclose()


@pytest_asyncio.fixture(loop_scope="module")
async def slowly(backend):
    """A tiny model on an idle machine would end before a swap comes, and on a busy one, too."""
    await backend._engine.post("/slow_down", {"forward_sleep_time": FORWARD_S})
    yield
    if backend.failure is None:
        await backend._engine.post("/slow_down", {"forward_sleep_time": None})


def request(index: int, count: int = 20, **extra) -> LLMRequest:
    """A prompt of its own per index; past the end of sequence unless told otherwise."""
    fields = {name: extra.pop(name) for name in ("logprob_start", "top_logprobs") if name in extra}
    generator = torch.Generator().manual_seed(index)
    prompt = torch.randint(2, VOCAB_SIZE, (3 + index % 9,), generator=generator).tolist()
    options = {"ignore_eos": True, "max_new_tokens": count} | extra
    return LLMRequest(
        rid=f"r{index}", input_ids=prompt, gconfig=SamplingConfig(**options), **fields
    )


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
    await asyncio.wait_for(progress.reached.wait(), DEADLINE_S)


# Generation.


async def test_logprobs_are_those_of_transformers(backend, policies):
    options = [{}, {"temperature": 0.0}, {"temperature": 0.7}, {"top_k": 5, "top_p": 0.8}]
    asked = [request(i, 60, **options[i % 4]) for i in range(16)]
    await check_logprobs(backend, policies.model(backend.version), asked, TOLERANCE)


async def test_biases_shape_the_logprobs(backend, policies):
    asked = request(1, 40, temperature=0.8, logit_bias={7: 3.0, 9: -2.0})
    response = await backend.generate(asked)
    model = policies.model(backend.version)
    assert error_of(response, shaped_logprobs(model, asked, response.output_tokens)) < TOLERANCE


async def test_outputs_follow_a_regular_expression_or_a_schema(backend, policies):
    free, tokenizer = {"ignore_eos": False}, TextTokenizer(str(policies.folders[0]))
    values = [12, "AB", "C"]
    by_regex = [request(i, 40, regex="[A-C]{3}-[0-9]{2}", **free) for i in range(6)]
    by_schema = [request(6 + i, 40, json_schema={"enum": values}, **free) for i in range(6)]
    asked = by_regex + by_schema
    responses = await asyncio.gather(*map(backend.generate, asked))
    texts = [tokenizer.decode(response.output_tokens) for response in responses]
    show(f"texts: {texts}")
    assert all((r.stop_reason, r.stop_match) == ("stop", EOS) for r in responses)
    assert all(re.fullmatch("[A-C]{3}-[0-9]{2}", text) for text in texts[:6])
    assert all(json.loads(text) in values for text in texts[6:])
    model = policies.model(backend.version)
    places = [*["ABC"] * 3, "-", *["0123456789"] * 2]
    allowed = [sorted(ord(c) - ord(" ") + 2 for c in place) for place in places]
    for one, response in zip(by_regex, responses[:6], strict=True):
        expected = allowed_logprobs(model, one, response.output_tokens, [*allowed, [EOS]])
        assert error_of(response, expected) < TOLERANCE


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


@pytest.mark.usefixtures("slowly")
async def test_an_aborted_sequence_goes_on_from_its_prefix(backend, policies):
    asked, progress = request(5, 200), Progress(30)
    task = asyncio.create_task(backend.generate(asked, progress))
    await ready(progress)
    await backend.abort(asked.rid)
    part = await asyncio.wait_for(task, DEADLINE_S)
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


@pytest.mark.usefixtures("slowly")
@pytest.mark.parametrize("mode", ["in_place", "retract"])
async def test_nothing_is_sampled_in_a_pause(backend, policies, mode):
    asked, progress = request(8, 80), Progress(20)
    task = asyncio.create_task(backend.generate(asked, progress))
    await ready(progress)
    await backend.pause(mode)
    await backend._requests.settle()
    seen = len(progress.tokens)
    held = asyncio.create_task(backend.generate(request(9, 5)))
    assert await backend.flush() == (mode == "retract")
    await backend._requests.settle()
    assert len(progress.tokens) == seen < 80
    assert not held.done()
    await backend.resume()
    response, later = await asyncio.wait_for(asyncio.gather(task, held), DEADLINE_S)
    assert len(later.output_tokens) == 5
    assert response.num_recomputes == (mode == "retract")
    assert error_of(response, policies.recomputed(asked, response)) < TOLERANCE


# Versions.


@pytest.mark.usefixtures("slowly")
@pytest.mark.parametrize("policy", ["keep", "recompute", "abort", "drain", "keep"])
async def test_each_token_has_the_version_that_sampled_it(backend, policies, policy):
    old = backend.version
    meta = policies.publish()
    staged = await asyncio.to_thread(backend.stage, meta, policies.reader())
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
    responses = await asyncio.wait_for(asyncio.gather(*tasks), DEADLINE_S)
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
    await backend.swap(backend.stage(meta, policies.reader()), "keep")
    response = await backend.generate(asked)
    assert response.cached_tokens == 0
    assert error_of(response, policies.recomputed(asked, response)) < TOLERANCE


@pytest.mark.usefixtures("slowly")
async def test_a_swap_in_a_pause_is_true_too(backend, policies):
    asked, progress = request(12, 120), Progress(20)
    task = asyncio.create_task(backend.generate(asked, progress))
    await ready(progress)
    await backend.pause("in_place")
    meta = policies.publish()
    await backend.swap(backend.stage(meta, policies.reader()), "keep")
    assert backend.is_paused
    await backend.resume()
    response = await asyncio.wait_for(task, DEADLINE_S)
    assert [version for version, _, _ in response.version_runs] == [meta.version - 1, meta.version]
    assert error_of(response, policies.recomputed(asked, response)) < TOLERANCE


async def test_a_version_of_another_shape_is_refused_and_the_old_one_serves(
    backend, policies, tmp_path
):
    tensors = dict(policies.models[0].named_parameters())
    tensors["lm_head.weight"] = torch.zeros(VOCAB_SIZE - 1, 32)
    with closing(make_local_publisher(str(tmp_path))) as publisher:
        meta = publisher.publish(999, tensors.items())
    receiver = make_receiver(ReceiverConfig(allow=(str(tmp_path),)))
    with pytest.raises(SyncError, match="another model"):
        backend.stage(meta, receiver.within(Deadline(DEADLINE_S)))
    asked = request(13)
    response = await backend.generate(asked)
    assert error_of(response, policies.recomputed(asked, response)) < TOLERANCE


async def test_a_version_that_vanished_is_refused_and_the_old_one_serves(backend, policies):
    old = backend.version
    meta = policies.publish()
    staged = backend.stage(meta, policies.reader())
    shutil.rmtree(meta.path)
    progress = Progress(10)
    task = asyncio.create_task(backend.generate(request(14, 60), progress))
    await ready(progress)
    with pytest.raises(SyncError, match="refused"):
        await backend.swap(staged, "keep")
    assert backend.version == old
    asked, response = request(14, 60), await asyncio.wait_for(task, DEADLINE_S)
    assert response.version_runs == [(old, 0, 60)]
    assert error_of(response, policies.replayed(asked, response)) < TOLERANCE
    policies.newest += 1  # so that the next version has other weights than the one that serves


# Transactions.

BUCKET = "/update_weights_from_distributed"
LOAD = "/update_weights_from_disk"


class Trainer:
    """`sglang_publisher.py` as a process, with the orders of its publications."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.epoch = 0

    async def told(self, word: str) -> str:
        self.process.stdin.write(word.encode() + b"\n")
        return await self.heard()

    async def heard(self) -> str:
        line = await asyncio.wait_for(self.process.stdout.readline(), DEADLINE_S)
        return line.decode().strip()

    def tell(self, word: str) -> None:
        self.process.stdin.write(word.encode() + b"\n")

    async def announce(self, version: int) -> WeightPrepareRequest:
        self.epoch += 1
        return WeightPrepareRequest(
            epoch=self.epoch,
            version=version,
            path=await self.told(f"announce {version}"),
            group_rank=GroupRankBody(rank=1, world_size=2),
        )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def trainer(policies: Policies):
    program = Path(__file__).with_name("sglang_publisher.py")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, str(program), *map(str, policies.folders)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    trainer = Trainer(process)
    assert await trainer.heard() == "here"
    yield trainer
    if process.returncode is None:
        process.kill()
    await process.wait()


def gate_of(backend: SGLangBackend, policies: Policies) -> VersionGate:
    receiver = make_receiver(ReceiverConfig(allow=("gloo:", f"shm://{policies.root}")))
    return VersionGate(backend, receiver, "keep", DEADLINE_S)


class Crowd:
    """More requests than fit, in flight."""

    def __init__(self, backend: SGLangBackend, first: int) -> None:
        self.asked = [request(first + i, 160) for i in range(NUM_SLOTS + 4)]
        self.reader = Progress(30)
        self._tasks = [
            asyncio.create_task(backend.generate(one, None if i else self.reader))
            for i, one in enumerate(self.asked)
        ]

    async def is_under_way(self) -> None:
        await ready(self.reader)

    async def assert_truthful(self, expect) -> list[LLMResponse]:
        """Each token as probable as under the version that is said to have sampled it."""
        responses = await asyncio.wait_for(asyncio.gather(*self._tasks), DEADLINE_S)
        errors = [error_of(r, expect(one, r)) for one, r in zip(self.asked, responses, strict=True)]
        runs = {tuple(version for version, _, _ in r.version_runs) for r in responses}
        show(f"  {len(responses)} requests, versions {sorted(runs)}, max error {max(errors):.1e}")
        assert max(errors) < TOLERANCE
        assert self.reader.tokens == responses[0].output_tokens
        assert self.reader.versions == responses[0].output_versions
        return responses


async def assert_serves(backend, policies, version: int) -> None:
    """What a fresh prompt gets is what transformers computes from this version's files."""
    asked = request(60, 20, logprob_start=0)
    response = await backend.generate(asked)
    assert response.version_runs == [(version, 0, 20)]
    assert error_of(response, policies.recomputed(asked, response)) < TOLERANCE
    ids = list(asked.input_ids)
    prompt = reference_logprobs(policies.model(version), ids[:1], ids[1:])
    got = torch.tensor(response.prompt_logprobs[1:], dtype=torch.float64)
    assert (got - prompt).abs().max() < TOLERANCE


@pytest.fixture
def as_files(backend, monkeypatch):
    """The same engine, under the other way to receive."""
    config = backend._config.model_copy(update={"receive": "files"})
    monkeypatch.setattr(backend, "_config", config)


@pytest.mark.usefixtures("as_files", "slowly")
async def test_deltas_in_shared_memory_reach_the_engine_as_files(backend, policies):
    gate, epoch = gate_of(backend, policies), 0
    root = policies.root.parent / "shm"
    gate.receiver._config = ReceiverConfig(allow=(f"shm://{root}",))
    publisher = StoredPublisher(SharedMemoryStore(str(root)), StoredSync(delta=DeltaConfig()))
    for policy in ("keep", "recompute", "keep"):
        policies.newest, epoch = backend.version + 1, epoch + 1
        meta = publisher.publish(
            policies.newest, policies.model(policies.newest).named_parameters()
        )
        crowd = Crowd(backend, 100)
        await crowd.is_under_way()
        order = WeightPrepareRequest(epoch=epoch, version=meta.version, path=meta.path)
        started = time.monotonic()
        assert await gate.prepare(order) == meta.digest
        staged = time.monotonic()
        commit = WeightCommitRequest(epoch=epoch, version=meta.version, policy=policy)
        await gate.commit(commit)
        show(
            f"delta, {policy}: staged in {(staged - started) * 1e3:.0f} ms beside generation, "
            f"committed in {(time.monotonic() - staged) * 1e3:.0f} ms"
        )
        expect = policies.recomputed if policy == "recompute" else policies.replayed
        await crowd.assert_truthful(expect)
        await assert_serves(backend, policies, meta.version)
    publisher.close()
    gate.receiver.close()


async def broadcast(backend: Any, gate: VersionGate, trainer: Any, version: int) -> None:
    """Publish a version over Gloo and commit it, while the engine generates."""
    order = await trainer.announce(version)
    trainer.tell(f"publish {version}")
    digest = await gate.prepare(order)
    assert await trainer.heard() == digest
    assert not backend.is_paused
    await gate.commit(WeightCommitRequest(epoch=order.epoch, version=version))


@pytest.mark.usefixtures("as_files", "slowly")
async def test_a_broadcast_reaches_the_engine_as_files_while_it_generates(
    backend, policies, trainer
):
    gate = gate_of(backend, policies)
    policies.newest = version = backend.version + 1
    crowd = Crowd(backend, 120)
    await crowd.is_under_way()
    await broadcast(backend, gate, trainer, version)
    await crowd.assert_truthful(policies.replayed)
    await assert_serves(backend, policies, version)
    gate.receiver.close()


@pytest.mark.usefixtures("slowly")
@pytest.mark.parametrize("policy", ["keep", "recompute", "abort", "keep"])
async def test_a_version_flows_into_the_live_weights(backend, policies, trainer, policy):
    gate = gate_of(backend, policies)
    policies.newest = version = backend.version + 1
    crowd = Crowd(backend, 140)
    await crowd.is_under_way()
    order = await trainer.announce(version)
    started = time.monotonic()
    trainer.tell(f"publish {version}")
    digest = await gate.prepare(order)
    arrived = time.monotonic()
    assert await trainer.heard() == digest
    assert backend.version == version - 1
    answer = await gate.commit(
        WeightCommitRequest(epoch=order.epoch, version=version, policy=policy)
    )
    show(
        f"group, {policy}: joined and received in {(arrived - started) * 1e3:.0f} ms, "
        f"committed in {(time.monotonic() - arrived) * 1e3:.0f} ms"
    )
    assert (backend.version, answer.digest) == (version, digest)
    expect = policies.recomputed if policy == "recompute" else policies.replayed
    responses = await crowd.assert_truthful(expect)
    assert any(r.stop_reason == "interrupt" for r in responses) == (policy == "abort")
    await assert_serves(backend, policies, version)


async def test_adapters_change_the_base_that_serves(backend, policies, trainer, tmp_path):
    lora = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"]}
    folders = {
        name: save_adapter(tmp_path / name, policies.folders[0], seed, **lora)
        for seed, name in enumerate("ab", 1)
    }
    errors = []
    for version in (50, 51):
        for name, folder in folders.items():
            await backend.load_adapter(name, folder, version)
        if version == 50:
            await as_a_file(backend, policies)
        else:
            await as_a_broadcast(backend, policies, trainer)
        asked = [
            request(500 + i, 30).model_copy(update={"adapter": name})
            for i, name in enumerate(["a", "b", None] * 3)
        ]
        responses = await asyncio.gather(*map(backend.generate, asked))
        for one, response in zip(asked, responses, strict=True):
            base = load_reference(policies.folders[backend.version % 2])
            model = merged(base, one.adapter and folders[one.adapter])
            expected = reference_logprobs(model, list(one.input_ids), response.output_tokens)
            errors.append(error_of(response, expected))
            assert response.version_runs == [(version if one.adapter else backend.version, 0, 30)]
    show(f"max error of 18 x 30 logprobs: {max(errors):.1e}")
    assert max(errors) < TOLERANCE
    for name in folders:
        await backend.unload_adapter(name)
    assert dict(backend.adapters) == {}


@pytest.mark.usefixtures("slowly")
async def test_an_abort_in_the_middle_of_a_broadcast_brings_the_old_version_back(
    backend, policies, trainer
):
    await as_a_file(backend, policies)
    old = backend.version
    gate = gate_of(backend, policies)
    crowd = Crowd(backend, 160)
    buckets, loads = times_asked(backend, BUCKET), times_asked(backend, LOAD)
    await crowd.is_under_way()
    order = await trainer.announce(old + 1)
    trainer.tell(f"publish {old + 1} 2")
    preparing = asyncio.create_task(gate.prepare(order))
    assert await trainer.heard() == "stalled"
    await is_torn(backend, buckets)
    started = time.monotonic()
    gate.abort(WeightAbortRequest(epoch=order.epoch, version=old + 1))
    with pytest.raises(SyncError, match="was aborted"):
        await preparing
    await backend.flush()  # comes after the transfer
    assert times_asked(backend, LOAD) == loads + 1
    show(f"old version back after {(time.monotonic() - started) * 1e3:.0f} ms")
    assert (await trainer.told(f"cancel {old + 1}")).startswith("failed")
    assert (backend.version, backend.failure) == (old, None)
    responses = await crowd.assert_truthful(policies.replayed)
    assert {run[0] for r in responses for run in r.version_runs} == {old}
    await assert_serves(backend, policies, old)


@pytest.mark.usefixtures("slowly")
async def test_what_was_received_and_not_committed_is_taken_back(backend, policies, trainer):
    old = backend.version
    gate = gate_of(backend, policies)
    crowd = Crowd(backend, 180)
    await crowd.is_under_way()
    order = await trainer.announce(old + 1)
    trainer.tell(f"publish {old + 1}")
    assert await gate.prepare(order) == await trainer.heard()
    gate.abort(WeightAbortRequest(epoch=order.epoch, version=old + 1))
    responses = await crowd.assert_truthful(policies.replayed)
    assert {run[0] for r in responses for run in r.version_runs} == {old}
    await assert_serves(backend, policies, old)


@pytest.mark.usefixtures("slowly")
async def test_a_trainer_that_is_killed_in_the_middle_leaves_the_old_version(
    backend, policies, trainer
):
    """The last one with this trainer."""
    old = backend.version
    gate = gate_of(backend, policies)
    crowd = Crowd(backend, 200)
    buckets, loads = times_asked(backend, BUCKET), times_asked(backend, LOAD)
    await crowd.is_under_way()
    order = await trainer.announce(old + 3)  # others are used up
    trainer.tell(f"publish {old + 3} 2")
    preparing = asyncio.create_task(gate.prepare(order))
    assert await trainer.heard() == "stalled"
    await is_torn(backend, buckets)
    started = time.monotonic()
    trainer.process.kill()
    with pytest.raises(SyncError):
        await preparing
    assert times_asked(backend, LOAD) == loads + 1
    show(f"old version back {(time.monotonic() - started) * 1e3:.0f} ms after the trainer's death")
    responses = await crowd.assert_truthful(policies.replayed)
    assert {run[0] for r in responses for run in r.version_runs} == {old}
    await assert_serves(backend, policies, old)
    policies.newest = old


async def as_a_file(backend, policies) -> None:
    """A version that can be read again, and serves."""
    policies.newest = backend.version
    meta = policies.publish()
    await backend.swap(backend.stage(meta, policies.reader()), "keep")


async def as_a_broadcast(backend, policies, trainer) -> None:
    """A version that flows into the live weights, and serves."""
    gate = gate_of(backend, policies)
    policies.newest = version = backend.version + 1
    order = await trainer.announce(version)
    trainer.tell(f"publish {version}")
    digest = await gate.prepare(order)
    assert await trainer.heard() == digest
    await gate.commit(WeightCommitRequest(epoch=order.epoch, version=version, policy="keep"))


def times_asked(backend, path: str) -> int:
    """What the engine's log says."""
    return Path(backend._config.log_file).read_text().count(f"POST {path} ")


async def is_torn(backend, buckets: int) -> None:
    """Until the engine has received more buckets than these."""
    async with asyncio.timeout(DEADLINE_S):
        while times_asked(backend, BUCKET) <= buckets:  # noqa: ASYNC110 - it tells nobody
            await asyncio.sleep(0.01)


async def test_counters_tell_what_was_done(backend):
    load = backend.load()
    assert load.generated_tokens > 1000
    assert load.kv_capacity_tokens == 16384
    assert 0 < load.busy_s < load.uptime_s
    assert (load.running, load.queued) == (0, 0)


@pytest.mark.usefixtures("slowly")
async def test_the_engine_keeps_its_promises(backend, policies, tmp_path):
    """The suite of `headway engine check`, which leaves weights of its own behind."""
    model = str(policies.folders[backend.version % 2])
    command = [sys.executable, "-m", "headway.launch.cli", "engine", "check", backend._engine.url]
    command += ["--model", model, "--scratch", str(tmp_path)]
    run = await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=STDOUT)
    told = (await run.communicate())[0].decode()
    show(told)
    assert run.returncode == 0, told
    assert told.splitlines()[-1] == "28 hold, 0 do not, 0 left out"


async def test_the_death_of_the_engine_is_noticed_and_told(backend):
    """The last one on this engine."""
    progress = Progress(5)
    begun = asyncio.create_task(backend.generate(request(16, 240), progress))
    await ready(progress)
    engine = psutil.Process(backend._engine.pid)
    for child in engine.children(recursive=True):
        child.suspend()  # however slow this process is, no further request is answered
    unanswered = asyncio.create_task(backend.generate(request(18, 240)))
    await asyncio.sleep(0)
    started = time.monotonic()
    engine.kill()
    with pytest.raises(BackendError):
        await unanswered
    await asyncio.gather(begun, return_exceptions=True)
    async with asyncio.timeout(DEADLINE_S):
        while backend.failure is None:  # noqa: ASYNC110 - a word, no event
            await asyncio.sleep(0.01)
    show(f"death noticed after {time.monotonic() - started:.2f} s")
    assert "ended with status -9" in backend.failure
    with pytest.raises(BackendError, match="ended with status -9"):
        await backend.generate(request(17))


# The whole server.


async def generated(client: httpx.AsyncClient, asked: LLMRequest) -> LLMResponse:
    answer = await client.post(paths.GENERATE, json=asked.model_dump())
    return LLMResponse.model_validate_json(answer.content)


async def accepted(client: httpx.AsyncClient, path: str, body: dict) -> None:
    answer = await client.post(path, json=body)
    assert answer.status_code == 200, answer.text


async def has_tokens(client: httpx.AsyncClient) -> None:
    """Wait until a sequence is being decoded."""
    async with asyncio.timeout(DEADLINE_S):
        while (await client.get(paths.STATUS)).json()["servers"][0]["running"] == 0:  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def test_a_server_with_sglang_behind_it_serves_updates_and_ends_with_it(policies, tmp_path):
    """Its engine runs without a pipeline: there penalties are exact, and spans need no correction."""
    ready_file = tmp_path / "ready.json"
    config = {
        "service": {"port": 0, "ready_file": str(ready_file)},
        "model": {"path": str(policies.folders[0])},
        "weights": {"allow": [str(policies.root)]},
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
        async with httpx.AsyncClient(base_url=url, timeout=DEADLINE_S) as client:
            asked = request(1, 40, presence_penalty=0.7, frequency_penalty=0.4, temperature=0.8)
            response = await generated(client, asked)
            expected = shaped_logprobs(policies.model(0), asked, response.output_tokens)
            show(f"over HTTP: max error under penalties {error_of(response, expected):.1e}")
            assert error_of(response, expected) < TOLERANCE

            policies.newest += policies.newest % 2  # an odd version is the other model
            asked = request(18, 240)
            for policy, expect in (("keep", policies.replayed), ("recompute", policies.recomputed)):
                meta = policies.publish()
                body = {"version": meta.version, "epoch": meta.version}
                await accepted(client, paths.WEIGHTS_PREPARE, {**body, "path": meta.path})
                running = asyncio.create_task(generated(client, asked))
                await has_tokens(client)
                await accepted(client, paths.WEIGHTS_COMMIT, {**body, "policy": policy})
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


# A whole run.


async def test_the_bundled_file_trains_on_it_with_other_flags_alone(tmp_path: Path):
    args = {**ARGS, "--mem-fraction-static": None}
    await check_bundled_run(
        tmp_path, "run_sglang.yaml", {"python": PYTHON, "args": args, "env": ENV}
    )
