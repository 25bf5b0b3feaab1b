"""What only the SQLite ledger has: a file that others can edit, older files, and calls that share a
transaction."""

import asyncio
import sqlite3
import time
from contextlib import closing

import pytest

from gateway.ledger.on_sqlite import worker
from gateway.ledger.sqlite import SqliteLedger
from headway.contracts.codec import encode_groups
from headway.contracts.errors import ConfigError, Conflict, StateError
from headway.runtime.tasks import cancel_and_wait
from tests.unit.gateway.ledger_suite import ALL, Play, admit
from tests.unit.gateway.rollout_builders import make_group, make_request


@pytest.fixture
def path(tmp_path) -> str:
    return str(tmp_path / "ledger.sqlite")


@pytest.fixture
async def ledger(path):
    opened = SqliteLedger(path)
    await opened.open("one", 30.0)
    yield opened
    await opened.close()


async def test_a_ledger_that_waits_for_a_lock_is_closed_without_it(path, monkeypatch):
    monkeypatch.setattr(worker, "BUSY_S", 60.0)
    opened = SqliteLedger(path)
    with closing(sqlite3.connect(path)) as other:
        other.execute("BEGIN EXCLUSIVE")
        opening = asyncio.create_task(opened.open("one", 30.0))
        await asyncio.sleep(0)
        began = time.monotonic()
        await cancel_and_wait([opening])
        assert time.monotonic() - began < 30.0, "it waited for the lock"


@pytest.fixture
async def edit(ledger, path):
    """Rollout `a` of 2 was consumed, `b` of 3 waits; edits go to the file."""
    play = Play(ledger)
    await play.finish("a", size=2)
    await play.deliver()
    await play.consume("a")
    await play.submit("b", size=3)
    await play.check()

    def edit(statement: str) -> None:
        with closing(sqlite3.connect(path)) as database, database:
            database.execute(statement)

    return edit


@pytest.mark.parametrize(
    ("statement", "lost", "duplicated"),
    [
        ("UPDATE rollouts SET state = 'consumed' WHERE id = 'b'", 3, 0),
        ("UPDATE rollouts SET state = 'queued' WHERE id = 'a'", 2, 0),
        ("DELETE FROM rollouts WHERE id = 'b'", 3, 0),
        ("DELETE FROM events WHERE rollout = 2", 3, 0),
        ("DELETE FROM events WHERE rollout = 1 AND event = 'complete'", 2, 0),
        ("INSERT INTO events VALUES (1, 99, 'consume', NULL, 0)", 0, 2),
        ("INSERT INTO events VALUES (2, 99, 'submit', NULL, 0)", 0, 3),
        ("INSERT INTO events VALUES (2, 99, 'teleport', NULL, 0)", 6, 0),
        ("INSERT INTO events VALUES (3, 1, 'submit', NULL, 0)", 1, 0),
        ("UPDATE tallies SET trajectories = 7 WHERE state = 'queued' AND consumer = ''", 4, 0),
        ("DELETE FROM tallies", 5, 0),
    ],
)
async def test_a_tampered_ledger_is_reported(ledger, edit, statement, lost, duplicated):
    edit(statement)
    audit = await ledger.audit()
    assert (audit.lost, audit.duplicated) == (lost, duplicated)


async def test_one_failure_does_not_hurt_the_calls_beside_it(ledger):
    play = Play(ledger)
    await play.finish("known")
    results = await asyncio.gather(
        *(ledger.submit([make_request(f"r{n}")], ALL) for n in range(5)),
        ledger.submit([make_request("half"), make_request("known", size=3)], ALL),
        ledger.consume(["known"], 0, -1),
        *(ledger.submit([make_request(f"s{n}")], ALL) for n in range(5)),
        ledger.counts(),
        return_exceptions=True,
    )
    assert results[:5] == results[7:12] == [[True]] * 5
    assert isinstance(results[5], Conflict)
    assert isinstance(results[6], Conflict)
    assert results[12].queued == 20
    assert await ledger.get("half") is None
    await play.check()


async def test_a_call_whose_caller_went_away_is_not_made(ledger):
    first = asyncio.ensure_future(ledger.submit([make_request("a")], ALL))
    second = asyncio.ensure_future(ledger.submit([make_request("b")], ALL))
    await asyncio.sleep(0)
    second.cancel()
    assert await first == [True]
    await Play(ledger).check()


async def test_a_file_that_another_process_holds_is_an_outage_and_no_value(
    ledger, path, monkeypatch
):
    await Play(ledger).submit("a")
    ledger._worker.call(
        lambda transaction: transaction.db.execute("PRAGMA busy_timeout = 1"), "read"
    )
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StateError, match="database is locked"):
            await ledger.lease(admit())
        assert (await ledger.counts()).queued == 2
    assert len(await ledger.lease(admit())) == 1


