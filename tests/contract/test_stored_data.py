"""Data that was stored before names of the code changed: ledgers, versions, a checkpoint.

`data/stored` was written by commit fa70b1c; what a store spells is read for as long as its schema is
supported, whatever the code calls it.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import sqlite3
import tarfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing
from pathlib import Path

import pytest
import torch
from redis.asyncio import Redis
from transformers import LlamaConfig, LlamaForCausalLM

from gateway.consumers.consumers import Consumers
from gateway.ledger.base import Ledger
from gateway.ledger.make import make_ledger
from gateway.sessions.session_directory import SessionDirectory
from gateway.versions.publication_state import PublicationState
from gateway.versions.shared_lock import SharedLock
from headway.contracts.codec import decode_groups
from headway.contracts.config.gateway import GatewayConfig
from headway.contracts.config.recovery import RecoveryConfig
from headway.contracts.config.weight_sync import ReceiverConfig
from headway.contracts.errors import ConfigError
from headway.contracts.http.weights import WeightRecord
from headway.contracts.types import WeightUpdateMeta
from headway.runtime.config import load_config
from tests.numeric.engines import open_engine, parameters_of
from tests.unit.gateway.ledger_suite import Play, RedisServer
from trainer.checkpoint import CheckpointContents, Checkpoints, RunState
from trainer.topology import Topology
from weight_sync.deadline import Deadline
from weight_sync.receiver import make_receiver

STORED = Path(__file__).parent / "data" / "stored"
STATES = {
    "consumed": "consumed",
    "delivered": "ready",  # given back when the consumer attached
    "failed": "failed",
    "filtered": "filtered",
    "leased": "leased",
    "queued": "queued",
    "ready": "ready",
    "replayed": "delivered",  # again, since it was not consumed
}


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory) -> Iterator[RedisServer]:
    if not RedisServer.is_installed():
        pytest.skip("redis-server is not installed: apt-get install redis-server")
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    yield server
    server.stop()


async def restore_redis(url: str) -> None:
    """Write the recorded keys; text stands for bytes in latin-1."""
    keys = json.loads((STORED / "ledger-redis.json").read_text())
    async with Redis.from_url(url, encoding="latin-1") as client:
        for key, record in keys.items():
            value = record["value"]
            if record["type"] == "hash":
                await client.hset(key, mapping=value)
            elif record["type"] == "zset":
                await client.zadd(key, dict(value))
            elif record["type"] == "list":
                await client.rpush(key, *value)
            elif record["type"] == "set":
                await client.sadd(key, *value)
            else:
                await client.set(key, value)


@pytest.fixture(params=["sqlite", "redis"])
async def address(request, tmp_path: Path) -> str:
    if request.param == "redis":
        server = request.getfixturevalue("redis_server")
        await restore_redis(server.url)
        return f"{server.url}?prefix=run0"
    path = tmp_path / "ledger.sqlite"
    with closing(sqlite3.connect(path)) as database:
        database.executescript((STORED / "ledger.sql").read_text())
    return str(path)


@asynccontextmanager
async def opened(address: str) -> AsyncIterator[Ledger]:
    ledger = make_ledger(address)
    await ledger.open("two", 30.0)
    yield ledger
    await ledger.close()


async def test_an_old_ledger_is_whole_and_goes_on(address: str):
    async with opened(address) as ledger:
        play = Play(ledger)
        await play.check()
        states = {name: await play.state(name) for name in STATES}
        # The lease ran out long ago: Redis sees it when it opens, SQLite when it is asked.
        await ledger.expire()
        assert states | {"leased": "leased"} == STATES
        assert await play.state("leased") == "queued"
        assert (await ledger.get("failed")).reason == "workflow: it raised"
        delivery = await play.deliver(count=1, delivery_id="d3", version=1)
        (payload,) = delivery.payloads
        (group,) = decode_groups(payload)
        assert group.oldest_version == 1
        assert set(await play.lease(version=2)) == {"leased", "queued"}
        await play.complete("leased", version=2)
        await play.check()


async def test_an_old_ledger_knows_consumer_owner_and_session(address: str):
    async with opened(address) as ledger:
        consumers = Consumers(ledger)
        await consumers.refresh()
        assert (consumers.name, consumers.version) == ("default", 1)
        consumers.check_term(1)
        assert await ledger.get_value("owner of default") == "trainer"
        session = await SessionDirectory(ledger).find("leased")
        assert session is not None
        assert (session.session_id, session.end_url) == ("s1", "http://a/end")


async def test_an_old_ledger_knows_what_was_published(address: str):
    async with opened(address) as ledger:
        state = PublicationState(ledger)
        await state.open()
        assert state.committed == WeightRecord(
            version=2, path="file:/weights/2", digest=f"{2:064x}"
        )
        assert (state.head, state.pinned, state.num_expected) == (2, 1, 2)
        assert [record.version for record in state.kept] == [1, 2]
        assert state.was_swapped("server-2")
        assert state.reserved is not None
        assert (state.reserved.name, state.reserved_servers) == ("evaluator", ("server-2",))
        epoch = state.epoch
        assert await state.next_epoch() > epoch
        async with asyncio.timeout(10.0), SharedLock(ledger, 1.0).held():
            pass


def test_old_versions_are_received(tmp_path: Path):
    shutil.copytree(STORED / "weights", tmp_path / "weights")
    with closing(make_receiver(ReceiverConfig(allow=(str(tmp_path),)))) as receiver:
        meta = WeightUpdateMeta(2, str(tmp_path / "weights" / "v00000002"))
        shapes = {"model.embed.weight": torch.Size((3, 4)), "norm.weight": torch.Size((2,))}
        staged = receiver.within(Deadline(30.0)).stage(meta, shapes)
        received = {name: tensor.clone() for name, tensor in staged.tensors.items()}
    assert torch.equal(
        received["model.embed.weight"], torch.arange(12, dtype=torch.float32).reshape(3, 4) / 7
    )
    assert received["norm.weight"].tolist() == [2.5, -1.0]


def test_an_old_checkpoint_is_loaded(tmp_path: Path):
    with tarfile.open(STORED / "checkpoint.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    config = LlamaConfig(vocab_size=61, max_position_embeddings=256, **sizes, **heads)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    engine = open_engine(tmp_path / "model")
    alone = Topology(0, 1, torch.device("cpu"))
    checkpoints = Checkpoints(tmp_path, RecoveryConfig(), alone)
    state = checkpoints.load_newest(CheckpointContents({"model": engine}))
    assert state == RunState("run-1", step=3, version=3, cursor=12, trajectories=24)
    loaded = parameters_of(engine)["model.embed_tokens.weight"]
    assert loaded.double().sum().item() == pytest.approx(0.6968, abs=1e-4)


def test_an_old_setting_is_refused_with_the_new_one(tmp_path: Path):
    file = tmp_path / "gateway.yaml"
    file.write_text("executor: {max_queued_each: 10}\n")
    with pytest.raises(ConfigError, match=r"executor\.max_queued_each; did you mean"):
        load_config(GatewayConfig, ["--config", str(file)])
