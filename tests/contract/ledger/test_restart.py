import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from gateway.ledger.make import make_ledger
from gateway.ledger.sqlite import SqliteLedger
from headway.contracts.errors import Conflict, StateError
from tests.unit.gateway.ledger_suite import SEVERAL_PROCESSES, Play, admit

on_durable_stores = pytest.mark.parametrize("store", SEVERAL_PROCESSES, indirect=True)
on_sqlite = pytest.mark.parametrize("store", ["sqlite-file"], indirect=True)
CHILD = Path(__file__).parent / "crash_child.py"


@on_sqlite
async def test_a_restart_puts_leased_rollouts_back_in_their_place(store, open_ledger):
    ledger = await open_ledger("before")
    play = Play(ledger)
    await play.submit("a", "b", "c")
    await play.lease()
    await play.complete("b")
    await play.submit("d")
    await ledger.close()
    ledger = await open_ledger("after")
    counts = await ledger.counts()
    assert (counts.queued, counts.leased, counts.ready) == (6, 0, 2)
    leases = await ledger.lease(admit())
    assert [(lease.rollout_id, lease.attempt) for lease in leases] == [("a", 2), ("c", 2), ("d", 1)]
    assert (await ledger.get("a")).reason == "the gateway restarted"
    assert (await ledger.audit()).requeues == 4


@on_durable_stores
async def test_a_visitor_takes_nothing_over(store, open_ledger, address):
    ledger = await open_ledger()
    play = Play(ledger)
    await play.submit("a")
    await play.lease()
    visitor = make_ledger(address)
    await visitor.connect()
    assert (await visitor.get("a")).state == "leased"
    await visitor.close()
    await play.complete("a")


@on_durable_stores
async def test_a_restart_keeps_everything_else(store, open_ledger):
    ledger = await open_ledger()
    play = Play(ledger)
    await play.finish("a", "b", "c")
    delivery = await play.deliver(2, "d0")
    await play.consume("a", step=4)
    await ledger.set_value("key", "value")
    before = await ledger.audit()
    await ledger.close()
    ledger = await open_ledger()
    assert await ledger.audit() == before
    assert await ledger.get_value("key") == "value"
    assert (await ledger.deliver("d0", 2, "default", 0, None)).payloads == delivery.payloads
    await ledger.consume(["a"], step=4, checkpoint_step=-1)
    with pytest.raises(Conflict):
        await ledger.consume(["a"], step=5, checkpoint_step=-1)


async def test_a_closed_ledger_says_so(address):
    ledger = make_ledger(address)
    with pytest.raises(StateError, match="is not open"):
        await ledger.counts()
    await ledger.close()
    await ledger.open("one", 1.0)
    with pytest.raises(StateError, match="is open already"):
        await ledger.open("one", 1.0)
    await ledger.close()
    with pytest.raises(StateError, match="is not open"):
        await ledger.counts()


async def test_a_path_that_cannot_be_opened_is_a_state_error(tmp_path):
    (tmp_path / "ledger.sqlite").mkdir()
    ledger = SqliteLedger(str(tmp_path / "ledger.sqlite"))
    with pytest.raises(StateError, match=r"ledger\.sqlite"):
        await ledger.open("one", 1.0)
    await ledger.close()


async def test_a_file_that_is_no_ledger_is_a_state_error(tmp_path):
    (tmp_path / "ledger.sqlite").write_bytes(b"not a database, but long enough to be read" * 50)
    ledger = SqliteLedger(str(tmp_path / "ledger.sqlite"))
    with pytest.raises(StateError):
        await ledger.open("one", 1.0)
    await ledger.close()


def play_and_kill(address: str, round_number: int, num_lines: int) -> list[tuple[str, ...]]:
    """Transitions that a child acknowledged before it was killed."""
    with subprocess.Popen(
        [sys.executable, str(CHILD), address, str(round_number)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    ) as child:
        assert child.stdout is not None
        lines = [child.stdout.readline() for _ in range(num_lines)]
        child.send_signal(signal.SIGKILL)
        lines += child.stdout.readlines()  # what it printed before the signal reached it
        assert child.wait(timeout=10) == -signal.SIGKILL
    return [tuple(line.split()) for line in lines]


@on_durable_stores
async def test_kill_9_loses_and_doubles_nothing(store, address):
    """Children play rollouts and print each transition once it returned; each is killed midway."""
    acknowledged = [
        entry
        for round_number, num_lines in enumerate([17, 64, 131])
        for entry in play_and_kill(address, round_number, num_lines)
    ]
    ledger = make_ledger(address)
    await ledger.open("reader", 30.0)
    try:
        audit = await ledger.audit()
        assert (audit.lost, audit.duplicated) == (0, 0)
        consumed = [name for event, name in acknowledged if event == "consume"]
        assert len(consumed) == len(set(consumed)), "a child was given what was consumed before"
        submitted = {name for event, name in acknowledged if event == "submit"}
        # The transition that the kill interrupted may have happened, without having been printed.
        assert len(consumed) <= audit.counts.consumed <= len(consumed) + 3
        assert len(submitted) <= audit.counts.submitted <= len(submitted) + 3
        for name in consumed[::5]:
            await ledger.consume([name], step=0, checkpoint_step=-1)  # idempotent: it is recorded
        assert (await ledger.audit()).counts == audit.counts == await ledger.counts()
    finally:
        await ledger.close()
