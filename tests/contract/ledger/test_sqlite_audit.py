"""The audit is a proof: whoever edits the tables behind its back is reported."""

import sqlite3

import pytest
from ledger_suite import Play
from rollout_builders import make_request

from headway.rollout.ledger.sqlite import SqliteLedger


@pytest.fixture
async def ledger(tmp_path):
    opened = SqliteLedger(str(tmp_path / "ledger.sqlite"))
    await opened.open()
    yield opened
    await opened.close()


@pytest.fixture
async def consumed_and_queued(ledger, tmp_path):
    """Rollout `a` of 2 was consumed, `b` of 3 waits; edits go to the file."""
    play = Play(ledger)
    await play.finish("a", size=2)
    await play.deliver()
    await ledger.consume(["a"], step=0, checkpoint_step=-1)
    await ledger.submit([make_request("b", size=3)], 100)
    audit = await ledger.audit()
    assert (audit.lost, audit.duplicated) == (0, 0)

    def edit(statement: str) -> None:
        with sqlite3.connect(tmp_path / "ledger.sqlite") as database:
            database.execute(statement)
        database.close()

    return edit


@pytest.mark.parametrize(
    ("statement", "lost", "duplicated"),
    [
        ("UPDATE rollouts SET state = 'consumed' WHERE id = 'b'", 3, 0),
        ("UPDATE rollouts SET state = 'queued' WHERE id = 'a'", 2, 0),
        ("DELETE FROM rollouts WHERE id = 'b'", 1, 0),
        ("DELETE FROM events WHERE id = 'b'", 3, 0),
        ("DELETE FROM events WHERE id = 'a' AND event = 'complete'", 2, 0),
        ("INSERT INTO events (id, event, at) VALUES ('a', 'consume', 0)", 0, 2),
        ("INSERT INTO events (id, event, at) VALUES ('b', 'submit', 0)", 0, 3),
        ("INSERT INTO events (id, event, at) VALUES ('b', 'teleport', 0)", 6, 0),
        ("INSERT INTO events (id, event, at) VALUES ('c', 'submit', 0)", 1, 0),
    ],
)
async def test_a_tampered_ledger_is_reported(
    ledger, consumed_and_queued, statement, lost, duplicated
):
    consumed_and_queued(statement)
    audit = await ledger.audit()
    assert (audit.lost, audit.duplicated) == (lost, duplicated)
