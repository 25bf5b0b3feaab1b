"""`headway status` for people: one page that says what is wrong first."""

from __future__ import annotations

from io import StringIO

from rich.console import Console

from headway.contracts.http.ledger import LedgerAudit, LedgerCounts
from headway.contracts.http.servers import ServerStatus
from headway.contracts.http.status import StatusResponse
from headway.contracts.http.weights import WeightRecord, WeightStatus
from headway.launch.status_page import status_page


def shown(*args, width: int = 120, **fields) -> str:
    console = Console(width=width, record=True, file=StringIO())
    console.print(status_page(*args, **fields))
    return console.export_text()


def status(**fields) -> StatusResponse:
    counts = LedgerCounts(submitted=5200, ready=200, consumed=5000)
    known = {"version": 7, "head": 8, "running": 3, "capacity": 12, "max_staleness": 2}
    return StatusResponse(**{**known, "counts": counts, **fields})


def test_the_page_tells_versions_servers_and_states():
    server = ServerStatus(
        server_id="gpu-1",
        url="http://h:1",
        version=7,
        running=4,
        max_running=16,
        state="fenced",
        reason="version 8 was not staged",
    )
    record = WeightRecord(version=7, path="/w/7")
    weights = WeightStatus(committed=record, head=8, epoch=9, pinned=7, publishing=8, kept=[record])
    page = shown(status(servers=[server]), weights, speed=1234.5)
    for text in (
        "7 serves, 8 is the newest, pinned, publishing 8",
        "at most 2",
        "1,234 per second",
    ):
        assert text in page
    assert "gpu-1: version 8 was not staged" in page
    (line,) = [line for line in page.splitlines() if line.startswith("gpu-1")]
    assert line.split() == ["gpu-1", "fenced", "7", "4", "/", "16", "0", "0%", "0"]
    assert "5,200" in page


def test_the_page_tells_failures_as_they_are_and_the_proof_if_it_was_asked_for():
    audit = LedgerAudit(counts=LedgerCounts(), lost=1, duplicated=0, max_staleness=2, requeues=3)
    away = {"url": "http://agent/play", "away_s": 61.4, "waiting": 16}
    failures = ["[bold]not markup[/bold]"]
    page = shown(status(last_failures=failures, services_away=[away]), None, audit=audit)
    assert "http://agent/play for 61 s, 16 calls wait" in page
    assert "[bold]not markup[/bold]" in page
    assert "1 lost, 0 consumed twice, 3 requeued, staleness at most 2" in page
    assert "no generation server has reported itself" in page
    assert "ledger:" not in shown(status(), None)


def test_nothing_is_cut_on_a_terminal_of_80_columns():
    server = ServerStatus(
        server_id="trainer-node-17-1234567-a1b2c3",
        url="http://h:1",
        version=123,
        running=128,
        max_running=1024,
        queued=12345,
        generated_tokens=123_456_789,
        state="quarantined",
    )
    page = shown(status(servers=[server]), None, width=80)
    words = page.split()
    for word in (
        *LedgerCounts.model_fields,
        *ServerStatus.model_fields.keys() & {"running", "queued"},
    ):
        assert word in words
    assert {"123,456,789", "quarantined", "5,200"} <= {*words}
    assert "…" not in page