async def test_leases_timeouts_and_logs_go_by_the_clock_that_it_was_given():
    now = 1000.0
    ledger = SqliteLedger(":memory:", lambda: now)
    await ledger.open("one", 30.0)
    play = Play(ledger)
    await play.submit("let-go", "renewed", "slow")
    await play.lease()
    await play.submit("late", timeout_s=100.0)
    now += 20.0
    assert await ledger.renew([play.leases["renewed"].key]) == set()
    await play.complete("slow")
    now += 20.0
    assert await ledger.expire() == 1
    (lease,) = await ledger.lease(admit(free=2))
    assert (lease.rollout_id, lease.age_s) == ("let-go", 40.0)
    now += 60.0
    assert await ledger.expire() == 3
    assert (await ledger.get("late")).reason == "its timeout_s=100 passed while it was queued"
    assert [event.at for event in await ledger.events("let-go")] == [1000, 1000, 1040, 1040, 1100]
    assert await ledger.compact(0.1) == 0
    now += 1.0
    assert await ledger.compact(0.1) == 1
    await play.check()
    await ledger.close()


OLD_SCHEMA = """
CREATE TABLE rollouts (seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE,
    consumer TEXT NOT NULL, digest TEXT NOT NULL, request TEXT NOT NULL, size INTEGER NOT NULL,
    state TEXT NOT NULL, attempt INTEGER NOT NULL DEFAULT 0, oldest_version INTEGER,
    staleness INTEGER, payload BLOB, reason TEXT, delivery_id TEXT, step INTEGER);
CREATE INDEX rollouts_by_state ON rollouts (state, consumer, seq);
CREATE INDEX rollouts_by_delivery ON rollouts (delivery_id);
CREATE TABLE events (seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL, event TEXT NOT NULL,
    detail TEXT, at REAL NOT NULL);
CREATE TABLE notes (key TEXT PRIMARY KEY, value TEXT NOT NULL);
"""
OLD_LOGS = {
    "queued": ["submit"],
    "leased": ["submit", "lease"],
    "ready": ["submit", "lease", "complete"],
    "consumed": ["submit", "lease", "requeue", "lease", "complete", "deliver", "consume"],
}
OLD_REQUEST_LACKS = {"priority", "timeout_s", "filter", "versions"}


def write_old_ledger(path: str) -> None:
    """As release 0.x left it."""
    with closing(sqlite3.connect(path)) as database, database:
        database.executescript(OLD_SCHEMA)
        for state, log in OLD_LOGS.items():
            text = make_request(state, 2).model_dump_json(exclude=OLD_REQUEST_LACKS)
            payload = encode_groups([make_group(state)]) if "complete" in log else None
            consumed = ("d0", 4) if state == "consumed" else (None, None)
            database.execute(
                "INSERT INTO rollouts (id, consumer, digest, request, size, state, attempt, "
                "oldest_version, staleness, payload, delivery_id, step) "
                "VALUES (?, 'default', '', ?, 2, ?, 1, 0, 1, ?, ?, ?)",
                (state, text, state, payload, *consumed),
            )
            database.executemany(
                "INSERT INTO events (id, event, at) VALUES (?, ?, 1000.0)",
                [(state, event) for event in log],
            )
        database.execute("INSERT INTO notes VALUES ('key', 'value')")


async def test_an_older_file_is_brought_up_to_date(path):
    write_old_ledger(path)
    for _ in range(2):
        ledger = SqliteLedger(path)
        await ledger.open("one", 30.0)
        play = Play(ledger)
        await play.check()
        audit = await ledger.audit()
        assert audit.counts.model_dump(exclude_defaults=True) == {
            **{"submitted": 8, "queued": 4, "ready": 2, "consumed": 2}
        }
        assert (audit.max_staleness, audit.requeues) == (1, 4)  # one by the restart
        assert await ledger.get_value("key") == "value"
        assert await ledger.submit([make_request("queued", 2)], ALL) == [False]
        assert (await ledger.get("consumed", with_payload=True)).payload is not None
        assert (await ledger.get("queued")).submitted_at == 1000.0
        await ledger.close()
    ledger = SqliteLedger(path)
    await ledger.open("one", 30.0)
    play = Play(ledger)
    assert await play.lease() == ["queued", "leased"]
    await play.complete("leased")
    assert await ledger.give_back("default", 3) == 1
    assert (await play.deliver(3, "d1")).num_ready == 3
    await play.check()
    await ledger.close()


@pytest.mark.parametrize(
    ("statement", "told"),
    [
        ("PRAGMA user_version = 99", "has schema 99, this release reads 2 and older"),
        ("CREATE TABLE songs (name TEXT)", r"is a database of something else \(tables \['songs'\]"),
    ],
)
async def test_a_file_of_others_is_refused_and_left_alone(path, statement, told):
    with closing(sqlite3.connect(path)) as database, database:
        database.execute(statement)
    ledger = SqliteLedger(path)
    with pytest.raises(ConfigError, match=told):
        await ledger.open("one", 1.0)
    await ledger.close()
    with closing(sqlite3.connect(path)) as database:
        tables = [name for (name,) in database.execute("SELECT name FROM sqlite_master")]
    assert tables in ([], ["songs"])
