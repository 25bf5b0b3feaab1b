"""A foreign trainer's update over three servers under load, one of which is killed in each phase of it.

Old or new everywhere, never both: each token of 32 requests in flight says which weights sampled it.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest

from tests.integration.version_fleet import LIMIT_S, Clients, Fleet
from tests.waiting import eventually

pytestmark = pytest.mark.extended
NUM_SERVERS = 3


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("fleet")
    with closing(Fleet(folder, NUM_SERVERS, has_traps=True)) as opened:
        yield opened


@pytest.mark.parametrize("phase", ["before", "staged", "swapping", "swapped"])
def test_a_server_is_killed_in_an_update(fleet: Fleet, phase: str) -> None:
    run, server = next_victim(fleet)
    clients, first = Clients(fleet, num_each=15), fleet.version
    with clients.flowing(), ThreadPoolExecutor(1) as pool:
        eventually(lambda: clients.answered > 8, LIMIT_S, "requests are answered")
        if phase == "before":
            fleet.kill(run, server)
            update = pool.submit(fleet.publish, weight_version=f"step-{first + 1}")
        else:
            fleet.traps(run, server).set(phase)
            update = pool.submit(fleet.publish, weight_version=f"step-{first + 1}")
            fleet.until_stopped(run, server)
            fleet.kill(run, server)
        answer = update.result(LIMIT_S)
        assert answer.json()["success"] is True, answer.text
        fleet.until_served(first + 1, NUM_SERVERS - 1)
        sampled = clients.answered
        eventually(lambda: clients.answered > sampled + 32, LIMIT_S, "it goes on")
        fleet.join()
        fleet.until_served(first + 1, NUM_SERVERS)
    assert clients.seen == {first, first + 1}


def next_victim(fleet: Fleet) -> tuple[int, int]:
    """A server that is still there: its run, and its number in it."""
    killed = len(fleet.runs) - 1  # each was replaced by a run of its own
    return (0, killed) if killed < NUM_SERVERS else (killed - NUM_SERVERS + 1, 0)
