"""The consumer that is attached: whose rollouts are bounded in staleness, and who publishes weights.

One note in the ledger holds it, so that a gateway that restarts, and every gateway that shares the
ledger, knows it. Each attachment has a number, the term; what an older incarnation of the consumer
still asks for is refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from gateway.ledger.base import DeliveryQueue, KeyValueStore, LedgerReader
from headway.contracts.config.base import Config
from headway.contracts.errors import Conflict, Fenced
from headway.contracts.http.consumers import ConsumerRequest
from headway.runtime.staleness import StalenessBound

NOTE = "consumer"


@dataclass(frozen=True, slots=True)
class Publisher:
    """A consumer as its attachment knows it."""

    name: str
    term: int


@dataclass(frozen=True, slots=True)
class Attachment:
    """Result of attaching a consumer."""

    given_back: int
    """Groups that a former incarnation had received but not kept."""
    term: int
    """Number of this attachment; an older incarnation is refused."""


class ConsumerLedger(DeliveryQueue, LedgerReader, KeyValueStore, Protocol):
    """Ledger roles that consumers need: the attachment's record, and the groups that may still be
    delivered."""


class _ConsumerRecord(Config):
    term: int = 0
    request: ConsumerRequest | None = None
    base: int = 0


class Consumers:
    """The attached consumer, if there is one."""

    def __init__(self, ledger: ConsumerLedger) -> None:
        self._ledger = ledger
        self._record = _ConsumerRecord()
        self._text: str | None = None

    @property
    def name(self) -> str | None:
        """Name of the attached consumer."""
        return None if self._record.request is None else self._record.request.consumer

    @property
    def version(self) -> int:
        """Version that it attached with; 0 without a consumer."""
        return 0 if self._record.request is None else self._record.request.version

    @property
    def bound(self) -> StalenessBound | None:
        """Staleness bound of the attached consumer; None without one."""
        request = self._record.request
        if request is None:
            return None
        return StalenessBound(request.batch_size, request.max_staleness, self._record.base)

    async def refresh(self) -> bool:
        """Read what this or another gateway wrote; whether it is news."""
        text = await self._ledger.get_value(NOTE)
        if text == self._text:
            return False
        self._text = text
        self._record = (
            _ConsumerRecord() if text is None else _ConsumerRecord.model_validate_json(text)
        )
        return True

    def check_free(self, name: str) -> None:
        """Refuse a second consumer.

        Raises:
            Conflict: another one is attached.
        """
        if self.name not in (None, name):
            raise Conflict(
                f"consumer {self.name!r} is attached; detach it first "
                f"(headway detach URL {self.name}), or use another gateway"
            )

    async def attach(self, request: ConsumerRequest) -> Attachment:
        """Bind a consumer; what it had received after its checkpoint is given back.

        Raises:
            Conflict: another consumer is attached.
        """
        await self.refresh()
        self.check_free(request.consumer)
        given_back = await self._ledger.give_back(request.consumer, request.step)
        counts = await self._ledger.counts(request.consumer)
        base = StalenessBound.base_of(request.version, request.batch_size, counts.consumed)
        record = _ConsumerRecord(term=self._record.term + 1, request=request, base=base)
        await self._write(record, f"consumer {request.consumer!r} was attached elsewhere just now")
        return Attachment(given_back, record.term)

    async def detach(self) -> None:
        """Nobody is attached any more; terms go on."""
        await self._write(
            _ConsumerRecord(term=self._record.term), "the consumer has attached again just now"
        )

    def check_term(self, term: int) -> None:
        """Raises `Fenced` if a consumer has attached since that term; 0 is unknown."""
        if term not in (0, self._record.term):
            raise Fenced(
                f"a consumer has attached again: term {term} was followed by {self._record.term}; end "
                "the older process"
            )

    def check_publisher(self, publisher: Publisher | None) -> None:
        """Check that a publisher may publish weights.

        Raises:
            Conflict: another consumer is attached.
            Fenced: a newer incarnation of it has attached, or it is not attached any more.
        """
        if publisher is None:
            if self.name is not None:
                raise Conflict(f"consumer {self.name!r} is attached; only it publishes weights")
        elif self.name is None:
            raise Fenced(f"consumer {publisher.name!r} is not attached any more")
        elif publisher.name != self.name:
            raise Conflict(f"consumer {self.name!r} is attached, and not {publisher.name!r}")
        elif publisher.term != self._record.term:
            raise Fenced(
                f"consumer {self.name!r} has attached again: term {publisher.term} was followed by "
                f"{self._record.term}; end the older process"
            )

    async def _write(self, record: _ConsumerRecord, otherwise: str) -> None:
        text = record.model_dump_json()
        if not await self._ledger.compare_and_set(NOTE, self._text, text):
            raise Conflict(f"{otherwise}; try again")
        self._record, self._text = record, text
