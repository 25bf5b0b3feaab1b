"""Names of consumers belong to the token that used them first."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from gateway.consumers.owners import Owners
from gateway.ledger.sqlite import SqliteLedger
from headway.contracts.errors import Forbidden
from headway.runtime.access import TOKEN, Token
from tests.unit.gateway.rollout_builders import make_request

TRAINER = Token("trainer", "a", ("consume",))
OTHER = Token("other", "b", ("consume",))
AGENT = Token("agent", "c", ("submit",), frozenset({"mine"}))
ADMIN = Token("operator", "d", ("admin",))


@pytest_asyncio.fixture
async def ledger(tmp_path: Path) -> AsyncIterator[SqliteLedger]:
    ledger = SqliteLedger(str(tmp_path / "ledger.sqlite"))
    await ledger.open("gateway", 30.0)
    yield ledger
    await ledger.close()


async def refused(owners: Owners, token: Token | None, *names: str) -> bool:
    """Both for acting under the names and for taking them."""
    TOKEN.set(token)
    seen = set()
    for ask in (owners.check, owners.claim):
        try:
            await ask(names)
            seen.add(False)
        except Forbidden as error:
            assert "belongs to another token" in str(error)
            seen.add(True)
    assert len(seen) == 1
    return seen.pop()


async def test_a_name_is_the_first_one_s(ledger: SqliteLedger):
    owners = Owners(ledger)
    assert not await refused(owners, TRAINER, "mine")
    assert not await refused(owners, TRAINER, "mine")
    assert await refused(owners, OTHER, "mine")
    assert await refused(owners, OTHER, "free", "mine")
    assert not await refused(owners, OTHER, "another")
    assert await refused(owners, TRAINER, "another")


async def test_who_is_let_in_owns_nothing(ledger: SqliteLedger):
    owners = Owners(ledger)
    for token in (None, ADMIN, AGENT):
        assert not await refused(owners, token, "mine")
    assert not await refused(owners, TRAINER, "mine")
    for token in (None, ADMIN, AGENT):
        assert not await refused(owners, token, "mine")
    assert await refused(owners, OTHER, "mine")


async def test_asking_takes_no_name(ledger: SqliteLedger):
    owners = Owners(ledger)
    TOKEN.set(OTHER)
    await owners.check(["mine"])
    assert not await refused(owners, TRAINER, "mine")


async def test_a_name_that_was_given_up_is_free(ledger: SqliteLedger):
    owners = Owners(ledger)
    await owners.release("mine")
    assert not await refused(owners, TRAINER, "mine")
    await owners.release("mine")
    assert not await refused(owners, OTHER, "mine")
    assert await refused(owners, TRAINER, "mine")


async def test_another_gateway_knows_it_and_so_does_the_next(ledger: SqliteLedger):
    assert not await refused(Owners(ledger), TRAINER, "mine")
    assert await refused(Owners(ledger), OTHER, "mine")


async def test_rollouts_are_their_consumer_s(ledger: SqliteLedger):
    owners = Owners(ledger)
    TOKEN.set(TRAINER)
    await owners.claim(["mine"])
    request = make_request("r0").model_copy(update={"consumer": "mine"})
    await ledger.submit([request], 100, None)
    await owners.check_rollouts(["r0", "unknown"])
    TOKEN.set(OTHER)
    await owners.check_rollouts(["unknown"])
    with pytest.raises(Forbidden, match="'mine' belongs"):
        await owners.check_rollouts(["r0"])
