"""The consumer that is attached: whose rollouts are bounded in staleness, and who publishes weights.

One note in the ledger holds it, so that a gateway that restarts, and every gateway that shares the
ledger, knows it. Each attachment has a number, the term; what an older incarnation of the consumer
still asks for is refused.
"""

from __future__ import annotations

from dataclasses import dataclass

from headway.contracts.config.base import Config
from headway.contracts.errors import Conflict, Fenced
from headway.contracts.http.consumers import ConsumerRequest
from headway.rollout.ledger.base import Ledger
from headway.runtime.staleness import StalenessBound

NOTE = "consumer"


@dataclass(frozen=True, slots=True)
class Publisher:
    """A consumer as its attachment knows it."""

    name: str
    term: int


@dataclass(frozen=True, slots=True)
class Attachment:
    """What a consumer learns when it attaches."""

    given_back: int
    """Groups that a former incarnation had received but not kept."""
    term: int
    """Number of this attachment; an older incarnation is refused."""


class _Page(Config):
    term: int = 0
    request: ConsumerRequest | None = None
    base: int = 0


class Consumers:
    """Who is attached, if anybody."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._page = _Page()
        self._text: str | None = None

    @property
    def name(self) -> str | None:
        """Of the attached consumer."""
        return None if self._page.request is None else self._page.request.consumer

    @property
    def version(self) -> int:
        """What it attached with; 0 without a consumer."""
        return 0 if self._page.request is None else self._page.request.version

    @property
    def bound(self) -> StalenessBound | None:
        """None while nobody is attached."""
        request = self._page.request
        if request is None:
            return None
        return StalenessBound(request.batch_size, request.max_staleness, self._page.base)

    async def refresh(self) -> bool:
        """Read what this or another gateway wrote; whether it is news."""
        text = await self._ledger.get_note(NOTE)
        if text == self._text:
            return False
        self._text = text
        self._page = _Page() if text is None else _Page.model_validate_json(text)
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
        page = _Page(term=self._page.term + 1, request=request, base=base)
        await self._turn(page, f"consumer {request.consumer!r} was attached elsewhere just now")
        return Attachment(given_back, page.term)

    async def detach(self) -> None:
        """Nobody is attached any more; terms go on."""
        await self._turn(_Page(term=self._page.term), "the consumer has attached anew just now")

    def check_term(self, term: int) -> None:
        """Raises `Fenced` if a consumer has attached since that term; 0 is unknown."""
        if term not in (0, self._page.term):
            raise Fenced(
                f"a consumer has attached anew: term {term} was followed by {self._page.term}; end the "
                "older process"
            )

    def check_publisher(self, publisher: Publisher | None) -> None:
        """Whether it may publish weights.

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
        elif publisher.term != self._page.term:
            raise Fenced(
                f"consumer {self.name!r} has attached anew: term {publisher.term} was followed by "
                f"{self._page.term}; end the older process"
            )

    async def _turn(self, page: _Page, otherwise: str) -> None:
        text = page.model_dump_json()
        if not await self._ledger.swap_note(NOTE, self._text, text):
            raise Conflict(f"{otherwise}; try again")
        self._page, self._text = page, text
