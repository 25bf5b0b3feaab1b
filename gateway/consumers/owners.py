"""Owners of consumers' names: a name belongs to the token that used it first.

It holds for all gateways of a ledger, and over restarts: a note for each name. Without tokens, and for
tokens of role `admin`, every name is free; so are the names that a token's configuration lists.

Not covered: reading. Every token may look at everybody's rollouts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Protocol

from gateway.ledger.base import KeyValueStore, LedgerReader
from headway.contracts.errors import Forbidden
from headway.runtime.access import TOKEN, Token

NOTE = "owner of {}"
NOBODY = ""
"""Value in the note of a name that was given up."""


class OwnerLedger(LedgerReader, KeyValueStore, Protocol):
    """Ledger roles that owners need: their records, and the consumer of each rollout."""


class Owners:
    """Owners of names, as the ledger has them."""

    def __init__(self, ledger: OwnerLedger) -> None:
        self._ledger = ledger

    async def check(self, names: Iterable[str]) -> None:
        """Let the calling token act for these consumers; those that nobody owns are free.

        Raises:
            Forbidden: one of them is another token's.
        """
        token = _bound_token()
        for name in _foreign(names, token):
            _check_owner(name, await self._ledger.get_value(NOTE.format(name)), token)

    async def check_rollouts(self, rollout_ids: Collection[str]) -> None:
        """Let the calling token act on these rollouts, as far as there are any.

        Raises:
            Forbidden: one of them is another token's.
        """
        if _bound_token() is None:
            return
        entries = [await self._ledger.get(rollout_id) for rollout_id in rollout_ids]
        await self.check(entry.request.consumer for entry in entries if entry is not None)

    async def claim(self, names: Iterable[str]) -> None:
        """Make those that nobody owns the calling token's.

        Raises:
            Forbidden: one of them is another token's, maybe since a moment ago.
        """
        token = _bound_token()
        for name in _foreign(names, token):
            assert token is not None
            note = NOTE.format(name)
            owner = await self._ledger.get_value(note)
            if not owner and await self._ledger.compare_and_set(note, owner, token.name):
                continue
            _check_owner(name, await self._ledger.get_value(note), token)

    async def release(self, name: str) -> None:
        """Nobody owns it any more."""
        note = NOTE.format(name)
        if owner := await self._ledger.get_value(note):
            await self._ledger.compare_and_set(note, owner, NOBODY)


def _bound_token() -> Token | None:
    """The calling one, unless it may do everything."""
    token = TOKEN.get()
    return None if token is None or token.may("admin") else token


def _foreign(names: Iterable[str], token: Token | None) -> list[str]:
    """Those that it is not free to use anyway."""
    return [] if token is None else sorted(set(names) - token.consumers)


def _check_owner(name: str, owner: str | None, token: Token | None) -> None:
    if owner and token is not None and owner != token.name:
        raise Forbidden(
            f"the consumer {name!r} belongs to another token than {token.name!r}; use another name, list "
            f"it under `consumers` of {token.name!r} in service.tokens, or let an admin detach it"
        )
