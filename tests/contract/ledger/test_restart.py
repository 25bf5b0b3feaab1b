import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from ledger_suite import STORES
from rollout_builders import make_group

from headway.contracts.errors import StateError
from headway.rollout.ledger.base import LeaseLimits
from headway.rollout.ledger.sqlite import SqliteLedger

DURABLE = [store for store in STORES if store.is_durable]
on_durable_stores = pytest.mark.parametrize(
    "store", DURABLE, indirect=True, ids=lambda store: store.name
)
CHILD = Path(__file__).parent / "crash_child.py"


@on_durable_stores
async def test_a_restart_puts_leased_rollouts_back_in_their_place(store, play, open_ledger):
    await play.submit("a", "b", "c")
    await play.lease_all()
    await play.ledger.complete(make_group("b"))
    await play.submit("d")
    ledger = await open_ledger()
    counts = await ledger.counts()
    assert (counts.queued, counts.leased, counts.ready) == (6, 0, 2)
    leases = [await ledger.lease(LeaseLimits(None, 0, 100), 0) for _ in range(3)]
    assert [(lease.request.rollout_id, lease.attempt) for lease in leases] == [
        ("a", 2),
        ("c", 2),
        ("d", 1),
    ]
    assert (await ledger.audit()).requeues == 4


@on_durable_stores
async def test_a_restart_keeps_everything_else(store, play, open_ledger):
    await play.finish("a", "b", "c")
    delivery = await play.deliver(2, "d0")
    await play.ledger.consume(["a"], step=4, checkpoint_step=-1)
    await play.ledger.put_note("key", "value")
    before = await play.ledger.audit()
    ledger = await open_ledger()
    assert await ledger.audit() == before
    assert await ledger.get_note("key") == "value"
    assert (await ledger.deliver("d0", 2, "default", None, 0, None)).payloads == delivery.payloads
    await ledger.consume(["a"], step=4, checkpoint_step=-1)


async def test_a_closed_ledger_says_so(store, tmp_path):
    ledger = store.make(tmp_path)
    with pytest.raises(StateError, match="is not open"):
        await ledger.counts()
    await ledger.close()


async def test_a_path_that_cannot_be_opened_is_a_state_error(tmp_path):
    (tmp_path / "ledger.sqlite").mkdir()
    ledger = SqliteLedger(str(tmp_path / "ledger.sqlite"))
    with pytest.raises(StateError, match=r"ledger\.sqlite"):
        await ledger.open()
    await ledger.close()


async def test_a_file_that_is_no_ledger_is_a_state_error(tmp_path):
    (tmp_path / "ledger.sqlite").write_bytes(b"not a database, but long enough to be read" * 50)
    ledger = SqliteLedger(str(tmp_path / "ledger.sqlite"))
    with pytest.raises(StateError):
        await ledger.open()
    await ledger.close()


def play_and_kill(store: str, folder: Path, round_number: int, num_lines: int) -> list[tuple]:
    """Transitions that a child acknowledged before it was killed."""
    with subprocess.Popen(
        [sys.executable, str(CHILD), store, str(folder), str(round_number)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    ) as child:
        lines = [child.stdout.readline() for _ in range(num_lines)]
        child.send_signal(signal.SIGKILL)
        lines += child.stdout.readlines()  # what it printed before the signal reached it
        assert child.wait(timeout=10) == -signal.SIGKILL
    return [tuple(line.split()) for line in lines]


@on_durable_stores
async def test_kill_9_loses_and_doubles_nothing(store, tmp_path):
    """Children play rollouts and print each transition once it returned; each is killed midway."""
    acknowledged: list[tuple[str, str]] = []
    for round_number, num_lines in enumerate((40, 7, 90)):
        acknowledged += play_and_kill(store.name, tmp_path, round_number, num_lines)

    ledger = store.make(tmp_path)
    await ledger.open()
    try:
        audit = await ledger.audit()
        assert (audit.lost, audit.duplicated) == (0, 0)
        consumed = [name for event, name in acknowledged if event == "consume"]
        assert len(consumed) == len(set(consumed)), "a child was given what was consumed before"
        submitted = {name for event, name in acknowledged if event == "submit"}
        # The transition that the kill interrupted may have happened, without having been printed.
        assert len(consumed) <= audit.counts.consumed <= len(consumed) + 3
        assert len(submitted) <= audit.counts.submitted <= len(submitted) + 3
        counts = audit.counts
        assert counts.submitted == (
            counts.queued + counts.ready + counts.delivered + counts.consumed + counts.failed
        )
        for name in consumed[::5]:
            await ledger.consume([name], step=0, checkpoint_step=-1)  # idempotent: it is recorded
        assert (await ledger.audit()).counts.consumed == counts.consumed
    finally:
        await ledger.close()
