"""Answers on their way from the engine's thread to those who wait on event loops."""

from __future__ import annotations

import logging

from headway.contracts.types import LLMDelta, LLMResponse
from inference_server.backends.embedded.sequence import Caller

log = logging.getLogger(__name__)

News = LLMDelta | LLMResponse | Exception


class OutputQueue:
    """Messages to callers since the last delivery; used by the engine's thread."""

    def __init__(self) -> None:
        self._news: list[tuple[Caller, News]] = []

    def put(self, caller: Caller, news: News) -> None:
        """Keep it for the next delivery."""
        self._news.append((caller, news))

    def deliver(self) -> None:
        """Send all of it, with one wake-up per event loop."""
        all_news, self._news = self._news, []
        for loop in {caller.loop for caller, _ in all_news}:
            mine = [(caller, news) for caller, news in all_news if caller.loop is loop]
            try:
                loop.call_soon_threadsafe(_take_all, mine)
            except RuntimeError:
                log.debug("an event loop closed before its answers came")


def _take_all(mine: list[tuple[Caller, News]]) -> None:
    for caller, news in mine:
        caller.take(news)
