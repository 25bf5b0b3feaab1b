"""What goes by the event loop's clock, and so on a simulator's."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import gateway
from gateway.fleet.members import Members
from gateway.fleet.response_validator import ResponseValidator
from gateway.ledger.sqlite import SqliteLedger
from gateway.versions.publication_state import PublicationState
from headway.contracts.config.gateway import FleetConfig
from headway.contracts.http.servers import ServerReport
from headway.runtime.clock import monotonic
from tests.virtual_time import run_virtual

CONTROLLER = ("consumers", "execution", "fleet", "gateway", "publishing", "sessions", "versions")
HOUR_S = 3600.0


def report(name: str) -> ServerReport:
    return ServerReport(server_id=name, url=f"http://{name}:80", version=0)


def make_members(**config: float) -> Members:
    state = PublicationState(SqliteLedger(":memory:"))
    return Members(FleetConfig(**config), ResponseValidator(state))


def test_outside_of_a_loop_it_is_the_clock_of_the_process():
    before = time.monotonic()
    assert before <= monotonic() <= time.monotonic()


def test_nothing_of_the_controller_takes_the_time_elsewhere():
    """It would mix two clocks: a simulator's loop has a time of its own."""
    root = Path(gateway.__file__).parent
    for package in CONTROLLER:
        for path in (root / package).rglob("*.py"):
            assert "time.monotonic" not in path.read_text(), path


async def lose_one_of_two() -> tuple[float, set[str]]:
    members = make_members(lease_s=HOUR_S)
    await members.start()
    for name in ("silent", "lively"):
        members.set_ready(members.on_report(report(name)))
    while len(members.ready()) == 2:
        await asyncio.sleep(HOUR_S / 10)
        members.on_report(report("lively"))
    lost_at = monotonic()
    states = {status.server_id for status in members.statuses() if status.state == "ready"}
    await members.aclose()
    return lost_at, states


def test_a_server_that_is_silent_for_an_hour_is_lost_on_virtual_time():
    before = time.monotonic()
    lost_at, ready = run_virtual(lose_one_of_two())
    assert HOUR_S < lost_at < 1.5 * HOUR_S
    assert ready == {"lively"}
    assert time.monotonic() - before < HOUR_S / 100


async def sit_out_a_quarantine() -> list[bool]:
    members = make_members(max_failures=1, quarantine_s=HOUR_S, lease_s=10 * HOUR_S)
    await members.start()
    member = members.on_report(report("ill"))
    members.set_ready(member)
    members.charge(member, "it answers nonsense")
    free = [member.is_free(monotonic())]
    for _ in range(2):
        await asyncio.sleep(HOUR_S / 2 + 1.0)
        free.append(member.is_free(monotonic()))
    await members.aclose()
    return free


def test_a_quarantine_is_over_on_virtual_time():
    assert run_virtual(sit_out_a_quarantine()) == [False, False, True]


async def wait_for_servers() -> float:
    members = make_members(lease_s=HOUR_S)
    await members.until_present(1, HOUR_S)
    return monotonic()


def test_a_wait_ends_at_its_deadline_on_virtual_time():
    assert run_virtual(wait_for_servers()) >= HOUR_S
